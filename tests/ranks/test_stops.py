"""A stop at any moment: one sentence with how to go on, exit code 130, and nothing lost."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness.record.store import Store, check_folder
from tests.waiting import LONG

MOMENTS = int(os.environ.get("MOMENTS", "2"))
"""Number of moments of each kind of stop."""
LASTS = float(os.environ.get("LASTS", "12"))
"""Seconds in which the moments lie: from the command's start to about its end."""
MATRIX = """
trials: 2
timed_seconds: 0
defaults: {workload: llama-nano, sequence_length: 32, batch: 8, devices: 2, warmup_steps: 1,
  timed_steps: 3, seed: SEED}
cells: [{strategy: ddp}, {strategy: single, devices: 1}]
"""
KINDS = [(number, group) for number in (signal.SIGINT, signal.SIGTERM) for group in (False, True)]


def start(folder: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "bench", *words, "--no-report"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("number", "group"), KINDS, ids=lambda of: of.name if isinstance(of, signal.Signals) else of
)
def test_a_stop_at_any_moment_is_one_sentence(
    number: signal.Signals, group: bool, tmp_path: Path
) -> None:
    chance = random.Random(f"{number} {group}")
    for moment in range(MOMENTS):
        # A new seed needs a new reference run, which can be stopped too.
        (tmp_path / "m.yaml").write_text(MATRIX.replace("SEED", str(chance.randrange(10**6))))
        run = start(tmp_path, "run", "--matrix", "m.yaml", "--run", f"run-{moment}")
        after = LASTS * (moment + chance.random()) / MOMENTS
        try:
            said = "".join(run.communicate(timeout=after))
        except subprocess.TimeoutExpired:
            (os.killpg if group else os.kill)(run.pid, number)
            said = "".join(run.communicate(timeout=LONG))
        where = f"after {after:.2f} s: exit code {run.returncode}\n{said}"
        assert "Traceback" not in said, where
        assert "torch/" not in said, where  # no warning of its own either
        assert run.returncode in (0, 130) or (run.returncode == -number and not said), where
        if run.returncode == 130:
            sentences = [line for line in said.splitlines() if "run --resume" in line]
            assert len(sentences) == 1, where
            assert "interrupted" in sentences[0], where
        store = Store(tmp_path / "results")
        if f"run-{moment}" in store.run_ids():
            resumed = start(tmp_path, "run", "--resume", "--run", f"run-{moment}")
            said = "".join(resumed.communicate(timeout=LONG))
            assert resumed.returncode == 0, said
            trials = store.load([f"run-{moment}"], steps=False).trials
            good = trials[trials["status"] == "ok"]
            assert sorted(good["trial"]) == [0, 0, 1, 1], where
            assert set(trials["status"]) <= {"ok", "interrupted"}, where
            assert check_folder(store).problems == ()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_while_packages_are_imported_is_one_sentence(
    number: signal.Signals, tmp_path: Path
) -> None:
    (tmp_path / "m.yaml").write_text(MATRIX.replace("SEED", "1"))
    run = start(tmp_path, "run", "--matrix", "m.yaml", "--dry-run")
    try:
        run.wait(timeout=0.8)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, number)
    said = "".join(run.communicate(timeout=LONG))
    assert "Traceback" not in said
    assert run.returncode in (0, 130)


CUT_OFF = """
import multiprocessing, os, socket
from multiprocessing import forkserver
import psutil
from harness.launch.launcher import Launcher

class Removed:
    def __reduce__(self):
        return open, ("removed",)

if __name__ == "__main__":
    launcher = Launcher()
    sentinel, writer = forkserver.connect_to_new_process([])
    os.close(writer)  # before what to start was sent
    child = forkserver.read_signed(sentinel)
    assert forkserver.read_signed(sentinel) == 1, "the child ended well"
    context = multiprocessing.get_context("forkserver")
    child = context.Process(target=print, args=(Removed(),))  # like a semaphore
    child.start()
    child.join()
    assert child.exitcode == 1, child.exitcode
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(forkserver._forkserver._forkserver_address)
    psutil.Process(launcher.fork_server).wait()
    print("all ended")
"""


def test_a_stop_while_a_rank_is_started_is_no_traceback(tmp_path: Path) -> None:
    """torch raises an exception at a signal, which may cut off what the fork server is sent, or
    remove a semaphore that the new process needs."""
    (tmp_path / "cut_off.py").write_text(CUT_OFF)
    ended = subprocess.run(
        [sys.executable, "cut_off.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )
    assert ended.stdout == "all ended\n", ended.stderr
    assert "Traceback" not in ended.stderr


ORPHAN = """
import multiprocessing, os, signal, time
from harness.host.process import die_with_parent
from harness.launch.launcher import Launcher

def outlive(launcher):
    fork_server = os.getppid()
    os.kill(launcher, signal.SIGKILL)
    while os.getppid() == fork_server:
        time.sleep(0.01)
    print("alone", flush=True)
    die_with_parent()
    time.sleep(3600)

if __name__ == "__main__":
    Launcher()
    context = multiprocessing.get_context("forkserver")
    context.Process(target=outlive, args=(os.getpid(),)).start()
    time.sleep(3600)
"""


def test_a_process_whose_parents_die_while_it_starts_ends(tmp_path: Path) -> None:
    """The kernel was not yet asked to end it with its parent."""
    (tmp_path / "orphan.py").write_text(ORPHAN)
    run = subprocess.Popen(
        [sys.executable, "orphan.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = run.communicate(timeout=LONG)  # returns when no process has this output
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
    assert (said, run.returncode) == ("alone\n", -signal.SIGKILL)
