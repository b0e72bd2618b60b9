"""python -m tests.faults.campaign [--faults N] [--seed S]: injects faults, one after the other,
into trials that share one results folder, and says after each what was lost, recorded twice, or
left behind. The same seed gives the same faults."""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import psutil

from harness.host.scratch import PREFIX
from harness.launch.launcher import Launcher
from harness.record.store import Store
from tests.conftest import left_in
from tests.faults.kinds import KINDS, Place

HANG_SECONDS = "1"


class Campaign:
    """Faults in a folder of their own, and what has to hold after each of them."""

    def __init__(self, folder: Path, temporary: Path, seed: int, launcher: Launcher) -> None:
        chance = random.Random(seed)
        self.place = Place(Store(folder / "results"), launcher, chance, temporary)
        self.kept: dict[str, bytes] = {}
        """Trial files so far, and their content."""
        self.before = self._processes()

    def order(self, count: int, kinds: Sequence[str] = tuple(KINDS)) -> list[str]:
        """So many faults: every kind once, in a random order, before any comes again."""
        names: list[str] = []
        while len(names) < count:
            names += self.place.chance.sample(list(kinds), len(kinds))
        return names[:count]

    def strike(self, kind: str) -> None:
        """Injects a fault; raises AssertionError where something does not hold after it."""
        KINDS[kind](self.place)
        files = {str(file): file.read_bytes() for file in self.place.files()}
        lost = self.kept.keys() - files.keys() - self.place.taken_out
        assert not lost, f"lost: {sorted(lost)}"
        changed = [
            file for file in self.kept.keys() & files.keys() if self.kept[file] != files[file]
        ]
        assert not changed, f"changed: {changed}"
        self.kept = files
        trials = self.place.store.load(steps=False).trials
        twice = trials[trials.duplicated(["run_id", "cell_id", "trial", "attempt"])]
        assert twice.empty, f"recorded twice: {twice}"
        bad = trials[~trials["status"].isin(["ok"])]
        assert (bad["reason"].str.len() > 0).all(), "a failure without its cause"
        deadline = time.monotonic() + 10
        while (left := self._processes() - self.before) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left, f"left running: {left}"
        scratch = list(Path(tempfile.gettempdir()).glob(f"{PREFIX}*/rank*"))
        assert not scratch, f"left in temporary folders: {scratch}"

    def end(self) -> None:
        """After the last fault: nothing is left of the runs that were killed."""
        left = left_in(self.place.temporary)
        assert len(left) <= 2, f"only the last killed run may have left its folders: {left}"

    def _processes(self) -> set[int]:
        """Below this process and the fork server; zombies, and the helpers of multiprocessing,
        aside."""
        found = set()
        for process in psutil.Process().children(recursive=True):
            try:
                helps = any("multiprocessing" in word for word in process.cmdline()[:4])
                forked = process.ppid() != os.getpid()
                if process.status() != psutil.STATUS_ZOMBIE and (forked or not helps):
                    found.add(process.pid)
            except psutil.NoSuchProcess:
                continue
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    os.environ["PARALLELISM_BENCH_HANG_SECONDS"] = HANG_SECONDS
    struck: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        tempfile.tempdir = f"{folder}/tmp"
        temporary = Path(folder, "runs-tmp")
        temporary.mkdir()
        Path(tempfile.tempdir).mkdir()
        campaign = Campaign(Path(folder), temporary, given.seed, Launcher())
        for number, kind in enumerate(campaign.order(given.faults), 1):
            begin = time.monotonic()
            struck[kind] += 1
            try:
                campaign.strike(kind)
                outcome = "held"
            except AssertionError as error:
                failed[kind] += 1
                outcome = f"DID NOT HOLD: {error}"
            print(f"{number} {kind}: {outcome} ({time.monotonic() - begin:.1f} s)", flush=True)
    print(f"\nseed {given.seed}\n\n| fault | injected | did not hold |\n|---|---|---|")
    for kind in sorted(struck):
        print(f"| {kind} | {struck[kind]} | {failed[kind]} |")
    print(f"| all | {struck.total()} | {failed.total()} |", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
