"""Injects faults into trials that share results folders. After each fault, checks that nothing
was lost, recorded twice, or left behind."""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from harness.host.folders import PREFIX
from harness.launch.launcher import Launcher
from harness.record.store import Store
from tests.conftest import left_in
from tests.faults.kinds import KINDS
from tests.faults.place import Place
from tests.faults.side_kinds import ordered

HANG_SECONDS = "1"
FAULTS_IN_A_FOLDER = 50
"""Each check reads the whole folder: with all 500 faults in one, a campaign took hours."""


class Campaign:
    """Faults injected in shared folders, with checks after each."""

    def __init__(self, folder: Path, temporary: Path, seed: int, launcher: Launcher) -> None:
        chance = random.Random(seed)
        self.folder, self.struck = folder, 0
        self.place = Place(Store(folder / "results"), launcher, chance, temporary)
        self.seconds: dict[str, float] = {}
        """Seconds spent so far by kind of fault, including checks."""
        self.kept: dict[str, bytes] = {}
        """Content of the trial files so far, by name."""
        self.before = self._processes()

    def order(self, count: int, kinds: Sequence[str] = tuple(KINDS)) -> list[str]:
        """Returns `count` faults: every kind once, in random order, before any repeats."""
        return ordered(kinds, count, self.place.chance)

    def strike(self, kind: str) -> None:
        """Injects a fault; raises AssertionError if a check fails afterwards."""
        began = time.monotonic()
        if self.struck and self.struck % FAULTS_IN_A_FOLDER == 0:
            self.place.store, self.kept = Store(self.folder / f"results-{self.struck}"), {}
        self.struck += 1
        try:
            KINDS[kind](self.place)
            self._look()
        finally:
            self.seconds[kind] = self.seconds.get(kind, 0.0) + time.monotonic() - began

    def _look(self) -> None:
        """Checks what must hold after every fault."""
        files = {str(file): file.read_bytes() for file in self.place.files()}
        lost = self.kept.keys() - files.keys() - self.place.taken_out
        assert not lost, f"lost: {sorted(lost)}"
        changed = [
            file for file in self.kept.keys() & files.keys() if self.kept[file] != files[file]
        ]
        assert not changed, f"changed: {changed}"
        self.kept = files
        if self.place.store.run_ids():  # some kinds of faults use other folders
            trials = self.place.store.load(steps=False).trials
            twice = trials[trials.duplicated(["run_id", "cell_id", "trial", "attempt"])]
            assert twice.empty, f"recorded twice: {twice}"
            bad = trials[~trials["status"].isin(["ok"])]
            assert (bad["reason"].str.len() > 0).all(), "a failure without a reason"
        deadline = time.monotonic() + 10
        while (left := self._processes() - self.before) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left, f"left running: {left}"
        scratch = list(Path(tempfile.gettempdir()).glob(f"{PREFIX}*/rank*"))
        assert not scratch, f"left in temporary folders: {scratch}"

    def end(self) -> None:
        """Checks after the last fault that killed runs left nothing behind."""
        left = left_in(self.place.temporary)
        assert len(left) <= 2, f"only the last killed run may have left its folders: {left}"

    def _processes(self) -> set[int]:
        """Returns descendants of this process, without zombies and multiprocessing's helpers."""
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


def table(
    struck: Counter[str], failed: Mapping[str, list[str]], seconds: Mapping[str, float]
) -> str:
    """Returns a Markdown table of faults, their number, failed checks and mean time."""
    rows = ["| fault | injected | did not hold | seconds each |", "|---|---|---|---|"]
    rows += [
        f"| {kind} | {struck[kind]} | {len(failed.get(kind, []))}"
        f" | {seconds[kind] / struck[kind]:.1f} |"
        for kind in sorted(struck)
    ]
    return "\n".join(rows)
