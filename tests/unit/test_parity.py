"""The parity verdict, on handmade numbers."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest

from harness.analysis.consistency import loss_deviations
from harness.cell.cell import Cell
from harness.cell.training import EXACT, REASONS, Tolerance, rounding_alone
from harness.parity.comparison import with_replicas
from harness.parity.reference import Deviations, Noise
from harness.parity.reference_runs import reference_cell
from harness.parity.verdict import (
    KINDS,
    PRECISION,
    Limits,
    ParityVerdict,
    allowed_deviation,
    parity_verdict,
    widest,
)
from harness.run.prepared import PreparedTrial
from harness.run.references import _Judging
from harness.seam.base import Emulation
from harness.seam.checkpoints import plain_name
from harness.seam.optimizers import OVER_SHARDS, TOLERANCES
from harness.seam.registry import make_strategy
from harness.workloads import make_workload

LOOSE = Tolerance(1e-2, 0.5, "coarse rounding")
REFERENCE = [2.0, 1.0]


def verdict(losses, updates=({"a": 0.0, "b": 0.0},), allowed=EXACT, names=("a", "b"), tied=None):
    ranks = [Deviations(of_rank) for of_rank in updates]
    limits = allowed if isinstance(allowed, Limits) else Limits(allowed)
    return parity_verdict(losses, REFERENCE, ranks, names, limits, tied)


def judged(limits: Limits = Limits(EXACT), **kinds: Any) -> ParityVerdict:
    """Returns the verdict of a rank whose losses and parameter agree, unlike other states."""
    ranks = [Deviations({"a": 0.0}, **kinds)]
    return parity_verdict(REFERENCE, REFERENCE, ranks, ("a",), limits)


def test_equal_is_exact() -> None:
    assert verdict([2.0, 1.0]).verdict == "exact"
    assert verdict([2.0 + 1.9e-6, 1.0]).verdict == "exact"


def test_a_small_deviation_is_diverged_for_an_exact_strategy_and_tolerated_for_a_loose_one() -> (
    None
):
    strict = verdict([2.0, 1.0 + 2e-5])
    assert strict.verdict == "diverged"
    assert "step 1" in strict.reason
    assert strict.max_loss_deviation == pytest.approx(2e-5)
    loose = verdict([2.0, 1.0 + 2e-5], allowed=LOOSE)
    assert loose.verdict == "within tolerance"
    assert loose.reason.startswith(f"coarse rounding{REASONS}only parameters are judged")
    assert verdict([2.0, 1.0], allowed=LOOSE).verdict == "exact", "it is better than declared"


def test_parameters_are_held_to_their_tolerance() -> None:
    found = verdict([2.0, 1.0], [{"a": 0.0, "b": 0.01}])
    assert (found.verdict, found.worst_tensor) == ("diverged", "b")


def test_the_worst_rank_counts() -> None:
    assert verdict([2.0, 1.0], [{"a": 0.0, "b": 0.0}, {"a": 0.3}]).verdict == "diverged"


@pytest.mark.parametrize("losses", [[2.0, math.nan], [2.0, None], [2.0], [math.inf, 1.0]])
def test_missing_or_not_finite_is_diverged(losses) -> None:
    assert verdict(losses, allowed=LOOSE).verdict == "diverged"


def test_a_parameter_that_no_rank_shows_is_diverged() -> None:
    found = verdict([2.0, 1.0], [{"a": 0.0}])
    assert found.verdict == "diverged"
    assert found.reason.endswith(" b")
    assert verdict([2.0, 1.0], [{"a": 0.0}, {"b": 0.0}]).verdict == "exact", "stages have their own"
    assert verdict([2.0, 1.0], [{"a": 0.0, "twin": 0.0}], tied={"twin": "b"}).verdict == "exact"


def test_not_a_number_in_parameters_is_diverged() -> None:
    assert verdict([2.0, 1.0], [{"a": math.nan, "b": 0.0}], allowed=LOOSE).verdict == "diverged"


def test_deviations_are_relative() -> None:
    assert loss_deviations([2.2, 1.1], [2.0, 1.0]) == pytest.approx([0.1, 0.1])


def test_reasons_to_deviate_add_up() -> None:
    assert widest(EXACT, EXACT) == EXACT
    both = widest(LOOSE, Tolerance(1e-3, 2.0, "other"))
    assert (both.loss, both.update, both.reason) == (1e-2, 2.0, "coarse rounding; other")


@pytest.mark.parametrize(
    ("noise", "precision", "limits"),
    [
        (None, "fp32", (1e-6, 1e-4)),
        (Noise(1e-7, Deviations({"a": 1e-5})), "fp32", (1e-6, 1e-4)),  # 5x is below the limit
        (Noise(3e-7, Deviations({"a": 4e-4})), "fp32", (1.5e-6, 2e-3)),
        (Noise(3e-7, Deviations({"b": 4e-4})), "fp32", (1.5e-6, 1e-4)),  # another tensor
        (Noise(1e-3, Deviations({"a": 0.3})), "fp32", (1e-5, 5e-3)),  # capped
        (Noise(1e-3, Deviations({"a": 0.3})), "bf16", (4e-3, 0.1)),
    ],
)
def test_a_limit_is_five_times_the_references_noise_up_to_a_cap(
    noise: Noise | None, precision: str, limits: tuple[float, float]
) -> None:
    found = Limits(EXACT, precision, noise=noise)
    assert (found.loss, found.of(KINDS[0], "a")) == pytest.approx(limits)


@pytest.mark.parametrize(
    ("moved", "moment", "word"),
    [
        (8.6e-3, 8.6e-3, "exact"),
        (8.6e-3, 2.1e-2, "diverged"),
        (1.0, 2.1e-2, "diverged"),
        (1e-3, 8.6e-3, "diverged"),
    ],
)
def test_noise_widens_the_limits_of_optimizer_states_further(
    moved: float, moment: float, word: str
) -> None:
    """One process whose samples came in reverse order moved the moments of a BatchNorm's bias by
    8.6e-3 of their norm, and all-reduced statistics moved them by as much."""
    noise = Noise(0.0, Deviations({"a": 1e-5}, moments={"a exp_avg": moved}))
    limits = Limits(EXACT, noise=noise)
    assert limits.of(KINDS[0], "a") == EXACT.update, "no kind widens another"
    assert judged(limits, moments={"a exp_avg": moment}).verdict == word


def test_weights_near_one_may_be_off_by_what_fp32_cannot_represent() -> None:
    """At a learning rate of 1e-4, two correct AdamWs differ by 2e-3 of a norm's update."""
    moved = [{"a": 2e-3, "b": 0.0}]
    assert verdict([2.0, 1.0], moved).verdict == "diverged"
    limits = Limits(EXACT, roundings={"a": 2.5e-3, "b": 1e-6})
    found = verdict([2.0, 1.0], moved, allowed=limits)
    assert (found.verdict, found.update_tolerance) == ("exact", pytest.approx(2.6e-3))
    assert verdict([2.0, 1.0], [{"a": 0.0, "b": 2e-3}], allowed=limits).worst_tensor == "b"
    assert judged(limits, decays={"a": 2e-3}).verdict == "exact", "all may round alike"


def test_a_deviation_within_the_noise_is_a_matter_of_rounding() -> None:
    """The fp32 twin of a bf16 cell must be exact on a GPU, or the cell is not recommended."""
    noise, moved = Noise(1e-7, Deviations({"a": 4e-4})), [Deviations({"a": 1e-3, "b": 0.0})]
    limits = Limits(EXACT, noise=noise)
    found = parity_verdict([2.0, 1.0], REFERENCE, moved, ("a", "b"), limits)
    assert (found.verdict, found.update_tolerance) == ("exact", 2e-3)
    assert "4.0e-04" in found.reason
    limits = Limits(LOOSE, noise=noise)
    loose = parity_verdict([2.0, 1.0], REFERENCE, moved, ("a", "b"), limits)
    assert (loose.verdict, loose.reason) == ("within tolerance", LOOSE.reason)


@pytest.mark.parametrize(
    ("loss", "update"),
    [(2.4e-5, 0.019), (1.4e-4, 0.17), (1.4e-4, 0.19), (2.8e-3, 0.23), (3.8e-2, 1.0)],
)
def test_no_noise_hides_a_wrong_training(loss: float, update: float) -> None:
    """The deviations are those of broken training in docs/explanation/parity.md: no weight decay,
    scaled loss, clipped gradients, a repeated batch, and embeddings trained separately."""
    endless = Limits(EXACT, noise=Noise(math.inf, Deviations({"a": math.inf})))
    assert verdict([2.0, 1.0 + loss], allowed=endless).verdict == "diverged"
    moved = [{"a": update, "b": 0.0}]
    assert verdict([2.0, 1.0], moved, allowed=endless).verdict == "diverged"


@pytest.mark.parametrize(
    ("kind", "tensor", "limit", "half"),
    [
        ("elements", "a", 1e-2, 0.9),
        ("decays", "a", 1e-5, 2e-3),
        ("buffers", "mean", 1e-4, 2e-2),
        ("moments", "a exp_avg", 1e-4, 0.1),
        ("scales", "exp_avg", 1e-4, 1e-2),
    ],
)
def test_each_kind_of_deviation_has_its_limit(
    kind: str, tensor: str, limit: float, half: float
) -> None:
    def word(deviation: float, *limits: Limits) -> str:
        return judged(*limits, **{kind: {tensor: deviation}}).verdict

    assert (word(0.9 * limit), word(1.1 * limit)) == ("exact", "diverged")
    bf16 = Limits(PRECISION["bf16"], "bf16")
    assert (word(0.9 * half, bf16), word(1.1 * half, bf16)) == ("within tolerance", "diverged")
    assert word(math.inf, bf16) == word(math.nan) == "diverged"


@pytest.mark.parametrize(
    ("kind", "tensor", "limit"), [("directions", "a", 7.0), ("coarse", "a exp_avg", 0.5)]
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_some_limits_do_not_depend_on_the_update(
    kind: str, tensor: str, limit: float, precision: str
) -> None:
    limits = Limits(PRECISION.get(precision, EXACT), precision)
    below, above = ({kind: {tensor: share * limit}} for share in (0.9, 1.1))
    assert judged(limits, **below).verdict == "exact"
    assert judged(limits, **above).verdict == "diverged"


def test_states_in_16_bits_are_seen_however_wide_the_limit() -> None:
    found = judged(Limits(LOOSE), moments={"a exp_avg": 9.0}, coarse={"a exp_avg": 1.0})
    assert (found.verdict, "16 bits" in found.reason) == ("diverged", True)


@pytest.mark.parametrize(
    ("kind", "tensor", "deviation"),
    [
        ("decays", "a", 8e-3),  # a mixture in bf16 without decay; a right one is off by 3e-5
        ("moments", "a exp_avg", 0.4),  # half of the gradients
        ("scales", "exp_avg", 0.04),  # gradients 4% too large
    ],
)
def test_kinds_are_judged_by_noise_in_the_same_kind_if_updates_may_be_far_off(
    kind: str, tensor: str, deviation: float
) -> None:
    wrong = {kind: {tensor: deviation}}
    wide = Tolerance(3e-3, 0.35, "other experts", other_kinds=0.05)
    noise = Noise(0.0, Deviations({"a": 0.2}))
    assert judged(Limits(wide, "bf16", noise=noise), **wrong).verdict == "diverged"
    noisy = Limits(wide, "bf16", noise=Noise(0.0, Deviations(**{kind: {tensor: deviation / 4}})))
    assert judged(noisy, **wrong).verdict == "within tolerance"
    unjudged = judged(Limits(wide, "bf16"), **wrong)
    assert unjudged.verdict == "within tolerance"
    assert not rounding_alone("bf16", unjudged.reason), "so it is not advised"


def test_a_limit_by_noise_replaces_a_wide_one() -> None:
    muon, noise = TOLERANCES["muon"], Noise(0.0, Deviations({"a": 0.01, "b": 0.3}))
    limits = Limits(muon, "bf16", noise=noise)
    found = [limits.of(KINDS[0], name) for name in ("a", "b", "c")]
    assert found == pytest.approx([0.05, muon.update, muon.others])
    assert Limits(muon, "bf16").of(KINDS[0], "a") == muon.update
    sharded = Limits(widest(muon, OVER_SHARDS["muon"]), noise=noise)
    assert [sharded.of(KINDS[0], name) for name in ("a", "b")] == [0.1, muon.update]
    assert sharded.of(KINDS[1], "a") == KINDS[1].in_fp32 * muon.others


@pytest.mark.parametrize(
    ("other", "may_differ", "word"),
    [
        (1e-4, False, "exact"),  # tensor b's limit is wide, a's is not
        (2e-3, False, "diverged"),
        (2e-3, True, "exact"),
        (math.nan, False, "diverged"),
    ],
)
def test_ranks_are_held_to_the_limit_of_the_tensor_in_which_they_differ(
    other: float, may_differ: bool, word: str
) -> None:
    wide = Limits(EXACT, roundings={"b": 0.1 - EXACT.update})
    trained = verdict(REFERENCE, [{"a": 0.0, "b": 0.09}], wide)
    assert (trained.verdict, trained.update_tolerance) == ("exact", 0.1)
    ranks = [{"a": 1.0, "b": 1.0}, {"a": 1.0 + other, "b": 1.5}]
    found = with_replicas(trained, ranks, {"a": 1.0, "b": 1.0}, wide, may_differ)
    assert found.verdict == word


def test_noise_of_the_reference_declares_no_other_training() -> None:
    noise = Noise(0.0, Deviations({"a": 0.5, "b": 0.5}))
    moved, limits = (
        [Deviations({"a": 0.01, "b": 0.01})],
        Limits(PRECISION["bf16"], "bf16", {}, noise),
    )
    found = parity_verdict(REFERENCE, REFERENCE, moved, ("a", "b"), limits)
    assert (found.verdict, "itself moves" in found.reason) == ("within tolerance", True)
    assert rounding_alone("bf16", found.reason)


def test_states_that_cannot_be_gathered_are_named() -> None:
    ranks = [Deviations({"a": 0.0, "b": 0.0}, moments={"a exp_avg": 0.0})]
    found = parity_verdict(REFERENCE, REFERENCE, ranks, ("a", "b"), Limits(EXACT))
    assert found.max_moment_deviation == 0.0
    assert "1 of 2" in (found.moments_skipped_reason or "")
    assert judged(moments={"a exp_avg": 0.0}).verdict == "exact"


def test_wrappers_are_taken_off_names() -> None:
    assert plain_name("module.model.layers.0.weight") == "model.layers.0.weight"
    assert (
        plain_name("_fsdp_wrapped_module.model.layers.0._fsdp_wrapped_module.weight")
        == "model.layers.0.weight"
    )


@pytest.mark.parametrize(
    ("optimizer", "update"), [("adamw", 1e-4), ("adamw_8bit", 0.02), ("muon", 0.2)]
)
def test_an_optimizer_that_amplifies_rounding_may_deviate_further(
    optimizer: str, update: float
) -> None:
    """DDP with AdamW8bit deviates by 2.9e-3 after 20 steps although it trains the same."""
    axes: Any = {"workload": "llama-nano", "devices": 2, "optimizer": optimizer}
    cell = Cell(strategy="ddp", **axes)
    strategy = make_strategy(cell)
    allowed = allowed_deviation(cell, make_workload("llama-nano"), strategy, strategy.layout(2))
    assert allowed.update == update


@pytest.mark.parametrize(
    ("noise", "allowed", "verdict"),
    [
        (0.0, EXACT, "diverged"),
        (1e-3, EXACT, "diverged"),
        (0.02, EXACT, "unknown"),
        (0.02, Tolerance(0.1, 0.04, "declared"), "diverged"),
    ],
)
def test_noise_of_the_reference_is_not_the_strategys_divergence(
    noise: float, allowed: Tolerance, verdict: str
) -> None:
    """The verdict is unknown only if the reference's noise alone exceeds the limit."""
    cell = Cell(strategy="ddp", devices=2, workload="llama-nano")
    workload = make_workload("llama-nano")
    names = ("head.weight", "body.weight")

    def off_by(deviation: float) -> Deviations:
        return Deviations(dict.fromkeys(names, deviation))

    judging = _Judging(
        prepared=cast("PreparedTrial", SimpleNamespace(cell=cell, workload=workload)),
        limits=Limits(allowed, noise=Noise(0.0, off_by(noise))),
        no_exchange=None,
        reference_losses=[1.0],
        why_not="",
        reference=None,
    )
    facts = SimpleNamespace(trainable=names)
    with mock.patch("harness.parity.verdict.model_facts", return_value=facts):
        assert judging.of([1.0], [off_by(0.05)]).verdict == verdict


@pytest.mark.parametrize(
    ("strategy", "options", "agree"),
    [
        ("diloco", {"period": 3}, [2, 5, 8]),
        ("collectives", {"average": "parameters", "period": 3}, [2, 5, 8]),
        ("post_local_sgd", {"start_step": 2, "period": 3}, [0, 1, 2, 5, 8]),
        ("ddp", {"comm_hook": "powersgd"}, list(range(9))),
    ],
)
def test_a_reference_emulates_ranks_that_train_apart(
    strategy: str, options: dict[str, object], agree: list[int]
) -> None:
    cell = Cell(strategy=strategy, options=options, devices=2, workload="llama-nano")
    reference = reference_cell(cell)
    emulates = make_strategy(reference)
    assert isinstance(emulates, Emulation)
    assert (reference.devices, reference.micro_batches, emulates.emulated_ranks) == (1, 2, 2)
    assert [step for step in range(9) if emulates.ranks_agree(step)] == agree
    large = {"device": "cuda", "global_batch": 6, "sequence_length": 1024}
    assert reference_cell(cell.model_copy(update=large)).micro_batches == 6


@pytest.mark.parametrize(
    ("strategy", "options", "order"),
    [
        ("deepspeed", {"stage": 1}, "ranks"),
        ("deepspeed", {"stage": 2}, "micro_batches"),
        ("amp", {"opt_level": "O2"}, "ranks"),
        ("fsdp2", {"mixed_precision": True}, "fp32"),
    ],
)
def test_a_reference_in_half_precision_adds_parts_as_the_ranks_do(
    strategy: str, options: dict[str, object], order: str
) -> None:
    axes: dict[str, Any] = {"options": options, "devices": 2, "micro_batches": 2}
    reference = reference_cell(Cell(strategy=strategy, precision="bf16", **axes))
    assert (reference.devices, reference.micro_batches) == (1, 4)
    assert (reference.options["ranks"], reference.options["order"]) == (2, order)
