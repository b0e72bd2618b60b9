"""The controls of a trial's ranks wait for each other."""

from __future__ import annotations

import itertools
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.cell.cell import Cell
from harness.worker.control_process import _Others
from harness.worker.spec import TrialSpec
from harness.workloads import DataSource
from tests.waiting import LONG

RANKS = 16


@pytest.fixture
def controls(tmp_path: Path) -> Iterator[list[_Others]]:
    """Each rank's side of the waiting; the ranks' ends of the lines stay open."""
    data = DataSource("text", "t", "f", None, ((0, 9),), 4)
    cell = Cell(strategy="ddp", devices=RANKS)
    spec = TrialSpec(cell, data, RANKS, scratch=str(tmp_path))
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(RANKS)]
    others = [_Others(spec, rank, line, 0) for rank, (line, _) in enumerate(pairs)]
    yield others
    sockets = [side for other in others for side in (other.socket, other.sender)]
    for side in (*sockets, *itertools.chain(*pairs)):
        side.close()


def test_two_late_controls_whose_queues_are_full_do_not_block_each_other(
    controls: list[_Others],
) -> None:
    """Linux queues 11 messages per socket: 14 early controls fill the queues of the late ones."""
    largest: dict[int, list[float]] = {}

    def wait(rank: int) -> None:
        largest[rank] = [controls[rank].wait(rank + pause) for pause in range(20)]

    threads = [threading.Thread(target=wait, args=(rank,), daemon=True) for rank in range(RANKS)]
    for thread in threads[2:]:
        thread.start()
    time.sleep(0.3)
    assert not largest
    for thread in threads[:2]:
        thread.start()
    deadline = time.monotonic() + LONG
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    expected = [float(RANKS - 1 + pause) for pause in range(20)]
    assert largest == dict.fromkeys(range(RANKS), expected)
    assert all(control.numbers == {} for control in controls)


def test_a_control_whose_rank_has_ended_does_not_wait_for_the_others(
    controls: list[_Others],
) -> None:
    """It ends even if another control has not started, so that a restarted rank is served."""
    Path(controls[2].addresses[3]).unlink()
    controls[2].line.shutdown(socket.SHUT_RDWR)
    with pytest.raises(EOFError, match="the rank has ended"):
        controls[2].wait(0.0)
