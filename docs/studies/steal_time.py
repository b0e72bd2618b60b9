"""Emulates steal time: processor time that a hypervisor gives to other guests.

Start `.venv/bin/python docs/studies/steal_time.py SECONDS [MOST_SHARE]` as root alongside a run. On
each core, a real-time process computes for a share of every 4 ms, which wanders between 0 and
MOST_SHARE (0.45) in spells of 2 to 60 seconds, half of it common to all cores. Prints each core's
mean share.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
import time

PERIOD_SECONDS = 0.004
SHORTEST_SPELL_SECONDS, LONGEST_SPELL_SECONDS = 2.0, 60.0
MOST_SHARE = 0.45
SEED = 1


def spells(chance: random.Random, seconds: float, most: float) -> list[tuple[float, float]]:
    """Returns each spell's end in seconds and stolen share."""
    found, at = [], 0.0
    while at < seconds:
        ratio = LONGEST_SPELL_SECONDS / SHORTEST_SPELL_SECONDS
        at += SHORTEST_SPELL_SECONDS * ratio ** chance.random()
        found.append((at, most * chance.random()))
    return found


def take(core: int, seconds: float, most: float) -> None:
    os.sched_setaffinity(0, {core})
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    everywhere = spells(random.Random(SEED), seconds, most)
    here = spells(random.Random(SEED + 1 + core), seconds, most)
    began, taken = time.monotonic(), 0.0
    while (now := time.monotonic() - began) < seconds:
        share = sum(next(share for end, share in part if end > now) for part in (everywhere, here))
        busy = share / 2 * PERIOD_SECONDS
        until = time.monotonic() + busy
        while time.monotonic() < until:
            pass
        taken += busy
        time.sleep(PERIOD_SECONDS - busy)
    print(f"core {core}: {taken / seconds:.0%} of its time taken\n", end="", flush=True)


def main() -> None:
    seconds = float(sys.argv[1])
    most = float(sys.argv[2]) if len(sys.argv) > 2 else MOST_SHARE
    processes = [
        multiprocessing.Process(target=take, args=(core, seconds, most))
        for core in sorted(os.sched_getaffinity(0))
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


if __name__ == "__main__":
    main()
