"""The pieces of a recipe: learning rates, groups, numbers of labels, and the norm's verdict."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from harness.export import plan_of
from harness.parity.gradient_norms import allowed_norm, norm_deviations, with_norms
from harness.parity.verdict import ParityVerdict
from harness.spec.cell import Cell
from harness.spec.errors import Refused
from harness.strategy.recipe import clip_gradients, learning_rate_factor, parameter_groups
from harness.strategy.registry import make_strategy, validate
from harness.worker.batches import IGNORED, Batches
from harness.workloads import make_workload, prepare_data

EXACT = ParityVerdict("exact", "", 0.0, 0.0, None, 1e-6, 1e-4)
CPU = torch.device("cpu")


def test_the_learning_rate_rises_and_then_falls_within_the_segment() -> None:
    cell = Cell(strategy="single", schedule="warmup_cosine", parity_steps=12)
    factors = [learning_rate_factor(cell, step) for step in range(20)]
    assert factors[:4] == pytest.approx([1 / 3, 2 / 3, 1.0, 1.0])
    assert all(a > b for a, b in itertools.pairwise(factors[3:13]))
    assert factors[12:] == pytest.approx([0.1] * 8)
    assert learning_rate_factor(Cell(strategy="single"), 5) == 1.0


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
    whole = Batches(data, 0, 8, slice(0, 8), CPU, padded=True).fetch(3)
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), whole.labels.flatten())
    total, means = 0.0, []
    for rank in range(2):
        rows = slice(4 * rank, 4 * rank + 4)
        share = Batches(data, 0, 8, rows, CPU, padded=True).fetch(3)
        assert torch.equal(share.labels, whole.labels[rows])
        parts = zip(share.split(2), logits[rows].chunk(2), strict=True)
        for part, rows_logits in parts:
            total += float(workload.loss(rows_logits, part.labels, part.label_tokens)) / 4
            means.append(float(workload.loss(rows_logits, part.labels)))
    assert total == pytest.approx(float(expected), rel=1e-6)
    assert np.mean(means) != pytest.approx(float(expected), rel=1e-3)
    assert (whole.labels[:, 0] != IGNORED).all()


def test_the_norm_is_of_all_gradients_but_copies() -> None:
    parameters = [torch.zeros(1, requires_grad=True) for _ in range(3)]
    for parameter in parameters:
        parameter.grad = torch.full((1,), 3.0)
    assert float(clip_gradients(parameters, 1e9)) == pytest.approx(math.sqrt(27))
    assert float(clip_gradients(parameters, 1.0, copies=parameters[1:])) == pytest.approx(3.0)
    assert [float(p.grad) for p in parameters if p.grad is not None] == pytest.approx([1.0] * 3)


def test_a_norm_off_by_more_than_allowed_diverges() -> None:
    near = norm_deviations([2.0, 2.0 + 1e-6, 2.0], [0, 1, 1], [2.0, 2.0])
    assert with_norms(EXACT, near).verdict == "exact"
    assert with_norms(EXACT, near).max_norm_deviation == pytest.approx(5e-7)
    for norms in ([2.0, 2.1], [2.0, None], [2.0, math.nan]):
        off = norm_deviations(norms, [0, 1], [2.0, 2.0])
        assert with_norms(EXACT, off).verdict == "diverged"
    assert norm_deviations([None], [0], []) == {}
    assert with_norms(EXACT, {}) == EXACT


def test_wider_tolerances_allow_more() -> None:
    assert allowed_norm(1e-6, 0.02) == 1e-5  # only updates are wider
    assert allowed_norm(2e-3, 0.12) == pytest.approx(2e-2)
    assert allowed_norm(1e-3, 5e-3) == 5e-3
    assert allowed_norm(0.05, 1.0) == math.inf


def test_what_cannot_be_done_is_refused() -> None:
    flat = {"use_orig_params": False}
    for cell in (
        Cell(strategy="fsdp1", devices=2, decay="matrices", options=flat),
        Cell(strategy="ddp", devices=2, labels="padded", workload="bert-micro"),
    ):
        with pytest.raises(Refused):
            validate(cell, make_workload(cell.workload), here=False)
    clipped = Cell(strategy="ddp", devices=2, clip_norm=1.0)
    assert plan_of(make_strategy(clipped), clipped, "torchrun") is None
