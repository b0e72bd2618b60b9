"""Bytes that a rank moves in a step: in theory, and over network and disk."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.measure.clock import Method, replaced
from harness.seam.job import Router, TrainState

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch._ops import OpOverload

    from harness.workloads import Workload
    from harness.workloads.operators import OperatorObserver


@dataclass(frozen=True, order=True)
class Call:
    operation: str
    tensor_bytes: int
    """Bytes of the whole tensor (after a gather, before a scatter), or of a list's tensors."""
    group_size: int
    dtype: str = ""


def _once(n: int) -> float:
    return (n - 1) / n


def _twice(n: int) -> float:
    return 2 * (n - 1) / n


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
"""Bytes a rank must send, averaged over ranks, per byte of the tensor, by group size. The
all-reduce follows Rabenseifner (2004), and ZeRO (arXiv 1910.02054, section 7.1) without the factor
(n-1)/n."""
GLOO = {**THEORY, "reduce_scatter": _twice, "reduce": lambda n: (n - 1) / n * (1 + 1 / n)}
"""Factors of torch's gloo. It scatters after an all-reduce, and reduces by a reduce-scatter and a
gather."""
RING = THEORY
"""Factors of a ring, as in NCCL, MPI (large messages) and Horovod's Gloo."""


def logical_bytes(calls: Iterable[tuple[Call, float]]) -> float:
    """Returns the minimum number of bytes that a rank must send per step for these calls."""
    return sum(
        count * call.tensor_bytes * THEORY[call.operation](call.group_size) for call, count in calls
    )


def algorithm_bytes(calls: Iterable[tuple[Call, float]], backend: str) -> float:
    """Returns the bytes a rank sends per step by the backend's algorithm, without headers."""
    factors = GLOO if backend == "gloo" else RING
    return sum(
        count * call.tensor_bytes * factors[call.operation](call.group_size)
        for call, count in calls
    )


LEAST_BYTES = 1024
"""Size of a collective below which its dtype does not count: norms, losses and flags."""
# Operators of torch's namespaces c10d and _c10d_functional -> operation, position of the whole
# tensor.
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


def counting(calls: Counter[Call], operators: list[int]) -> OperatorObserver:
    """Returns a dispatch mode that counts collectives in `calls` and operators in
    `operators[0]`."""
    import torch

    from harness.workloads.operators import OperatorObserver

    class Counting(OperatorObserver):
        def observe(
            self,
            func: OpOverload,
            args: Sequence[object],
            kwargs: Mapping[str, object],
            result: object,
        ) -> None:
            operators[0] += 1
            plain = not isinstance(func, torch._ops.HigherOrderOperator)
            if (
                plain
                and func.namespace in ("c10d", "_c10d_functional")
                and (call := collective_call(func._opname, args))
            ):
                calls[call] += 1

    return Counting()


def collective_call(name: str, args: Sequence[object]) -> Call | None:
    if name not in _OPERATORS:
        return None
    operation, position = _OPERATORS[name]
    size = _group_size(args)
    functional = isinstance(args[-1], str)
    is_part = operation in ("gather", "scatter") or (functional and operation == "all_gather")
    whole = tensor_bytes(args[position]) * (size if is_part else 1)
    return Call(operation, whole, size, dtype_of(args[position]))


@dataclass(frozen=True)
class StepCalls:
    calls: Counter[Call]
    operators: list[int]
    """Number of operators that torch saw, as the only item."""
    all_named: bool
    """Whether ranks communicate only by torch or by calls that the strategy names."""

    @property
    def complete(self) -> bool:
        return bool(self.operators[0]) and self.all_named

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Collectives of floating-point tensors with their dtypes; empty unless complete."""
        large = [call for call in self.calls if call.tensor_bytes >= LEAST_BYTES]
        named = {f"{call.operation} {call.dtype}" for call in large if "float" in call.dtype}
        return tuple(sorted(named)) if self.complete else ()


@contextlib.contextmanager
def step_calls(train_state: TrainState, processes: int) -> Iterator[StepCalls]:
    """Counts the collectives of a step, also those outside torch.distributed that the strategy
    names."""
    import torch.distributed as dist

    all_named = processes == 1 or dist.is_initialized() or bool(train_state.collectives)
    seen = StepCalls(Counter(), [0], all_named)

    def counted(operation: str, method: Method) -> Method:
        def call(tensor: object, *args: object, **kwargs: object) -> object:
            size = tensor_bytes(tensor)
            seen.calls[Call(operation, size, processes, dtype_of(tensor))] += 1
            return method(tensor, *args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for owner, name, operation in train_state.collectives:
            stack.enter_context(replaced(owner, name, functools.partial(counted, operation)))
        stack.enter_context(counting(seen.calls, seen.operators))
        yield seen


def _group_size(args: Sequence[object]) -> int:
    import torch.distributed as dist
    from torch._C import ScriptObject

    for argument in reversed(args):
        if isinstance(argument, dist.ProcessGroup):
            return argument.size()
        if isinstance(argument, ScriptObject) and "ProcessGroup" in str(argument._type()):
            return dist.ProcessGroup.unbox(argument).size()
        if isinstance(argument, str):
            resolve: Any = getattr(dist.distributed_c10d, "_resolve_process_group")  # noqa: B009
            return int(resolve(argument).size())
    return dist.get_world_size()


def _tensors(nested: object) -> list[Tensor]:
    from torch.utils._pytree import tree_leaves

    leaves: list[Tensor] = tree_leaves(nested)
    return leaves


def tensor_bytes(tensors: object) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(tensors))


def dtype_of(tensors: object) -> str:
    """Returns the first tensor's dtype without torch's prefix; empty if there is none."""
    return next((str(t.dtype).removeprefix("torch.") for t in _tensors(tensors)), "")


_NOT_SENT, _BYTES_SENT = 144, 200
"""Byte offsets in struct tcp_info of linux/tcp.h, since Linux 4.19: 32-bit tcpi_notsent_bytes, and
64-bit tcpi_bytes_sent, followed by tcpi_bytes_retrans."""

STILL_SECONDS = 0.002
"""Time within which a library's thread sends the data of its step."""
MOST_LOOKS = 5
"""Maximum number of looks while waiting, because some libraries never fall silent (Horovod's
cycles)."""


def tcp_bytes_sent() -> int | None:
    """Returns the payload bytes given to this process's open TCP connections; None on older
    kernels. Bytes that the kernel still holds count, or the next step would count them.
    Retransmissions do not, because they depend on the machine's load."""
    total = 0
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not os.readlink(entry.path).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as copy:
                if (
                    copy.family not in (socket.AF_INET, socket.AF_INET6)
                    or copy.type != socket.SOCK_STREAM
                ):
                    continue
                info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            if len(info) < _BYTES_SENT + 16:
                return None
            sent, repeated = struct.unpack_from("QQ", info, _BYTES_SENT)
            (held,) = struct.unpack_from("I", info, _NOT_SENT)
            total += sent - repeated + held
    return total


def wait_until_sent() -> None:
    """Waits until libraries' threads stop sending."""
    before = tcp_bytes_sent()
    for _ in range(MOST_LOOKS):
        time.sleep(STILL_SECONDS)
        now = tcp_bytes_sent()
        if now == before:
            return
        before = now


def disk_bytes() -> tuple[int, int] | None:
    """Returns the bytes this process read from and wrote to block devices."""
    try:
        fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    except OSError:
        return None
    return int(fields["read_bytes"]), int(fields["write_bytes"])


def folder_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


@dataclass
class RankTraffic:
    """Bytes sent, read and written in counted steps. Unknown numbers are None."""

    over_tcp: bool
    sent: int | None = 0
    disk_read: int | None = 0
    disk_written: int | None = 0
    steps: int = 0
    _start: tuple[int | None, tuple[int, int] | None] | None = None

    def _read(self) -> tuple[int | None, tuple[int, int] | None]:
        return tcp_bytes_sent() if self.over_tcp else None, disk_bytes()

    def start(self) -> None:
        self._start = self._read()

    def stop(self, steps: int) -> None:
        """Stops after this many steps. If a closed connection lowers a counter, the total is
        unknown."""
        if self._start is None:
            return
        if self.over_tcp:
            wait_until_sent()
        (sent, disk), (sent_now, disk_now) = self._start, self._read()
        self.sent = _more(self.sent, sent, sent_now)
        self.disk_read = _more(self.disk_read, disk and disk[0], disk_now and disk_now[0])
        self.disk_written = _more(self.disk_written, disk and disk[1], disk_now and disk_now[1])
        self.steps += steps
        self._start = None


def _more(total: int | None, before: int | None, now: int | None) -> int | None:
    if total is None or before is None or now is None or now < before:
        return None
    return total + now - before


ExpertTokens = dict[int, tuple[int, ...]]


def routers_of(model: nn.Module, workload: Workload) -> dict[int, Router]:
    """Returns the routers of transformers' mixtures by block number, even in wrapped models.

    Their last output holds the chosen experts: (tokens, experts per token).
    """
    ends = re.compile(
        rf"(?:^|\.){re.escape(workload.block_path)}\.(\d+)\."
        rf"(?:\w+\.)*?{re.escape(workload.mixture_path)}\.(?:\w+\.)*?gate$"
    )

    def tokens(output: tuple[Tensor, ...]) -> Tensor:
        return output[-1].flatten().bincount(minlength=workload.experts)

    return {
        int(match[1]): Router(module, tokens)
        for name, module in model.named_modules()
        if (match := ends.search(name))
    }


@contextlib.contextmanager
def counted(routers: Mapping[int, Router], counts: ExpertTokens) -> Iterator[None]:
    """Adds each expert's tokens on this rank to `counts`, without backward's recomputations."""
    import torch

    def count(block: int, router: Router) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: object, output: Any) -> None:
            if torch._C._current_graph_task_id() != -1:  # within backward
                return
            new = router.tokens(output).tolist()
            before = counts.get(block, (0,) * len(new))
            counts[block] = tuple(int(a + b) for a, b in zip(before, new, strict=True))

        return hook

    with contextlib.ExitStack() as stack:
        for block, router in routers.items():
            handle = router.module.register_forward_hook(count(block, router))
            stack.callback(handle.remove)
        yield


def imbalance_of_experts(counts: ExpertTokens) -> float:
    """Returns the busiest expert's tokens over its block's mean, in the most uneven block."""
    return max(max(tokens) * len(tokens) / sum(tokens) for tokens in counts.values())
