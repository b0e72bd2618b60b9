"""Newer features of installed libraries train the same; the mistakes they make easy are reported.

The second half of each subject's rows are mistakes of tests/plugin/bench_plugin/installed_traps.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tests.ranks.conftest import Row, RunCells, check_rows, row
from tests.ranks.test_traps import RECIPE, SGD

exact, near, diverges, fails = (
    partial(row, outcome) for outcome in ("exact", "within tolerance", "diverged", "failed")
)
FEW: dict[str, Any] = {"timed_steps": 1, "parity_steps": 4, "warmup_steps": 3}
MIXTURE: dict[str, Any] = {"workload": "mixtral-nano"}
PADDED: dict[str, Any] = {"labels": "padded", "micro_batches": 2}
EXPERT: dict[str, Any] = {"split": "experts"}
PARALLEL: dict[str, Any] = {"engine": "model_parallel"}

RIGHT: dict[str, list[Row]] = {
    "lightning_fabric": [
        exact("lightning_fabric", **RECIPE),
        exact("lightning_fabric", PARALLEL | {"tensor": 2}, devices=4, **RECIPE),
        exact("lightning_fabric", PARALLEL, micro_batches=2),
        exact("fabric_traps", {"engine": "fsdp1"}, workload="bert-micro"),
        near("lightning_fabric", precision="bf16"),
        exact("lightning_fabric", **SGD),
    ],
    "two dimensions": [
        exact("fsdp2_tensor", {"tensor": 2, "replicas": 2}, devices=8, **RECIPE | FEW),
        exact("fsdp2_tensor", {"tensor": 2}, devices=4, workload="gpt2-nano", **RECIPE | FEW),
        exact("fsdp2_tensor", {"tensor": 2, "sequence_parallel": True}, devices=4, **FEW),
        near("fsdp2_tensor", {"tensor": 2}, devices=4, precision="bf16", **FEW),
        exact("ring_on_cpu", {"fsdp2": True, "sequence_ranks": 2}, devices=4, **SGD | FEW),
        exact("fsdp2", {"hybrid": True, "replicas": 3}, devices=6, global_batch=12, **FEW),
        exact("fsdp2", {"hybrid": True, "replicas": 2}, devices=6, global_batch=12, **FEW),
    ],
    "AutoTP": [
        exact("deepspeed_auto", {"stage": 1}, devices=4, **RECIPE | FEW),
        *(exact("deepspeed_auto", {"stage": s}, micro_batches=2) for s in (0, 1, 2)),
        *(exact("deepspeed_auto", {"stage": s}, devices=4, **FEW) for s in (0, 2)),
        exact("deepspeed_auto", clip_norm=0.6, **SGD),
    ],
    "AutoEP": [
        exact("deepspeed_auto", {"stage": 2} | EXPERT, devices=4, **MIXTURE, **FEW),
        *(exact("deepspeed_auto", {"stage": s} | EXPERT, **MIXTURE) for s in (0, 1, 2)),
        exact("deepspeed_auto", EXPERT, workload="qwen3-moe-nano", micro_batches=2),
        exact("deepspeed_auto", {"stage": 1} | EXPERT, **MIXTURE, **SGD),
    ],
    "losses": [
        exact("ddp", loss="torch_linear", **PADDED),
        exact("fsdp2", loss="torch_linear", **RECIPE),
        exact("fsdp1", loss="torch_linear"),
        exact("deepspeed", {"stage": 3}, loss="torch_linear", **PADDED),
        exact("ddp", loss="torch_linear", workload="gpt2-nano", recompute="full"),
        near("ddp", loss="torch_linear", precision="bf16"),
        exact("ddp", loss="deepspeed_chunked", **PADDED),
        exact("deepspeed", {"stage": 2}, loss="deepspeed_chunked"),
        exact("single", devices=1, loss="torch_linear", **MIXTURE),
    ],
    "offloaded activations": [
        exact("ddp", activations="host", recompute="full", **RECIPE),
        exact("fsdp2", activations="host", micro_batches=2),
        exact("deepspeed", {"stage": 3}, activations="host"),
        exact("tensor", activations="host", workload="gpt2-nano", recompute="selective"),
    ],
}
WRONG: dict[str, list[Row]] = {
    "lightning_fabric": [
        exact("fabric_traps", {"engine": "fsdp1"}, **RECIPE),
        diverges("fabric_traps", {"trap": "inner_model"}),
        diverges("fabric_traps", {"trap": "undivided"}, micro_batches=2, **SGD),
        diverges("fabric_traps", {"trap": "local_norm", "engine": "fsdp1"}, **RECIPE),
    ],
    "two dimensions": [
        exact("fsdp2_tensor_traps", devices=4, **FEW),
        diverges("fsdp2_tensor_traps", {"trap": "other_samples"}, devices=4, **FEW),
        diverges("fsdp2_tensor_traps", {"trap": "local_norm"}, devices=4, **RECIPE | FEW),
    ],
    "AutoTP": [
        exact("autotp_traps", **FEW),
        fails("autotp_traps", {"trap": "other_samples"}, "Data inconsistency", **FEW),
        diverges("autotp_traps", {"trap": "other_samples_later"}, **FEW),
        diverges("autotp_traps", {"trap": "unreduced"}, **FEW),
    ],
    "AutoEP": [
        exact("autoep_traps", **MIXTURE),
        diverges("autoep_traps", {"trap": "frozen_experts"}, **MIXTURE),
        diverges("autoep_traps", {"trap": "unnormalised"}, **MIXTURE),
        diverges("autoep_traps", **MIXTURE, **RECIPE | {"micro_batches": 1}),
    ],
    "losses": [
        exact("loss_traps", loss="torch_linear", **PADDED),
        *(
            diverges("loss_traps", {"trap": trap}, loss="torch_linear", **PADDED)
            for trap in ("mean_of_chunks", "divided_by_all")
        ),
    ],
    "offloaded activations": [
        exact("loss_traps", activations="host"),
        *(
            diverges("loss_traps", {"trap": trap}, activations="host")
            for trap in ("reused_buffer", "stored_in_bf16")
        ),
    ],
    "muon": [diverges("deepspeed", {"stage": 2}, optimizer="muon", clip_norm=0.6)],
}


@pytest.mark.thorough
@pytest.mark.parametrize("subject", WRONG)
def test_each_mistake_is_reported(run_cells: RunCells, subject: str) -> None:
    check_rows(run_cells, WRONG[subject])
