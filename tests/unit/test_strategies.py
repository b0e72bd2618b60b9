"""Rules for strategies: small files, documented options, and no mention in other code."""

from __future__ import annotations

import ast
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
from harness.cell.errors import Unavailable, UsageError
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
    """Returns the parts of a module that name a strategy: by importing from harness.strategies, by
    the strategy's class, or by a string that has no other meaning."""
    names = {p.stem for p in FILES} - _other_meanings()
    classes = {strategies()[p.stem].__name__ for p in FILES}
    found = []
    for node in ast.walk(ast.parse(source)):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
        if (
            any(module.startswith("harness.strategies") for module in modules)
            or getattr(node, "id", getattr(node, "attr", None)) in classes
            or (isinstance(node, ast.Constant) and node.value in names)
        ):
            found.append(f"line {getattr(node, 'lineno', '?')}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize(
    ("code", "names_one"),
    [
        ("f'{x}' in {'fsdp2': 1}", True),
        ("from harness.strategies.ddp import Ddp", True),
        ("import harness.strategies.ddp", True),
        ("isinstance(x, Fsdp2)", True),
        ("row['data_parallel']", False),
        ("f'efficiency_single'", False),
        ("x = ddp", False),
    ],
)
def test_a_named_strategy_is_seen(code: str, names_one: bool) -> None:
    assert bool(_strategies_named(code)) == names_one


def test_no_strategy_is_named_outside_its_folder() -> None:
    """Code outside harness/strategies knows strategies only by what they declare."""
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
    axes: dict[str, Any] = {"workload": "llama-nano", "optimizer": "muon"}
    cell = Cell(strategy="ddp", devices=2, options={"comm_hook": "powersgd"}, **axes)
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


@pytest.mark.thorough
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
