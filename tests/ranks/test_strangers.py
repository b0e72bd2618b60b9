"""A stranger without a run's key, on its nodes' network, cannot interfere with the run.

The stranger can neither start a trial, read a result nor stop the run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from harness.links.emulated import _Process, unsupported_reason
from harness.links.switch import INTERFACE, NodeShare, address
from harness.nodes.protocol import HANDSHAKE_SECONDS
from harness.nodes.rendezvous import Rendezvous
from harness.record.store import Store
from tests.ranks.conftest import cell
from tests.ranks.stranger import ATTEMPTS
from tests.waiting import LONG, until

pytestmark = [
    pytest.mark.skipif(bool(unsupported_reason()), reason=unsupported_reason()),
    pytest.mark.skipif(os.getuid() != 0, reason="only root may enter other namespaces"),
    pytest.mark.xdist_group("namespaces"),
]
NONCE = 32
"""Bytes that the coordinator sends to anybody."""


def within(process: int, *words: str) -> list[str]:
    """Returns a command that runs in the network of a process."""
    return ["nsenter", f"--target={process}", "--net", *words]


def python(process: int, module: str, *words: object) -> list[str]:
    return within(process, sys.executable, "-m", module, *map(str, words))


@pytest.mark.thorough
def test_a_stranger_on_the_nodes_network_changes_nothing(tmp_path: Path) -> None:
    rendezvous, recorded = tmp_path / "rendezvous", tmp_path / "recorded"
    slow = cell("faulty", nodes=2, options={"fault": "slow"}, timed_steps=30)
    axes = slow.model_dump(exclude_defaults=True) | {"batch": 8}
    matrix = tmp_path / "m.yaml"
    matrix.write_text(json.dumps({"trials": 1, "timed_seconds": 0, "cells": [axes]}))
    switch, started = _Process(), list[subprocess.Popen[str]]()

    def start(words: list[str]) -> subprocess.Popen[str]:
        started.append(subprocess.Popen(words, stdout=subprocess.PIPE, text=True))
        return started[-1]

    try:
        share: NodeShare = {"cores": sorted(os.sched_getaffinity(0)), "gpus": None}
        switch.ask({"nodes": [share] * 3, "rendezvous_file": str(rendezvous)})
        head, _, third = sorted(
            agent.pid for agent in psutil.Process(switch.process.pid).children()
        )
        # Once started, this process keeps the third node's network alive.
        stayed = start(within(third, "sh", "-c", "echo in; exec sleep 300"))
        assert stayed.stdout
        assert stayed.stdout.readline() == "in\n"
        stranger = stayed.pid
        psutil.Process(third).kill()
        tap = start(
            python(switch.process.pid, "tests.ranks.tap", "p1", address(1), address(0), recorded)
        )
        assert tap.stdout
        assert tap.stdout.readline() == "listening\n"
        options = ["--matrix", matrix, "--results", tmp_path / "results", "--no-report"]
        options += ["--nodes", 2, "--rendezvous", rendezvous, "--interface", INTERFACE]
        run = start(python(head, "bench", "run", *options))
        until(lambda: run.poll() is not None or recorded.exists())
        where = Rendezvous.read(rendezvous)
        assert where.addresses == (address(0),)
        words = python(stranger, "tests.ranks.stranger", address(0), where.port, recorded)
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        assert run.poll() is None, "the run ended before the stranger had tried everything"
        assert run.wait(timeout=LONG) == 0
    finally:
        switch.end()
        for process in started:
            process.kill()
            process.communicate()
    answers = json.loads(done.stdout)
    assert answers.keys() == ATTEMPTS.keys()
    for name, answer in answers.items():
        assert answer["closed"], name
        assert answer["heard_bytes"] <= NONCE, name
        assert answer["seconds"] < HANDSHAKE_SECONDS + 3, name
    trials = Store(tmp_path / "results").load(steps=False).trials
    assert trials[["status", "reason"]].to_numpy().tolist() == [["ok", ""]]
    assert list(trials["node_names"][0]) == ["node0", "node1"]
