"""Faults of files next to the results folder, and faults two at a time."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from harness.record.store import QUARANTINE, Store, check_folder
from tests.faults.host_kinds import in_memory, mounts
from tests.faults.place import Inject, Place
from tests.faults.run_process import Run
from tests.waiting import LONG, until

Damage = Callable[[bytes, random.Random], bytes]


def flipped_anywhere(content: bytes, chance: random.Random) -> bytes:
    changed = bytearray(content)
    changed[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    return bytes(changed)


DAMAGES: dict[str, Damage] = {
    "is empty": lambda content, chance: b"",
    "is cut off": lambda content, chance: content[: chance.randrange(len(content))],
    "is zeros": lambda content, chance: bytes(len(content)),
    "has a flipped bit": flipped_anywhere,
}
FILES = {
    "a reference's JSON": "references/*/reference.json",
    "a reference's tensors": "references/*/*.safetensors",
    "a tokens file": "data/*.npy",
    "a file of facts": "[df]a*/*.json",
}
"""Patterns of files in the cache."""


def cache_of(place: Place) -> dict[str, str]:
    """Returns the variable of a cache that only the campaign's runs use."""
    return {"PARALLELISM_BENCH_CACHE": str(place.temporary.parent / "cache")}


def damage_cache(place: Place, pattern: str, change: Damage) -> Path:
    files = sorted(Path(cache_of(place)["PARALLELISM_BENCH_CACHE"]).glob(pattern))
    file = place.chance.choice(files)
    file.write_bytes(change(file.read_bytes(), place.chance))
    return file


def fill(place: Place) -> None:
    """Fills the cache by a run, once."""
    if not Path(cache_of(place)["PARALLELISM_BENCH_CACHE"], "references").exists():
        Run(place, environment=cache_of(place)).finish(good=3)


def damaged(pattern: str, change: Damage) -> Inject:
    """Returns a damage to the cache: the next run says so in one line, and makes the file again."""

    def inject(place: Place) -> None:
        fill(place)
        file = damage_cache(place, pattern, change)
        run = Run(place, environment=cache_of(place))
        run.finish(good=3)
        errors = run.errors()
        assert "Traceback" not in errors, errors
        assert any(file.name in line and "damaged" in line for line in errors.splitlines()), errors
        assert file.stat().st_size

    return inject


def stopped_and_damaged(number: int) -> Inject:
    """A run is ended in the middle, and its cache is damaged before it goes on."""

    def inject(place: Place) -> None:
        fill(place)
        run = Run(place, environment=cache_of(place))
        run.until_in_the_middle()
        run.process.send_signal(number)
        run.process.wait(timeout=LONG)
        change = place.chance.choice(list(DAMAGES.values()))
        damage_cache(place, place.chance.choice(list(FILES.values())), change)
        run.finish()
        assert "Traceback" not in run.errors()

    return inject


def damaged_under_way(place: Place) -> None:
    """A file of the cache is damaged while a run uses it."""
    fill(place)
    run = Run(place, environment=cache_of(place))
    run.until_in_the_middle()
    damage_cache(place, "references/*/reference.json", DAMAGES["has a flipped bit"])
    run.process.wait(timeout=LONG)
    assert "Traceback" not in run.errors()
    assert all(status == "ok" or reason for status, reason in run.ended())
    Run(place, environment=cache_of(place)).finish(good=3)


def killed_and_cut(place: Place) -> None:
    """A run is killed, and a trial of it is damaged: repaired and resumed, it has all trials."""
    run = Run(place, place.temporary.parent / f"killed-{place.chance.randrange(10**9)}")
    run.until_in_the_middle()
    run.process.kill()
    run.process.wait()
    _cut_one(run.store, place.chance)
    _repair(run.store).wait(timeout=LONG)
    run.finish()


def repair_killed(place: Place) -> None:
    """A repair is killed: each damaged file is at its place or in quarantine, and a second repair
    moves the rest."""
    folder = place.temporary.parent / f"repaired-{place.chance.randrange(10**9)}"
    run = Run(place, folder)
    run.finish(good=3)
    contents = [_cut_one(run.store, place.chance)]
    repair = _repair(run.store)
    time.sleep(place.chance.uniform(0.0, 1.5))
    repair.kill()
    repair.wait()
    assert _repair(run.store).wait(timeout=LONG) in (0, 2)
    moved = [file.read_bytes() for file in (folder / QUARANTINE).rglob("*.parquet")]
    assert moved == contents
    assert check_folder(run.store).problems == ()
    run.finish()


def _cut_one(store: Store, chance: random.Random) -> bytes:
    file = chance.choice(sorted((store.folder / "trials").glob("*/*.parquet")))
    content = file.read_bytes()[: chance.randrange(1, file.stat().st_size)]
    file.write_bytes(content)
    # The copy would still have the row.
    for copy in (store.folder / "gathered").glob("*/*"):
        copy.unlink()
    return content


def _repair(store: Store) -> subprocess.Popen[bytes]:
    words = [sys.executable, "-m", "bench", "check", str(store.folder), "--repair"]
    return subprocess.Popen(words, stdout=subprocess.DEVNULL)


def repair_during_a_run(place: Place) -> None:
    """A folder is repaired while a run writes to it."""
    run = Run(place)
    run.until_in_the_middle()
    repair = _repair(run.store)
    run.finish(good=3)
    repair.wait(timeout=LONG)


def full_disk_and_stop(number: int) -> Inject:
    """The disk is full, and the run is ended before it notices."""

    def inject(place: Place) -> None:
        with in_memory(place) as disk:
            run = Run(place, disk / "results")
            run.until_in_the_middle()
            with contextlib.suppress(OSError), open(disk / "filler", "wb", buffering=0) as sink:
                while True:
                    sink.write(bytes(4096))
            run.process.send_signal(number)
            run.process.wait(timeout=LONG)
            assert "Traceback" not in run.errors()
            (disk / "filler").unlink()
            run.finish()

    return inject


def full_disk_and_damaged_cache(place: Place) -> None:
    """The cache's disk is full while a damaged file must be made again: the results are kept, and
    with room the run goes on."""
    with in_memory(place, "200m") as disk:
        environment = {"PARALLELISM_BENCH_CACHE": str(disk / "cache")}
        Run(place, environment=environment).finish(good=3)
        files = sorted((disk / "cache").glob("*/*.json"))
        file = place.chance.choice(files)
        file.write_bytes(b"")
        with contextlib.suppress(OSError), open(disk / "filler", "wb", buffering=0) as sink:
            while True:
                sink.write(bytes(4096))
        run = Run(place, environment=environment)
        run.process.wait(timeout=LONG)
        assert "Traceback" not in run.errors()
        (disk / "filler").unlink()
        run.finish()


def both_ended(first: int, second: int) -> Inject:
    """Two runs write to one folder; one is killed, and the other is asked to end."""

    def inject(place: Place) -> None:
        runs = [Run(place), Run(place)]
        for run, number in zip(runs, (first, second), strict=True):
            run.until_in_the_middle()
            run.process.send_signal(number)
        for run in runs:
            run.finish()

    return inject


def fork_server_and_rank(place: Place) -> None:
    """A rank raises while the fork server is killed: the trial has one cause, the next is fine."""
    from tests.ranks.conftest import cell

    server = place.launcher.fork_server
    delay = place.chance.uniform(0.05, 0.6)
    killer = threading.Timer(delay, os.kill, (server, signal.SIGKILL))
    killer.start()
    status, reason = place.trial(cell("faulty", options={"fault": "raises", "at_step": 2}))
    killer.join()
    assert status == "failed", reason
    assert reason
    assert place.trial(cell("ddp"))[0] == "ok"


class NodesRun(Run):
    """A run on two nodes, which are agents on this host."""

    def start(self) -> subprocess.Popen[bytes]:
        meeting = self.place.temporary.parent / f"{self.name}.rendezvous"
        meeting.unlink(missing_ok=True)
        options = ["--nodes", "2", "--rendezvous", str(meeting), "--interface", "lo"]
        begin = self.words.index("--run")
        self.words = [*self.words[:begin], "--run", self.name, *options]
        words = [sys.executable, "-m", "harness.agent", str(meeting), "--interface", "lo"]
        self.agents = [
            subprocess.Popen([*words, "--node", str(number)], stderr=subprocess.DEVNULL)
            for number in range(2)
        ]
        return super().start()

    def end(self) -> None:
        for agent in self.agents:
            agent.kill()
            agent.wait()


def full_disk_and_lost_node(place: Place) -> None:
    """The disk is full while a node is lost: nothing that was recorded is lost, and with room and a
    new node the run goes on."""
    with in_memory(place) as disk:
        run = NodesRun(place, disk / "results", "{strategy: ddp, nodes: 2}")
        try:
            run.until_in_the_middle()
            with contextlib.suppress(OSError), open(disk / "filler", "wb", buffering=0) as sink:
                while True:
                    sink.write(bytes(4096))
            run.agents[1].kill()
            run.process.wait(timeout=LONG)
            assert "Traceback" not in run.errors()
            recorded = run.recorded()
            (disk / "filler").unlink()
            run.end()
            run.process = run.start()
            run.process.wait(timeout=LONG)
            assert run.recorded() >= recorded
            statuses = {status for status, _ in run.ended()}
            assert "ok" in statuses, statuses
        finally:
            run.end()


def lost_node_and_stop(place: Place) -> None:
    """A node is lost, and the run is asked to end at the same time."""
    run = NodesRun(place, place.temporary.parent / "lost", "{strategy: ddp, nodes: 2}")
    try:
        run.until_in_the_middle()
        run.agents[1].kill()
        run.process.terminate()
        run.process.wait(timeout=LONG)
        assert "Traceback" not in run.errors()
        run.end()
        run.process = run.start()
        run.process.wait(timeout=LONG)
        until(lambda: run.process.poll() is not None)
        assert "ok" in {status for status, _ in run.ended()}
    finally:
        run.end()


PAIRS: dict[str, Inject] = {
    "a run is killed, its cache is damaged": stopped_and_damaged(signal.SIGKILL),
    "a run is asked to end, its cache is damaged": stopped_and_damaged(signal.SIGTERM),
    "a cache is damaged under way": damaged_under_way,
    "a run is killed, a file is cut off": killed_and_cut,
    "a file is cut off, a repair is killed": repair_killed,
    "a repair, while a run writes": repair_during_a_run,
    "a disk is full, the run is killed": full_disk_and_stop(signal.SIGKILL),
    "a disk is full, the run is asked to end": full_disk_and_stop(signal.SIGTERM),
    "a disk is full, the cache is damaged": full_disk_and_damaged_cache,
    "two runs, one killed and one asked to end": both_ended(signal.SIGKILL, signal.SIGTERM),
    "the fork server is killed, a rank raises": fork_server_and_rank,
    "a disk is full, a node is lost": full_disk_and_lost_node,
    "a node is lost, the run is asked to end": lost_node_and_stop,
}
"""Faults two at a time."""
SIDE_KINDS: dict[str, Inject] = {
    f"{file} {what}": damaged(pattern, change)
    for file, pattern in FILES.items()
    for what, change in DAMAGES.items()
}
LACKING: dict[str, Callable[[], str]] = {
    kind: lambda: mounts("mount") for kind in PAIRS if "disk is full" in kind
}
"""Reasons why some kinds cannot be injected here; empty if they can."""


def ordered(kinds: Sequence[str], count: int, chance: random.Random) -> list[str]:
    """Returns `count` faults, every kind once before any repeats, a fifth of them pairs."""
    pairs = [kind for kind in kinds if kind in PAIRS]
    single = [kind for kind in kinds if kind not in PAIRS]
    number = max(round(count / 5), min(count - len(single), len(pairs))) if pairs else 0
    number = number if single else count
    names = [*_repeated(pairs, number, chance), *_repeated(single, count - number, chance)]
    return chance.sample(names, len(names))


def _repeated(kinds: Sequence[str], count: int, chance: random.Random) -> list[str]:
    names: list[str] = []
    while len(names) < count:
        names += chance.sample(list(kinds), len(kinds))
    return names[:count]
