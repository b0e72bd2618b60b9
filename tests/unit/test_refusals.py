"""Combinations that would fail, or train something else, are refused before they start."""

from __future__ import annotations

from typing import Any

import pytest

from harness.cell.cell import Cell
from harness.cell.errors import Refused, Unavailable
from harness.seam.registry import validate
from harness.workloads import make_workload
from tests.commands import needs_horovod

Axes = dict[str, Any]
FLAT = {"options": {"use_orig_params": False}}
SEQUENCE = {"options": {"sequence_parallel": True}}
ONE_STAGE = {"devices": 1, "options": {"tensor": 1, "pipeline": 1}}
GPU = {"device": "cuda"}
GPT, BERT, RESNET = ({"workload": name} for name in ("gpt2-nano", "bert-micro", "resnet-micro"))
EXPERTS = {"workload": "mixtral-nano", "micro_batches": 2}
LORA = {"workload": "llama-nano+lora"}
BF16 = {"precision": "bf16"}
BALANCED, DROPOUT, PACKED = {"balance_weight": 0.1}, {"dropout": 0.1}, {"documents": "packed"}
SELECTIVE = {"recompute": "selective"}
COMPILED, GRAPHS = {"compile": "block"}, {"compile": "block_cudagraphs"}


def stages(schedule: str, micro_batches: int = 4) -> Axes:
    options = {"schedule": schedule}
    return {"workload": "llama-micro", "micro_batches": micro_batches, "options": options}


def powersgd(mib: int) -> Axes:
    options = {"comm_hook": "powersgd", "bucket_cap_mb": mib}
    return {"workload": "llama-micro", "options": options}


def deepspeed(stage: int, **options: Any) -> Axes:
    return {"options": {"stage": stage, **options}}


def averaged(period: int) -> Axes:
    return {"parity_steps": 8, "options": {"average": "parameters", "period": period}}


def local_from(step: int) -> Axes:
    return {"parity_steps": 8, "options": {"start_step": step}}


@pytest.mark.parametrize(
    ("strategy", "plain", "refused"),
    [
        ("fsdp1", FLAT, {"decay": "matrices"}),
        ("ddp", BERT, {"labels": "padded"}),
        ("ddp", {}, DROPOUT),
        ("ddp", GPT | COMPILED, DROPOUT),
        ("data_parallel", GPT | GPU, DROPOUT),
        ("ddp", {}, BALANCED),
        ("pipeline", EXPERTS, BALANCED),
        ("three_d", EXPERTS | ONE_STAGE, BALANCED),
        ("ulysses", EXPERTS, BALANCED),
        ("deepspeed_auto", EXPERTS | {"options": {"split": "experts"}}, BALANCED),
        ("ddp", BERT, PACKED),
        ("pipeline", {"micro_batches": 2}, PACKED),
        ("pipeline", {"devices": 1}, PACKED),
        ("vertical", {"devices": 1}, PACKED),
        ("ulysses", {}, PACKED),
        ("data_parallel", {}, PACKED),
        ("tensor", SEQUENCE, PACKED),
        ("single", {"devices": 1, **RESNET}, SELECTIVE),
        ("ddp", {"workload": "llama-nano+prefix"}, SELECTIVE),
        ("ddp", LORA, SELECTIVE),
        ("fairscale_oss", {}, SELECTIVE),
        ("fairscale_oss", BF16, {"recompute": "full"}),
        ("deepspeed", deepspeed(3), SELECTIVE),
        ("pipeline", stages("zbv"), SELECTIVE),
        ("pipeline", stages("dualpipev"), SELECTIVE),
        ("pipeline", stages("dualpipev"), {"micro_batches": 2}),
        ("ulysses", {}, {"sequence_length": 33}),
        ("ulysses", {}, BERT),
        ("ulysses", {}, {"workload": "llama-nano+prompt"}),
        ("ulysses", {}, {"devices": 4}),
        ("ulysses", {}, {"devices": 4, "options": {"sequence_ranks": 3}}),
        ("ulysses_zero", {}, GPT),
        ("context_parallel", GPU, {"device": "cpu"}),
        ("context_parallel", GPU, {"sequence_length": 34}),
        ("zero_redundancy", {}, COMPILED),
        ("tensor", SEQUENCE, COMPILED),
        ("ddp", RESNET, COMPILED),
        ("ddp", LORA, COMPILED),
        ("ddp", {}, GRAPHS),
        ("fsdp2", GPU, GRAPHS),
        ("ddp", GPU | {"micro_batches": 2}, GRAPHS),
        ("ddp", GPU | {"recompute": "full"}, GRAPHS),
        ("ddp", GPU | {"warmup_steps": 2}, GRAPHS),
        ("ddp", powersgd(4), powersgd(3)),
        ("ddp", powersgd(4), {"workload": "llama-nano+bf16"}),
        ("fsdp2", {"options": {"mixed_precision": True}, **BF16}, {"optimizer": "muon"}),
        ("fsdp1", {}, {"optimizer": "muon"}),
        ("fsdp2", {}, {"optimizer": "adamw_8bit"}),
        ("amp", BF16, {"options": {"rounded_masters": True}}),
        ("deepspeed", deepspeed(0), deepspeed(0, bucket_elements=1000)),
        ("deepspeed", deepspeed(2), deepspeed(2, persistent_elements=0)),
        ("deepspeed", deepspeed(3), deepspeed(3, folder="")),
        ("deepspeed", deepspeed(1), {"workload": "llama-nano+bf16"}),
        ("horovod", {}, {"options": {"transport": "tcp"}}),
        ("parameter_server", {"options": {"mode": "asynchronous"}}, {"precision": "fp16"}),
        ("post_local_sgd", local_from(7), local_from(8)),
        ("collectives", averaged(8), averaged(9)),
        ("tensor", {}, LORA),
        ("fsdp2", {}, {"workload": "llama-nano+int8+lora"}),
        ("fsdp1", FLAT, LORA),
        ("ddp", {"workload": "llama-nano+fp16"}, {"precision": "fp16"}),
    ],
    ids=str,
)
def test_a_change_that_cannot_be_trained_is_refused(
    strategy: str, plain: Axes, refused: Axes
) -> None:
    """The cell without the change is valid."""
    if strategy == "horovod":
        needs_horovod()
    for axes, is_refused in ((plain, False), (plain | refused, True)):
        cell = Cell(**{"strategy": strategy, "devices": 2, "workload": "llama-nano", **axes})
        workload = make_workload(cell.workload)
        if is_refused:
            with pytest.raises((Refused, Unavailable)):
                validate(cell, workload, here=False)
        else:
            validate(cell, workload, here=False)
