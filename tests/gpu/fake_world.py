"""One rank of a world of any size, on tensors without data: what a strategy sets up and does in a
step.

The strategy's own code and torch's run as they are, on fake tensors (they have shape, dtype and
device, and no values) of type `cpu`, or of the type that the environment variable
BENCH_FAKE_DEVICE names: `cuda` needs what tests/gpu/fake_cuda.py prepares. Substituted are:

- communication: torch's process group `fake`, whose collectives return at once, with whatever is in
  their tensors; an asynchronous all-reduce answers with its own tensor;
- values: `.item()` is zero, a mask selects all; meshes are made and read outside of the fake mode,
  because the numbers in them are needed; a copied model keeps its mode; a module that is moved
  exchanges only parameters that change; memory that is asked to be pinned is;
- DDP's reducer, which is C++: the comparison of shapes over ranks and the second arrangement of
  buckets read memory and are left out; its own all-reduce is torch's hook of the same meaning;
- FSDP1's question whether memory is allocated: by the storage's size, not by its address;
- a pipeline's first exchange of shapes: what a neighbour would send is worked out from the cell;
- threads of DataParallel on CPUs, which run one after the other in the thread with the fake mode;
- files: a snapshot is written without content;
- RPC of a parameter server: the other side's answers are tensors of the right shapes on the host.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed import device_mesh, rpc
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import _flat_param as flat_parameters
from torch.distributed.pipelining import stage as pipelining
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.nn.parallel import distributed as ddp
from torch.testing._internal.distributed.fake_pg import FakeStore

from harness.spec.cell import Cell
from harness.spec.training import Batch
from harness.strategies import _data_parallel, _parameter_server
from harness.strategy.base import Strategy
from harness.strategy.job import Job
from harness.strategy.registry import validate
from harness.workloads import make_workload

DEVICE = os.environ.get("BENCH_FAKE_DEVICE", "cpu")

Substitute = contextlib.AbstractContextManager[Any]
Function = Callable[..., Any]


class OneMode(FakeTensorMode):
    """A fake mode that its tensors keep when they are copied."""

    def __deepcopy__(self, memo: dict[int, Any]) -> OneMode:
        return self


@contextlib.contextmanager
def one_rank(
    cell: Cell,
    rank: int,
    scratch: Path,
    strategy: Strategy | None = None,
) -> Iterator[tuple[Strategy, Job]]:
    """The cell's strategy (or the one given) and the job of one of its ranks, until the block ends.

    Raises what `validate` raises.
    """
    workload = make_workload(cell.workload)
    strategy = strategy or validate(cell, workload)[0]
    layout = strategy.layout(cell.devices)
    serves = rank >= layout.processes - layout.servers
    on_gpu = cell.device == "cuda" and not serves
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    drawn_on = torch.device("cuda", 0) if cell.device == "cuda" and serves else device
    job = Job(cell, workload, layout, device, rank, scratch, weights_device=drawn_on)
    if strategy.process_group:
        store = FakeStore()
        dist.init_process_group("fake", store=store, rank=rank, world_size=layout.processes)
    try:
        with contextlib.ExitStack() as stack:
            for substitute in substitutes(job):
                stack.enter_context(substitute)
            stack.enter_context(OneMode())
            yield strategy, job
    finally:
        if strategy.process_group:
            _clear_sharding_prop_cache()  # its meshes name groups, whose names are given anew
            dist.destroy_process_group()


def batch(job: Job, step: int) -> Batch:
    """This rank's share of the global batch of a step, on its device."""
    samples, length = job.cell.global_batch // job.layout.shares, job.cell.sequence_length
    inputs = job.workload.sample_inputs(samples, length).to(job.device)
    shape = (samples, length) if job.workload.kind == "causal" else (samples,)
    return Batch(step, inputs, torch.zeros(shape, dtype=torch.long, device=job.device))


def substitutes(job: Job) -> Iterator[Substitute]:
    put = mock.patch.object
    yield mock.patch.dict(fake_impls.op_implementations_dict, operators(job))
    yield put(torch.utils, "swap_tensors", only_what_changes(torch.utils.swap_tensors))
    yield put(torch, "save", lambda what, file: Path(file).write_bytes(b""))
    yield put(dist, "all_reduce", answering(dist.all_reduce))
    yield put(device_mesh, "init_device_mesh", outside(device_mesh.init_device_mesh))
    mesh = device_mesh.DeviceMesh
    for name in ("__init__", "__getitem__", "get_group", "get_local_rank"):
        yield put(mesh, name, outside(getattr(mesh, name)))
    yield put(mesh, "_concatenate", staticmethod(outside(mesh._concatenate)))
    model = ddp.DistributedDataParallel
    yield put(ddp, "_verify_param_shape_across_processes", lambda *_: None)
    yield put(model, "_ddp_init_helper", buckets_once(model._ddp_init_helper))
    yield put(model, "_lazy_init", all_reduce_in_python(model._lazy_init))
    allocated = lambda tensor: tensor.untyped_storage().size() > 0  # noqa: E731
    yield put(flat_parameters, "_data_ptr_allocated", allocated)
    stage = pipelining.PipelineStage
    yield put(stage, "_send_meta", lambda stage, meta, peer: None)
    yield put(stage, "_recv_meta", lambda stage, peer: neighbours_shapes(job, stage, peer))
    yield put(_data_parallel, "ThreadPoolExecutor", lambda *_, **__: InThisThread())
    if job.layout.servers:
        yield from server_or_worker(job)


def operators(job: Job) -> dict[Any, Function]:
    """Answers to questions about values and addresses: (fake mode, operator, arguments) ->
    result."""
    aten = torch.ops.aten

    def item(mode: Any, func: Any, tensor: Tensor) -> float:
        return 0.0 if tensor.is_floating_point() else 0

    def nonzero(mode: Any, func: Any, tensor: Tensor) -> Tensor:
        return tensor.new_zeros((tensor.numel(), tensor.dim()), dtype=torch.long)

    def pin(mode: Any, func: Any, tensor: Tensor, device: Any = None) -> Tensor:
        return tensor.clone()

    def pinned(mode: Any, func: Any, tensor: Tensor, device: Any = None) -> bool:
        return tensor.device.type == "cpu"

    answers = {aten._local_scalar_dense.default: item, aten.nonzero.default: nonzero}
    if job.cell.device == "cuda":
        answers |= {aten._pin_memory.default: pin, aten.is_pinned.default: pinned}
    return answers


def outside(function: Function) -> Function:
    """The function with the values of its tensors."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return call


def only_what_changes(swap: Function) -> Function:
    """Fake parameters are exchanged also for themselves; weak references to them do not matter
    here."""
    none = SimpleNamespace(getweakrefs=lambda tensor: ())

    def call(parameter: Tensor, moved: Tensor) -> None:
        if (parameter.device, parameter.dtype) != (moved.device, moved.dtype):
            with mock.patch.object(torch.utils, "weakref", none):
                swap(parameter, moved)

    return call


class Answered:
    """A call that has come to its end, with this result."""

    def __init__(self, tensor: Tensor) -> None:
        self.future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        self.future.set_result([tensor])

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        return self.future

    def wait(self) -> bool:
        return True


def answering(all_reduce: Function) -> Function:
    def call(tensor: Tensor, *args: Any, async_op: bool = False, **more: Any) -> Answered | None:
        all_reduce(tensor, *args, **more)
        return Answered(tensor) if async_op else None

    return call


class Reducer:
    """DDP's reducer but for the second arrangement of its buckets."""

    def __init__(self, reducer: Any) -> None:
        self.reducer = reducer

    def _rebuild_buckets(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.reducer, name)


def buckets_once(init: Function) -> Function:
    def call(model: Any, *args: Any) -> None:
        init(model, *args)
        model.reducer = Reducer(model.reducer)

    return call


def all_reduce_in_python(lazy_init: Function) -> Function:
    """Before the first forward: the strategy has registered a hook by then, or wants none."""

    def call(model: Any) -> None:
        if not model._comm_hooks:
            model.register_comm_hook(model.process_group, allreduce_hook)
        lazy_init(model)

    return call


def neighbours_shapes(job: Job, stage: Any, peer: int) -> Any:
    """What the stage before says of its hidden states, or the one behind of their gradients."""
    samples = job.cell.global_batch // job.layout.shares // job.cell.micro_batches
    shape = torch.Size((samples, job.cell.sequence_length, job.workload.hf_config().hidden_size))
    meta = pipelining._TensorMeta(
        shape=shape,
        stride=(shape[1] * shape[2], shape[2], 1),
        dtype=torch.float32,
        requires_grad=peer < stage.stage_index,
    )
    if peer < stage.stage_index:
        return pipelining._StageForwardMeta((meta,))
    return pipelining._StageBackwardMeta((meta,))


class InThisThread:
    """An executor whose work is done when it is asked for."""

    def map(self, function: Function, *items: Iterable[Any]) -> list[Any]:
        with torch.enable_grad():  # as in a new thread, whatever the caller's mode is
            return list(map(function, *items))


def server_or_worker(job: Job) -> Iterator[Substitute]:
    """For a worker the server's answers, for the server two pushes of each worker, one a step."""

    def whole() -> list[Tensor]:
        assert job.train_state is not None
        return [torch.zeros_like(p, device="cpu") for p in job.train_state.model.parameters()]

    def push(to: str, function: Function, arguments: tuple[int, list[Tensor]]) -> Any:
        devices = {gradient.device.type for gradient in arguments[1]}
        assert devices == {"cpu"}, f"RPC without device maps refuses tensors on {devices}"
        return whole(), 1.0

    workers = [*range(job.layout.data)] * 2
    pushes = ((worker, whole(), mock.Mock()) for worker in workers)
    put = mock.patch.object
    yield put(_parameter_server, "join", lambda job, tcp: None)
    yield put(rpc, "rpc_sync", push)
    yield put(rpc, "rpc_async", lambda *_: Answered(torch.zeros(())))
    yield put(_parameter_server, "next_push", lambda: next(pushes))
    yield put(_parameter_server, "next_confirmation", lambda: 0)
