"""Which collectives did a step call, and how many bytes do they move: by theory, and by the
backend's own algorithm?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True, order=True)
class Call:
    """A collective: `tensor_bytes` is the whole tensor's, gathered or before it is scattered; of
    all parts where it is a list."""

    operation: str
    tensor_bytes: int
    group_size: int


def _once(n: int) -> float:
    """What a rank must send, over the tensor: all but one of N ranks pass each byte on once."""
    return (n - 1) / n


def _twice(n: int) -> float:
    return 2 * (n - 1) / n


# Sent by a rank over the tensor's bytes, mean of the ranks: an all-reduce is a reduce-scatter and
# an all-gather (Rabenseifner 2004; ZeRO, arXiv 1910.02054, section 7.1, which leaves (N-1)/N out).
THEORY: dict[str, Callable[[int], float]] = {
    "all_reduce": _twice,
    "reduce_scatter": _once,
    "all_gather": _once,
    "all_to_all": _once,
    "broadcast": _once,
    "reduce": _once,
    "gather": _once,
    "scatter": _once,
    "send": lambda n: 1.0,
    "receive": lambda n: 0.0,
}
# The same as torch's gloo backend does it: it reduces all to scatter, and reduces by a
# reduce-scatter and a gather to the root.
GLOO = {**THEORY, "reduce_scatter": _twice, "reduce": lambda n: (n - 1) / n * (1 + 1 / n)}
# A ring, as NCCL, MPI for large messages and Horovod's Gloo have it.
RING = THEORY


def logical_bytes(calls: Iterable[tuple[Call, float]]) -> float:
    """What a rank must send for these (call, count per step), by theory."""
    return sum(
        count * call.tensor_bytes * THEORY[call.operation](call.group_size) for call, count in calls
    )


def algorithm_bytes(calls: Iterable[tuple[Call, float]], backend: str) -> float:
    """What the backend's algorithm sends for them, headers aside."""
    factors = GLOO if backend == "gloo" else RING
    return sum(
        count * call.tensor_bytes * factors[call.operation](call.group_size)
        for call, count in calls
    )


# Operator of torch's namespaces c10d and _c10d_functional -> (operation, argument that holds the
# whole tensor).
_OPERATORS = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_": ("all_gather", 0),
    "allgather_coalesced_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "gather_": ("gather", 1),
    "scatter_": ("scatter", 0),
    "alltoall_base_": ("all_to_all", 1),
    "alltoall_": ("all_to_all", 1),
    "send": ("send", 0),
    "recv_": ("receive", 0),
    "recv_any_source_": ("receive", 0),
    "all_reduce": ("all_reduce", 0),
    "all_reduce_": ("all_reduce", 0),
    "all_reduce_coalesced": ("all_reduce", 0),
    "all_gather_into_tensor": ("all_gather", 0),
    "all_gather_into_tensor_out": ("all_gather", 0),
    "all_gather_into_tensor_coalesced": ("all_gather", 0),
    "reduce_scatter_tensor": ("reduce_scatter", 0),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 0),
    "all_to_all_single": ("all_to_all", 0),
    "broadcast": ("broadcast", 0),
}


def counting(calls: Counter[Call], seen: list[int]) -> TorchDispatchMode:
    """A mode that adds every collective called under it, C++ wrappers' included, to `calls`, and
    every operator to `seen[0]`."""
    import torch
    from torch.distributed.tensor import DTensor
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if any(t is DTensor for t in types):  # its parts' operators come one by one
                return NotImplemented
            seen[0] += 1
            result = func(*args, **(kwargs or {}))
            plain = not isinstance(func, torch._ops.HigherOrderOperator)
            if (
                plain
                and func.namespace in ("c10d", "_c10d_functional")
                and (call := _call(func._opname, args))
            ):
                calls[call] += 1
            return result

    return Counting()  # type: ignore[no-untyped-call]


def _call(name: str, args: Any) -> Call | None:
    if name not in _OPERATORS:
        return None
    operation, place = _OPERATORS[name]
    size = _group_size(args)
    functional = isinstance(args[-1], str)
    a_part = operation in ("gather", "scatter") or (functional and operation == "all_gather")
    return Call(operation, tensor_bytes(args[place]) * (size if a_part else 1), size)


def _group_size(args: Any) -> int:
    """Of the process group among the arguments: an object, or its name where the operator is
    functional."""
    import torch.distributed as dist
    from torch._C import ScriptObject

    for argument in reversed(args):
        if isinstance(argument, dist.ProcessGroup):
            return argument.size()
        if isinstance(argument, ScriptObject) and "ProcessGroup" in str(argument._type()):
            return dist.ProcessGroup.unbox(argument).size()
        if isinstance(argument, str):
            return int(dist.distributed_c10d._resolve_process_group(argument).size())  # type: ignore[arg-type,attr-defined]
    return dist.get_world_size()


def tensor_bytes(what: Any) -> int:
    """Of a tensor or of nested lists of them."""
    import torch

    if isinstance(what, torch.Tensor):
        return what.numel() * what.element_size()
    return sum(tensor_bytes(one) for one in what)
