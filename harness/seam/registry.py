from __future__ import annotations

import functools
import importlib
import importlib.metadata
import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from harness.cell.cell import SCRIPT, Cell, is_script
from harness.cell.errors import Refused, Unavailable, UsageError, first_error
from harness.cell.training import Layout
from harness.host.environment import missing_compiler, version_of
from harness.host.packages import how_to_install, is_installed, unbuilt
from harness.host.user_code import digest_of, names_user_class, user_class
from harness.seam.base import Strategy
from harness.seam.checkpoints import admit_checkpoint, saving_cell
from harness.seam.optimizers import EXTRA_OPTIMIZERS, packages_of
from harness.workloads.catalog import source_of

if TYPE_CHECKING:
    from harness.workloads import Workload

ENTRY_POINTS = "parallelism_bench.strategies"
GRAPH_WARMUP = 3
"""Warm-up steps of a CUDA graph: normal, recorded, replayed."""
HOME = "harness.strategies"
LINEAR_HEADS = ("gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
"""transformers' names of models whose logits are a linear layer of the last hidden states."""
LOSS_PACKAGES = {"liger_linear": "liger_kernel", "deepspeed_chunked": "deepspeed"}
"""Packages of losses by value of the loss axis."""
NO_EXCHANGE = "no_exchange"
"""Name of the strategy whose ranks exchange nothing, to measure parity limits."""
REPLICAS, POWER_SGD, HALF_RANKS = "replicas", "power_sgd", "half_ranks"
"""References that emulate ranks in one process."""
HIDDEN = (NO_EXCHANGE, REPLICAS, POWER_SGD, HALF_RANKS)
"""Unlisted strategies, for references."""


def _load(module_name: str, name: str) -> type[Strategy]:
    module = importlib.import_module(module_name)
    classes = [
        value
        for value in vars(module).values()
        if isinstance(value, type)
        and issubclass(value, Strategy)
        and value.__module__ == module.__name__
    ]
    if len(classes) != 1:
        raise UsageError(
            f"strategy file {module_name!r} must define one Strategy, but defines {len(classes)}"
            f" (for {name!r})"
        )
    return classes[0]


@functools.cache
def strategies() -> dict[str, type[Strategy]]:
    """Returns all strategies by name: files of harness/strategies/, then packages' entry
    points."""
    home = importlib.import_module(HOME)
    names = sorted(
        info.name for info in pkgutil.iter_modules(home.__path__) if not info.name.startswith("_")
    )
    classes = {name: _load(f"{HOME}.{name}", name) for name in names}
    for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
        named = f"entry point {point.name!r} of group {ENTRY_POINTS!r}"
        classes[point.name] = _require_strategy(point.load(), named)
    return classes


def _strategy_class(name: str) -> type[Strategy]:
    if names_user_class(name):
        return _require_strategy(user_class(name).loaded, f"strategy {name!r}")
    if is_script(name):
        return _load(f"{HOME}._{SCRIPT}", name)
    if name in HIDDEN:
        return _load(f"{HOME}._{name}", name)
    found = strategies()
    if name not in found:
        raise UsageError(
            f"unknown strategy {name!r}; use one of {', '.join(found)}, or give FILE.py:CLASS"
        )
    return found[name]


def _require_strategy(loaded: object, named: str) -> type[Strategy]:
    if isinstance(loaded, type) and issubclass(loaded, Strategy):
        return loaded
    path = f"{getattr(loaded, '__module__', '?')}:{getattr(loaded, '__qualname__', loaded)}"
    raise UsageError(f"{named} must be a Strategy class of harness.seam, but is {path}")


def offered(cell: Cell) -> bool:
    """Returns whether this version has the cell's strategy."""
    try:
        return bool(_strategy_class(cell.strategy))
    except UsageError:
        return False


def make_strategy(cell: Cell) -> Strategy:
    """Returns the cell's strategy; raises UsageError for an unknown name or option."""
    cls = _strategy_class(cell.strategy)
    for option in cell.options:
        if option not in cls.model_fields:
            options = ", ".join(cls.model_fields) or "none"
            raise UsageError(
                f"strategy {cell.strategy!r} has no option {option!r}; its options are: {options}"
            )
    usual = {
        name: field.get_default(call_default_factory=True)
        for name, field in cls.model_fields.items()
    }
    noted = {
        name: value
        for name, value in cell.defaults.items()
        if name in usual and value != usual[name]
    }
    try:
        return cls(**{**noted, **cell.set_unnamed, **cell.options})
    except ValidationError as error:
        raise UsageError(f"strategy {cell.strategy!r}, option {first_error(error)}") from None


def with_defaults(cell: Cell) -> Cell:
    """Returns the cell with default options, and paths and digests of users' files. Raises
    UsageError."""
    left_out = make_strategy(cell).model_dump(mode="json", exclude=set(cell.options))
    return cell.model_copy(update={"defaults": left_out, **_sources(cell)})


def _sources(cell: Cell) -> dict[str, str]:
    fields: dict[str, str] = {}
    if names_user_class(cell.strategy):
        found = user_class(cell.strategy)
        fields |= {"strategy": found.name, "strategy_digest": found.digest}
    if is_script(cell.strategy):
        path = Path(cell.strategy).expanduser().resolve()
        fields |= {"strategy": str(path), "strategy_digest": digest_of(path)}
    workload, digest = source_of(cell.workload)
    return fields | ({"workload": workload, "workload_digest": digest} if digest else {})


def require_unchanged(cell: Cell) -> None:
    """Raises UsageError if a user's file has changed since the cell was planned."""
    planned, now = cell.model_dump(), _sources(cell)
    for field in ("strategy", "workload"):
        if planned[f"{field}_digest"] and planned[f"{field}_digest"] != now[f"{field}_digest"]:
            raise UsageError(f"{now[field]} has changed since the run was planned; start a new run")


def own_command(strategy: Strategy, cell: Cell) -> Callable[[Path], list[str] | None]:
    """Returns a function from scratch folder to the strategy's launch command; None if it has no
    launcher of its own."""
    launcher = strategy.own_launcher
    return functools.partial(launcher.command, cell) if launcher else _no_command


def _no_command(scratch: Path) -> None:
    """Returns None. Trials that share their ranks are pickled, which a lambda cannot be."""


def batches_normalised(strategy: Strategy, cell: Cell, layout: Layout) -> int:
    """Returns how many parts of the batch BatchNorm normalises separately."""
    ranks = 1 if strategy.capabilities.synchronizes_batch_norm else layout.data
    return ranks * cell.micro_batches


def stand_in_of(strategy: Strategy, cell: Cell, workload: Workload) -> str | None:
    """Returns what replaces strategy or workload on the cell's device."""
    on_host = cell.activations == "host" and cell.device == "cpu"
    no_copy = "nothing to offload: activations are already in host memory" if on_host else None
    return strategy.stand_in(cell) or workload.stand_in(cell) or no_copy


def _admit_nodes(cell: Cell, strategy: Strategy, layout: Layout) -> None:
    if cell.devices % cell.nodes:
        raise Refused(
            f"{cell.devices} devices do not divide into {cell.nodes} nodes; use a multiple of"
            f" {cell.nodes}"
        )
    if layout.devices_per_process > 1:
        raise Refused(
            f"{cell.strategy} drives all devices from one process, which cannot span {cell.nodes}"
            " nodes"
        )
    if cell.launcher == "spawn":
        raise Refused(
            "torch.multiprocessing.spawn starts ranks on one node only: leave the launcher out"
        )
    if strategy.capabilities.max_restarts:
        raise Refused(f"{cell.strategy} can only be restarted on a single node: leave nodes out")
    if launcher := strategy.own_launcher:
        raise Refused(
            f"{launcher.name} starts ranks on one node only; leave out nodes, or the option for it"
        )


def required_packages() -> list[str]:
    return list(dict.fromkeys(name for cls in strategies().values() for name in cls.requires))


def _require(package: str, install: str = "") -> None:
    if is_installed(package):
        return
    failure = unbuilt(package)
    remedy = failure.reason if failure else install or how_to_install(package)
    raise Unavailable(f"package {package} is not installed: {remedy}")


def validate(cell: Cell, workload: Workload, here: bool = True) -> tuple[Strategy, Layout]:
    """Returns strategy and layout if the cell can run; raises UsageError, Refused or Unavailable.

    `here`: check this host's packages too.
    """
    strategy = make_strategy(cell)
    if here:
        for package in strategy.requires:
            _require(package, strategy.install)
        for package in (*workload.requires, *packages_of(cell)):
            _require(package)
    capabilities = strategy.capabilities
    if capabilities.max_devices is not None and cell.devices > capabilities.max_devices:
        raise Refused(
            f"{cell.strategy} runs on {capabilities.max_devices} device, not on {cell.devices}"
        )
    layout = strategy.layout(cell.devices)
    if cell.links and cell.nodes < 2:
        raise Refused("links connect nodes: set nodes to 2 or more, or leave links out")
    if cell.nodes > 1:
        _admit_nodes(cell, strategy, layout)
    if capabilities.unverified:
        strategy.check(cell, workload)
        return strategy, layout
    if cell.optimizer in EXTRA_OPTIMIZERS and cell.optimizer not in capabilities.extra_optimizers:
        raise _without_extra_optimizer(cell)
    if cell.optimizer == "muon" and not workload.block_path:
        raise Refused(
            f"Muon updates the blocks' matrices, and {workload.name} does not say which modules are"
            " its blocks; use optimizer adamw"
        )
    if cell.precision not in capabilities.precisions:
        raise Refused(
            f"{cell.strategy} runs in {', '.join(capabilities.precisions)}, not in {cell.precision}"
        )
    _admit_parts(cell, workload, layout)
    if layout.pipeline > 1 or layout.tensor > 1:
        workload.check_split(layout)
    _admit_recipe(cell, workload, layout, layout.pipeline > 1 or capabilities.stages)
    if layout.sequence > 1:
        workload.check_sequence(layout, cell.sequence_length)
    workload.check(cell, strategy.shards_parameters)
    if workload.skipped and layout.processes > 1 and not capabilities.skips_parameters:
        raise Refused(
            f"{workload.skipped[0]} in {workload.name} takes part in the losses of some samples"
            f" only, and a rank of {cell.strategy} that skips it would make the others wait; use"
            " ddp, or let every sample use it, if only with the weight 0"
        )
    if cell.recompute != "none":
        workload.check_recompute(cell.recompute)
    if cell.loss != "plain":
        _admit_loss(cell, strategy, workload, here)
    if cell.activations != "device":
        _admit_activations(cell, strategy, workload, layout)
    if cell.compile != "none":
        _admit_compiled(cell, strategy, workload, here)
    if cell.checkpoint != "none" or cell.checkpoint_from:
        _admit_checkpoint(cell, strategy, workload, here)
    strategy.check(cell, workload)
    return strategy, layout


def _admit_parts(cell: Cell, workload: Workload, layout: Layout) -> None:
    """Raises Refused if the global batch cannot be cut into this many parts."""
    pieces = layout.data * cell.micro_batches
    if cell.global_batch % pieces:
        raise Refused(
            f"global batch {cell.global_batch} does not divide into {layout.data} data-parallel"
            f" ranks x {cell.micro_batches} micro-batches; use a multiple of {pieces}"
        )
    if (fewest := workload.fewest_samples) * pieces > cell.global_batch:
        raise Refused(
            f"{layout.data} data-parallel ranks x {cell.micro_batches} micro-batches leave"
            f" {cell.global_batch // pieces} sample for each, and BatchNorm in {workload.name}"
            f" needs {fewest} in training; use a larger global batch"
        )
    if pieces > 1 and workload.depends_on_batch:
        raise Refused(
            f"a sample's loss in {workload.name} depends on the other samples of its batch, which"
            f" {pieces} parts would change: with a loss over the whole batch, use one device; if"
            " samples only have unequal weights, return the sum and add weight(labels)"
        )


def _admit_recipe(cell: Cell, workload: Workload, layout: Layout, stages: bool) -> None:
    if (cell.labels == "padded" or cell.documents == "packed") and workload.kind != "causal":
        raise Refused(
            f"{workload.name} has one label per sample, so none can be left out; use a causal"
            " workload, such as a llama, or labels all and documents one"
        )
    if cell.dropout:
        _admit_dropout(cell, workload, layout)
    if cell.balance_weight:
        _admit_balance(cell, workload, layout, stages)
    if cell.documents == "packed" and (stages or layout.sequence > 1):
        raise Refused(
            "stages pass on hidden states without the documents' mask, and ranks that share a"
            " sample attend to all of it; use a strategy that keeps samples whole, or documents one"
        )
    if cell.documents == "packed" and layout.devices_per_process > 1:
        raise Refused(f"{cell.strategy} passes on token ids only; use ddp, or documents one")


def _admit_dropout(cell: Cell, workload: Workload, layout: Layout) -> None:
    if workload.family is None or not workload.family.dropouts or workload.suffixes:
        raise Refused(
            f"{workload.name} has no dropout whose masks are known, since fused attention draws its"
            " own; use a gpt2 workload without a suffix, or dropout 0"
        )
    if cell.compile != "none":
        raise Refused("dropout is not known to compile; use compile none, or dropout 0")
    if layout.devices_per_process > 1 and cell.device == "cuda":
        raise Refused(
            "replicas of torch.nn.DataParallel would share their masks; use ddp, or dropout 0"
        )


def _admit_balance(cell: Cell, workload: Workload, layout: Layout, stages: bool) -> None:
    if not workload.experts or workload.suffixes:
        raise Refused(
            f"{workload.name} has no routers to balance; use a mixtral or qwen3-moe workload"
            " without a suffix, or balance_weight 0"
        )
    if stages or layout.sequence > 1 or layout.devices_per_process > 1:
        raise Refused(
            "the balancing loss needs the scores of all blocks for whole samples, which no rank of"
            f" {cell.strategy} has; use ddp, or balance_weight 0"
        )


def _admit_loss(cell: Cell, strategy: Strategy, workload: Workload, here: bool) -> None:
    if not strategy.capabilities.fused_loss:
        able = [name for name, cls in strategies().items() if cls.capabilities.fused_loss]
        raise Refused(f"{cell.strategy} computes its loss from logits only; use {', '.join(able)}")
    causal = workload.kind == "causal" and not workload.suffixes
    if not causal or workload.hf_config().model_type not in LINEAR_HEADS:
        raise Refused(
            f"the loss of {workload.name} is not known to be that of a plain linear head; use a"
            f" {', '.join(LINEAR_HEADS)} model without a suffix, or loss plain"
        )
    if cell.loss == "liger_linear" and cell.device == "cpu":
        raise Unavailable("Liger's kernels run on GPUs only: use a GPU, or loss torch_linear")
    if here and (package := LOSS_PACKAGES.get(cell.loss)):
        _require(package, f"pip install {package.replace('_', '-')}")
    installed = (version_of("torch") or "0.0").split(".")[:2]
    if here and cell.loss == "torch_linear" and tuple(map(int, installed)) < (2, 13):
        raise Unavailable("torch has linear_cross_entropy from version 2.13 on: install it")


def _admit_activations(cell: Cell, strategy: Strategy, workload: Workload, layout: Layout) -> None:
    workload.check_recompute("full")
    copied = strategy.capabilities.stages or layout.devices_per_process > 1
    if copied or cell.compile != "none" or cell.dropout:
        raise Refused(
            "offloaded activations are not known to train the same in stages, copies of a model,"
            " compiled blocks or with dropout; use activations device"
        )


def _without_extra_optimizer(cell: Cell) -> Refused:
    able = [
        name
        for name, cls in strategies().items()
        if cell.optimizer in cls.capabilities.extra_optimizers
    ]
    return Refused(
        f"{cell.strategy} cannot use {cell.optimizer}: it needs whole parameters, and their names;"
        f" use {', '.join(able)}, or optimizer adamw"
    )


def _admit_checkpoint(cell: Cell, loads: Strategy, workload: Workload, here: bool) -> None:
    admit_checkpoint(cell, loads.checkpoints)
    if not cell.checkpoint_from:
        return
    saves, _ = validate(saving_cell(cell), workload, here)
    if not (saves.capabilities.reshards and loads.capabilities.reshards):
        able = [name for name, cls in strategies().items() if cls.capabilities.reshards]
        raise Refused(
            f"{cell.strategy} x{cell.devices} cannot load a checkpoint of {cell.checkpoint_from}:"
            f" only {', '.join(able)} load each other's"
        )


def _admit_cuda_graphs(cell: Cell) -> None:
    if cell.device != "cuda":
        raise Refused("CUDA graphs need GPUs; use compile block on CPUs")
    if cell.micro_batches > 1 or cell.recompute != "none":
        raise Refused(
            "a CUDA graph overwrites its earlier results when a block runs twice in a step; use"
            " micro_batches 1 and recompute none, or compile block"
        )
    if cell.warmup_steps < GRAPH_WARMUP:
        raise Refused(
            f"CUDA graphs are recorded in the second step; use {GRAPH_WARMUP} warmup_steps or more"
        )


def _admit_compiled(cell: Cell, strategy: Strategy, workload: Workload, here: bool) -> None:
    if cell.compile not in strategy.capabilities.compiles:
        able = [
            name for name, cls in strategies().items() if cell.compile in cls.capabilities.compiles
        ]
        raise Refused(
            f"{cell.strategy} is not known to train the same with compile {cell.compile}; use"
            f" {', '.join(able)}, or compile none"
        )
    if cell.compile == "block_cudagraphs":
        _admit_cuda_graphs(cell)
    if not workload.block_path:
        raise Refused(
            f"{workload.name} does not say which modules are its blocks, which are compiled one by"
            " one; use a gpt2, llama or bert workload, or compile none"
        )
    if workload.suffixes:
        raise Refused(
            f"blocks of {workload.name} with +{' and +'.join(workload.suffixes)} are not known to"
            " compile; use the workload without suffixes, or compile none"
        )
    if here and (lacks := missing_compiler()):
        raise Unavailable(lacks)
