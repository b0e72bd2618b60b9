"""Faults injected into trials and their results folder, and the records that must follow."""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from harness.cell.cell import Cell
from harness.record.files import VERSION, VERSION_KEY
from harness.record.store import check_folder, quarantine
from tests.faults.host_kinds import HOST_KINDS
from tests.faults.place import Inject, Place
from tests.faults.run_process import Run
from tests.faults.side_kinds import PAIRS, SIDE_KINDS
from tests.ranks.conftest import cell


def of_a_rank(
    fault: str, status: str, reason: str, devices: int = 2, first_step: int = 0
) -> Inject:
    """Returns a fault of the strategy `faulty`, at a random step of the last rank."""

    def inject(place: Place) -> None:
        tried = cell(
            "faulty",
            devices=devices,
            options={"fault": fault, "at_step": place.chance.randrange(first_step, 8)},
            time_limit_seconds=20,
        )
        if fault == "out_of_memory":
            tried = replace_axes(tried, memory_limit_bytes=256 * 2**20)
        found = place.trial(tried)
        assert found[0] == status, found
        assert re.search(reason, found[1]), found

    return inject


def replace_axes(tried: Cell, **axes: object) -> Cell:
    return tried.model_copy(update=axes)


def nothing(place: Place) -> None:
    """Injects no fault: a good trial is recorded as ok."""
    assert place.trial(cell("ddp"))[0] == "ok"


def damage(change: Callable[[bytearray, random.Random], bytes]) -> Inject:
    """Returns a fault that damages a recorded trial's file; the folder's check must find it and
    quarantine it."""

    def inject(place: Place) -> None:
        files = place.files()
        if not files:
            nothing(place)
            files = place.files()
        file = place.chance.choice(files)
        content = change(bytearray(file.read_bytes()), place.chance)
        file.write_bytes(content)
        problems = check_folder(place.store).problems
        assert [problem.file for problem in problems] == [file], problems
        assert quarantine(place.store, problems[0].file).read_bytes() == content
        place.taken_out.add(str(file))

    return inject


def cut(content: bytearray, chance: random.Random) -> bytes:
    return bytes(content[: chance.randrange(len(content))])


def flipped(content: bytearray, chance: random.Random) -> bytes:
    """Flips a bit in a column's values, which follow the page header."""
    column = pq.ParquetFile(pa.BufferReader(bytes(content))).metadata.row_group(0).column(0)
    begin = column.dictionary_page_offset or column.data_page_offset
    content[begin + column.total_compressed_size - 1] ^= 1 << chance.randrange(8)
    return bytes(content)


def foreign(content: bytearray, chance: random.Random) -> bytes:
    return chance.randbytes(2000)


def of_the_future(place: Place) -> None:
    """A file with a newer schema is reported with its version, and not as damaged."""
    nothing(place)
    file = place.chance.choice(place.files())
    before = file.read_bytes()
    rows = pq.read_table(file)
    pq.write_table(rows.replace_schema_metadata({VERSION_KEY: str(VERSION + 1)}), file)
    (problem,) = check_folder(place.store).problems
    assert not problem.damaged
    assert str(VERSION + 1) in problem.what
    file.write_bytes(before)


def folder_removed(place: Place) -> None:
    """The copies of runs, which only speed up reading, are removed."""
    shutil.rmtree(place.store.folder / "gathered", ignore_errors=True)
    nothing(place)


def of_a_run(signals: tuple[int, ...], pause: float = 0.0) -> Inject:
    """Returns a fault that signals a run's process, `pause` seconds apart, and resumes the run."""

    def inject(place: Place) -> None:
        run = Run(place)
        run.until_in_the_middle()
        for number in signals:
            if run.process.poll() is None:
                os.kill(run.process.pid, number)
                time.sleep(pause)
        run.finish()

    return inject


def machine_suspended(place: Place) -> None:
    """All processes of a run are stopped, and continued later."""
    run = Run(place)
    run.until_in_the_middle()
    stopped: list[psutil.Process] = []
    try:
        stopped.append(psutil.Process(run.process.pid))  # first: it starts the others
        stopped[0].suspend()
        for child in stopped[0].children(recursive=True):
            stopped.append(child)
            child.suspend()
        time.sleep(3.0)
    except psutil.NoSuchProcess:
        pass  # it had just ended
    finally:
        for process in reversed(stopped):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
    run.finish(good=3)


def fork_server_killed(place: Place) -> None:
    """The fork server is killed during a trial; the next trial gets a new one."""
    killer = threading.Timer(
        place.chance.uniform(0.05, 0.6), os.kill, (place.launcher.fork_server, signal.SIGKILL)
    )
    killer.start()
    status, reason = place.trial(cell("ddp"))
    killer.join()
    assert status in ("ok", "failed"), reason
    nothing(place)


def two_runs(place: Place) -> None:
    """Two runs write to one folder while this process reads it."""
    runs = [Run(place), Run(place)]
    while any(run.process.poll() is None for run in runs):
        if place.store.run_ids():  # none until the first of them has started
            place.store.load(steps=False)
        time.sleep(0.2)
    for run in runs:
        run.finish()


HANGS = r"^hangs: .* \d+ s in (step \d+|set-up)"
KINDS: dict[str, Inject] = {
    "no fault": nothing,
    "a rank raises": of_a_rank("raises", "failed", "rank 1: ValueError: the planted mistake"),
    "a rank raises in set-up": of_a_rank("raises_in_setup", "failed", "mistake in setup"),
    "a rank is killed": of_a_rank("killed", "failed", "rank 1 was killed by SIGKILL"),
    "a rank exits": of_a_rank("exits", "failed", "rank 1 exited with code 0"),
    "a rank has a segmentation fault": of_a_rank("segfaults", "failed", "killed by SIGSEGV"),
    "a loss is no number": of_a_rank("nan", "diverged", "not finite at step"),
    "a rank floods its log": of_a_rank("floods_its_log", "failed", "the planted flood"),
    "a rank writes no text": of_a_rank("writes_no_text", "failed", "the planted bytes"),
    "a rank has no memory": of_a_rank("out_of_memory", "out_of_memory", "allocate memory"),
    "a rank starts many children": of_a_rank("forks", "failed", "the planted children"),
    "a collective is never entered": of_a_rank("hangs", "timeout", HANGS + ".*rank 1 never"),
    "a rank is stopped": of_a_rank("stops_itself", "timeout", HANGS + ".*rank 1 never"),
    "a rank loops in C": of_a_rank("loops_in_c", "timeout", HANGS, first_step=1),
    "a rank leaves a child": of_a_rank("leaves_children", "ok", "^$"),
    "a file is cut off": damage(cut),
    "a file has a flipped bit": damage(flipped),
    "a file is of another tool": damage(foreign),
    "a file is of the future": of_the_future,
    "copies are removed": folder_removed,
    "a run is killed": of_a_run((signal.SIGKILL,)),
    "a run is asked to end": of_a_run((signal.SIGTERM,)),
    "a run is suspended": of_a_run((signal.SIGSTOP, signal.SIGCONT), pause=2.0),
    "a machine is suspended": machine_suspended,
    "the fork server is killed": fork_server_killed,
    "two runs write to one folder": two_runs,
    **HOST_KINDS,
    **SIDE_KINDS,
    **PAIRS,
}
"""Faults by their name in the table."""
