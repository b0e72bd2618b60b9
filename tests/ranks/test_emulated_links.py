"""Emulated links between network namespaces: their rates, training across them, and clean-up."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest

from harness.cell.cell import Cell, Link
from harness.launch.launcher import Launcher
from harness.links.emulated import EmulatedNodes, LinksLauncher, unsupported_reason
from harness.record.plan import Plan
from harness.record.store import Results, Store
from harness.run.runner import ProgressListener, Runner
from tests.conftest import runs
from tests.listening import is_loopback, watched
from tests.ranks.conftest import cell
from tests.waiting import LONG, PROMPT, until

pytestmark = pytest.mark.skipif(bool(unsupported_reason()), reason=unsupported_reason())


@pytest.fixture(scope="module")
def emulated() -> Iterator[EmulatedNodes]:
    made = EmulatedNodes(2)
    made.ready()
    yield made
    made.close()


@pytest.fixture
def run_cells(
    emulated: EmulatedNodes, launcher: Launcher, tmp_path: Path
) -> Callable[..., Results]:
    def run(*cells: Cell, explain: bool = False) -> Results:
        store = Store(tmp_path / "results")
        plan = Plan.new("test", cells, 1, [])
        runner = Runner(
            store,
            plan,
            launcher=lambda packages: LinksLauncher(emulated, lambda _: launcher, packages),
        )
        runner.begin()
        assert runner.run(ProgressListener())
        assert not explain or runner.explain(ProgressListener())
        return store.load([plan.run_id])

    return run


def over(link: Any, strategy: str = "ddp", **axes: Any) -> Cell:
    return cell(strategy, **{"nodes": 2, "links": link, **axes})


@pytest.mark.alone
@pytest.mark.parametrize("asked", ["100mbit", "1gbit 1ms"])
def test_a_link_does_what_is_asked(emulated: EmulatedNodes, asked: str) -> None:
    """Others may use this machine, so a link is measured up to ten times."""
    link = Link.of(asked)
    for _ in range(10):
        emulated._link, emulated._columns = "", {}
        measured = emulated.use(asked)
        near = [
            measured["link_bits_per_second"] == pytest.approx(link.bits_per_second, rel=0.1),
            measured["link_latency_seconds"] == pytest.approx(link.delay_seconds, abs=5e-4),
        ]
        if all(near):
            break
    assert all(near), measured
    assert measured["link_emulation"].startswith("network namespaces, tbf")
    assert (", " in measured["link_emulation"].partition("tbf")[2]) == bool(link.delay_seconds)


@pytest.mark.alone
def test_trains_the_same_over_a_link(run_cells: Callable[..., Results]) -> None:
    """Training is exact, and processes listen only on the nodes' interface or on loopback."""
    with watched() as seen:
        found = run_cells(
            over("1gbit"),
            over("none", "horovod"),
            over({"rate": "1gbit", "delay": "1ms"}, "fsdp2"),
            explain=True,
        )
    assert seen.outside == []
    assert {"10.97.0.1", "10.97.0.2"} <= seen.elsewhere
    others = seen.elsewhere - {"10.97.0.1", "10.97.0.2"}
    assert [address for address in others if not is_loopback(address)] == []
    for trial in found.trials.to_dict("records"):
        assert (trial["status"], trial["reason"]) == ("ok", ""), trial["log_tail"]
        assert trial["parity_verdict"] == "exact"
        assert list(trial["node_names"]) == ["node0", "node1"]
        facts = json.loads(trial["node_facts"])
        assert [(node["host"], node["address"]) for node in facts] == [
            ("node0", "10.97.0.1"),
            ("node1", "10.97.0.2"),
        ]
        # The nominal rate, which these virtual interfaces lack.
        assert [node["link_bits_per_second"] for node in facts] == [None, None]
        assert "emulated links" in trial["stand_in"]
    trials = found.trials.set_index("strategy")
    assert trials["links"].to_dict() == {"ddp": "1gbit", "horovod": "none", "fsdp2": "1gbit 1ms"}
    assert (
        trials.loc["ddp", "link_bits_per_second"]
        < 1.05e9
        < trials.loc["horovod", "link_bits_per_second"]
    )
    assert (
        trials.loc["ddp", "link_latency_seconds"]
        < 1e-3
        < trials.loc["fsdp2", "link_latency_seconds"]
    )
    explained = found.explained.set_index("cell_name")
    assert set(explained["status"]) == {"ok"}
    assert all(min(sent) > 0 for sent in explained["sent_bytes"])


MODEL = {
    "workload": "gpt2-micro",
    "sequence_length": 16,
    "global_batch": 2,
    "timed_steps": 4,
    "parity_steps": 5,
}


@pytest.mark.thorough
@pytest.mark.alone
def test_a_step_takes_its_compute_and_its_bytes_on_the_wire(
    run_cells: Callable[..., Results],
) -> None:
    """DDP reduces one bucket after the backward pass, so nothing overlaps.

    The model computes little, because noise in compute would disturb the test. Others may use this
    machine, so the fastest of up to four launches counts. On the slowest link, strategies rank by
    their bytes.
    """
    cells = [
        *(
            over(link, options={"bucket_cap_mb": 25.0}, **MODEL)
            for link in ("none", "1gbit", "100mbit")
        ),
        over("100mbit", options={"comm_hook": "powersgd"}, **MODEL),
        over("100mbit", "deepspeed", options={"stage": 3}, **MODEL),
    ]
    trials = run_cells(*cells).trials
    for _ in range(3):
        if takes_what_its_bytes_take(trials):
            return
        trials = pd.concat([trials, run_cells(*cells).trials])
    assert takes_what_its_bytes_take(trials), trials[
        ["label", "links", "step_seconds_p50", "link_bits_per_second", "sent_bytes_per_step"]
    ].to_string()


def takes_what_its_bytes_take(trials: pd.DataFrame) -> bool:
    """Returns whether each cell's fastest launch takes as long as its bytes.

    Strategies must rank by bytes on the slowest link, and DDP's step times must be within 15% on
    two links.
    """
    for trial in trials.to_dict("records"):
        assert trial["status"] == "ok", trial["log_tail"]
    trials = trials.assign(sent=[max(sent) for sent in trials["sent_bytes_per_step"]])
    best = trials.sort_values("step_seconds_p50").drop_duplicates("cell_id")
    slowest = best[best["links"] == "100mbit"]
    assert len(slowest) == 3
    ddp = best[best["label"].str.contains("bucket_cap_mb")].set_index("links")
    assert ddp.loc["100mbit", "sent"] > 3e6
    wire = 8 * ddp["sent"] / ddp["link_bits_per_second"]
    compute = ddp.loc["none", "step_seconds_p50"] - wire["none"]
    return slowest["sent"].is_monotonic_increasing and all(
        ddp.loc[link, "step_seconds_p50"] == pytest.approx(compute + wire[link], rel=0.15)
        for link in ("1gbit", "100mbit")
    )


@pytest.mark.alone
def test_a_lost_node_is_started_anew(
    emulated: EmulatedNodes, run_cells: Callable[..., Results]
) -> None:
    assert set(run_cells(over("none")).trials["status"]) == {"ok"}
    agents = psutil.Process(emulated.pid).children()
    agents[1].kill()
    assert set(run_cells(over("none", seed=1)).trials["status"]) == {"ok"}
    assert agents[0].pid not in [agent.pid for agent in psutil.Process(emulated.pid).children()]


@pytest.mark.thorough
@pytest.mark.xdist_group("namespaces")
@pytest.mark.skipif(
    os.getuid() != 0 or not shutil.which("setpriv"),
    reason="needs root and setpriv, to drop root's capabilities",
)
def test_an_unprivileged_user_gets_a_user_namespace() -> None:
    code = (
        "from harness.links.emulated import EmulatedNodes as E; e = E(2); print(e.use('1gbit"
        " 1ms')); e.close()"
    )
    less = [
        f"--{of}=-sys_admin,-net_admin,-net_raw,-sys_nice,-sys_resource"
        for of in ("bounding-set", "inh-caps")
    ]
    done = subprocess.run(
        ["setpriv", *less, sys.executable, "-c", code], capture_output=True, text=True
    )
    if "does not let this user" in done.stderr:
        pytest.skip("this system has no user namespaces")
    assert "'link_emulation': 'network namespaces, tbf" in done.stdout, done.stderr


def train(processes: list[psutil.Process]) -> bool:
    """Returns whether ranks of both nodes train; like the switch, they lead their own sessions."""
    leaders = []
    for process in processes:
        with contextlib.suppress(OSError):
            if os.getsid(process.pid) == process.pid:
                leaders.append(process)
    return len(spaces(leaders)) == 3


def remaining_in(namespaces: set[str], before: float) -> list[str]:
    """Returns processes in these namespaces that started before a time.

    A later namespace of another test may reuse a removed one's number.
    """
    remaining = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.create_time() < before and spaces([process]) & namespaces:
                remaining.append(str(process))
    return remaining


def spaces(processes: list[psutil.Process]) -> set[str]:
    names = set()
    for process in processes:
        try:
            names.add(os.readlink(f"/proc/{process.pid}/ns/net"))
        except OSError:
            continue
    return names


@pytest.mark.xdist_group("namespaces")
@pytest.mark.parametrize(
    "how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.thorough)]
)
def test_a_run_that_is_ended_leaves_no_process_and_no_namespace(
    tmp_path: Path, how: signal.Signals
) -> None:
    matrix = tmp_path / "m.yaml"
    one = over("1gbit 1ms", "faulty", options={"fault": "hangs"})
    axes = one.model_dump(exclude_defaults=True) | {"batch": 8}
    matrix.write_text(json.dumps({"trials": 1, "cells": [axes]}))
    arguments = [
        "bench",
        "run",
        "--matrix",
        str(matrix),
        "--results",
        str(tmp_path / "results"),
        "--no-report",
    ]
    with (tmp_path / "output").open("w") as output:
        run = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            stdout=output,
            env={**os.environ, "PARALLELISM_BENCH_HANG_SECONDS": "0"},  # no hang detection
        )
    outer = os.readlink("/proc/self/ns/net")
    looked, below = time.time(), list[psutil.Process]()
    while run.poll() is None and not train(below):
        time.sleep(0.2)
        looked = time.time()
        below = psutil.Process(run.pid).children(recursive=True)
    made = spaces(below) - {outer}
    if len(made) < 3:  # a reference's ranks may have one of their own
        pytest.fail(f"exit code {run.poll()}; {(tmp_path / 'output').read_text()}")
    assert remaining_in(made, looked)
    run.send_signal(how)
    assert run.wait(timeout=LONG) == (130 if how == signal.SIGTERM else -how)
    until(lambda: not any(map(runs, below)), within=PROMPT)
    assert remaining_in(made, looked) == []
