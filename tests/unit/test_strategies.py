"""Rules for strategies: small files, documented options, and no mention in other code."""

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

from harness.cell.cell import BASELINE, Cell
from harness.cell.errors import Refused, Unavailable, UsageError
from harness.cell.training import Layout
from harness.export import TARGETS
from harness.host.environment import environment
from harness.record.files import TABLES, arrow_schema
from harness.seam.base import CostModel, Strategy
from harness.seam.job import Job
from harness.seam.optimizers import optimizer_bytes
from harness.seam.registry import (
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
    """Counts the lines before the formulas: imports, options, export and training."""
    strategy = next(node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    formulas = (
        part.lineno
        for part in strategy.body
        if isinstance(part, ast.FunctionDef) and part.name in vars(CostModel)
    )
    return next(formulas, (strategy.end_lineno or 0) + 1) - 1


def test_strategy_files_are_small() -> None:
    lengths = {p.stem: _lines_of_training(p.read_text()) for p in FILES}
    assert min(lengths.values()) <= 45
    assert max(lengths.values()) <= 130, lengths
    whole = {p.name: len(p.read_text().splitlines()) for p in FILES[0].parent.glob("*.py")}
    assert max(whole.values()) <= 370, whole


def test_the_interface_of_strategies_is_narrow() -> None:
    """A strategy may override at most 16 class variables and methods."""
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
        "a strategy may set variables for libraries, but must not time, log, print or read the"
        " environment"
    )


def _other_meanings() -> set[str]:
    """Returns names that the code declares for something else: recorded columns and tables, Python
    packages, export targets, and the baseline."""
    columns = {name for table in TABLES for name in arrow_schema(table).names}
    return {*TABLES, *columns, *required_packages(), *TARGETS, BASELINE}


def _strategies_named(source: str) -> list[str]:
    """Returns places in a module that name a strategy (see the test below)."""
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
        # Strings with another meaning count too, next to something called a strategy.
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
            f"{where}: {ast.unparse(value)} next to {ast.unparse(subject)}"
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
    """Code outside harness/strategies knows strategies only by what they declare.

    A module names a strategy if it

    - imports from harness.strategies;
    - uses the name of a strategy's class;
    - has a string that names a strategy and nothing else that the code declares (`ddp`);
    - has a string that names a strategy and something else (a recorded column such as
      `data_parallel`, a package such as `deepspeed`; see `_other_meanings`) and means the strategy:
      it is compared with, looked up in, passed or assigned to something called a strategy.
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
        "import sys; from harness.seam.registry import strategies; strategies();"
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
    """The model's gradients are 3.5 MiB; several buckets abort on gloo."""
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


@pytest.mark.parametrize(
    ("strategy", "axes", "said"),
    [
        ("ddp", {"options": {"comm_hook": "powersgd"}, "workload": "llama-nano+bf16"}, "bf16"),
        (
            "fsdp2",
            {"options": {"mixed_precision": True}, "precision": "bf16", "optimizer": "muon"},
            "Muon",
        ),
        ("amp", {"options": {"rounded_masters": True}, "precision": "bf16"}, "opt_level O2"),
        ("deepspeed", {"options": {"stage": 0, "bucket_elements": 1000}}, "stage 1, 2 or 3"),
        ("deepspeed", {"options": {"stage": 2, "persistent_elements": 0}}, "stage 3"),
        ("deepspeed", {"options": {"stage": 1}, "workload": "llama-nano+bf16"}, "precision bf16"),
        ("deepspeed", {"options": {"stage": 3, "folder": ""}}, "nvme"),
        ("horovod", {"options": {"transport": "tcp"}}, "leave transport out"),
        (
            "parameter_server",
            {"options": {"mode": "asynchronous"}, "precision": "fp16"},
            "mode synchronous",
        ),
    ],
    ids=str,
)
def test_what_would_train_something_else_or_nothing_else_is_refused(
    strategy: str, axes: dict[str, Any], said: str
) -> None:
    cell = Cell(**{"strategy": strategy, "devices": 2, "workload": "llama-nano", **axes})
    with pytest.raises(Refused, match=said):
        validate(cell, make_workload(cell.workload), here=False)


@pytest.mark.parametrize("mib", [0, -1])
def test_a_bucket_has_a_size(mib: float) -> None:
    with pytest.raises(UsageError, match="bucket_cap_mb"):
        make_strategy(Cell(strategy="ddp", options={"bucket_cap_mb": mib}))


@pytest.mark.parametrize(
    ("strategy", "options", "parity_steps", "skipped"),
    [
        ("post_local_sgd", {}, 6, True),
        ("post_local_sgd", {}, 7, False),
        ("post_local_sgd", {"start_step": 5}, 13, False),
        ("ddp", {"comm_hook": "powersgd"}, 5, True),
        ("ddp", {"comm_hook": "powersgd"}, 6, False),
        ("ddp", {}, 2, False),
    ],
)
def test_steps_that_come_before_a_change_of_method_are_not_replayed(
    strategy: str, options: dict[str, Any], parity_steps: int, skipped: bool
) -> None:
    cell = Cell(strategy=strategy, devices=2, options=options, parity_steps=parity_steps)
    assert bool(make_strategy(cell).rewind_skipped_reason(cell)) == skipped


def test_the_reference_of_powersgd_uses_the_cells_optimizer(tmp_path: Path) -> None:
    cell = Cell(
        strategy="ddp",
        devices=2,
        workload="llama-nano",
        optimizer="muon",
        options={"comm_hook": "powersgd"},
    )
    reference = make_strategy(cell).reference(cell)
    job = job_of(reference, tmp_path)
    make_strategy(reference).setup(job)
    assert job.train_state is not None
    (optimizer,) = job.train_state.optimizers
    assert any("adjust_lr_fn" in group for group in optimizer.param_groups)


def test_one_device_keeps_the_models_attention(tmp_path: Path) -> None:
    """Ring attention is causal, which BERT's is not."""
    from harness.strategies._sequence import config_of

    cell = Cell(strategy="context_parallel", workload="bert-micro")
    job = job_of(cell, tmp_path)
    before = config_of(job.model())._attn_implementation
    make_strategy(cell).setup(job)
    assert job.train_state is not None
    assert config_of(job.train_state.model)._attn_implementation == before


@pytest.mark.parametrize("rank", range(4))
def test_each_node_empties_its_offload_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    import torch.distributed as dist

    from harness.strategies._deepspeed_engine import emptied_folder

    monkeypatch.setattr(dist, "barrier", lambda: None)
    cell = Cell(strategy="deepspeed", devices=4, nodes=2, workload="llama-nano")
    job = dataclasses.replace(job_of(cell, tmp_path), rank=rank, local_processes=2)
    earlier = tmp_path / "parallelism-bench-offload" / "earlier"
    earlier.mkdir(parents=True)
    assert emptied_folder(job, str(tmp_path)) == earlier.parent
    assert earlier.exists() == (rank % 2 == 1)


@pytest.mark.parametrize(("precision", "name"), [("fp32", "DeepSpeed stage 0"), ("bf16", None)])
def test_only_fp32_deepspeed_is_compared_with_ddp(precision: Any, name: str | None) -> None:
    cell = Cell(strategy="deepspeed", devices=2, precision=precision)
    assert make_strategy(cell).ddp_equivalent_of(cell) == name


def job_of(cell: Cell, folder: Path) -> Job:
    import torch

    layout = make_strategy(cell).layout(cell.devices)
    return Job(cell, make_workload(cell.workload), layout, torch.device("cpu"), 0, folder)


def test_optimizers_keep_what_their_papers_say() -> None:
    """llama-micro has matrices of more than 4096 elements, and smaller vectors."""
    facts = model_facts(make_workload("llama-micro"), 32)

    def kept(optimizer: str) -> float:
        axes: dict[str, Any] = {"optimizer": optimizer}
        return optimizer_bytes(Cell(strategy="ddp", **axes), facts)

    assert kept("adamw") == 2 * facts.trained_bytes
    assert kept("sgd") == facts.trained_bytes
    assert 0.25 < kept("adamw_8bit") / kept("adamw") < 0.27, "a byte for four, and a scale for 256"


@pytest.mark.parametrize("name", ["llama-micro", "llama-nano+bf16", "mixtral-micro"])
def test_muon_keeps_one_moment_of_the_blocks_matrices(name: str) -> None:
    """AdamW keeps two of everything else, including the experts' three-dimensional parameters."""
    workload = make_workload(name)
    kept = sum(
        p.numel() * p.element_size() * (1 if p.ndim == 2 and workload.block_path in path else 2)
        for path, p in workload.build(0).named_parameters()
    )
    cell = Cell(strategy="ddp", workload=name, optimizer="muon")
    assert optimizer_bytes(cell, model_facts(workload, 32)) == kept


@pytest.mark.parametrize(
    ("strategy", "optimizer", "able"),
    [("fsdp2", "adamw_8bit", "ddp, single"), ("fsdp1", "muon", "ddp, fsdp2, single")],
)
def test_optimizers_that_a_strategy_cannot_shard_are_refused(
    strategy: str, optimizer: str, able: str
) -> None:
    """AdamW8bit does not support DTensors; Muon needs whole matrices and their names."""
    axes: dict[str, Any] = {"workload": "llama-nano", "optimizer": optimizer}
    cell = Cell(strategy=strategy, devices=2, **axes)
    with pytest.raises(Refused, match=f"cannot use {optimizer}: .*use {able}, "):
        validate(cell, make_workload(cell.workload))


WITH_DTENSORS = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from harness.cell.cell import Cell
from harness.seam.optimizers import optimizer_of

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(128, 128)
fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
cell = Cell(strategy="single", workload="llama-nano", optimizer="adamw_8bit")
optimizer = optimizer_of(cell, model)
model(torch.randn(4, 128)).sum().backward()
optimizer.step()
"""


@pytest.mark.slow
def test_an_optimizer_in_eight_bits_fails_with_sharded_parameters() -> None:
    """FSDP2 refuses AdamW8bit, whose update takes plain tensors only. Once this test fails, the
    refusal can be removed."""
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


@pytest.mark.slow
def test_deepspeed_takes_no_compiler_and_no_lock_at_the_first_collective() -> None:
    """DeepSpeed's shared-memory collectives stay disabled even if compiled. A rank killed while it
    builds them leaves a lock in the user's cache, for which all later ranks would wait."""
    pytest.importorskip("deepspeed", reason="make setup installs DeepSpeed")
    ended = subprocess.run(
        [sys.executable, "-c", LEFT_OUT], cwd=HOME, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
