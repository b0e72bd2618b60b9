"""Rehearsals: counting, extrapolation and errors.

tests/ranks/test_rehearse.py compares the figures with real ranks.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from bench.cli.rehearse import rehearse as command
from harness.cell.errors import Refused, UsageError
from harness.cell.training import Layout
from harness.planner.rehearsal.ledger import KINDS, Ledger, StepRegion
from harness.planner.rehearsal.rehearse import (
    DEPTHS,
    RankPeaks,
    RelativeRegion,
    at_depth,
    default_ranks,
    rehearse,
)
from harness.planner.rehearsal.world import SUBSTITUTIONS, CopyableFakeMode, fake_rank
from harness.seam.job import Job
from harness.seam.registry import make_strategy
from harness.workloads import make_workload
from harness.workloads.counts import model_facts
from tests.commands import told
from tests.ranks.conftest import cell
from tests.tiny_models import save_config

ROOT = Path(__file__).parents[2]

# Libraries call deprecated torch functions, which are not tested here.
quiet = pytest.mark.filterwarnings("ignore")


def test_a_ledger_adds_up_what_is_made_freed_and_resized() -> None:
    ledger = Ledger()
    with CopyableFakeMode(), ledger.recording():
        first = torch.zeros(100)
        view = first[:10].view(2, 5)
        assert ledger.total == 400, "a view has no memory of its own"
        ledger.begin_step(0)
        kept = first + 1
        between = kept * 2
        last = between + 1
        assert ledger.total == 1600
        del between, view
        last.untyped_storage().resize_(0)
        assert ledger.total == 800
        last.untyped_storage().resize_(200)
        assert ledger.total == 1000
        ledger.mark(first, "parameters")
    peak = ledger.peaks[StepRegion(0, "forward")]
    assert peak.nbytes == 1600
    split = peak.split()
    assert (split["parameters"], split["activations"]) == (400, 1200)
    assert sum(split.values()) == peak.nbytes
    assert ledger.peaks[StepRegion(-1, "set-up")].nbytes == 400


def test_a_collective_counts_with_the_backends_own_buffer() -> None:
    one = cell("ddp", 4, workload="llama-nano")
    strategy = make_strategy(one)
    workload = make_workload(one.workload)
    job = Job(one, workload, Layout(data=4), torch.device("cpu"), 3, Path())
    ledger = Ledger()
    # torch before 2.12 has only the second name.
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    with fake_rank(strategy, job), ledger.recording():
        part, whole = torch.zeros(100), torch.zeros(400)
        ledger.begin_step(0)
        dist.all_reduce(whole)
        assert ledger.peaks[StepRegion(0, "forward")].nbytes == 2000, "an all-reduce works in place"
        gather(whole, part)
    peak = ledger.peaks[StepRegion(0, "forward")]
    assert peak.nbytes == 2000 + 1600
    assert peak.split()["buffers"] == 3600
    assert ledger.total == 2000


@pytest.mark.slow
@quiet
@pytest.mark.parametrize("strategy", ["fsdp2", "zero_redundancy"])
def test_shallow_models_give_the_peak_of_the_deep_one(strategy: str) -> None:
    one = cell(strategy, 64, workload="llama-64x13", global_batch=64, sequence_length=32)
    fast, whole = (rehearse(one, every_block=every).fullest for every in (False, True))
    assert whole.rehearsed_blocks == (13,)
    assert fast.peak_bytes == pytest.approx(whole.peak_bytes, rel=1e-3)
    assert fast.kept_bytes == pytest.approx(whole.kept_bytes, rel=1e-3)
    assert fast.setup_peak_bytes == pytest.approx(whole.setup_peak_bytes, rel=1e-3)
    # ZeroRedundancyOptimizer deals out whole parameters, others to a rank at each depth.
    assert fast.rehearsed_blocks == ((13,) if strategy == "zero_redundancy" else DEPTHS)


@pytest.mark.slow
@quiet
@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp2"])
def test_what_is_kept_between_steps_is_what_the_formula_says(strategy: str) -> None:
    one = cell(strategy, 1 if strategy == "single" else 4, workload="llama-micro")
    facts = model_facts(make_workload(one.workload), one.sequence_length)
    rehearsal = rehearse(one, ranks=[0])
    formula = make_strategy(one).states(one, Layout(data=one.devices), facts)
    assert formula is not None
    expected = formula.total - formula.gradients  # gradients are cleared after the update
    assert rehearsal.fullest.kept_bytes == pytest.approx(expected, rel=0.01)
    assert rehearsal.fullest.at_peak["optimizer"] == pytest.approx(formula.optimizer, rel=0.01)


def test_an_uneven_growth_is_not_extrapolated() -> None:
    where = RelativeRegion(1, "backward", 0, "block -1")

    def peaks(nbytes: int, depth: int) -> RankPeaks:
        return RankPeaks(
            0, depth, {where: dict.fromkeys(KINDS, 0) | {"activations": nbytes}}, nbytes
        )

    even = at_depth([peaks(100 + 10 * d, d) for d in DEPTHS], 32)
    assert even is not None
    assert sum(even.peak()[1].values()) == 100 + 10 * 32
    assert even.resident == 100 + 10 * 32
    assert (
        at_depth([peaks(size, d) for size, d in zip((130, 140, 151), DEPTHS, strict=True)], 32)
        is None
    )


def test_only_a_config_of_the_suite_has_another_depth() -> None:
    deeper = make_workload("gpt2-nano").with_blocks(7)
    assert deeper is not None
    assert (deeper.blocks, deeper.hf_config().n_layer) == (7, 7)
    assert make_workload("resnet-micro").with_blocks(7) is None
    assert make_workload("llama-nano+lora").with_blocks(7) is None


def test_ranks_of_a_large_world_are_the_first_of_each_stage() -> None:
    assert default_ranks(Layout(data=2, tensor=2)) == [0, 1, 2, 3]
    assert default_ranks(Layout(data=8, pipeline=4, tensor=2)) == [0, 2, 4, 6]
    assert default_ranks(Layout(data=64)) == [0]


def test_every_substitution_is_in_the_document() -> None:
    text = " ".join((ROOT / "docs" / "explanation" / "rehearsal.md").read_text().split())
    table = dict(re.findall(r"\| ([^|]+?) \| ([^|-][^|]*?) \|", text))
    assert {what for what in SUBSTITUTIONS if not table.get(what)} == set()


@quiet
def test_what_cannot_be_rehearsed_is_refused() -> None:
    for one in (
        cell("data_parallel", 2),
        cell("parameter_server", 2),
        cell("ddp", 2, device="cuda"),
        cell("ddp", 64, global_batch=8),
        cell("ddp", 2, sequence_length=10**9),
        cell("ddp", 2, global_batch=10**20),
    ):
        with pytest.raises((Refused, UsageError)):
            rehearse(one, ranks=[0])
    with pytest.raises(UsageError):
        rehearse(cell("ddp", 2), ranks=[2])


@quiet
@pytest.mark.slow
def test_a_rehearsal_leaves_the_next_one_as_it_is() -> None:
    """DeepSpeed replaces attention and linear functions for the whole process."""
    linear = torch.nn.functional.linear
    alone = rehearse(cell("ddp", 2, seed=8), ranks=[0]).fullest.peak_bytes
    for seed in (8, 9):  # each rehearses anew
        rehearse(cell("ulysses_zero", 2, options={"stage": 3}, seed=seed), ranks=[0])
    assert rehearse(cell("ddp", 2, seed=9), ranks=[0]).fullest.peak_bytes == alone
    assert torch.nn.functional.linear is linear


@quiet
def test_a_repeated_rehearsal_is_read_from_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    one = cell("ddp", 2, workload="llama-nano", seed=7)
    first = rehearse(one, ranks=[1])
    monkeypatch.setattr("harness.planner.rehearsal.rehearse.rehearse_rank", None)
    assert rehearse(one, ranks=[1]) == first
    monkeypatch.setattr("harness.planner.rehearsal.rehearse._code_version", lambda: "changed")
    with pytest.raises(UsageError, match="cannot be rehearsed"):
        rehearse(one, ranks=[1])


@quiet
def test_the_command_has_figures_or_the_reason_why_a_cell_is_unknown() -> None:
    cells = ["ddp", "ddp:gradient_as_bucket_view=true", "parameter_server"]
    words = ("--model", "llama-nano", "--rank", "0", "--json")
    plain, viewed, unknown = json.loads(told(command, *cells, *words))
    assert [rank["rank"] for rank in plain["ranks"]] == [0]
    assert sum(plain["ranks"][0]["at_peak"].values()) == plain["peak_bytes"]
    gradients = 4 * model_facts(make_workload("llama-nano"), 64).parameters
    saved = plain["ranks"][0]["kept_bytes"] - viewed["ranks"][0]["kept_bytes"]
    assert saved in (0, pytest.approx(gradients, rel=0.01))
    assert plain["unknown"] is None
    assert (unknown["peak_bytes"], unknown["ranks"]) == (None, [])
    assert unknown["unknown"]


@pytest.mark.slow
@quiet
def test_a_model_with_norms_of_heads_peaks_as_a_llama_of_its_sizes(tmp_path: Path) -> None:
    sizes = {"hidden_size": 512, "num_hidden_layers": 6, "intermediate_size": 1536, "head_dim": 128}
    peaks = []
    for model in ("llama", "qwen3"):
        name = save_config(tmp_path / model, model, **sizes, tie_word_embeddings=False)
        of_model = cell("fsdp2", 8, workload=name, global_batch=8, sequence_length=16)
        peaks.append(rehearse(of_model, ranks=(0,)).fullest.peak_bytes)
    assert peaks[1] == pytest.approx(peaks[0], rel=0.03)
