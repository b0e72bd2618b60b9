"""Simulates one rank of a world of any size in one process, with almost no memory.

Code runs unchanged on fake tensors, except for SUBSTITUTIONS.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import fake_impls
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed import device_mesh
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import _flat_param as flat_parameters
from torch.distributed.pipelining import schedules
from torch.distributed.pipelining import stage as pipelining
from torch.distributed.tensor import debug as tensor_caches
from torch.nn.parallel import distributed as ddp
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.weak import WeakTensorKeyDictionary

from harness.cell.training import Batch, of_each_tensor
from harness.seam.base import Strategy
from harness.seam.job import Job

if TYPE_CHECKING:
    from torch._ops import OpOverload

Patch = contextlib.AbstractContextManager[object]
Function = Callable[..., Any]

put = mock.patch.object
_SWAP = torch.utils.swap_tensors


class CopyableFakeMode(FakeTensorMode):
    """A fake mode that deep copies share, and that remembers the results of `all()` as true."""

    def __init__(self) -> None:
        super().__init__()
        self.true = WeakTensorKeyDictionary()

    def __deepcopy__(self, memo: object) -> CopyableFakeMode:
        return self

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        result: object = super().__torch_dispatch__(func, types, args, kwargs or {})
        if func is torch.ops.aten.all.default:
            self.true[result] = True
        return result


def values(job: Job) -> Iterator[Patch]:
    aten = torch.ops.aten

    def item(mode: CopyableFakeMode, func: object, tensor: Tensor) -> float:
        return 0.0 if tensor.is_floating_point() else int(tensor in mode.true)

    def nonzero(mode: object, func: object, tensor: Tensor) -> Tensor:
        return tensor.new_zeros((tensor.numel(), tensor.dim()), dtype=torch.long)

    answers: dict[object, Function] = {
        aten._local_scalar_dense.default: item,
        aten.nonzero.default: nonzero,
    }
    yield mock.patch.dict(fake_impls.op_implementations_dict, answers)


def swap_if_changed(parameter: Tensor, moved: Tensor) -> None:
    """Swaps parameters only if device or dtype changes; torch would also swap equal fake
    parameters."""
    none = SimpleNamespace(getweakrefs=lambda tensor: ())
    if (parameter.device, parameter.dtype) != (moved.device, moved.dtype):
        with put(torch.utils, "weakref", none):
            _SWAP(parameter, moved)  # type: ignore[no-untyped-call]


def moved_modules(job: Job) -> Iterator[Patch]:
    yield put(torch.utils, "swap_tensors", swap_if_changed)


def data_in_masks(job: Job) -> Iterator[Patch]:
    from transformers.utils import import_utils

    yield put(import_utils, "is_fake_tensor", lambda tensor: False)


def files(job: Job) -> Iterator[Patch]:
    yield put(torch, "save", lambda what, file: Path(file).write_bytes(b""))


def saved_weights(job: Job) -> Iterator[Patch]:
    from harness.workloads import workload

    yield put(workload, "has_weights", lambda path: False)


class CompletedWork:
    def __init__(self, tensor: Tensor) -> None:
        self.future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        self.future.set_result([tensor])

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        return self.future

    def wait(self) -> bool:
        return True


def asynchronous_all_reduce(job: Job) -> Iterator[Patch]:
    all_reduce: Function = dist.all_reduce

    def completed(
        tensor: Tensor, *args: object, async_op: bool = False, **more: object
    ) -> CompletedWork | None:
        all_reduce(tensor, *args, **more)
        return CompletedWork(tensor) if async_op else None

    yield put(dist, "all_reduce", completed)


@dataclass(frozen=True)
class SentWork:
    """Messages in flight, which keep their tensors alive."""

    work: dist.Work
    tensors: Sequence[Tensor]

    def wait(self) -> bool:
        return bool(self.work.wait())


def messages(job: Job) -> Iterator[Patch]:
    send: Function = schedules._batch_p2p

    def send_and_hold(operations: Sequence[dist.P2POp], desc: str | None = None) -> list[SentWork]:
        tensors = [operation.tensor for operation in operations]
        return [SentWork(work, tensors) for work in send(operations, desc)]

    yield put(schedules, "_batch_p2p", send_and_hold)


def _outside(function: Function) -> Function:
    def call(*args: object, **kwargs: object) -> object:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return call


def meshes(job: Job) -> Iterator[Patch]:
    yield put(device_mesh, "init_device_mesh", _outside(device_mesh.init_device_mesh))
    mesh = device_mesh.DeviceMesh
    for name in ("__init__", "__getitem__", "get_group", "get_local_rank"):
        yield put(mesh, name, _outside(getattr(mesh, name)))
    yield put(mesh, "_concatenate", staticmethod(_outside(mesh._concatenate)))


class _BucketsOnce:
    def __init__(self, reducer: Any) -> None:
        self.reducer = reducer

    def _rebuild_buckets(self) -> bool:
        return False

    def __getattr__(self, name: str) -> object:
        return getattr(self.reducer, name)


def ddp_reducer(job: Job) -> Iterator[Patch]:
    model: Any = ddp.DistributedDataParallel
    init, lazy_init = model._ddp_init_helper, model._lazy_init

    def init_once(self: Any, *args: object) -> None:
        init(self, *args)
        self.reducer = _BucketsOnce(self.reducer)

    def all_reduce_in_python(self: Any) -> None:
        # Runs before the first forward, after the strategy has registered its hook, if any.
        if not self._comm_hooks:
            self.register_comm_hook(self.process_group, allreduce_hook)
        lazy_init(self)

    yield put(ddp, "_verify_param_shape_across_processes", lambda *_: None)
    yield put(model, "_ddp_init_helper", init_once)
    yield put(model, "_lazy_init", all_reduce_in_python)


def flat_parameter_memory(job: Job) -> Iterator[Patch]:
    def allocated(tensor: Tensor) -> bool:
        return tensor.untyped_storage().size() > 0

    yield put(flat_parameters, "_data_ptr_allocated", allocated)


def neighbouring_stages(job: Job) -> Iterator[Patch]:
    stage = pipelining.PipelineStage
    if hasattr(stage, "_recv_meta"):
        yield put(stage, "_send_meta", lambda stage, meta, peer: None)
        yield put(stage, "_recv_meta", lambda stage, peer: _from_neighbour(job, stage, peer))
        return

    # Before torch 2.12, a stage sends its outputs' shapes as tensors on the `meta` device.
    def receive(objects: list[object], **source: object) -> None:
        objects[0] = (torch.empty(_hidden_shape(job), device="meta"),)

    yield put(dist, "send_object_list", lambda objects, **target: None)
    yield put(dist, "recv_object_list", receive)


def _hidden_shape(job: Job) -> torch.Size:
    samples = job.cell.global_batch // job.layout.shares // job.cell.micro_batches
    return torch.Size((samples, job.cell.sequence_length, job.workload.hidden_size))


def _from_neighbour(job: Job, stage: pipelining.PipelineStage, peer: int) -> object:
    shape = _hidden_shape(job)
    before = peer < stage.stage_index
    kinds: Any = pipelining
    meta = kinds._TensorMeta(
        shape=shape,
        stride=(shape[1] * shape[2], shape[2], 1),
        dtype=torch.float32,
        requires_grad=before,
    )
    return (kinds._StageForwardMeta if before else kinds._StageBackwardMeta)((meta,))


def same_order_on_all_ranks(job: Job) -> Iterator[Patch]:
    name = "assert_ints_same_as_other_ranks"
    if "deepspeed" in sys.modules:
        for module in ("partitioned_param_coordinator", "parameter_offload"):
            zero = importlib.import_module(f"deepspeed.runtime.zero.{module}")
            if hasattr(zero, name):
                yield put(zero, name, lambda numbers: None)


def update_in_c(job: Job) -> Iterator[Patch]:
    def nothing(*args: object) -> None: ...

    if "deepspeed" in sys.modules:
        adam: Any = importlib.import_module("deepspeed.ops.adam.cpu_adam")
        functions = ("create_adam", "adam_update", "destroy_adam")
        module = SimpleNamespace(**dict.fromkeys(functions, nothing))
        yield put(adam.CPUAdamBuilder, "load", lambda builder: module)


SUBSTITUTIONS: dict[str, Callable[[Job], Iterable[Patch]]] = {
    "values of tensors": values,
    "`torch.utils.swap_tensors` when a module is moved": moved_modules,
    "transformers' check whether a tensor has data": data_in_masks,
    "`torch.save`": files,
    "saved weights of a model": saved_weights,
    "`torch.distributed.all_reduce` with `async_op`": asynchronous_all_reduce,
    "a pipeline's messages": messages,
    "`DeviceMesh`": meshes,
    "DDP's reducer, which is C++": ddp_reducer,
    "FSDP1's check whether a tensor has memory": flat_parameter_memory,
    "a pipeline's exchange of shapes between stages": neighbouring_stages,
    "DeepSpeed's check that all ranks run the modules in one order": same_order_on_all_ranks,
    "DeepSpeed's Adam in C++, which would read the tensors": update_in_c,
}
"""Parts of torch that need data or other ranks, and patches that replace them; the process group
`fake` replaces gloo. docs/explanation/rehearsal.md says what each does instead."""


@contextlib.contextmanager
def fake_rank(strategy: Strategy, job: Job) -> Iterator[None]:
    """Makes this process rank `job.rank` with fake tensors."""
    if strategy.capabilities.process_group:
        size = job.layout.processes
        dist.init_process_group("fake", store=FakeStore(), rank=job.rank, world_size=size)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.dict(os.environ, launcher_variables(job)))
            stack.enter_context(globals_put_back(strategy.requires))
            for patches in SUBSTITUTIONS.values():
                for patch in patches(job):
                    stack.enter_context(patch)
            stack.enter_context(CopyableFakeMode())
            yield
    finally:
        if strategy.capabilities.process_group:
            # Cached meshes refer to groups by names, which are reused.
            tensor_caches._clear_python_sharding_prop_cache()
            tensor_caches._clear_fast_path_sharding_prop_cache()
            dist.destroy_process_group()


def launcher_variables(job: Job) -> dict[str, str]:
    """Returns torchrun's variables, with all ranks on one node."""
    rank, world = str(job.rank), str(job.layout.processes)
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    return variables | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


@contextlib.contextmanager
def globals_put_back(packages: Sequence[str]) -> Iterator[None]:
    """Restores these packages' global variables, which keep process groups, and what DeepSpeed
    replaces for the whole process: torch's linear function (ZeRO-3) and transformers' attention
    functions (sequence parallelism)."""
    for package in packages:
        importlib.import_module(package)
    if "deepspeed" in packages:
        importlib.import_module("deepspeed.runtime.sequence_parallel.parallel_state_sp")
    attention: Any = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    modules = [m for name, m in sys.modules.items() if name.partition(".")[0] in packages]
    modules.append(torch.nn.functional)
    before = [(vars(module), dict(vars(module))) for module in modules]
    try:
        with mock.patch.dict(attention._local_mapping):
            yield
    finally:
        for variables, values_before in before:
            variables.update(values_before)


def fake_batch(job: Job, step: int) -> Batch:
    samples, length = job.cell.global_batch // job.layout.shares, job.cell.sequence_length
    inputs, labels = of_each_tensor(
        lambda tensor: tensor.to(job.device), job.workload.sample(samples, length)
    )
    return Batch(step, inputs, labels)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hides libraries' deprecation warnings and sends their output to stderr."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")
        yield
