"""Before a cell starts, its strategy refuses what would silently be something else."""

from __future__ import annotations

from typing import Any

import pytest

from harness.cell.cell import Cell
from harness.cell.errors import Refused, Unavailable
from harness.seam.registry import make_strategy, validate
from harness.workloads import make_workload
from tests.ranks.conftest import cell

FSDP2, CONFIG_FILE = {"engine": "fsdp2"}, {"config_file": True}
ADASUM = {"op": "adasum", "controller": "mpi"}
ON_GPU: dict[str, Any] = {"strategy": "fairscale_fsdp", "device": "cuda"}


def offloads(stage: int, **to: str) -> Cell:
    return cell("deepspeed", options={"stage": stage, **to})


REFUSED: list[tuple[Cell, type[Exception], str]] = [
    (cell("accelerate", precision="fp16"), Unavailable, "fp16"),
    (cell("accelerate", workload="resnet-micro", options=FSDP2), Refused, "image models"),
    (cell("accelerate", launcher="spawn", options=CONFIG_FILE), Refused, "launcher"),
    (cell("trainer", precision="fp16"), Unavailable, "fp16"),
    (cell("trainer", workload="resnet-micro", options=FSDP2), Refused, "image models"),
    (cell("trainer", workload="llama-nano+prompt"), Refused, "unshifted labels"),
    (cell("deepspeed", precision="fp16", options={"stage": 0}), Refused, "loss scale"),
    (offloads(0, offload_optimizer="cpu"), Refused, "stage 0 offloads nothing"),
    (offloads(2, offload_optimizer="nvme"), Refused, "in stage 3 only"),
    (offloads(2, offload_parameters="cpu"), Refused, "in stage 3 only"),
    (
        cell("deepspeed", optimizer="sgd", options={"stage": 2, "offload_optimizer": "cpu"}),
        *(Refused, "use optimizer adamw"),
    ),
    (
        cell("deepspeed", workload="resnet-micro", precision="bf16", options={"stage": 2}),
        *(Refused, "BatchNorm"),
    ),
    (cell("horovod", options={"op": "adasum"}), Refused, "set controller to mpi"),
    (cell("horovod", 3, options=ADASUM, global_batch=9), Refused, "power of two"),
    (cell("horovod", precision="fp16", options=ADASUM), Refused, "use bf16 or fp32"),
    (
        cell("horovod", launcher="spawn", options={"controller": "mpi"}),
        *(Refused, "leave the launcher out"),
    ),
    (cell("horovod", workload="llama-nano+bf16"), Refused, "set the precision to bf16"),
    (cell("fairscale_fsdp"), Unavailable, "GPU"),
    (cell(**ON_GPU, workload="llama-nano+lora"), Refused, r"fsdp1.*fsdp2"),
    (
        cell(**ON_GPU, micro_batches=2, options={"cpu_offload": True, "no_sync": False}),
        *(Refused, "no_sync=true"),
    ),
    (cell("fairscale_oss", options={"reduce_fp16": True}), Refused, "reduce_buffer_size"),
    (cell("diloco", options={"period": 9}), Refused, "outer step"),
]


@pytest.mark.parametrize(("one", "error", "said"), REFUSED, ids=lambda value: str(value)[:80])
def test_what_would_be_something_else_is_refused(
    one: Cell, error: type[Exception], said: str
) -> None:
    check: Any = make_strategy(one).check if one.device == "cuda" else validate
    with pytest.raises(error, match=said):
        check(one, make_workload(one.workload))


@pytest.mark.parametrize(
    ("one", "stand_in", "wraps"),
    [
        (cell("accelerate"), None, "Accelerate"),
        (cell("accelerate", options=FSDP2), "over gloo", None),
        (cell("accelerate", options=CONFIG_FILE), None, "Accelerate (config.yaml)"),
        (cell("trainer"), None, "transformers Trainer"),
        (cell("trainer", options=FSDP2), "over gloo", None),
        (cell("deepspeed", options={"stage": 0}), None, "DeepSpeed stage 0"),
        (offloads(2, offload_optimizer="cpu"), "already in host memory", None),
    ],
    ids=lambda value: str(value)[:80],
)
def test_what_stands_in_for_a_gpu_and_who_wraps_ddp_is_declared(
    one: Cell, stand_in: str | None, wraps: str | None
) -> None:
    strategy = make_strategy(one)
    found = strategy.stand_in(one)
    assert found is None if stand_in is None else stand_in in str(found)
    assert strategy.ddp_equivalent_of(one) == wraps
