"""The search for the largest model and its table, without processes."""

from __future__ import annotations

import json
import re
import resource
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.cli.maxsize import CELLS, _plan, maxsize
from harness.analysis.maxsize import MaxsizeResult, limits, maxsize_results, order_notes
from harness.cell.cell import Cell
from harness.cell.errors import NothingToResume, UsageError
from harness.launch.outcome import Outcome, RankOutputs, classify_end
from harness.measure.memory_kinds import held_bytes, phase
from harness.measure.peak_memory import MemoryMeter
from harness.record.plan import Growth, Plan, cell_at_size, resumable, steps_of
from harness.record.store import Store
from harness.record.trial import TrialRecord
from harness.run.maxsize import (
    Search,
    largest,
    plan_of,
    predict,
)
from harness.run.runner import ProgressListener, Runner
from harness.seam.job import TrainState
from harness.strategies._deepspeed_zero import SWAP_BUFFERS
from harness.strategies.deepspeed import Deepspeed
from harness.worker.spec import log_file
from harness.workloads import make_workload
from harness.workloads.counts import _count, model_facts, parameters_of
from harness.workloads.workload_variants import ADAPTERS
from reports.run_facts import largest as largest_of
from tests.commands import ask
from tests.unit.recording import left_out_fields

BUDGET = 2**27


def base(strategy: str = "ddp", **axes: Any) -> Cell:
    small = {"devices": 2, "workload": "llama-64x1", "sequence_length": 16, "global_batch": 2}
    steps = {"warmup_steps": 1, "timed_steps": 1, "parity_steps": 2}
    return Cell(strategy=strategy, **{**small, **steps, "memory_limit_bytes": BUDGET, **axes})


@given(true=st.integers(0, 300), guess=st.integers(-5, 600))
def test_the_search_finds_the_largest_that_fits_and_its_neighbour(true: int, guess: int) -> None:
    asked: list[int] = []

    def fits(size: int) -> bool:
        assert 1 <= size <= 200
        asked.append(size)
        return size <= true

    low, high = largest(fits, guess, most=200)
    assert low == min(true, 200)
    assert high == (true + 1 if true < 200 else None)
    assert len(asked) == len(set(asked)) <= 20


def test_a_good_guess_takes_few_probes() -> None:
    asked: list[int] = []

    def fits(blocks: int) -> bool:
        asked.append(blocks)
        return blocks <= 93

    assert largest(fits, 99) == (93, 94)
    assert len(asked) <= 6


@pytest.mark.slow
@pytest.mark.parametrize(
    "suffix",
    ["", *(f"+{adapter}" for adapter in ADAPTERS), "+bf16", "+fp16", "+int8+lora", "+nf4+ia3"],
)
def test_facts_of_a_model_that_grows_are_those_of_a_walk(suffix: str) -> None:
    workload = make_workload(f"llama-64x4{suffix}")
    assert model_facts(workload, 16) == _count(workload, 16)


def test_a_size_is_one_of_its_family() -> None:
    assert cell_at_size(cell_at_size(base(), 5), 1) == base()
    with pytest.raises(UsageError, match="unknown workload 'gpt2-64x5'"):
        make_workload("gpt2-64x5")
    with pytest.raises(UsageError, match="multiple of 64"):
        make_workload("llama-100x5")


class Runs(Runner):
    """A runner without processes, whose trials fit up to a given size."""

    most = 20
    oddly: ClassVar[dict[int, str]] = {}
    """Status of probes under the limit that fail in another way, by number of blocks."""
    stop_after = 10**9

    def start(self, cells: Any) -> Any:
        return None

    def run_trial(
        self, launcher: Any, cell: Cell, key: Any, position: int, reference: Any, heard: Any
    ) -> TrialRecord:
        assert self.plan.search is not None
        growth = Growth.of(self.plan.search)
        blocks = steps_of(cell, growth)
        self.asked = [
            *getattr(self, "asked", []),
            (blocks, key.trial, cell.memory_limit_bytes is None),
        ]
        status = "ok" if blocks <= self.most or cell.memory_limit_bytes is None else "out_of_memory"
        if cell.memory_limit_bytes:
            status = self.oddly.get(blocks, status)
        if len(self.asked) > self.stop_after:
            status = "interrupted"
        row = left_out_fields(self.plan.run_id, cell, status, f"said {status}")
        row |= {
            "trial": key.trial,
            "attempt": key.attempt,
            "position": position,
            "parameters": parameters_of(cell_at_size(cell, 1, growth) if growth.tokens else cell),
            "wall_seconds": 1.0,
        }
        if status == "out_of_memory":
            held = dict.fromkeys(("parameters", "gradients", "optimizer", "library"), 2**24)
            held |= {"buffers": {"a bucket": 2**24}, "largest": {}}
            held |= {"other": 0, "stacks": 0, "in_use": BUDGET - 2**22}
            row |= {"failed_in": "update", "failed_holding": json.dumps(held)}
            kinds = ("parameter", "gradient", "optimizer", "library", "transient")
            row |= {f"formula_{kind}_bytes": 2.0**24 for kind in kinds}
        elif status == "ok":
            row |= {
                "peak_memory_bytes": BUDGET - 100,
                "setup_peak_memory_bytes": 100,
                "parity_verdict": "exact" if key.trial else "unknown",
            }
            row |= {"parameter_bytes": [1, 2], "optimizer_bytes": [3, 3], "library_buffers": "{}"}
        trial = TrialRecord(**row)
        self.store.write_trial(trial)
        return trial


class Dry(Search):
    def _verified(self, launcher: Any, cell: Cell, key: Any) -> TrialRecord:
        return self.runner.run_trial(launcher, cell, key, self.position, None, self.listener.step)


def searched(
    tmp_path: Path, plan: Plan | None = None, kind: type[Runs] = Runs, **how: Any
) -> tuple[bool, Runs, Store]:
    """Searches by a plan; returns whether it finished. A plan that is in the store is resumed."""
    store = Store(tmp_path / "results")
    runner = kind(store, plan or plan_of([base()], [], BUDGET, [["single", "ddp"]]))
    for name, value in how.items():
        setattr(runner, name, value)
    if not list(store.folder.glob("runs/*")):
        runner.begin()
    return Dry(runner, ProgressListener()).run(), runner, store


def test_a_search_is_recorded_and_told_as_a_table(tmp_path: Path) -> None:
    finished, runner, store = searched(tmp_path)
    assert finished
    [row] = maxsize_results(store.load())
    found = (row.label, row.status, row.workload, row.parity)
    assert found == ("ddp", "found", "llama-64x20", "exact")
    assert row.parameters == parameters_of(cell_at_size(base(), 20))
    assert row.next_parameters == parameters_of(cell_at_size(base(), 21))
    assert row.next_parameters - row.parameters == row.step
    assert row.kept_bytes == {"parameters": 2, "gradients": 0, "optimizer": 3, "library": 0}
    assert runner.asked.count((20, 1, False)) == 1
    assert sum(row.fill.values()) == BUDGET
    assert dict(row.responsible)["a bucket"] == 2**24
    assert row.predicted == predict(base(), BUDGET)["parameters"]


def test_sequences_grow_while_the_model_stays(tmp_path: Path) -> None:
    """The sequence grows by 8 tokens per step; 20 steps fit."""
    one = base("ulysses", workload="llama-128x2", sequence_length=8, micro_batches=2)
    finished, _, store = searched(tmp_path, plan_of([one], [], BUDGET, [], Growth(tokens=8)))
    assert finished
    [row] = maxsize_results(store.load())
    assert (row.status, row.parity, row.workload) == ("found", "exact", "llama-128x2")
    assert (row.parameters, row.next_parameters, row.step) == (160, 168, 8)
    assert row.largest_model == "160 tokens"
    found = largest_of(store.load())
    assert found
    assert found.winner
    assert found.winner.cell_id == cell_at_size(one, 20, Growth(tokens=8)).id


def test_a_block_grows_wider_by_whole_heads(tmp_path: Path) -> None:
    """The one block grows by 64 hidden units per step; 20 steps fit."""
    one = base("ddp", workload="llama-64x1")
    finished, _, store = searched(tmp_path, plan_of([one], [], BUDGET, [], Growth(width=64)))
    assert finished
    [row] = maxsize_results(store.load())
    assert (row.status, row.parity, row.workload) == ("found", "exact", "llama-1280x1")
    assert (row.parameters, row.next_parameters, row.step) == (1280, 1344, 64)
    assert row.largest_model == "1280 hidden units"
    found = largest_of(store.load())
    assert found
    assert found.growth.what == "widest layer"
    assert found.winner
    assert found.winner.cell_id == cell_at_size(one, 20, Growth(width=64)).id


@pytest.mark.parametrize("grow", CELLS)
def test_no_search_contains_a_cell_that_is_always_refused(grow: Any) -> None:
    plan = _plan(grow, "512MiB", 2, None, CELLS[grow], [], {})
    assert [left.reason for left in plan.left_out if left.status == "refused"] == []


def test_parameters_gathered_from_a_disk_fit_deepspeeds_swap_buffers() -> None:
    """On one rank, `llama-512x51` had ended as "Not enough buffers 0 for swapping 1"."""
    sizes = model_facts(make_workload("llama-512x51"), 16).sizes
    zero = Deepspeed(stage=3, offload_optimizer="nvme", offload_parameters="nvme")
    swapped = sorted(size for size in sizes if size > zero.persistent(sizes))
    assert sum(swapped[:SWAP_BUFFERS]) > zero.live(sizes) > 0
    assert zero.model_copy(update={"bucket_elements": 3}).live(sizes) == 3


def test_a_stopped_search_goes_on_where_it_was(tmp_path: Path) -> None:
    finished, first, store = searched(tmp_path, stop_after=3)
    assert not finished
    [row] = maxsize_results(store.load())
    assert row.status == "unfinished"
    assert row.reason
    finished, second, store = searched(tmp_path, resumable(store, "maxsize"))
    assert finished
    assert not set(first.asked[:-1]) & set(second.asked)
    assert maxsize_results(store.load())[0].workload == "llama-64x20"
    trials = store.load().trials
    (again,) = trials[trials["attempt"] == 2]["status"]
    assert again in ("ok", "out_of_memory")


def test_bench_run_does_not_resume_a_search(tmp_path: Path) -> None:
    _, _, store = searched(tmp_path)
    with pytest.raises(NothingToResume):
        resumable(store, None)


def test_an_odd_failure_is_tried_again_and_reported(tmp_path: Path) -> None:
    """A failure counts as out of memory only if the same cell trains without the limit."""

    class Broken(Runs):
        def run_trial(self, launcher: Any, cell: Cell, *rest: Any) -> TrialRecord:
            limited = cell.model_copy(update={"memory_limit_bytes": BUDGET})
            return super().run_trial(launcher, limited, *rest)

    odd = dict.fromkeys(range(1, 400), "failed")
    finished, runner, store = searched(tmp_path, kind=Broken, oddly=odd)
    assert finished
    [row] = maxsize_results(store.load())
    assert (row.status, row.parameters) == ("stopped", None)
    assert "failed: said failed" in row.reason
    assert len(runner.asked) == 2 + 2, "each probe twice"


def test_a_failure_that_only_the_limit_brings_about_is_too_large(tmp_path: Path) -> None:
    finished, runner, store = searched(tmp_path, oddly=dict.fromkeys(range(21, 400), "timeout"))
    assert finished
    [row] = maxsize_results(store.load())
    assert (row.status, row.workload) == ("found", "llama-64x20")
    assert "fail, but only under the limit: said timeout" in limits(row)
    assert any(unlimited for _, _, unlimited in runner.asked)


def test_nothing_fits(tmp_path: Path) -> None:
    _, _, store = searched(tmp_path, most=0)
    [row] = maxsize_results(store.load())
    assert (row.status, row.parameters, row.largest_model) == ("none fits", None, "none fits")


def test_an_order_unlike_the_theorys_is_noted() -> None:
    common: dict[str, Any] = {"reason": "", "workload": "w", "budget": 100, "status": "found"}
    one, two, three, four = (
        MaxsizeResult(f"stage {n}", parameters=size, **common)
        for n, size in enumerate((50, 50, 51, 52), 1)
    )
    assert order_notes([one, three, four], [["stage 1", "stage 3", "stage 4"]]) == []
    [note] = order_notes([one, two, three], [["stage 1", "stage 2", "stage 3"]])
    assert "stage 2" in note


def test_the_phase_is_read_off_the_traceback() -> None:
    from harness.measure.clock import timed_step

    class Optimizer:
        def step(self) -> None:
            raise MemoryError

    class Loss:
        def backward(self) -> None:
            Optimizer().step()

    def during(step: Any) -> str:
        try:
            timed_step(lambda: None, step, lambda: None)
        except MemoryError as error:
            return phase(error)
        raise AssertionError

    assert during(lambda batch: Optimizer().step()) == "update"
    assert during(lambda batch: Loss().backward()) == "backward"
    assert during(lambda batch: bytearray(2**62)) == "forward"
    with pytest.raises(MemoryError) as caught:
        bytearray(2**62)
    assert phase(caught.value) == "set-up"


def test_memory_held_by_a_rank_is_counted_by_kind() -> None:
    import torch

    model = torch.nn.Linear(1000, 100, bias=False)
    model(torch.ones(1, 1000)).sum().backward()
    stray = torch.zeros(12345)
    meter = MemoryMeter(torch.device("cpu"), None)
    optimizer = torch.optim.SGD(model.parameters())
    state = TrainState(model, [optimizer], library=lambda: [("library", "pool", 77)])
    holding = held_bytes(meter, state)
    assert (holding["parameters"], holding["gradients"]) == (400000, 400000)
    assert (holding["library"], holding["buffers"]) == (77, {"pool": 77})
    assert holding["other"] >= stray.nbytes
    unknown = held_bytes(meter, None)
    assert unknown["parameters"] >= 400000, "in set-up, parameters are recognised by class"


@pytest.mark.slow
def test_the_limit_is_lifted_for_the_harness_and_for_the_last_words() -> None:
    import torch

    before = resource.getrlimit(resource.RLIMIT_DATA)
    try:
        meter = MemoryMeter(torch.device("cpu"), 2**30)
        limited = resource.getrlimit(resource.RLIMIT_DATA)
        assert limited[0] != before[0]
        with meter.unlimited():
            assert resource.getrlimit(resource.RLIMIT_DATA) == before
        assert resource.getrlimit(resource.RLIMIT_DATA) == limited
        meter.lift()
        assert resource.getrlimit(resource.RLIMIT_DATA) == before
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def test_an_abort_for_lack_of_memory_is_no_mere_failure(tmp_path: Path) -> None:
    log_file(tmp_path, 1).write_text(
        "terminate called after throwing an instance of 'std::bad_alloc'\n  what(): "
        " std::bad_alloc\n"
    )
    said = ended(tmp_path)
    assert said.status == "out_of_memory"
    assert re.match(r"rank 1 was killed by SIGABRT.*bad_alloc", said.reason)
    log_file(tmp_path, 1).write_text("something else")
    assert ended(tmp_path).status == "failed"


def ended(scratch: Path) -> Outcome:
    left = RankOutputs(exit_codes={1: -6})
    left.read(str(scratch), range(2))
    return classify_end(base(), 2, left)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--budget lots", "'lots' is not an amount of memory"),
        ("--budget 0", "--budget '0'.*more than 0"),
        ("--budget 999TiB", "--budget '999TiB'.*at most"),
        ("--only dpp", "--only 'dpp'.*ddp"),
        ("--hidden 100", "multiple of 64"),
        ("--search-matrix nowhere.yaml", "nowhere.yaml"),
        ("--resume", "nothing to resume"),
        ("--resume --budget 1GiB", "--resume.*--budget"),
        ("--grow sequence --set sequence_length=8", "--set sequence_length.*--grow"),
    ],
)
def test_a_mistake_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=said):
        ask(maxsize, *words.split())
    assert list(tmp_path.iterdir()) == []
