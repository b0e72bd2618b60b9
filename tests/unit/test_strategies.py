"""The house rules of strategies: small files, options as documented fields, found by file name,
none named elsewhere."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from harness.export import TARGETS
from harness.host.environment import environment
from harness.record.schema import TABLES, arrow_schema
from harness.spec.cell import BASELINE, Cell
from harness.spec.errors import Refused, Unavailable, UsageError
from harness.spec.training import Layout
from harness.strategy.base import Strategy
from harness.strategy.job import TrainState, TrainStateOptions
from harness.strategy.optimizers import optimizer_bytes
from harness.strategy.registry import (
    _require,
    make_strategy,
    required_packages,
    strategies,
    validate,
)
from harness.workloads import make_workload
from harness.workloads.counts import model_facts

HOME = Path(__file__).parents[2]
FILES = sorted(
    p for p in (HOME / "harness" / "strategies").glob("*.py") if not p.stem.startswith("_")
)


def _lines_of_training(source: str) -> int:
    """Lines of a strategy's file up to its cost model: imports, options, export and training."""
    lines = source.splitlines()
    costs = (
        node.lineno
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name.endswith("Costs")
    )
    return next(costs, len(lines) + 1) - 1


def test_strategy_files_are_small() -> None:
    lengths = {p.stem: _lines_of_training(p.read_text()) for p in FILES}
    assert min(lengths.values()) <= 45
    assert max(lengths.values()) <= 130, lengths
    whole = {p.name: len(p.read_text().splitlines()) for p in FILES[0].parent.glob("*.py")}
    assert max(whole.values()) <= 370, whole


def test_the_seam_is_narrow() -> None:
    """Class variables and methods that a strategy may override."""
    public = {name for name in (*vars(Strategy), *Strategy.__annotations__) if name[0] != "_"}
    assert len(public - set(vars(BaseModel))) <= 16, sorted(public)


@pytest.mark.parametrize("file", FILES, ids=lambda p: p.stem)
def test_a_strategy_is_described_and_needs_one_method(file: Path) -> None:
    cls = strategies()[file.stem]
    assert (cls.__doc__ or "").strip()
    assert all(field.description for field in cls.model_fields.values()), (
        "a docstring under each option"
    )
    assert cls.setup is not Strategy.setup
    assert not re.search(
        r"\bprint\(|os\.getenv|os\.environ(?! \|= |\.update\()|perf_counter|logging\.",
        file.read_text(),
    ), (
        "it never times, logs, prints or reads the environment; it may set what a library reads"
        " from there"
    )


def _other_meanings() -> set[str]:
    """What a string may name beside a strategy, as the code itself declares it: recorded columns
    and tables, Python packages, launchers to export to, and the baseline of what is recorded."""
    columns = {name for table in TABLES for name in arrow_schema(table).names}
    return {*TABLES, *columns, *required_packages(), *TARGETS, BASELINE}


def _strategies_named(source: str) -> list[str]:
    """Places in a module that name a strategy (see the test below)."""
    names = {p.stem for p in FILES}
    ambiguous = names & _other_meanings()
    classes = {cls.__name__ for name, cls in strategies().items() if name in names}
    found: list[str] = []

    def literal(node: ast.AST | None, allowed: set[str]) -> bool:
        value = getattr(node, "value", None)
        return isinstance(node, ast.Constant) and value in names and value not in allowed

    for node in ast.walk(ast.parse(source)):
        where = f"line {getattr(node, 'lineno', '?')}"
        modules = (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
        found += [f"{where}: {m}" for m in modules if m.startswith("harness.strategies")]
        if isinstance(node, ast.Name | ast.Attribute):
            identifier = node.id if isinstance(node, ast.Name) else node.attr
            found += [f"{where}: {identifier}"] if identifier in classes else []
        if literal(node, ambiguous):
            found.append(f"{where}: {ast.unparse(node)}")
        # Strings with another meaning too, where they stand beside something called a strategy.
        beside: list[tuple[ast.AST | None, ast.AST | None]] = []
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            beside += [(a, b) for a in sides for b in ast.walk(ast.Tuple(sides)) if a is not b]
        elif isinstance(node, ast.Subscript):
            beside.append((node.value, node.slice))
        elif isinstance(node, ast.Call):
            beside += [(node.func, argument) for argument in node.args]
            beside += [(ast.Name(k.arg or ""), k.value) for k in node.keywords]
        elif isinstance(node, ast.Dict):
            beside += list(zip(node.keys, node.values, strict=True))
        elif isinstance(node, ast.Assign):
            beside += [(target, node.value) for target in node.targets]
        found += [
            f"{where}: {ast.unparse(value)} beside {ast.unparse(subject)}"
            for subject, value in beside
            if subject and "strateg" in ast.unparse(subject).lower() and literal(value, set())
        ]
    return found


@pytest.mark.parametrize(
    "code",
    [
        "x = 'ddp'",
        "f'{x}' in {'fsdp2': 1}",
        "from harness.strategies.ddp import Ddp",
        "import harness.strategies.ddp",
        "isinstance(x, Fsdp2)",
        "cell.strategy == 'single'",
        "row['strategy'] in ('deepspeed', 'x')",
        "Cell(strategy='accelerate')",
        "{'strategy': 'single'}",
        "strategies()['horovod']",
        "strategies().get('tensor')",
        "make_strategy('collectives')",
        "STRATEGY = 'single'",
    ],
)
def test_a_named_strategy_is_seen(code: str) -> None:
    assert _strategies_named(code)


@pytest.mark.parametrize(
    "code", ["row['data_parallel']", "find_spec('deepspeed')", "f'efficiency_single'", "x = ddp"]
)
def test_another_meaning_is_none(code: str) -> None:
    assert not _strategies_named(code)


def test_no_strategy_is_named_outside_its_folder() -> None:
    """What is outside harness/strategies knows strategies by what they say of themselves.

    There, a module names a strategy if it

    - imports anything of harness.strategies;
    - uses the name of a strategy's class;
    - has a string that is a strategy's name and nothing else that this code declares (`ddp`);
    - has a string that is both a strategy's name and something else (a recorded column such as
      `data_parallel`, a package such as `deepspeed`; see `_other_meanings`) where it means the
      strategy: compared with, looked up in, handed to or assigned to what is called a strategy.
    """
    for folder in ("bench", "harness", "reports"):
        for source in (HOME / folder).rglob("*.py"):
            if (HOME / "harness" / "strategies") not in source.parents:
                found = _strategies_named(source.read_text())
                assert not found, f"{source} names strategies: {found}"


def test_the_baseline_is_a_strategy_on_one_device() -> None:
    assert strategies()[BASELINE].capabilities.max_devices == 1


def test_listing_strategies_imports_no_torch() -> None:
    code = (
        "import sys; from harness.strategy.registry import strategies; strategies();"
        " sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=HOME).returncode == 0


def test_layouts_deal_out_the_batch() -> None:
    layout = Layout(data=2, pipeline=2, tensor=2)
    assert (layout.devices, layout.processes, layout.shares) == (8, 8, 2)
    assert [layout.share(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    one_process = Layout(data=4, devices_per_process=4)
    assert (one_process.processes, one_process.shares) == (1, 1)


def test_a_missing_package_makes_the_cell_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell(strategy="ddp", devices=2, workload="llama-nano")
    monkeypatch.setattr(type(make_strategy(cell)), "requires", ("no_such_package",))
    with pytest.raises(Unavailable, match="no_such_package is not installed"):
        validate(cell, make_workload("llama-nano"))


def test_what_strategies_require_is_recorded_and_installed_as_they_say() -> None:
    required = required_packages()
    assert {"accelerate", "deepspeed", "fairscale", "horovod"} <= set(required)
    recorded = json.loads(environment(["pytest", "no_such_package"])["libraries"])
    assert recorded["pytest"]
    assert "no_such_package" not in recorded
    with pytest.raises(Unavailable, match="no_such_package is not installed: make setup"):
        _require("no_such_package", strategies()["horovod"].install)


def test_an_entry_point_that_is_no_strategy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata as metadata

    point = metadata.EntryPoint("mine", "json:dumps", "parallelism_bench.strategies")
    monkeypatch.setattr(metadata, "entry_points", lambda group: [point])
    with pytest.raises(UsageError, match=r"'mine'.*Strategy.*json:dumps"):
        strategies.__wrapped__()


@pytest.mark.parametrize(("start_step", "refused"), [(7, False), (8, True), (100, True)])
def test_local_steps_begin_among_those_that_are_verified(start_step: int, refused: bool) -> None:
    cell = Cell(
        strategy="post_local_sgd", devices=2, parity_steps=8, options={"start_step": start_step}
    )
    context = pytest.raises(Refused) if refused else contextlib.nullcontext()
    with context:
        validate(cell, make_workload(cell.workload))


def test_an_average_of_parameters_is_among_the_steps_that_are_verified() -> None:
    axes: dict[str, Any] = {"strategy": "collectives", "devices": 2, "parity_steps": 8}
    for period in (8, 9):
        cell = Cell(**axes, options={"average": "parameters", "period": period})
        context = pytest.raises(Refused) if period > 8 else contextlib.nullcontext()
        with context:
            validate(cell, make_workload(cell.workload))


def test_powersgd_gets_one_bucket_on_cpus() -> None:
    """The gradients of the model are 3.5 MiB; several buckets abort on gloo."""
    workload = make_workload("llama-micro")
    one = Cell(
        strategy="ddp",
        devices=2,
        workload="llama-micro",
        options={"comm_hook": "powersgd", "bucket_cap_mb": 3},
    )
    with pytest.raises(Refused, match="give bucket_cap_mb 4 or more"):
        validate(one, workload)
    validate(
        one.model_copy(update={"options": {"comm_hook": "powersgd", "bucket_cap_mb": 4}}), workload
    )


def test_register_takes_what_a_train_state_has() -> None:
    fields = {field.name: field.type for field in dataclasses.fields(TrainState)}
    options = {
        name: kind.__forward_arg__ for name, kind in TrainStateOptions.__annotations__.items()
    }
    by_harness = {"schedules": "Sequence[LambdaLR]"}
    given = {"model": "nn.Module", "optimizers": "Sequence[Optimizer]", **options}
    assert given | by_harness == fields
    assert TrainStateOptions.__optional_keys__ == set(options)


def test_optimizers_keep_what_their_papers_say() -> None:
    """Llama-nano has matrices of more than 4096 elements, and vectors of fewer."""
    workload = make_workload("llama-micro")
    facts = model_facts(workload, 32)

    def kept(optimizer: str) -> float:
        axes: dict[str, Any] = {"optimizer": optimizer}
        return optimizer_bytes(Cell(strategy="ddp", **axes), facts)

    model = workload.build(0)
    matrices = sum(
        p.numel()
        for name, p in model.named_parameters()
        if p.ndim == 2 and name.startswith(workload.block_path)
    )
    assert kept("adamw") == 2 * facts.trained_bytes
    assert kept("sgd") == facts.trained_bytes
    assert kept("muon") == 2 * facts.trained_bytes - 4 * matrices
    assert 0.25 < kept("adamw_8bit") / kept("adamw") < 0.27, "a byte for four, and a scale for 256"


@pytest.mark.parametrize(
    ("strategy", "optimizer", "able"),
    [("fsdp2", "adamw_8bit", "ddp, single"), ("fsdp1", "muon", "ddp, fsdp2, single")],
)
def test_optimizers_that_a_strategy_cannot_shard_are_refused(
    strategy: str, optimizer: str, able: str
) -> None:
    """AdamW8bit keeps no state of a DTensor; Muon needs whole matrices and their names."""
    axes: dict[str, Any] = {"workload": "llama-nano", "optimizer": optimizer}
    cell = Cell(strategy=strategy, devices=2, **axes)
    with pytest.raises(Refused, match=f"cannot use {optimizer}: .*use {able}, "):
        validate(cell, make_workload(cell.workload))


WITH_DTENSORS = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from harness.spec.cell import Cell
from harness.strategy.optimizers import optimizer_of

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(128, 128)
fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
cell = Cell(strategy="single", workload="llama-nano", optimizer="adamw_8bit")
optimizer = optimizer_of(cell, model)
model(torch.randn(4, 128)).sum().backward()
optimizer.step()
"""


def test_an_optimizer_in_eight_bits_fails_with_sharded_parameters() -> None:
    """Why FSDP2 refuses AdamW8bit: its update takes plain tensors only. As soon as this fails, the
    refusal may go."""
    pytest.importorskip("bitsandbytes", reason="make setup installs bitsandbytes")
    ended = subprocess.run(
        [sys.executable, "-c", WITH_DTENSORS],
        cwd=HOME,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert "got mixed torch.Tensor and DTensor" in ended.stderr


LEFT_OUT = """
from harness.strategies import _deepspeed

_deepspeed.compiled_parts = lambda: {"deepspeed_shm_comm", "cpu_adam"}
_deepspeed.settle("cpu", 1)
import deepspeed
from deepspeed.comm.torch import build_shm_op

assert set(deepspeed.ops.__compatible_ops__) == {"cpu_adam"}
assert build_shm_op() is None
"""


def test_deepspeed_takes_no_compiler_and_no_lock_at_the_first_collective() -> None:
    """Its shared-memory collectives stay out even where they are compiled: their building leaves a
    lock in the user's cache if the rank is killed, for which every later rank would wait."""
    pytest.importorskip("deepspeed", reason="make setup installs DeepSpeed")
    ended = subprocess.run(
        [sys.executable, "-c", LEFT_OUT], cwd=HOME, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
