"""python -m scripts.unreached: lists settings of the pinned libraries that no option reaches.

Looks at the fields of configuration classes and at parameters of functions. A setting counts as
reached if its name is an argument, a key or an option in harness/strategies or in the workloads.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SETTINGS = {
    "accelerate.parallelism_config": "ParallelismConfig",
    "accelerate.utils": "DeepSpeedPlugin FullyShardedDataParallelPlugin",
    "deepspeed.module_inject.auto_ep_config": "AutoEPConfig",
    "deepspeed.runtime.tensor_parallel.config": "TPTrainingConfig",
    "deepspeed.runtime.zero.config": "DeepSpeedZeroConfig",
    "fairscale.nn": "FullyShardedDataParallel",
    "fairscale.nn.data_parallel": "ShardedDataParallel",
    "horovod.torch": "DistributedOptimizer",
    "lightning_fabric.strategies": "DDPStrategy FSDPStrategy ModelParallelStrategy",
    "torch.distributed.fsdp": "FullyShardedDataParallel MixedPrecisionPolicy fully_shard",
    "torch.distributed.optim": "ZeroRedundancyOptimizer",
    "torch.nn": "LinearCrossEntropyOptions",
    "torch.nn.parallel": "DistributedDataParallel",
    "torchft.local_sgd": "DiLoCo",
    "transformers.distributed.configuration_utils": "DistributedConfig",
}
"""Configuration classes and functions by module."""


def fields_of(module: str, name: str) -> list[str]:
    """Returns the settings of a class or function, in order."""
    found = getattr(importlib.import_module(module), name)
    declared = getattr(found, "model_fields", None) or getattr(found, "__dataclass_fields__", None)
    if declared is None:
        declared = inspect.signature(found).parameters
    public = [field for field in declared if not field.startswith("_")]
    return [field for field in public if field not in ("self", "args", "kwargs")]


def words_of(source: str) -> Iterator[str]:
    """Yields the names of arguments, options and keys in a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.keyword) and node.arg:
            yield node.arg
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"\w+", node.value) if " " not in node.value else ()


def unreached() -> dict[str, list[str]]:
    """Returns each class's or function's settings that nothing reaches."""
    folders = ("harness/strategies", "harness/workloads", "harness/seam")
    files = [file for folder in folders for file in (ROOT / folder).rglob("*.py")]
    reached = {word for file in files for word in words_of(file.read_text(encoding="utf-8"))}
    pairs = [(module, name) for module, names in SETTINGS.items() for name in names.split()]
    return {
        f"{module}.{name}": [field for field in fields_of(module, name) if field not in reached]
        for module, name in pairs
    }


if __name__ == "__main__":
    for path, fields in unreached().items():
        print(f"{path}: {', '.join(fields) or 'all reached'}")
