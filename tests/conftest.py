"""Shared fixtures, the order of tests, and checks that tests leave nothing behind."""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import psutil
import pytest

from harness.host.folders import cache_folder
from harness.host.gc_tuning import collect_seldom
from harness.seam.registry import strategies
from tests.budget import summary

ROOT = Path(__file__).parents[1]


FOLDERS = ("cluster", "unit", "gpu", "ranks", "faults", "browser")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update",
        action="store_true",
        help="write generated tables, pictures and golden files instead of comparing them",
    )


@pytest.fixture
def update(request: pytest.FixtureRequest) -> bool:
    """Whether to write generated files instead of comparing them."""
    return bool(request.config.getoption("--update"))


def pytest_configure(config: pytest.Config) -> None:
    collect_seldom()
    # No deadline per example, because other tests run at the same time.
    hypothesis.settings.register_profile("no deadline", deadline=None)
    hypothesis.settings.load_profile("no deadline")
    config.addinivalue_line("markers", "alone: measures time, so nothing else may run")
    config.addinivalue_line(
        "markers", "thorough: slow, and finds little that other tests do not; not in make test"
    )
    config.addinivalue_line(
        "markers", "slow: a unit test of several seconds, not in make test-quick"
    )
    config.addinivalue_line(
        "markers", "quick: a fast unit test, or one cell of each strategy: make test-quick"
    )


@pytest.hookimpl(tryfirst=True)  # before pytest looks at markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Orders the tests, and groups those that must share a worker.

    SLURM tests come first, on one worker, because they mostly wait. Then come unit tests and every
    strategy once, which most changes break. Tests that measure time come last, and run alone.
    """

    def order(item: pytest.Item) -> tuple[bool, int, bool]:
        folder = item.path.parent.name
        place = FOLDERS.index(folder) if folder in FOLDERS else len(FOLDERS)
        return bool(item.get_closest_marker("alone")), place, item.path.name != "test_strategies.py"

    items.sort(key=order)
    for item in items:
        slow = item.get_closest_marker("slow") or item.get_closest_marker("thorough")
        if item.path.parent.name == "unit" and not slow:
            item.add_marker(pytest.mark.quick)
        if group := _group(item):
            item.add_marker(pytest.mark.xdist_group(group))


def _group(item: pytest.Item) -> str:
    """Returns the test's group, which shares a worker; empty if any worker may run it."""
    if item.get_closest_marker("alone"):
        return "alone"
    if item.path.parent.name == "cluster":
        return "cluster"
    fixtures = getattr(item, "_fixtureinfo", None)
    shared = fixtures.name2fixturedefs.values() if fixtures else ()
    return str(item.path) if any(found[-1].scope == "module" for found in shared) else ""


@pytest.hookimpl(hookwrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """With several workers, a test that measures time waits for the others, then runs alone."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield
        return
    folder = item.config._tmp_path_factory.getbasetemp().parent  # type: ignore[attr-defined]
    with open(folder / "running.lock", "w") as lock:
        alone = item.get_closest_marker("alone") is not None
        fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


@pytest.fixture(scope="session", autouse=True)
def stop_from_the_keyboard() -> Iterator[None]:
    """Handles SIGINT like in a terminal; a shell's background processes ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session", autouse=True)
def files_are_not_forced_to_the_disk() -> Iterator[None]:
    """Spares a busy disk's seconds. Tests kill processes, which lose no written data; only a
    machine that loses its power does."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("os.fsync", lambda descriptor: None)
        yield


def _counted() -> Path:
    """Returns a folder that keeps counts of models between sessions, until the code that counts
    changes. Counting takes two minutes of processor time."""
    code = hashlib.blake2s(digest_size=8)
    for file in sorted((ROOT / "harness" / "workloads").rglob("*.py")):
        code.update(file.read_bytes())
    return cache_folder() / "tests" / code.hexdigest()


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Gives the tests their own data and references, shared by a session's workers; a test may
    replace them for its worker. Results of torch.compile, which takes half a minute, are kept
    between sessions."""
    before = os.environ.get("PARALLELISM_BENCH_CACHE")
    cache = tmp_path_factory.mktemp("cache")
    base = tmp_path_factory.getbasetemp()
    session = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    shared = {name: session / f"cache-{name}" for name in ("data", "references")}
    shared |= {name: _counted() / name for name in ("facts", "operators")}
    shared["compiled"] = cache_folder() / "compiled"
    for name, folder in shared.items():
        folder.mkdir(parents=True, exist_ok=True)
        (cache / name).symlink_to(folder)
    os.environ["PARALLELISM_BENCH_CACHE"] = str(cache)
    yield
    if before is None:
        del os.environ["PARALLELISM_BENCH_CACHE"]
    else:
        os.environ["PARALLELISM_BENCH_CACHE"] = before


@pytest.fixture(scope="session", autouse=True)
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Installs tests/plugin like a user's package, for this process and its children."""
    target = tmp_path_factory.mktemp("site")
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--disable-pip-version-check",
    ]
    copy = tmp_path_factory.mktemp("plugin")
    subprocess.run(["cp", "-r", str(ROOT / "tests" / "plugin") + "/.", str(copy)], check=True)
    subprocess.run([*command, "--target", str(target), str(copy)], check=True, capture_output=True)
    sys.path.append(str(target))
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(target)
    importlib.invalidate_caches()
    strategies.cache_clear()
    yield target
    sys.path.remove(str(target))
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


def _helpers() -> set[int]:
    """Returns processes that serve several tests: the fork server, multiprocessing's resource
    tracker, those of test nodes, and SLURM's daemons."""
    modules = ("multiprocessing.forkserver", "multiprocessing.resource_tracker")
    found = set()
    children = psutil.Process().children()
    for child in children:
        try:
            line = " ".join(child.cmdline())
            # These serve a file's tests, and have helpers.
            if "harness.agent" in line or "harness.links" in line or child.name() == "slurmctld":
                found.add(child.pid)
                children += child.children()
            if any(module in line for module in modules) or child.name() in (
                "slurmctld",
                "slurmscriptd",
                "slurmd",
                "slurmstepd",
            ):
                found.add(child.pid)
        except psutil.Error:
            continue
    return found


def _of_browser(process: psutil.Process, there: set[int]) -> bool:
    """Returns whether a browser that serves several tests started it, such as a spare renderer."""
    try:
        parent = process.parent()
        return parent is not None and parent.pid in there and parent.name() == "chromium"
    except psutil.Error:
        return False


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints what each layer cost."""
    seconds: dict[str, float] = {}
    limited: dict[str, float] = {}
    for report in itertools.chain(*terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            seconds[report.nodeid] = seconds.get(report.nodeid, 0) + report.duration
            if report.when == "call" and "thorough" not in report.keywords:
                limited[report.nodeid] = report.duration
    terminalreporter.section("tests by layer")
    for line in summary(seconds, limited):
        terminalreporter.write_line(line)


_AT_BEGIN = pytest.StashKey[set[str]]()


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[_AT_BEGIN] = _shared_memory()


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails a session that leaves files in shared memory."""
    if left := _shared_memory() - session.config.stash[_AT_BEGIN]:
        print(f"left behind in /dev/shm: {sorted(left)}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def left_in(folder: str | Path) -> list[str]:
    """Returns the names in a temporary folder, without libraries' caches."""
    caches = ("torchinductor_", "torch_extensions")
    return sorted(name for name in os.listdir(folder) if not name.startswith(caches))


def runs(process: psutil.Process) -> bool:
    """Whether the process is alive. This process inherits orphans of killed runs, which stay
    zombies because it does not wait for them."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _shared_memory() -> set[str]:
    """Returns libraries' files in shared memory, without semaphores of the fork server's children.

    Empty in a worker, which would see the other workers' files; the end of the session is checked.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        return set()
    folder = Path("/dev/shm")
    return (
        {path.name for path in folder.iterdir() if not path.name.startswith("sem.")}
        if folder.is_dir()
        else set()
    )


@pytest.fixture(autouse=True)
def leaks_nothing() -> Iterator[None]:
    """Fails a test that leaves a process, a thread, an environment variable or a file in the
    checkout."""
    variables = {k: v for k, v in os.environ.items() if k not in _VOLATILE}
    files, shared = set(ROOT.iterdir()), _shared_memory()
    threads = set(threading.enumerate())
    # Such as a browser that serves several tests.
    there = {p.pid for p in psutil.Process().children(recursive=True)}
    folder = Path.cwd()
    yield
    assert Path.cwd() == folder
    assert {k: v for k, v in os.environ.items() if k not in _VOLATILE} == variables
    assert set(ROOT.iterdir()) == files
    assert not _shared_memory() - shared
    # On a busy machine, a browser that showed a large page takes seconds to end.
    deadline = time.monotonic() + 15
    while True:
        left = [t for t in threading.enumerate() if t not in threads and not t.daemon]
        processes = [
            p
            for p in psutil.Process().children(recursive=True)
            if p.pid not in there | _helpers() and runs(p) and not _of_browser(p, there)
        ]
        if not left and not processes:
            return
        if time.monotonic() > deadline:
            pytest.fail(f"left behind: threads {left}, processes {processes}")
        time.sleep(0.05)


# Set by pytest itself, or by torch's agent and libraries on import in this process.
_VOLATILE = {
    "PYTEST_CURRENT_TEST",
    "TOKENIZERS_PARALLELISM",
    "TORCHINDUCTOR_CACHE_DIR",
    "_RJEM_MALLOC_CONF",
    "KMP_INIT_AT_FORK",
    "KMP_DUPLICATE_LIB_OK",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
}
