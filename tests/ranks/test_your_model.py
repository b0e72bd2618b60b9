"""A user's own models train in real ranks as in one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.cell.errors import Refused
from harness.record.store import load
from harness.seam.registry import validate
from harness.workloads import make_workload
from tests import pages
from tests.ranks.conftest import RunCells, cell
from tests.tiny_models import save_config

MICRO: dict[str, Any] = {"warmup_steps": 1, "timed_steps": 2, "parity_steps": 3}
STRATEGIES: dict[str, tuple[str, ...]] = {
    "llama": ("pipeline", "fsdp1"),
    "qwen3": ("tensor",),
    "gemma3_text": ("pipeline",),
    "t5": ("fsdp2",),
    "roberta": ("ddp",),
}


def test_models_train_as_in_one_process(run_cells: RunCells, tmp_path: Path) -> None:
    cells = []
    for model, strategies in STRATEGIES.items():
        workload = save_config(tmp_path / model, model)
        data = "images" if model == "vit" else "stdlib"
        for strategy in strategies:
            parts = 2 if "pipeline" in strategy else 1
            axes = {"workload": workload, "data": data, "micro_batches": parts, **MICRO}
            cells.append(cell(strategy, **axes))
    trials = run_cells(*cells).trials
    verdicts = {(t.workload, t.strategy): (t.parity_verdict, t.reason) for t in trials.itertuples()}
    assert {v for v, _ in verdicts.values()} == {"exact"}, verdicts
    assert len(verdicts) == sum(len(strategies) for strategies in STRATEGIES.values())


PAGE = pages.ROOT / "docs" / "your_model.md"
WRONG = """from harness.seam import Job, Strategy, TrainStep, standard_step


class Wrong(Strategy):
    def setup(self, job: Job) -> TrainStep:
        model = job.model()
        optimizer = job.optimizer(model.parameters())
        job.register(model, optimizer)
        return standard_step(job, model, optimizer)
"""
"""A strategy whose ranks do not exchange gradients."""


def test_the_model_of_the_documents_trains_as_in_one_process(
    run_cells: RunCells, tmp_path: Path
) -> None:
    next(block for block in pages.blocks(PAGE.read_text()) if block.path).apply(tmp_path)
    (tmp_path / "wrong.py").write_text(WRONG)
    tiny = {"workload": f"{tmp_path / 'my.py'}:Tiny", **MICRO}
    wrong = f"{tmp_path / 'wrong.py'}:Wrong"
    trials = run_cells(cell("ddp", **tiny), cell(wrong, **tiny)).trials
    verdicts = dict(zip(trials["strategy"], trials["parity_verdict"], strict=True))
    assert verdicts == {"ddp": "exact", wrong: "diverged"}


IRREGULAR = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.layer, self.gate = kind, nn.Linear(8, 8), nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4 if kind == "skips" else 0))
        self.late = nn.Linear(4, 4) if kind == "unused" else None
        if kind == "mixed":
            self.layer.bfloat16()

    def forward(self, x):
        if self.kind == "reentrant":
            x = x.requires_grad_()
            for _ in range(3):
                x = checkpoint(self.layer, x, use_reentrant=True).tanh()
        else:
            x = self.layer(x.to(self.layer.weight.dtype)).float().tanh()
        for number, expert in enumerate(self.experts):
            rows = (x.argmax(1) % 4 == number).nonzero()[:, 0]
            if len(rows):
                x = x.index_add(0, rows, expert(x[rows]))
        return self.gate(x)


class Reentrant:
    kind = "reentrant"

    def __init__(self):
        self.x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))

    def build(self):
        return Net(self.kind)

    def batch(self, samples):
        return self.x[samples % 64], samples % 4

    def loss(self, output, labels):
        return F.cross_entropy(output, labels)


class Skips(Reentrant):
    kind = "skips"


class Unused(Reentrant):
    kind = "unused"


class Mixed(Reentrant):
    kind = "mixed"
"""


@pytest.mark.thorough
def test_ddp_gets_the_flags_that_irregular_models_need(run_cells: RunCells, tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(IRREGULAR)
    names = ("Reentrant", "Skips", "Unused", "Mixed")
    cells = [cell("ddp", workload=f"{tmp_path / 'nets.py'}:{name}", **MICRO) for name in names]
    stages = {"options": {"stage": 2}, "workload": cells[0].workload, **MICRO}
    with pytest.raises(Refused, match="use_reentrant=False"):
        validate(cell("deepspeed", **stages), make_workload(cells[0].workload))
    trials = run_cells(*cells).trials
    found = {
        workload.rpartition(":")[2]: (verdict, reason)
        for workload, verdict, reason in zip(
            trials["workload"], trials["parity_verdict"], trials["reason"], strict=True
        )
    }
    verdicts = {name: verdict for name, (verdict, _) in found.items()}
    assert verdicts.pop("Mixed") in ("exact", "within tolerance"), found
    assert verdicts == dict.fromkeys(names[:3], "exact"), found


@pytest.mark.thorough
def test_the_example_of_the_documents_runs(tmp_path: Path) -> None:
    commands = [c for block in pages.blocks(PAGE.read_text()) for c in block.commands]
    (command,) = (command for command in commands if "--model" in command)
    next(block for block in pages.blocks(PAGE.read_text()) if block.path).apply(tmp_path)
    some = "".join(f" --only {name}" for name in ("single", "ddp"))
    run(f"{command} --trials 1{some}", tmp_path)
    trials = load(tmp_path / "results").trials
    launched = trials[trials["status"] != "refused"]
    assert set(launched["workload"]) == {f"{tmp_path / 'my.py'}:Tiny"}
    verdicts = dict(zip(launched["strategy"], launched["parity_verdict"], strict=True))
    assert verdicts == dict.fromkeys(("single", "ddp"), "exact")
    written = [file.read_text() for file in (tmp_path / "reports" / "html").glob("*.html")]
    assert any("my.py:Tiny" in page for page in written)
    assert launched["samples_per_second"].notna().all()
    assert launched["tokens_per_second"].isna().all(), "its samples have no tokens"
    assert list((tmp_path / "reports" / "html").glob("*.html"))


def run(command: str, folder: Path) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = os.environ | {"PATH": path, "PYTHONPATH": str(pages.ROOT)}
    done = subprocess.run(
        command.split(), cwd=folder, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
