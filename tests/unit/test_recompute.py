"""Recomputation: operators that run again, costs, savings and refusals."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from bench.cli.maxsize import _changes
from harness.cell.cell import Cell
from harness.cell.errors import UsageError
from harness.cell.training import Batch
from harness.measure.memory_kinds import peak_split
from harness.seam.job import Job
from harness.seam.peak_memory import peak_bytes, states_by_formula
from harness.seam.registry import make_strategy, with_defaults
from harness.workloads import counts, make_workload
from harness.workloads import recompute as products_of
from harness.workloads.counts import _count, model_facts
from harness.workloads.operators import activation_bytes, recomputed_flops
from harness.workloads.recompute import experts_backward, products, recompute_blocks

KINDS = ("none", "selective", "full")
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class Operators(TorchDispatchMode):
    """Counts calls by operator."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Any, int] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        packet = func._overloadpacket
        self.calls[packet] = self.calls.get(packet, 0) + 1
        return func(*args, **(kwargs or {}))


def trained(model: nn.Module) -> tuple[dict[str, torch.Tensor], Operators]:
    """Returns gradients by name after a forward and a backward pass, and the operators called."""
    workload = make_workload("llama-nano")
    inputs = torch.arange(64).reshape(2, 32)
    with Operators() as operators:
        workload.loss(workload.logits(model, inputs), inputs).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, operators


@pytest.mark.parametrize(
    ("recompute", "attention", "products_again"),
    [("none", 0, 0), ("selective", 0, 0), ("full", 2, 12)],
)
def test_what_is_computed_again(recompute: str, attention: int, products_again: int) -> None:
    """In two blocks, `full` repeats attention, and all matrix products but a block's last. Names of
    parameters and gradients do not change."""
    workload = make_workload("llama-nano")
    plain, once = trained(workload.build(0))
    model = workload.build(0)
    if recompute != "none":
        recompute_blocks(model, workload.blocks_of(model), recompute)
    gradients, operators = trained(model)
    assert gradients.keys() == plain.keys()
    assert all(torch.equal(gradients[name], plain[name]) for name in plain)
    assert operators.calls[FLASH] == once.calls[FLASH] + attention == 2 + attention
    mm = torch.ops.aten.mm
    assert operators.calls[mm] - once.calls[mm] == products_again
    if recompute != "none":
        norms = torch.ops.aten.rsqrt
        assert operators.calls[norms] == once.calls[norms] + 4


def test_a_copy_computes_with_its_own_parameters() -> None:
    """DataParallel copies modules with their attributes but other parameters. A forward bound to
    the original would train only the original."""
    workload = make_workload("llama-nano")
    model = workload.build(0)
    recompute_blocks(model, workload.blocks_of(model), "full")
    replica = copy.deepcopy(model)
    for own, first in zip(workload.blocks_of(replica), workload.blocks_of(model), strict=True):
        parts = {name: own.__dict__[name] for name in ("_parameters", "_modules", "_buffers")}
        own.__dict__.update(first.__dict__ | parts)
    gradients, _ = trained(replica)
    assert any(".layers." in name for name in gradients)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_attention_is_kept_under_each_of_its_names() -> None:
    aten = torch.ops.aten
    on_gpus = ("flash_attention", "efficient_attention", "cudnn_attention")
    names = [getattr(aten, f"_scaled_dot_product_{name}") for name in on_gpus]
    assert products().keys() >= {FLASH, *names, aten.mm, aten.addmm, aten.bmm}


def test_products_of_experts_are_kept() -> None:
    """A mixture of experts multiplies with a separate operator."""
    workload = make_workload("mixtral-nano")
    calls = []
    for recompute in ("selective", "full"):
        model = workload.build(0)
        recompute_blocks(model, workload.blocks_of(model), recompute)
        calls.append(trained(model)[1].calls[torch.ops.aten._grouped_mm])
    in_two_blocks = 2 * 2 * 3
    assert calls == [in_two_blocks, in_two_blocks + 2 * 2]


def test_operations_of_recomputation_match_those_counted_by_hand() -> None:
    """A block has four projections of h by h, three of h by f, and attention (hidden size h,
    feed-forward size f). torch skips the last product and the addition after it."""
    workload, tokens, hidden, feed_forward, blocks = make_workload("llama-64x3"), 32, 64, 192, 3
    whole = recomputed_flops(workload, tokens, "full", whole_blocks=True)
    stopped = recomputed_flops(workload, tokens, "full")
    last = 2 * tokens * hidden * feed_forward
    assert whole - stopped == blocks * (last + tokens * hidden)
    by_hand = 2 * tokens * (4 * hidden**2 + 3 * hidden * feed_forward) + 4 * tokens**2 * hidden
    elementwise = recomputed_flops(workload, tokens, "selective", whole_blocks=True)
    assert whole == blocks * by_hand + elementwise
    assert 0 < recomputed_flops(workload, tokens, "selective") < 0.05 * stopped
    assert recomputed_flops(workload, tokens, "none") == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-64x3", "gpt2-nano", "bert-micro"])
def test_each_kind_takes_less_memory_and_more_operations(name: str) -> None:
    workload = make_workload(name)
    sizes = [activation_bytes(workload, 2, 64, recompute) for recompute in KINDS]
    operations = [recomputed_flops(workload, 64, recompute) for recompute in KINDS]
    assert sizes[0] > sizes[1] > sizes[2]
    assert operations[0] < operations[1] < operations[2]


def test_a_block_that_is_computed_again_keeps_its_input_alone() -> None:
    samples, tokens, hidden = 2, 64, 64
    sizes = [
        activation_bytes(make_workload(f"llama-64x{blocks}"), samples, tokens, "full")
        for blocks in (1, 2, 4)
    ]
    of_input = 4 * samples * tokens * hidden
    assert sizes[1] - sizes[0] == of_input
    assert sizes[2] - sizes[1] == 2 * of_input


@pytest.mark.slow
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_the_peak_follows_the_formula(recompute: str, tmp_path: Path) -> None:
    """The formula is within 5% of a real step's peak; see docs/studies/recompute-memory.md."""
    cell = Cell(strategy="single", workload="llama-64x4", sequence_length=128, recompute=recompute)
    workload, strategy = make_workload(cell.workload), make_strategy(cell)
    job = Job(cell, workload, strategy.layout(1), torch.device("cpu"), 0, tmp_path)
    step = strategy.setup(job)
    assert job.recomputes
    assert job.train_state is not None
    tokens = torch.randint(0, 256, (8, 128))
    step(Batch(0, tokens, tokens))
    peak = peak_split(job.train_state, "cpu", lambda: step(Batch(1, tokens, tokens)))["peak"]
    assert peak == pytest.approx(peak_bytes(cell), rel=0.05)


def test_from_the_second_micro_batch_on_all_gradients_are_there() -> None:
    cell = Cell(strategy="ddp", devices=2, workload="llama-64x1", micro_batches=2)
    kept = 10**7
    states = states_by_formula(cell)
    assert states is not None
    assert kept > states.transient > 0
    assert peak_bytes(cell, kept) == states.total + states.transient + kept


def test_the_axis_is_part_of_a_cell_only_where_it_is_used() -> None:
    plain = with_defaults(Cell(strategy="ddp", devices=2))
    assert plain.model_copy(update={"recompute": "none"}).id == plain.id
    full = plain.model_copy(update={"recompute": "full"})
    assert full.id != plain.id
    assert full.label == "ddp(recompute=full)"
    assert full.reference().id == plain.reference().id


@pytest.mark.parametrize(
    ("workload", "layers", "again"), [("llama-nano", 7, 1), ("gpt2-nano", 4, 1)]
)
def test_tensor_parallelism_repeats_collectives(workload: str, layers: int, again: int) -> None:
    """Each layer all-reduces hidden states once; the all-reduce after attention is repeated."""
    plain = Cell(strategy="tensor", devices=2, workload=workload)
    strategy = make_strategy(plain)
    facts = model_facts(make_workload(workload), plain.sequence_length)
    sent = [
        strategy.traffic(
            plain.model_copy(update={"recompute": recompute}), strategy.layout(2), facts
        )
        for recompute in ("none", "full")
    ]
    assert sent[0]
    assert sent[1]
    assert sent[1] / sent[0] == pytest.approx((layers + again) / layers)


def test_a_search_takes_the_axis_and_sets_its_own() -> None:
    assert _changes(["recompute=full"]) == {"recompute": "full"}
    with pytest.raises(UsageError, match=r"--set devices.*use --devices"):
        _changes(["devices=4"])


def test_operations_of_experts_need_no_operator_for_their_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """transformers has the operator from 5.23 on."""
    workload, counted = make_workload("mixtral-nano"), []
    for present in (experts_backward(), None):
        monkeypatch.setattr(products_of, "experts_backward", lambda found=present: found)
        monkeypatch.setattr(counts, "experts_backward", lambda found=present: found)
        products_of.grouped_products.cache_clear()
        counted.append(_count(workload, 32))
    products_of.grouped_products.cache_clear()
    assert counted[0] == counted[1]
