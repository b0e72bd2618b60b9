"""Profiles of time, bytes and memory: made-up events, calls and tensors, worked out by hand."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.cli.profile import name_ranks
from harness.cell.cell import Cell
from harness.cell.errors import UsageError
from harness.launch.outcome import Outcome
from harness.measure.rank_traffic import Call, algorithm_bytes, counting, logical_bytes
from harness.measure.step_breakdown import Event, breakdown, own_seconds, stacks, straggler
from harness.record.profile_record import COMPONENTS, SPLIT
from harness.record.run_record import RunRecord
from harness.record.store import Store, load
from harness.record.trial import TrialRecord
from harness.run.profile import profile_record
from harness.worker.rank_answer import ProfiledAnswer, RankAnswer
from harness.worker.rank_profile import events_of, training_thread
from reports.run_report import ran
from tests.unit.made_results import run_row, trial_rows
from tests.unit.stored_trials import one_cell_run


def parts(
    *events: Event, end: float = 10.0, pipeline: bool = False, alone: bool = False
) -> dict[str, float]:
    """Returns the nonzero parts of a step from 0 to `end` on thread 1, in seconds."""
    found = breakdown(events, 1, 0.0, end, pipeline=pipeline, alone=alone)
    assert sum(found[name] for name in COMPONENTS) == pytest.approx(end)
    return {name: round(seconds, 9) for name, seconds in found.items() if seconds}


def test_pieces_have_no_holes_and_the_innermost_comes_last() -> None:
    inner, outer = Event("operator", 1, 3, 4), Event("optimizer", 1, 2, 6)
    assert stacks([inner, outer], 0, 8) == [
        (0, 2, ()),
        (2, 3, ("optimizer",)),
        (3, 4, ("optimizer", "operator")),
        (4, 6, ("optimizer",)),
        (6, 8, ()),
    ]


def test_an_event_that_ends_a_tick_late_ends_with_the_outer_one() -> None:
    pieces = stacks(
        [Event("optimizer", 1, 0, 4), Event("operator", 1, 1, 4.5), Event("wait", 1, 5, 6)], 0, 8
    )
    assert [(a, b) for a, b, _ in pieces] == [(0, 1), (1, 4), (4, 5), (5, 6), (6, 8)]
    assert pieces[2][2] == ()


def test_operators_overlap_communication_and_gaps_expose_it() -> None:
    """A collective runs from 2 to 8, operators until 5 and from 7. The gap from 5 to 7 is exposed,
    the rest overlapped."""
    found = parts(Event("operator", 1, 0, 5), Event("flight", 2, 2, 8), Event("operator", 1, 7, 10))
    assert found == {"compute": 8.0, "communication": 2.0, "overlapped": 4.0, "operators": 8.0}


def test_each_component_matches_that_worked_out_by_hand() -> None:
    """Data 0-1, compute 1-4 with an interpreter gap, a wait 4-6, offload 6-7, and the optimizer
    7-10 with a wait of 1 s."""
    events = [
        Event("data", 1, 0, 1),
        Event("operator", 1, 1, 2),
        Event("operator", 1, 3, 4),
        Event("wait", 1, 4, 6),
        Event("offload", 1, 6, 7),
        Event("optimizer", 1, 7, 10),
        Event("operator", 1, 7, 8),
        Event("wait", 1, 8, 9),
    ]
    assert parts(*events) == {
        "data": 1.0,
        "compute": 3.0,
        "communication": 3.0,
        "offload": 1.0,
        "optimizer": 2.0,
        "operators": 3.0,
    }


def test_waiting_for_a_neighbour_is_the_bubble_and_only_in_a_pipeline() -> None:
    """A message is in flight all the time, but only waiting for it is the bubble."""
    events = [Event("transfer", 2, 0, 10), Event("operator", 1, 0, 4), Event("wait", 1, 6, 9)]
    assert parts(*events, pipeline=True) == {"compute": 7.0, "bubble": 3.0, "operators": 4.0}
    assert parts(*events) == {"compute": 7.0, "communication": 3.0, "operators": 4.0}


def test_gradient_hooks_are_communication_where_there_are_others() -> None:
    events = [Event("hook", 1, 2, 6), Event("operator", 1, 2, 3)]
    assert parts(*events) == {"compute": 7.0, "communication": 3.0, "operators": 1.0}
    assert parts(*events, alone=True) == {"compute": 10.0, "operators": 1.0}


def test_device_kernels_take_precedence() -> None:
    """The host waits for kernels: compute 0-4, a collective 2-6 (exposed from 4), a copy 7-8."""
    events = [
        Event("device compute", 7, 0, 4),
        Event("device communication", 8, 2, 6),
        Event("device copy", 9, 7, 8),
        Event("operator", 1, 0, 1),
    ]
    found = parts(*events)
    assert found == {
        "compute": 7.0,
        "communication": 2.0,
        "offload": 1.0,
        "overlapped": 2.0,
        "operators": 4.0,
    }


def test_own_time_leaves_waiting_out_and_names_the_straggler() -> None:
    step = dict.fromkeys(COMPONENTS, 1.0)
    assert own_seconds(step) == len(COMPONENTS) - 2
    assert straggler([[1.0, 1.0, 1.2, 1.0], [1.0, 1.0, 1.3, 1.0], [2.0, 2.0, 3.0, 1.0]]) == (
        2,
        pytest.approx(0.3),
    )
    assert straggler([[1.0, 1.1], [1.0, 1.1]]) is None
    assert straggler([[1.0, 2.0], [2.0, 1.0]]) is None, "slowest once each is noise"
    assert straggler([[1.0], [1.0]]) is None


def raw(name: str, begin: int, end: int, thread: int = 1, scope: int = 0) -> Any:
    """Returns a host event of the profiler."""
    return SimpleNamespace(
        name=lambda: name,
        start_ns=lambda: begin,
        end_ns=lambda: end,
        start_thread_id=lambda: thread,
        device_type=lambda: SimpleNamespace(name="CPU"),
        activity_type=lambda: "cpu_op",
        scope=lambda: scope,
        correlation_id=lambda: begin,
        linked_correlation_id=lambda: 0,
    )


def test_the_end_of_backward_is_a_hook() -> None:
    """Wrappers wait for communication from the last operator's end, 60 and 150, to backward's end.
    The third backward has no operator."""
    node = "autograd::engine::evaluate_function: AddmmBackward0"
    backwards = [raw("bench:backward", *span) for span in ((10, 90), (100, 200), (210, 220))]
    nodes = [raw(node, *span) for span in ((110, 150), (40, 60), (20, 40), (100, 120))]
    found = events_of([*backwards, *nodes, raw(node, 50, 80, thread=2), raw("python", 0, 9)], 10)
    assert {(event.kind, event.thread) for event in found} == {("hook", 1)}
    assert [(round(event.begin * 1e9), round(event.end * 1e9)) for event in found] == [
        (50, 80),
        (140, 190),
    ]


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("aten::mm", ["operator"]),
        ("gloo:all_reduce", ["flight"]),
        ("gloo:recv", ["transfer"]),
        ("_c10d_functional::wait_tensor", ["wait"]),
        ("Optimizer.step#AdamW.step", ["optimizer"]),
        ("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", ["hook"]),
        ("bench:offload", ["offload"]),
        ("autograd::engine::evaluate_function: AddmmBackward0", []),
        ("AddmmBackward0", []),
        ("FSDP::pre_forward (0)", []),
    ],
)
def test_profiler_names_map_to_kinds(name: str, kinds: list[str]) -> None:
    annotation = 7 if name.startswith("FSDP") else 0
    event = raw(name, 0, 1, scope=annotation)
    assert [found.kind for found in events_of([event], 0)] == kinds


@pytest.mark.parametrize(
    ("name", "annotation", "kinds"),
    [
        ("ampere_sgemm_32x32_sliced1x4_nn", False, ["device matmul"]),
        ("Memcpy DtoD (Device -> Device)", False, ["device compute"]),
        ("Memcpy HtoD (Pinned -> Device)", False, ["device copy"]),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", False, ["device communication"]),
        ("Optimizer.step#AdamW.step", True, ["device optimizer"]),
        ("nccl:all_reduce", True, []),
    ],
)
def test_device_events_need_no_activity_type(name: str, annotation: bool, kinds: list[str]) -> None:
    """Events have activity types only from torch 2.12 on."""
    event = raw(name, 0, 1)
    del event.activity_type
    event.device_type = lambda: SimpleNamespace(name="CUDA")
    event.is_user_annotation = lambda: annotation
    assert [found.kind for found in events_of([event], 0)] == kinds


def test_the_copy_of_a_batch_is_data_and_no_offload() -> None:
    """The host launches a batch's copy at 2, within data 1-3, and another one at 4. The GPU copies
    the batch from 3 to 5 s, and what the other one asked for from 6 to 7 s."""

    def copy(begin: int, end: int, launched: int) -> Any:
        event = raw("Memcpy HtoD (Pinned -> Device)", begin * 10**9, end * 10**9)
        event.activity_type = lambda: "gpu_memcpy"
        event.device_type = lambda: SimpleNamespace(name="CUDA")
        event.is_user_annotation = lambda: False
        event.linked_correlation_id = lambda: launched * 10**9
        return event

    spans = [("bench:data", 1, 3), ("aten::copy_", 2, 3), ("aten::copy_", 4, 5)]
    on_host = [raw(name, begin * 10**9, end * 10**9) for name, begin, end in spans]
    seconds = parts(*events_of([*on_host, copy(3, 5, 2), copy(6, 7, 4)], 0))
    assert (seconds["data"], seconds["offload"]) == (4.0, 1.0)


def test_a_library_that_trains_in_a_thread_of_its_own() -> None:
    """Thread 2 computes, so it gets the calling thread's data events.

    If both threads compute, the calling thread counts.
    """
    events = [Event("data", 1, 0, 1), Event("operator", 2, 1, 9), Event("operator", 1, 0, 0.1)]
    assert training_thread(events, 1) == 2
    assert Event("data", 2, 0, 1) in events
    assert training_thread([Event("operator", 1, 0, 2), Event("operator", 2, 0, 9)], 1) == 1


def test_bytes_of_collectives_match_those_worked_out_by_hand() -> None:
    """1200 bytes over 4 ranks: an all-reduce sends 2 x 3/4, a reduce-scatter or all-gather 3/4.
    Gloo scatters after a full all-reduce."""
    for operation, logical, by_gloo in (
        ("all_reduce", 1800, 1800),
        ("reduce_scatter", 900, 1800),
        ("all_gather", 900, 900),
        ("reduce", 900, 1125),
    ):
        calls = [(Call(operation, 1200, 4), 1.0)]
        assert logical_bytes(calls) == algorithm_bytes(calls, "ring") == logical
        assert algorithm_bytes(calls, "gloo") == by_gloo
    both = [(Call("send", 100, 2), 3.0), (Call("receive", 100, 2), 3.0)]
    assert logical_bytes([*both, (Call("all_reduce", 8, 1), 1.0)]) == 300


@pytest.mark.filterwarnings("ignore::FutureWarning")  # libraries call the old names
def test_collectives_are_counted_with_group_and_whole_tensor() -> None:
    """Uses torch's fake process group of 4 ranks, which moves nothing."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        calls: Counter[Call] = Counter()
        seen = [0]
        with counting(calls, seen):
            dist.all_reduce(torch.zeros(10))
            dist.all_gather_into_tensor(torch.zeros(8), torch.zeros(2))
            dist.reduce_scatter_tensor(torch.zeros(2), torch.zeros(8))
            dist.broadcast(torch.zeros(3, dtype=torch.bfloat16), 0)
            dist.all_gather([torch.zeros(5) for _ in range(4)], torch.zeros(5))
            torch.distributed._functional_collectives.all_gather_tensor(
                torch.zeros(2), 0, dist.group.WORLD
            ).wait()
            torch.zeros(3) + 1
    finally:
        dist.destroy_process_group()
    assert calls == {
        Call("all_reduce", 40, 4, "float32"): 1,
        Call("all_gather", 32, 4, "float32"): 2,
        Call("reduce_scatter", 32, 4, "float32"): 1,
        Call("broadcast", 6, 4, "bfloat16"): 1,
        Call("all_gather", 80, 4, "float32"): 1,
    }
    assert seen[0] > 6


def answer(rank: int, own: float, wait: float, **more: Any) -> RankAnswer:
    def step(scale: float) -> dict[str, float]:
        zero = dict.fromkeys((*COMPONENTS, "overlapped", "operators"), 0.0)
        return {
            **zero,
            "step": (own + wait) * scale,
            "compute": own * scale,
            "communication": wait * scale,
            "operators": own * scale,
        }

    memory = dict(zip((*SPLIT, "peak"), (1, 2, 3, 4, 5, 6, 21), strict=True))
    good = ProfiledAnswer(
        plain_seconds=(0.9, 1.0, 5.0),
        profiled=(step(2), step(1), step(9)),
        calls=(("all_reduce", 100, 2, 3),),
        sent_bytes_per_step=310.0,
        wire="gloo",
        memory=memory,
        unseen_buffers={},
        memory_reason="",
        private_bytes=30,
    )
    return RankAnswer(rank, profiled=replace(good, **more))


def test_a_row_matches_that_worked_out_by_hand(tmp_path: Path) -> None:
    """The 4 s step of three (2, 4 and 18 s) is broken down. Rank 1 works for 1.5 of 2 s; rank 0
    waits for it."""
    outcome = Outcome("ok", "", 0.0, 1.0, answers=(answer(0, 1.0, 1.0), answer(1, 1.5, 0.5)))
    row = profile_record("run-1", Cell(strategy="ddp", devices=2), 1, outcome)
    assert (row.profiled_step_seconds, row.plain_step_seconds) == (4.0, 1.0)
    assert row.compute_seconds == (2.0, 3.0)
    assert row.own_seconds == (2.0, 3.0)
    assert (row.straggler, row.straggler_excess) == (1, pytest.approx(0.5))
    assert row.logical_bytes == row.algorithm_bytes == (300.0, 300.0)
    assert row.peak_activations_bytes == (4, 4)
    store = Store(tmp_path)
    store.write_run(RunRecord(**one_cell_run()))
    store.write_profile(replace(row, theory_bytes=301.0))
    loaded = load(tmp_path).explained
    assert loaded.loc[0, "compute_seconds"].tolist() == [2.0, 3.0]
    assert loaded.loc[0, "theory_bytes"] == 301.0


def test_a_failed_profile_is_recorded_with_its_reason() -> None:
    outcome = Outcome("timeout", "too long", 0.0, 1.0)
    row = profile_record("run-1", Cell(strategy="ddp"), 2, outcome)
    assert (row.status, row.reason, row.attempt) == ("timeout", "too long", 2)


def test_unseen_bytes_and_memory_are_unknown() -> None:
    """RPC messages are not collectives, and the tracker does not see a library's own thread."""
    blind = answer(
        0, 1.0, 1.0, calls=None, memory=None, memory_reason="why", sent_bytes_per_step=None
    )
    outcome = Outcome("ok", "", 0.0, 1.0, answers=(blind,))
    row = profile_record("r", Cell(strategy="x"), 1, outcome)
    assert (row.logical_bytes, row.sent_bytes, row.peak_tracked_bytes) == ((), (), ())
    assert row.memory_reason == "why"


def trace(pid: int) -> bytes:
    events = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": "python"}},
        {"ph": "X", "name": "bench:step", "pid": pid, "ts": 1, "dur": 2},
    ]
    return gzip.compress(json.dumps({"traceEvents": events}).encode())


def test_ranks_are_named_in_traces_and_shown_together(tmp_path: Path) -> None:
    for rank, pid in ((0, 70), (1, 60)):
        (tmp_path / f"rank{rank}.json.gz").write_bytes(trace(pid))
    names = ["rank0.json.gz", "rank1.json.gz", "all.json.gz"]
    assert [file.name for file in name_ranks(tmp_path)] == names
    together = json.loads(gzip.decompress((tmp_path / "all.json.gz").read_bytes()))["traceEvents"]
    by_pid = {e["pid"]: e["args"]["name"] for e in together if e["name"] == "process_name"}
    assert by_pid == {70: "rank 0", 60: "rank 1"}


def test_a_trace_without_the_step_is_refused(tmp_path: Path) -> None:
    events = [{"ph": "X", "name": "aten::add", "pid": 70, "ts": 1, "dur": 2}]
    text = json.dumps({"traceEvents": events}).encode()
    (tmp_path / "rank0.json.gz").write_bytes(gzip.compress(text))
    with pytest.raises(UsageError, match="rank 0 has no event"):
        name_ranks(tmp_path)


def test_the_report_shows_where_time_goes_only_for_profiled_cells(tmp_path: Path) -> None:
    """Compute takes 2 and 3 s of a 4 s step, 2.5 s on average; 310 bytes are sent, not 300."""
    cell = Cell(strategy="ddp", devices=2)
    outcome = Outcome("ok", "", 0.0, 1.0, answers=(answer(0, 1.0, 1.0), answer(1, 1.5, 0.5)))
    store = Store(tmp_path / "results")
    store.write_run(RunRecord(**run_row()))
    for row in trial_rows(cell, [10.0, 11.0]):
        store.write_trial(TrialRecord(**row))
    assert not ran(store.load()).profiled
    store.write_profile(
        replace(profile_record("20260101T000000-abcd", cell, 1, outcome), theory_bytes=400.0)
    )
    (row,) = ran(store.load()).profiled
    assert row.parts["compute"] == pytest.approx(2.5)
    assert row.off_theory == pytest.approx(-0.25)
    assert row.off_algorithm == pytest.approx(310 / 300 - 1)
    assert (row.straggler, row.peak["tracked"], row.private) == (1, 21, 30)
