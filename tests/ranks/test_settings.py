"""Strategies train the same at further settings, and keep between steps what their formulas say.

Matrix `full`, in test_strategies.py, covers other settings.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pandas as pd
import pytest

from harness.strategies._deepspeed import fp16_on_cpu
from tests.ranks.conftest import Row, RunCells, check_rows, row
from tests.ranks.test_installed import RIGHT
from tests.ranks.test_strategies import states_follow_the_formula
from tests.ranks.test_traps import BALANCE, DROPOUT, PACKED, SGD

exact, near = partial(row, "exact"), partial(row, "within tolerance")
FEW: dict[str, Any] = {"timed_steps": 1, "parity_steps": 4}
ENGINES = ("ddp", "zero2", "zero3", "fsdp2")
# GPT-2 ties its embeddings, and the engines must keep them tied.
TIED: dict[str, Any] = {"workload": "gpt2-nano", "micro_batches": 2}
QLORA: dict[str, Any] = {"workload": "llama-nano+nf4+lora"}

SETTINGS: dict[str, list[Row]] = {
    "accelerate": [
        exact("accelerate", {"engine": "zero3"}, devices=4, **FEW),
        *(exact("accelerate", {"engine": engine}, **TIED) for engine in ENGINES),
        *(exact("accelerate", {"engine": one}, devices=4, **FEW) for one in ("zero2", "fsdp2")),
        exact("accelerate", {"engine": "fsdp2"}, **QLORA),
        *(exact("accelerate", {"engine": one}, precision="bf16") for one in ("zero2", "fsdp2")),
    ],
    "trainer": [
        exact("trainer", {"engine": "zero3"}, devices=4, workload="llama-micro", **FEW),
        *(exact("trainer", {"engine": engine}, **TIED) for engine in ENGINES),
        *(
            exact("trainer", {"engine": engine}, devices=4, workload="llama-micro", **FEW)
            for engine in ("ddp", "zero2", "fsdp2")
        ),
        exact("trainer", devices=1),
        exact("trainer", optimizer="sgd", micro_batches=4),
        exact("trainer", {"engine": "fsdp2"}, workload="bert-micro"),
        exact("trainer", workload="llama-nano+lora"),
        exact("trainer", workload="resnet-micro", micro_batches=2),
        exact("trainer", {"engine": "zero2"}, precision="bf16"),
        near("trainer", {"engine": "fsdp2"}, precision="bf16"),
        exact("trainer", recompute="full", documents="packed", **DROPOUT),
        exact("trainer", **BALANCE),
    ],
    "deepspeed": [
        exact(
            "deepspeed",
            {"stage": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"},
            devices=4,
            **FEW,
        ),
        exact("deepspeed", {"stage": 3}, devices=1),
        exact("deepspeed", {"stage": 0}, micro_batches=4),
        exact("deepspeed", {"stage": 2}, devices=4, **FEW),
        exact("deepspeed", {"stage": 2}, **TIED),
        exact("deepspeed", {"stage": 3}, workload="bert-micro", micro_batches=2),
        exact("deepspeed", {"stage": 1, "offload_optimizer": "cpu"}, micro_batches=2),
        exact("deepspeed", {"stage": 3}, workload="llama-nano+lora"),
        exact("deepspeed", {"stage": 1}, optimizer="sgd"),
        exact("deepspeed", {"stage": 3}, documents="packed", **DROPOUT),
        exact("deepspeed", {"stage": 3, "persistent_elements": 0}, **QLORA),
        *(exact("deepspeed", {"stage": stage}, precision="bf16") for stage in (0, 3)),
        *[exact("deepspeed", {"stage": stage}, precision="fp16") for stage in (1, 3)]
        * fp16_on_cpu(),
    ],
    "deepspeed's layers and stages": [
        exact("deepspeed_pipeline", recompute="full", **DROPOUT),
        exact("tiled_linear", {"in_tiles": 2, "out_tiles": 3}),
        exact("tiled_linear", workload="bert-micro"),
        near("tiled_linear", micro_batches=2, precision="bf16"),
        exact("deepspeed_pipeline", workload="gpt2-nano", micro_batches=4),
        exact("deepspeed_pipeline", workload="bert-micro", micro_batches=4),
        exact("deepspeed_pipeline", devices=4, workload="llama-micro", micro_batches=4, **FEW),
        exact("deepspeed_pipeline", devices=1, micro_batches=4),
    ],
    "sequence": [
        exact(
            *("ulysses", {"sequence_ranks": 2}),
            devices=4,
            workload="qwen3-moe-nano",
        ),
        *(exact("ulysses_zero", {"stage": stage}, **SGD) for stage in (0, 1, 2, 3)),
        exact("ulysses_zero", sequence_length=256, micro_batches=2),
        exact("ulysses", workload="gpt2-nano", micro_batches=2, recompute="full"),
        exact("ulysses", sequence_length=256, **DROPOUT),
        # torch supports its ring attention on GPUs only; here it runs over the attention of CPUs.
        exact("ring_on_cpu", {"pass_by": "allgather"}, workload="qwen3-moe-nano", **SGD),
        exact("ring_on_cpu", {"pass_by": "alltoall"}, workload="qwen3-moe-nano", **SGD),
        exact("ring_on_cpu", sequence_length=256, **DROPOUT),
    ],
    "fairscale": [
        exact("fairscale_oss", {"reduce_buffer_size": 20_000}, devices=4, workload="llama-micro"),
        exact("fairscale_oss", {"reduce_buffer_size": 2**23}, devices=4, workload="llama-micro"),
        exact("fairscale_oss", {"reduce_buffer_size": 0}, workload="llama-micro"),
        exact("fairscale_oss", {"reduce_buffer_size": 0}, micro_batches=2),
        exact("fairscale_oss", optimizer="sgd"),
        near("fairscale_oss", precision="bf16"),
    ],
    # Gloo ranks train with faked CUDA streams and pinned memory; the rest needs a GPU.
    "fairscale, fully sharded": [
        exact("fairscale_on_cpu", {"no_sync": False, "cpu_offload": True}, micro_batches=2),
        exact("fairscale_on_cpu"),
        exact("fairscale_on_cpu", {"reshard_after_forward": False}),
        exact("fairscale_on_cpu", {"cpu_offload": True}),
        exact("fairscale_on_cpu", micro_batches=2),
        near("fairscale_on_cpu", precision="fp16"),
        exact("fairscale_on_cpu", workload="gpt2-nano"),
        exact("fairscale_on_cpu", devices=4, **FEW),
    ],
    "parameter server": [
        near("parameter_server", precision="fp16"),
        exact("parameter_server", micro_batches=2),
        exact("parameter_server", optimizer="sgd"),
        near("parameter_server", precision="bf16"),
        exact("parameter_server", {"transport": "tcp"}, devices=4, workload="llama-micro"),
        exact("parameter_server", {"mode": "asynchronous"}, devices=1),
    ],
    "horovod": [
        exact("horovod", {"fusion_threshold_mib": 1.0, "cycle_time_ms": 0.5}),
        exact("horovod", optimizer="sgd"),
    ],
    "shards": [
        near("fsdp2", devices=4, optimizer="muon", **FEW),
        *(exact(name, devices=4, **FEW) for name in ("zero_redundancy", "fsdp1", "fsdp2")),
        exact("fsdp1", workload="llama-nano+lora"),
        exact("fsdp2", workload="llama-nano+dora"),
        exact("zero_redundancy", workload="llama-nano+lora"),
        exact("fsdp1", **QLORA),
        exact("fsdp2", micro_batches=2, **QLORA),
        # FSDP2 casts each gathered parameter, which would corrupt weights packed as fp32.
        exact("fsdp2", {"mixed_precision": True}, precision="bf16", **QLORA),
        exact("single", devices=1, workload="llama-nano+lora"),
        exact("fsdp2", labels="padded", seed=1, **PACKED),
    ],
    # Tied embeddings are on one rank in V schedules, else on both ends of the pipeline.
    "pipelines": [
        exact("pipeline", recompute="full", **DROPOUT),
        *(
            exact("pipeline", {"schedule": name}, workload="gpt2-micro", micro_batches=4, **FEW)
            for name in ("looped_bfs", "dualpipev")
        ),
    ],
    # Tensor parallelism leaves norms as plain tensors next to DTensors. torch refuses lists of
    # both, and on GPUs updates by lists unless told otherwise.
    "ways to compute AdamW": [
        exact("parallelism_config", {"tensor": 2}, optimizer="adamw_foreach", **FEW),
        *(
            exact(name, optimizer=way, **FEW)
            for name in ("fsdp2", "tensor")
            for way in ("adamw_foreach", "adamw_fused")
        ),
        near("ddp", workload="llama-micro", optimizer="adamw_8bit", **FEW),
    ],
    "masks, documents and balance": [
        exact("tensor", documents="packed", **DROPOUT),
        exact("data_parallel", recompute="full", **DROPOUT),
        exact("ddp", documents="packed", seed=1, **BALANCE),
    ],
}


ALL = {**SETTINGS, **RIGHT}


def follow_their_formulas(run_cells: RunCells, rows: list[Row]) -> None:
    for trial in check_rows(run_cells, rows):
        # With offload the formula separates host from device memory; a CPU has only one. Flat
        # parameters and whole ones deal out a few adapters unevenly.
        whole = trial["strategy"] in ("fsdp1", "zero_redundancy") and "lora" in trial["workload"]
        if not whole and "cpu_offload" not in trial["options"]:
            states_follow_the_formula(pd.Series(trial))


@pytest.mark.parametrize("subject", ALL)
def test_the_least_plain_setting_trains_the_same(run_cells: RunCells, subject: str) -> None:
    follow_their_formulas(run_cells, ALL[subject][:1])


@pytest.mark.thorough
@pytest.mark.parametrize("subject", ALL)
def test_other_settings_train_the_same(run_cells: RunCells, subject: str) -> None:
    follow_their_formulas(run_cells, ALL[subject][1:])
