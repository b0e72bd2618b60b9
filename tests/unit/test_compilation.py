"""torch.compile in a rank: the folder for compiled code, and no compilation in timed steps."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from harness.cell.cell import Cell
from harness.host.folders import cache_folder
from harness.seam.job import Job
from harness.seam.registry import validate
from harness.worker import compilation
from harness.worker.compilation import checked_compile_seconds, prepare_to_compile
from harness.workloads import make_workload

COMPILED = Cell(strategy="single", compile="block", warmup_steps=3)
GRAPHS = COMPILED.model_copy(update={"compile": "block_cudagraphs", "device": "cuda"})


@pytest.mark.parametrize(("cell", "mode"), [(COMPILED, None), (GRAPHS, "reduce-overhead")])
def test_each_block_is_compiled_in_the_cells_mode(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cell: Cell, mode: str | None
) -> None:
    modes: list[str | None] = []
    monkeypatch.setattr(nn.Module, "compile", lambda _, mode=None: modes.append(mode))
    cell = cell.model_copy(update={"workload": "llama-nano"})
    strategy, layout = validate(cell, make_workload(cell.workload), here=False)
    assert cell.compile in strategy.capabilities.compiles
    workload = make_workload(cell.workload)
    job = Job(cell, workload, layout, torch.device("cpu"), 0, tmp_path)
    assert modes == [mode] * len(workload.blocks_of(job.model()))


def test_missing_cuda_graphs_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without graphs, torch launches kernels one by one and only logs it."""
    monkeypatch.setattr(compilation, "compile_seconds", lambda: 4.0)
    monkeypatch.setitem(counters["inductor"], "cudagraph_skips", 2)
    assert checked_compile_seconds(COMPILED, 4.0) == 4.0
    with pytest.raises(RuntimeError, match="none of 2"):
        checked_compile_seconds(GRAPHS, 4.0)
    monkeypatch.setitem(counters["inductor"], "cudagraph_skips", 0)
    assert checked_compile_seconds(GRAPHS, 4.0) == 4.0


def test_compiling_nothing_or_in_a_timed_step_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "compile_seconds", lambda: 4.0)
    with pytest.raises(RuntimeError, match=r"again for 1.0 s.*more than 3 warmup_steps"):
        checked_compile_seconds(COMPILED, 3.0)
    assert checked_compile_seconds(Cell(strategy="single"), 0.0) is None
    monkeypatch.setattr(compilation, "compile_seconds", lambda: 0.0)
    with pytest.raises(RuntimeError, match=r"torch\.compile"):
        checked_compile_seconds(COMPILED, 0.0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by torch on import
def test_ranks_and_trials_share_one_folder_and_no_block_falls_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import torch._dynamo.config

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "elsewhere")
    monkeypatch.setattr(torch._dynamo.config, "fail_on_recompile_limit_hit", False)
    prepare_to_compile(Cell(strategy="single"))
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "elsewhere"
    prepare_to_compile(COMPILED)
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(cache_folder() / "compiled")
    assert torch._dynamo.config.fail_on_recompile_limit_hit
