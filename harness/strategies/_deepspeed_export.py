"""Export of DeepSpeed training to standalone scripts."""

from __future__ import annotations

import json
from dataclasses import replace

from harness.strategies._accelerate_config import accelerate_export, deepspeed_variables
from harness.strategies._deepspeed_zero import ZeroOptions
from harness.strategy import Cell, Export, make_workload, model_facts


def ulysses_export(options: ZeroOptions, cell: Cell, to: str, divisor: int) -> Export | None:
    """Returns DeepSpeed's script with samples split over ranks, or the ZeRO script for one rank;
    None for Accelerate.

    `divisor`: divides the loss before backward.
    """
    plain, layout = zero_export(options, cell, to), options.layout(cell.devices)
    if to == "accelerate" or plain is None or layout.sequence == 1:
        return None if to == "accelerate" else plain
    values = {
        "sequence": layout.sequence,
        "samples": cell.global_batch // layout.data // cell.micro_batches,
        "mpu": ", mpu=groups",
        "called": "model_at_positions",
        "trained_loss": "loss / parts" if divisor > 1 else "loss",
    }
    return replace(plain, template="ulysses_zero.py.j2", values=plain.values | values)


def zero_export(options: ZeroOptions, cell: Cell, to: str) -> Export | None:
    """Returns DeepSpeed's script with its config file, or Accelerate's script with the same
    config."""
    sizes = model_facts(make_workload(cell.workload), cell.sequence_length).sizes
    layout = options.layout(cell.devices)
    config = options.config(cell, layout, sizes, options.folder or "offload")
    on_cpu = cell.device == "cpu" and cell.precision == "fp32"
    asked = {
        "cpu_adam": options.offload_optimizer != "none" and cell.optimizer == "adamw",
        "undo_first_step": options.stage == 0 and cell.precision != "fp32",
        "keep_dtype": options.offload_parameters == "nvme" and on_cpu,
    }
    if to == "accelerate":
        return accelerate_export(cell, deepspeed=config, about_deepspeed=asked)
    files = {"ds_config.json": json.dumps(config, indent=2) + "\n"}
    variables = deepspeed_variables(cell)
    plain = {"autocast": False, "mpu": "", "called": "engine", "trained_loss": "loss"}
    return Export("deepspeed.py.j2", {**plain, **asked}, files, variables)
