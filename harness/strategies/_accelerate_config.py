from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

from harness.cell.errors import Refused, Unavailable
from harness.seam import Cell, Export
from harness.workloads import Workload, make_workload

PROGRAM = Path(sys.executable).with_name("accelerate")
_IN_FILE = {
    "fsdp_version": "fsdp_version",
    "transformer_cls_names_to_wrap": "fsdp_transformer_layer_cls_to_wrap",
}


def mixed_precision(cell: Cell) -> str:
    return "no" if cell.precision == "fp32" else cell.precision


def fsdp2_settings(
    workload: Workload, *, reshard_after_forward: bool = True, offload: bool | None = None
) -> dict[str, object]:
    """Returns Accelerate's FSDP2 settings, one unit per block.

    Without block names, Accelerate wraps other modules too, and fails on BERT.
    """
    classes = block_classes(workload)
    return {
        "fsdp_version": 2,
        "reshard_after_forward": reshard_after_forward,
        "cpu_ram_efficient_loading": False,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        **({"transformer_cls_names_to_wrap": classes} if classes else {}),
        **({} if offload is None else {"offload_params": offload}),
    }


def state_dict_type(cell: Cell) -> dict[str, object]:
    kinds = {"full": "FULL_STATE_DICT", "sharded": "SHARDED_STATE_DICT"}
    return {"state_dict_type": kinds[cell.checkpoint]} if cell.checkpoint in kinds else {}


def block_classes(workload: Workload) -> list[str]:
    import torch

    if not workload.block_paths:
        return []
    with torch.device("meta"):
        blocks = workload.blocks_of(workload.build(0, saved_weights=False))
    return sorted({type(block).__name__ for block in blocks})


def launch_config(
    cell: Cell, *, fsdp: dict[str, object] | None = None, deepspeed_file: str | None = None
) -> dict[str, object]:
    """Returns the config file for DDP, FSDP, or DeepSpeed with its config file.

    CPUs use MULTI_GPU too: without an MPI host file, MULTI_CPU starts one process.
    """
    config: dict[str, object] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if fsdp else "DEEPSPEED" if deepspeed_file else "MULTI_GPU",
        "num_machines": 1,
        "machine_rank": 0,
        "num_processes": cell.devices,
        "main_process_port": 0,
        "use_cpu": cell.device == "cpu",
    }
    if deepspeed_file:
        return config | {
            "deepspeed_config": {"deepspeed_config_file": deepspeed_file, "zero3_init_flag": False}
        }
    if fsdp:
        texts = {k: ",".join(v) if isinstance(v, list) else v for k, v in fsdp.items()}
        config["fsdp_config"] = {_IN_FILE.get(k, f"fsdp_{k}"): v for k, v in texts.items()}
    return config | {"mixed_precision": mixed_precision(cell)}


def check_launch(cell: Cell) -> None:
    """Raises Refused or Unavailable if `accelerate launch` cannot start the ranks."""
    if cell.launcher == "spawn":
        raise Refused(
            "with a config file `accelerate launch` starts the ranks: leave the launcher out"
        )
    if not PROGRAM.exists():
        raise Unavailable(
            f"no program accelerate next to {sys.executable}; reinstall the package accelerate"
        )


def launch_command(
    cell: Cell, scratch: Path, fsdp: dict[str, object] | None, deepspeed: dict[str, object] | None
) -> list[str]:
    """Writes config files to `scratch`; returns the `accelerate launch` command."""
    file, deepspeed_file = scratch / "config.yaml", scratch / "ds_config.json"
    if deepspeed:
        deepspeed_file.write_text(json.dumps(deepspeed))
    named = str(deepspeed_file) if deepspeed else None
    config = launch_config(cell, fsdp=fsdp, deepspeed_file=named)
    file.write_text(yaml.safe_dump(config, sort_keys=False))
    return [str(PROGRAM), "launch", "--config_file", str(file)]


def accelerate_export(
    cell: Cell,
    *,
    ddp: dict[str, object] | None = None,
    fsdp: dict[str, object] | None = None,
    deepspeed: dict[str, object] | None = None,
    about_deepspeed: dict[str, bool] | None = None,
) -> Export | None:
    """Returns one engine's script and config file; None for fp16 on CPUs, which Accelerate runs as
    fp32. `about_deepspeed`: template values that the config does not have."""
    if cell.precision == "fp16" and cell.device == "cpu" and deepspeed is None:
        return None
    file = "ds_config.json" if deepspeed else None
    files = {
        "accelerate_config.yaml": yaml.safe_dump(
            launch_config(cell, fsdp=fsdp, deepspeed_file=file), sort_keys=False
        )
    }
    if deepspeed:
        files["ds_config.json"] = (
            json.dumps({"zero_optimization": {"stage": 0}, **deepspeed}, indent=2) + "\n"
        )
    plain = "MULTI_CPU" if cell.device == "cpu" else "MULTI_GPU"
    values = {
        "engine": "deepspeed" if deepspeed else "fsdp" if fsdp else "plain",
        "wanted": "DEEPSPEED" if deepspeed else "FSDP" if fsdp else plain,
        "autocast": False,
        "ddp_arguments": _ddp_arguments(ddp or {}),
        "cpu_adam": False,
        "undo_first_step": False,
        "keep_dtype": False,
        **(about_deepspeed or {}),
    }
    variables = deepspeed_variables(cell) if deepspeed else {}
    return Export(
        "accelerate.py.j2",
        values,
        files,
        variables,
        ("accelerate", *(["deepspeed"] if deepspeed else [])),
    )


def fsdp2_export(cell: Cell, reshard_after_forward: bool, offload: bool) -> Export | None:
    """Returns an export to Accelerate's FSDP2 if that trains the same, else None.

    Accelerate computes half precision entirely in half, offloads only on GPUs, needs token
    embeddings, and cannot prefetch. Its hybrid sharding needs a ParallelismConfig.
    """
    workload = make_workload(cell.workload)
    on_cpu = offload and cell.device == "cpu"
    if cell.precision != "fp32" or on_cpu or workload.kind == "image":
        return None
    settings = fsdp2_settings(
        workload, reshard_after_forward=reshard_after_forward, offload=offload
    )
    return accelerate_export(cell, fsdp=settings)


def deepspeed_parts(cell: Cell, config: dict[str, object]) -> dict[str, Any]:
    """Returns the files and variables of an export that starts DeepSpeed itself."""
    files = {"ds_config.json": json.dumps(config, indent=2) + "\n"}
    return {"files": files, "variables": deepspeed_variables(cell)}


def deepspeed_variables(cell: Cell) -> dict[str, str]:
    """Returns DeepSpeed's environment; on CPUs it cannot count a host's devices itself."""
    return {"DS_ACCELERATOR": cell.device, "LOCAL_SIZE": str(cell.devices // cell.nodes)}


def _ddp_arguments(options: dict[str, object]) -> dict[str, str]:
    arguments = {name: repr(value) for name, value in options.items() if name != "comm_hook"}
    hook = str(options.get("comm_hook", "none"))
    if hook == "powersgd":
        arguments["comm_state_option"] = repr(
            {"matrix_approximation_rank": 4, "start_powerSGD_iter": 2}
        )
    if hook != "none":
        arguments["comm_hook"] = (
            f"DDPCommunicationHookType.{'POWER_SGD' if hook == 'powersgd' else hook.upper()}"
        )
    return arguments
