from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from harness.cell.cell import Cell
from harness.cell.training import Batch, Layout, Retained, TrainStep
from harness.seam.optimizers import optimizer_class, optimizer_of, with_dtensors_apart
from harness.seam.recipe import RecipeState, clip_gradients, make_scheduler, parameter_groups
from harness.workloads.recompute import offload_blocks, recompute_blocks

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn
    from torch.amp.grad_scaler import GradScaler
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LambdaLR
    from torch.optim.optimizer import ParamsT
    from transformers import PreTrainedModel

    from harness.workloads import Workload
    from harness.workloads.workload import HasLogits

COMPILE_MODES = {"block": None, "block_cudagraphs": "reduce-overhead"}
"""torch.compile modes by value of the compile axis.

`block_cudagraphs`, untested on GPUs, needs weights at fixed addresses and no collectives inside
blocks.
"""
Recompute = Callable[["nn.Module", "Sequence[nn.Module]", str], None]
"""Makes blocks recompute, in place: (model, its blocks, `selective` or `full`)."""
Wire = Literal["gloo", "ring"]
Wait = tuple[object, str, Literal["communication", "bubble", "offload", "optimizer", "data"]]
"""Object or module, function name, and the component its time counts towards."""
Sender = tuple[object, str, str]
"""Object or module, function name, and its collective operation."""
Save = Callable[[Path, int], "Callable[[], object] | None"]
"""Saves the state after this many steps to a folder; returns a function that waits for an
asynchronous save."""
Load = Callable[[Path], int]
"""Loads the state from a folder; returns its number of steps."""
Moment = tuple[str, str, "Tensor"]
"""Parameter name, name of an optimizer state of its shape (such as exp_avg), and that state."""
LOSS_SCALE = 4096.0
ROUTER_WEIGHT = "router_aux_loss_coef"
"""transformers' attribute for the weight of the balancing loss."""


@dataclass(frozen=True)
class Router:
    module: nn.Module
    tokens: Callable[[Any], Tensor]
    """Function from the module's output to the number of tokens of each expert, shape
    (experts,)."""


@dataclass
class TrainState:
    """What a strategy registers with the harness; never read during a timed step."""

    model: nn.Module
    optimizers: Sequence[Optimizer]
    restore: Mapping[str, Callable[[Tensor], Tensor]] = field(default_factory=dict)
    """Functions by parameter name, from a whole tensor to the workload's layout."""
    compute: Sequence[tuple[object, str]] = ()
    """Compute functions as (object, method name), timed separately for the pipeline bubble."""
    gather: Callable[[], Iterator[tuple[str, Tensor]]] | None = None
    """Yields whole tensors by name, if walking the model does not; called on all ranks."""
    moments: Callable[[], Iterable[Moment]] | None = None
    """Yields whole optimizer states, if walking the optimizers does not; called on all ranks."""
    states: Callable[[], Iterable[Retained]] | None = None
    """What this rank keeps between steps, if walking model and optimizers misses it."""
    library: Callable[[], Iterable[Retained]] | None = None
    """Library buffers in addition to those of model and optimizers."""
    offload_folder: Path | None = None
    """Folder of offloaded states, whose reads and writes are recorded."""
    waits: Sequence[Wait] = ()
    """Functions in which a rank waits unseen by torch's profiler, and the component that gets their
    time if nothing computes."""
    collectives: Sequence[Sender] = ()
    """Functions that send their first argument to all ranks by means other than
    torch.distributed."""
    wire: Wire = "gloo"
    """Algorithm that moves the bytes: that of torch's gloo backend, or rings."""
    routers: Mapping[int, Router] | None = None
    """Mixture-of-experts routers by block number; None for the workload's own."""
    over_tcp: bool = True
    """Whether CPU ranks communicate only over TCP; otherwise sent bytes are unknown."""
    counters: Sequence[tuple[object, str]] = ()
    """Step counters outside the optimizers that affect a step, as (object, attribute name)."""
    schedules: Sequence[LambdaLR] = ()
    """The cell's schedulers, filled in by the harness."""
    replicas: Sequence[TrainState] = ()
    """Further replicas that this process trains, in a reference run."""
    save: Save | None = None
    """Saves a checkpoint by the library's own means; called on all ranks."""
    load: Load | None = None
    """Loads that checkpoint into a newly built training; called on all ranks."""
    loads_in_setup: bool = False
    """Whether `setup` has loaded `Job.resume_from`, so that `load` only returns its step."""


@dataclass
class Job:
    """What the harness passes to a strategy: factories for the cell, and the rank's position."""

    cell: Cell
    workload: Workload
    layout: Layout
    device: torch.device
    rank: int
    scratch: Path
    """Trial folder, shared by a node's ranks."""
    restart_count: int = 0
    interface: str | None = None
    """Network interface that reaches all ranks. If None, libraries choose one."""
    node: str = ""
    """This rank's node; empty if there is only one."""
    local_processes: int = 1
    """Number of ranks on this node."""
    threads: int = 1
    """Number of intra-op threads."""
    weights_device: torch.device | None = None
    """Device that draws initial weights; None for `device`. In a GPU cell it is a GPU on every
    rank, also on a parameter server, since a CPU's generator would draw other weights than the
    reference's."""
    resume_from: Path | None = None
    """Checkpoint that `TrainState.load` will get; None if training starts anew."""
    train_state: TrainState | None = None
    recomputes: bool = False
    compiles: bool = False
    recipe: RecipeState = field(default_factory=RecipeState)

    @property
    def devices(self) -> list[torch.device]:
        """Devices of this process: one device, or all devices of the cell."""
        return self.layout.driven(self.device)

    def model(self, recompute: Recompute = recompute_blocks) -> nn.Module:
        """Builds the workload's model with seeded weights, on this rank's device, in training mode.

        `recompute`: a library's own way to enable recomputation.
        """
        model = self.workload.build(self.cell.seed, self.device, drawn_on=self.weights_device)
        self.follow_recipe(model)
        if self.cell.recompute != "none":
            recompute(model, self.workload.blocks_of(model), self.cell.recompute)
            self.recomputes = True
        if self.cell.activations == "host":
            offload_blocks(self.workload.blocks_of(model), pinned=self.device.type == "cuda")
        if self.cell.loss != "plain":
            from harness.workloads.fused_loss import fused_head

            self.recipe.head = fused_head(model, self.cell.loss)
        if self.cell.compile != "none":
            # Compilation happens at the first call, after wrapping, splitting or sharding.
            for block in self.workload.blocks_of(model):
                block.compile(mode=COMPILE_MODES[self.cell.compile])
            self.compiles = True
        return model

    def follow_recipe(self, model: nn.Module) -> None:
        """Applies the cell's dropout and balancing loss to a model, in place."""
        if self.cell.dropout:
            from harness.workloads.dropout import place_dropout

            layers, blocks = self.workload.dropouts_of(model), self.workload.blocks_of(model)
            place_dropout(model, layers, blocks, self.cell.dropout, self.recipe.masks)
        if self.cell.balance_weight:
            config = cast("PreTrainedModel", model).config
            config.output_router_logits = True
            for owner in (config, model):
                setattr(owner, ROUTER_WEIGHT, self.cell.balance_weight)

    def require_model(self) -> None:
        """Raises RuntimeError if the strategy had to call `model` but did not."""
        cell = self.cell
        for made, done, axis, value in (
            (self.recomputes, "recomputed", "recompute", cell.recompute),
            (self.compiles, "compiled", "compile", cell.compile),
        ):
            if value != "none" and not made:
                raise RuntimeError(
                    f"strategy {cell.strategy!r} did not build its model with job.model(), so"
                    f" nothing is {done}, but the cell asks for {axis} {value}"
                )

    def optimizer_class(self) -> tuple[type[Optimizer], dict[str, Any]]:
        """Returns the cell's optimizer as (class, arguments), for libraries that build it."""
        return optimizer_class(self.cell)

    def optimizer(
        self,
        parameters: Iterable[Tensor],
        matrices: Mapping[Tensor, bool] | None = None,
    ) -> Optimizer:
        """Builds the cell's optimizer. See `parameter_groups` for `matrices`."""
        factory, kwargs = self.optimizer_class()
        groups = parameter_groups(self.cell, parameters, matrices)
        return with_dtensors_apart(factory(groups, **kwargs))

    def parameter_groups(self, parameters: Iterable[Tensor]) -> ParamsT:
        """Returns parameters in the form the cell's optimizer takes."""
        return parameter_groups(self.cell, parameters)

    def groups(self, parameters: Iterable[Tensor]) -> list[dict[str, object]]:
        """Returns parameters as groups, even if the optimizer takes a list."""
        given = list(self.parameter_groups(parameters))
        whole: list[dict[str, object]] = [{"params": given}]
        return [part for part in given if isinstance(part, dict)] or whole

    def scheduler(self, optimizer: Optimizer) -> LambdaLR | None:
        """Returns the cell's scheduler; None if the learning rate is constant."""
        if self.cell.schedule == "constant":
            return None
        scheduler = make_scheduler(self.cell, optimizer)
        self.recipe.schedulers.append(scheduler)
        return scheduler

    def optimizer_of(self, model: nn.Module) -> Optimizer:
        """Builds the cell's optimizer, even if it needs parameter names."""
        return optimizer_of(self.cell, model)

    def dtype(self) -> torch.dtype:
        import torch

        return {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[
            self.cell.precision
        ]

    def autocast(self) -> contextlib.AbstractContextManager[object]:
        """Returns autocast in the cell's precision; a no-op in fp32."""
        import torch

        if self.cell.precision == "fp32":
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self.dtype())

    def loss(self, model: Callable[..., Tensor | HasLogits], batch: Batch) -> Tensor:
        """Returns a batch's mean loss, including the weighted balancing loss."""
        positions = {} if batch.positions is None else {"position_ids": batch.positions}
        from harness.workloads.fused_loss import loss_of

        cell, head = self.cell, self.recipe.head
        self.recipe.masks.keys = batch.keys
        if head:
            head.labels, head.label_tokens = batch.labels, batch.label_tokens
        with self.autocast():
            output = self.workload.output(model, batch.inputs, **positions)
            logits = self.workload.logits_of(output)
            loss = loss_of(cell.loss, self.workload, logits, batch.labels, batch.label_tokens)
            if cell.balance_weight:
                balancing = cast("HasLogits", output).aux_loss
                loss = loss + cell.balance_weight * balancing
            return loss

    def register(self, model: nn.Module, *optimizers: Optimizer) -> TrainState:
        """Registers the trained module and optimizers; call once.

        Set attributes of the returned state where its defaults do not hold.
        """
        self.train_state = TrainState(model, optimizers)
        return self.train_state

    def save_by(self, save: Save, load: Load, *, loads_in_setup: bool = False) -> None:
        """Replaces how the registered training is saved and loaded."""
        assert self.train_state is not None
        self.train_state.save, self.train_state.load = save, load
        self.train_state.loads_in_setup = loads_in_setup


def standard_step(
    job: Job,
    model: Callable[[Tensor], Tensor | HasLogits],
    optimizer: Optimizer,
    *,
    no_sync: Callable[[], contextlib.AbstractContextManager[object]] | None = None,
    before_update: Callable[[], None] | None = None,
    around_update: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    scaler: GradScaler | None = None,
    clear: Callable[[], object] | None = None,
) -> TrainStep:
    """Returns one optimizer step: forward and backward of every micro-batch (gradient
    accumulation), then the update.

    Divides losses by the number of micro-batches; scales fp16 losses dynamically
    (torch.amp.GradScaler). `no_sync` wraps all micro-batches but the last. `before_update` runs
    after the last backward; `around_update` wraps the update. `clear` replaces the optimizer's
    `zero_grad`, and `job.recipe.clip` torch's clipping.
    """
    scaler = scaler or loss_scaler(job)
    backward = backward_of(job, model, scaler, no_sync)
    update = update_of(job, optimizer, scaler, around_update, clear)

    def step(batch: Batch) -> Tensor:
        loss = backward(batch)
        if before_update:
            before_update()
        update()
        return loss

    return step


def backward_of(
    job: Job,
    model: Callable[[Tensor], Tensor | HasLogits],
    scaler: GradScaler,
    no_sync: Callable[[], contextlib.AbstractContextManager[object]] | None = None,
    go_back: Callable[[Tensor], object] | None = None,
) -> Callable[[Batch], Tensor]:
    """Returns the first half of a step, which adds up gradients and returns the mean loss.
    `go_back`: a library's own call of backward."""
    import torch

    parts = job.cell.micro_batches

    def backward(batch: Batch) -> Tensor:
        total = torch.zeros((), device=job.device)
        for index, part in enumerate(batch.split(parts)):
            with no_sync() if no_sync and index < parts - 1 else contextlib.nullcontext():
                loss = job.loss(model, part) / parts
                (go_back or torch.Tensor.backward)(scaler.scale(loss))
            total += loss.detach()
        return total

    return backward


def update_of(
    job: Job,
    optimizer: Optimizer,
    scaler: GradScaler,
    around_update: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
    clear: Callable[[], object] | None = None,
) -> Callable[[], None]:
    """Returns the second half of a step, which clips and updates."""
    clear = clear or optimizer.zero_grad
    clip = job.recipe.clip or functools.partial(clip_gradients, parameters_of(optimizer))
    scheduler, max_norm = job.scheduler(optimizer), job.cell.clip_norm

    def update() -> None:
        with around_update():
            if max_norm is not None:
                scaler.unscale_(optimizer)
                job.recipe.gradient_norm = clip(max_norm)
            scaler.step(optimizer)
        scaler.update()
        if scheduler:
            scheduler.step()
        clear()

    return update


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def loss_scaler(job: Job) -> GradScaler:
    """Returns dynamic loss scaling, which is enabled only for fp16 cells. Starts at 4096, because
    torch's 65536 may overflow and skip steps."""
    from torch.amp.grad_scaler import GradScaler

    return GradScaler(job.device.type, init_scale=LOSS_SCALE, enabled=job.cell.precision == "fp16")


def sharded_loss_scaler(job: Job) -> GradScaler:
    """Returns a scaler that makes all ranks skip the same steps."""
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    fp16 = job.cell.precision == "fp16"
    return ShardedGradScaler(job.device.type, init_scale=LOSS_SCALE, enabled=fp16)


def own_precision(job: Job) -> Job:
    """Returns the job without autocast and loss scaling, for strategies with their own."""
    return dataclasses.replace(job, cell=job.cell.model_copy(update={"precision": "fp32"}))
