"""fairscale: OSS with ShardedDataParallel, clearing its gradients, and FullyShardedDataParallel."""

from __future__ import annotations

from typing import Any

import pytest

from harness.cell.errors import Refused, Unavailable
from harness.strategies.fairscale_fsdp import FairscaleFsdp
from harness.strategies.fairscale_oss import FairscaleOss
from harness.workloads import make_workload
from tests.ranks.conftest import RunCells, cell, representative
from tests.ranks.test_strategies import states_follow_the_formula

pytest.importorskip("fairscale", reason="pip install fairscale")


@pytest.mark.parametrize(("devices", "buffer"), representative([(4, 2**23), (4, 20_000), (2, 0)]))
def test_states_are_dealt_out_by_whole_parameters(
    run_cells: RunCells, devices: int, buffer: int
) -> None:
    """Gradients outside the buckets are not kept between steps, and reducing them stays exact.

    Matrix full covers one rank.
    """
    row = run_cells(
        cell("fairscale_oss", devices, "llama-micro", options={"reduce_buffer_size": buffer})
    ).trials.iloc[0]
    assert row["parity_verdict"] == "exact", row["reason"]
    states_follow_the_formula(row)
    assert ("ShardedDataParallel" in row["library_buffers"]) == (buffer > 0)
    assert sum(row["optimizer_bytes"]) == pytest.approx(8 * row["trained_parameters"], rel=1e-3)


@pytest.mark.parametrize(
    "axes",
    # Matrix full covers micro-batches in buckets, and fp16.
    representative(
        [
            {"micro_batches": 2, "options": {"reduce_buffer_size": 0}},
            {"optimizer": "sgd"},
            {"precision": "bf16"},
        ]
    ),
    ids=str,
)
def test_it_trains_the_same_on_other_axes(run_cells: RunCells, axes: dict[str, Any]) -> None:
    row = run_cells(cell("fairscale_oss", **axes)).trials.iloc[0]
    assert (row["status"], row["reason"]) == ("ok", "")
    assert row["parity_verdict"] == ("within tolerance" if "precision" in axes else "exact")


@pytest.mark.parametrize(
    ("options", "half"),
    [({"broadcast_fp16": True}, 0.25), ({"reduce_fp16": True, "reduce_buffer_size": 0}, 0.75 / 2)],
    ids=str,
)
def test_fp16_on_the_way_is_declared_and_saves_bytes(
    run_cells: RunCells, options: dict[str, Any], half: float
) -> None:
    """On 2 ranks gloo's reduce sends 0.75 and its broadcast 0.5 of the payload per rank."""
    row = run_cells(cell("fairscale_oss", workload="llama-micro", options=options)).trials.iloc[0]
    assert row["status"] == "ok", row["reason"]
    assert row["parity_verdict"] in ("within tolerance", "unknown"), row["parity_reason"]
    whole = 4 * row["trained_parameters"]
    assert list(row["sent_bytes_per_step"]) == pytest.approx([(1.25 - half) * whole] * 2, rel=0.05)


@pytest.mark.parametrize(
    ("through", "status"),
    [
        ("model", "ok"),
        ("optimizer", "diverged"),
        ("shard", "diverged"),
        ("shard_to_zero", "diverged"),
        ("optimizer_to_zero", "ok"),
    ],
)
def test_gradients_must_stay_in_their_buckets(
    run_cells: RunCells, through: str, status: str
) -> None:
    """Clearing gradients to None through the optimizer detaches them from the reduced buckets.

    Clearing only a shard leaves the other gradients in place. Setting all to zero is correct.
    """
    row = run_cells(cell("fairscale_traps", options={"through": through})).trials.iloc[0]
    assert row["status"] == status, row["reason"]
    if status == "ok":
        assert row["parity_verdict"] == "exact"


def test_a_wide_declaration_hides_no_trap(run_cells: RunCells) -> None:
    row = run_cells(
        cell("fairscale_traps", options={"through": "optimizer", "broadcast_fp16": True})
    ).trials.iloc[0]
    assert row["status"] == "diverged"


SHARDED = [
    pytest.param({}, id="zero_dp_3"),
    pytest.param({"options": {"reshard_after_forward": False}}, id="zero_dp_2"),
    pytest.param({"options": {"cpu_offload": True}}, id="offload"),
    pytest.param({"micro_batches": 2}, id="micro-batches"),
    pytest.param(
        {"micro_batches": 2, "options": {"no_sync": False, "cpu_offload": True}},
        id="micro-batches reduced one by one, offload",
    ),
    pytest.param({"precision": "fp16"}, id="fp16"),
    pytest.param({"workload": "gpt2-nano"}, id="tied embeddings"),
    pytest.param({"devices": 4, "timed_steps": 1, "parity_steps": 4}, id="4 ranks"),
]


@pytest.mark.parametrize("axes", representative(SHARDED))
def test_the_mathematics_of_fully_sharded(run_cells: RunCells, axes: dict[str, Any]) -> None:
    """Gloo ranks train with faked CUDA streams and pinned memory; the rest needs a GPU."""
    row = run_cells(cell("fairscale_on_cpu", **axes)).trials.iloc[0]
    assert (row["status"], row["reason"]) == ("ok", "")
    assert row["parity_verdict"] == ("within tolerance" if "precision" in axes else "exact")
    # With offload the formula separates host from device memory; a CPU has only one.
    if "cpu_offload" not in axes.get("options", {}):
        states_follow_the_formula(row)


def test_fully_sharded_needs_a_gpu() -> None:
    one = cell("fairscale_fsdp")
    with pytest.raises(Unavailable, match="GPU"):
        FairscaleFsdp().check(one, make_workload(one.workload))
    on_gpu = cell("fairscale_fsdp", device="cuda")
    FairscaleFsdp(cpu_offload=True).check(on_gpu, make_workload(one.workload))
    with pytest.raises(Refused, match=r"fsdp1.*fsdp2"):
        FairscaleFsdp().check(on_gpu, make_workload("llama-nano+lora"))
    two_parts = cell("fairscale_fsdp", device="cuda", micro_batches=2)
    with pytest.raises(Refused, match="no_sync=true"):
        FairscaleFsdp(cpu_offload=True, no_sync=False).check(two_parts, make_workload(one.workload))


def test_an_option_that_would_be_ignored_is_refused() -> None:
    one = cell("fairscale_oss")
    with pytest.raises(Refused, match="reduce_buffer_size"):
        FairscaleOss(reduce_fp16=True).check(one, make_workload(one.workload))
