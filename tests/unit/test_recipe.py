"""Parts of a training recipe: learning rates, groups, labels, dropout and gradient norms."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from harness.cell.cell import Cell
from harness.parity.later import allowed_norm, norm_deviations, with_norms
from harness.parity.reference_runs import reference_cell, rounded_differently
from harness.parity.verdict import ParityVerdict
from harness.seam.recipe import clip_gradients, learning_rate_factor, parameter_groups
from harness.worker.batches import IGNORED, Batches, BatchRecipe
from harness.workloads import make_workload, prepare_data
from harness.workloads.dropout import Masks, mask, place_dropout
from harness.workloads.recompute import recompute_blocks

EXACT = ParityVerdict("exact", "", 0.0, 0.0, None, 1e-6, 1e-4)
CPU = torch.device("cpu")


def test_the_learning_rate_rises_and_then_falls_within_the_segment() -> None:
    cell = Cell(strategy="single", schedule="warmup_cosine", parity_steps=12)
    factors = [learning_rate_factor(cell, step) for step in range(20)]
    assert factors[:4] == pytest.approx([1 / 3, 2 / 3, 1.0, 1.0])
    assert all(a > b for a, b in itertools.pairwise(factors[3:13]))
    assert factors[12:] == pytest.approx([0.1] * 8)
    assert learning_rate_factor(Cell(strategy="single"), 5) == 1.0
    risen = cell.model_copy(update={"schedule": "warmup"})
    assert [learning_rate_factor(risen, step) for step in (1, 2, 19)] == [2 / 3, 1.0, 1.0]


def test_only_matrices_decay() -> None:
    matrix, vector = torch.zeros(2, 2), torch.zeros(2)
    cell = Cell(strategy="single", decay="matrices")
    groups = parameter_groups(cell, [vector, matrix])
    assert groups == [{"params": [matrix]}, {"params": [vector], "weight_decay": 0.0}]
    assert parameter_groups(Cell(strategy="single"), [vector, matrix]) == [vector, matrix]
    flat = parameter_groups(cell, [vector], {vector: True})
    assert flat == [{"params": [vector]}]


def test_parts_of_a_padded_batch_add_up_to_the_mean_over_all_labels() -> None:
    workload = make_workload("llama-nano")
    data = prepare_data("stdlib", workload, 32)
    logits = torch.randn(8, 32, 256, generator=torch.Generator().manual_seed(0))
    whole = Batches(data, 0, 8, slice(0, 8), CPU, recipe=BatchRecipe(padded=True)).fetch(3)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), whole.labels.flatten())
    total, means = 0.0, []
    for rank in range(2):
        rows = slice(4 * rank, 4 * rank + 4)
        share = Batches(data, 0, 8, rows, CPU, recipe=BatchRecipe(padded=True)).fetch(3)
        assert torch.equal(share.labels, whole.labels[rows])
        parts = zip(share.split(2), logits[rows].chunk(2), strict=True)
        for part, rows_logits in parts:
            total += float(workload.loss(rows_logits, part.labels, part.label_tokens)) / 4
            means.append(float(workload.loss(rows_logits, part.labels)))
    assert total == pytest.approx(float(expected), rel=1e-6)
    assert np.mean(means) != pytest.approx(float(expected), rel=1e-5)
    assert (whole.labels[:, 0] != IGNORED).all()


def test_the_norm_is_of_all_gradients_but_copies() -> None:
    parameters = [torch.zeros(1, requires_grad=True) for _ in range(3)]
    for parameter in parameters:
        parameter.grad = torch.full((1,), 3.0)
    assert float(clip_gradients(parameters, 1e9)) == pytest.approx(math.sqrt(27))
    assert float(clip_gradients(parameters, 1.0, copies=parameters[1:])) == pytest.approx(3.0)
    assert [float(p.grad) for p in parameters if p.grad is not None] == pytest.approx([1.0] * 3)


def test_a_norm_off_by_more_than_allowed_diverges() -> None:
    near = norm_deviations([[2.0, 2.0 + 1e-6, 2.0]], [0, 1, 1], [2.0, 2.0])
    assert with_norms(EXACT, near).verdict == "exact"
    assert with_norms(EXACT, near).max_norm_deviation == pytest.approx(5e-7)
    for norms in ([2.0, 2.1], [2.0, None], [2.0, math.nan]):
        off = norm_deviations([norms], [0, 1], [2.0, 2.0])
        assert with_norms(EXACT, off).verdict == "diverged"
    assert norm_deviations([[None]], [0], []) == {}
    assert norm_deviations([[0.0]], [0], [0.0]) == {0: 0.0}
    assert with_norms(EXACT, norm_deviations([[1.0]], [0], [0.0])).verdict == "diverged"
    assert with_norms(EXACT, {}) == EXACT


def test_the_norms_of_all_ranks_count() -> None:
    right, wrong = [2.0, 2.0], [2.0, 2.2]
    assert norm_deviations([right, wrong], [0, 1], [2.0, 2.0]) == {0: 0.0, 1: pytest.approx(0.1)}
    assert norm_deviations([right, [None, None]], [0, 1], [2.0, 2.0]) == {0: 0.0, 1: 0.0}, (
        "a parameter server's workers know no norm"
    )
    assert norm_deviations([[None], [None]], [0], [2.0]) == {0: math.inf}


def test_wider_tolerances_allow_more() -> None:
    assert allowed_norm(1e-6, 0.02) == 1e-5  # only updates are wider
    assert allowed_norm(2e-3, 0.12) == pytest.approx(2e-2)
    assert allowed_norm(1e-3, 5e-3) == 5e-3
    assert allowed_norm(0.05, 1.0) == math.inf


def test_masks_belong_to_tokens_wherever_they_are_computed() -> None:
    data = prepare_data("stdlib", make_workload("gpt2-nano"), 32)
    recipe = BatchRecipe(dropout=True)
    whole = Batches(data, 0, 8, slice(0, 8), CPU, recipe).fetch(3)
    later = Batches(data, 0, 8, slice(4, 8), CPU, recipe).fetch(3, number=9)
    assert whole.keys is not None
    everything = mask(whole.keys, 1, 64, 0.25)
    assert later.keys is not None
    assert torch.equal(mask(later.keys, 1, 64, 0.25), everything[4:])
    half = whole.part(1, 2, dimension=1)
    assert half.keys is not None
    assert torch.equal(mask(half.keys, 1, 64, 0.25), everything[:, 16:])
    other_step = Batches(data, 0, 8, slice(0, 8), CPU, recipe).fetch(4)
    assert other_step.keys is not None
    for other in (mask(whole.keys, 2, 64, 0.25), mask(other_step.keys, 1, 64, 0.25)):
        agree = float(((other > 0) == (everything > 0)).float().mean())
        assert agree == pytest.approx(0.25**2 + 0.75**2, abs=0.02)  # as if independent


def test_masks_drop_their_share_in_every_direction() -> None:
    keys = torch.from_numpy(np.random.default_rng(0).integers(0, 2**32, (16, 32)))
    factors = mask(keys, 0, 128, 0.1)
    assert factors.unique().tolist() == pytest.approx([0.0, 1 / 0.9])
    dropped = (factors == 0).double()
    assert float(dropped.mean()) == pytest.approx(0.1, abs=0.005)
    for dimensions, count in (((0, 1), 512), ((0, 2), 2048), ((1, 2), 4096)):
        spread = float(dropped.mean(dim=dimensions).std())
        assert spread == pytest.approx(math.sqrt(0.09 / count), rel=0.35)
    neighbours = float((dropped[..., 1:] * dropped[..., :-1]).mean())
    assert neighbours == pytest.approx(0.01, abs=0.002)


def test_dropout_without_a_batchs_keys_fails_loudly() -> None:
    model = make_workload("gpt2-nano").build(0)
    workload = make_workload("gpt2-nano")
    place_dropout(model, workload.dropouts_of(model), [], 0.1, Masks())
    assert len(workload.dropouts_of(model)) == 1 + 2 * 2
    with pytest.raises(RuntimeError, match="keys"):
        model(torch.zeros(2, 8, dtype=torch.long))


def test_recomputed_blocks_drop_the_same_even_after_other_batches() -> None:
    """A pipeline's stages compute other micro-batches before a backward pass."""
    workload, gradients = make_workload("gpt2-nano"), []
    inputs = torch.arange(16).reshape(2, 8)
    for recompute in (False, True):
        model, masks = workload.build(0), Masks()
        blocks = workload.blocks_of(model)
        place_dropout(model, workload.dropouts_of(model), blocks, 0.3, masks)
        if recompute:
            recompute_blocks(model, blocks, "full")
        masks.keys = inputs + 1
        loss = workload.logits(model, inputs).sum()
        masks.keys = inputs + 2
        loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


@pytest.mark.parametrize("padded", [False, True])
def test_packed_documents_have_positions_of_their_own(padded: bool) -> None:
    data = prepare_data("stdlib", make_workload("llama-nano"), 32)
    recipe = BatchRecipe(padded=padded, packed=True)
    whole = Batches(data, 0, 8, slice(0, 8), CPU, recipe).fetch(3)
    share = Batches(data, 0, 8, slice(4, 8), CPU, recipe).fetch(3)
    assert whole.positions is not None
    assert share.positions is not None
    assert torch.equal(share.positions, whole.positions[4:])
    begins = whole.positions == 0
    assert begins[:, 0].all()
    assert (begins.sum(dim=1) >= 2).all()
    steps = whole.positions[:, 1:] - whole.positions[:, :-1]
    assert ((steps == 1) | begins[:, 1:]).all()
    assert (whole.labels[:, :-1][begins[:, 1:]] == IGNORED).all()
    assert whole.label_tokens == (whole.labels != IGNORED).sum()
    assert share.label_tokens == whole.label_tokens / 2


def test_documents_do_not_see_each_other() -> None:
    """transformers separates documents by positions that restart, without a mask."""
    for name in ("llama-nano", "gpt2-nano", "mixtral-nano"):
        model = make_workload(name).build(0)
        tokens, positions = torch.arange(8)[None], torch.arange(4).repeat(2)[None]
        changed = tokens.clone()
        changed[:, :4] += 9
        before, after = (model(t, position_ids=positions).logits for t in (tokens, changed))
        torch.testing.assert_close(before[:, 4:], after[:, 4:])
        alone = model(tokens[:, 4:]).logits
        torch.testing.assert_close(before[:, 4:], alone)


def test_the_balancing_loss_is_of_each_ranks_micro_batch() -> None:
    cell = Cell(strategy="ddp", devices=2, micro_batches=2, workload="mixtral-nano")
    assert reference_cell(cell).micro_batches == 1
    balanced = cell.model_copy(update={"balance_weight": 0.5})
    reference = reference_cell(balanced)
    assert reference.micro_batches == 4
    data = prepare_data("stdlib", make_workload("mixtral-nano"), 32)
    assert rounded_differently(reference, data)[0].micro_batches == 4
