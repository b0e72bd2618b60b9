"""bench export: the cell it selects, the files it writes, and messages if it writes none."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from bench.api import TRIED_MATRICES
from bench.cli import app
from bench.expand import expand
from bench.matrix import Host, read_matrix
from harness.cell.cell import Cell
from harness.cell.errors import UsageError
from harness.export import TARGETS, export_files, plan_of, taken_by, write_files
from harness.seam.registry import make_strategy
from harness.workloads import make_workload
from tests.commands import needs_horovod
from tests.tiny_models import save_config
from tests.unit.test_mixture import DIVIDES_RANKS

ALLOWED = {
    "torch",
    "numpy",
    "transformers",
    "accelerate",
    "bitsandbytes",
    "deepspeed",
    "fairscale",
    "horovod",
    "torchao",
    "torchft",
    *sys.stdlib_module_names,
}
BY_TORCH = {
    *("single", "ddp", "fsdp1", "fsdp2", "zero_redundancy", "deepspeed", "ulysses", "ulysses_zero"),
    *("tensor", "pipeline", "three_d", "amp", "collectives", "post_local_sgd", "vertical"),
    *("parameter_server", "fairscale_oss", "deepspeed_pipeline", "tiled_linear", "trainer"),
    *("ddp_elastic", "diloco", "deepspeed_auto"),
    *("data_parallel", "sync_batch_norm"),
    *(["distributed_config"] if DIVIDES_RANKS else []),  # else the cell is refused
}
"""Strategies whose exports need torch's launcher only."""


def small(strategy: str, **axes: Any) -> Cell:
    sizes = {"devices": 2, "workload": "llama-nano", "sequence_length": 32}
    return Cell(**{"strategy": strategy, **sizes, **axes})


def pairs() -> list[tuple[Cell, str]]:
    """Returns cells of TRIED_MATRICES by target: one for each strategy, options, precision and
    device; skips workload suffixes."""
    found: dict[tuple[str, ...], tuple[Cell, str]] = {}
    host = Host("cpu", 2, 2**34)
    for cell in (c for name in TRIED_MATRICES for c in expand(read_matrix(name), host).cells):
        if make_workload(cell.workload).suffixes:
            continue
        for device in ("cpu", "cuda"):
            one = cell.model_copy(update={"device": device})
            for to in TARGETS:
                if plan_of(make_strategy(one), one, to):
                    found[one.label, one.precision, device, to] = one, to
    return list(found.values())


@pytest.mark.slow
def test_every_export_is_complete_and_readable(tmp_path: Path) -> None:
    needs_horovod()
    seen = set()
    for cell, to in pairs():
        files, _ = export_files(cell, to)
        assert {"train.py", "model.json", "run.sh", "README.md"} <= set(files)
        for name, content in files.items():
            assert name == "README.md" or f"`{name}`" in files["README.md"]
            assert not re.search(r"{{|{%", content)
            assert content.endswith("\n")
        imported = {
            (node.module if isinstance(node, ast.ImportFrom) else alias.name).split(".")[0]
            for node in ast.walk(ast.parse(files["train.py"]))
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
        }
        assert imported <= ALLOWED, (cell.name, to)
        if (cell.strategy, to) not in seen:
            for name in {"run.sh", "job.sbatch"} & files.keys():
                subprocess.run(["bash", "-n"], input=files[name], text=True, check=True)
        json.loads(files["model.json"])
        if to == "accelerate":
            config = yaml.safe_load(files["accelerate_config.yaml"])
            on_cpu = cell.device == "cpu"
            assert (config["num_processes"], config["use_cpu"]) == (cell.devices, on_cpu)
        if "ds_config.json" in files:
            assert json.loads(files["ds_config.json"])["gradient_clipping"] == 0.0
        if to == "slurm":
            assert files["job.sbatch"].startswith("#!/usr/bin/env bash\n# Directives of your site")
            assert ("--gpus-per-node" in files["job.sbatch"]) == (cell.device == "cuda")
        seen.add((cell.strategy, to))
    expected = {(strategy, to) for strategy in BY_TORCH for to in ("torchrun", "slurm")}
    expected |= {(s, "accelerate") for s in ("ddp", "fsdp2", "deepspeed", "accelerate")}
    expected |= {
        (s, "deepspeed") for s in ("deepspeed", "deepspeed_auto", "tiled_linear", "ulysses_zero")
    }
    expected |= {
        ("ddp", "spawn"),
        ("horovod", "mpirun"),
        ("horovod", "horovodrun"),
    }
    assert seen == expected


@pytest.mark.parametrize(
    ("kind", "call"),
    [("block", "block.compile()"), ("block_cudagraphs", 'block.compile(mode="reduce-overhead")')],
)
def test_the_script_compiles_blocks_where_the_cell_does(kind: str, call: str) -> None:
    plain, compiled = (
        export_files(small("ddp", compile=value, device="cuda"), "torchrun")[0]["train.py"]
        for value in ("none", kind)
    )
    added = [line for line in compiled.splitlines() if line not in plain.splitlines()]
    assert [line.strip() for line in added if not line.startswith('"""')] == [
        'for block in model.get_submodule("model.layers"):',
        call,
    ]
    ast.parse(compiled)


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_the_script_wraps_and_recomputes_encoder_and_decoder(tmp_path: Path, strategy: str) -> None:
    name = save_config(tmp_path, "t5", "T5ForSequenceClassification", num_labels=5)
    one = small(strategy, workload=name, recompute="full")
    script = export_files(one, "torchrun")[0]["train.py"]
    ast.parse(script)
    encoder, decoder = make_workload(name).block_paths
    both = f'[*model.get_submodule("{encoder}"), *model.get_submodule("{decoder}")]'
    assert script.count(both) == 2


@pytest.mark.parametrize("tied", [True, False])
def test_without_blocks_the_script_wraps_a_tied_model_as_one_unit(
    monkeypatch: pytest.MonkeyPatch, tied: bool
) -> None:
    workload = dataclasses.replace(make_workload("gpt2-nano"), block_paths=(), tied=tied)
    monkeypatch.setattr("harness.export.make_workload", lambda name: workload)
    script = export_files(small("fsdp1", workload="gpt2-nano"), "torchrun")[0]["train.py"]
    ast.parse(script)
    assert ("auto_wrap_policy" in script) is not tied


@pytest.mark.parametrize("to", ["deepspeed", "accelerate"])
def test_parameters_on_a_disk_keep_their_dtype(to: str) -> None:
    options = {"stage": 3, "offload_parameters": "nvme"}
    one = small("deepspeed", workload="llama-512x2", options=options)
    script = export_files(one, to)[0]["train.py"]
    ast.parse(script)
    assert "get_accelerator().is_fp16_supported" in script


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_tensor_parallel_plan_is_written_as_it_is(sequence_parallel: bool) -> None:
    from torch.distributed import tensor
    from torch.distributed.tensor import parallel

    one = small("tensor", options={"sequence_parallel": sequence_parallel})
    script = export_files(one, "torchrun")[0]["train.py"]
    written = script.partition("    plan = ")[2].partition("    model = ")[0]
    plan = eval(written, vars(parallel) | vars(tensor))
    split = make_workload("llama-nano").split
    assert split is not None
    meant = split.tensor_plan(sequence_parallel)
    assert {path: vars(style) for path, style in plan.items()} == {
        path: vars(style) for path, style in meant.items()
    }


def test_the_documents_table_is_right() -> None:
    """Checks the table in docs/export.md."""
    text = (Path(__file__).parents[2] / "docs" / "export.md").read_text()
    said = {
        row.split("|")[1].strip(" `"): row.split("|")[3].strip()
        for row in text.splitlines()
        if row.startswith("| `")
    }
    said["slurm"] = said["torchrun"]
    assert said.pop("mpirun") == "horovod with controller=mpi"
    said["spawn"] = said["torchrun"]
    for to in TARGETS.keys() - {"mpirun"}:
        assert set(said[to].split(", ")) == set(taken_by(to))


@pytest.mark.parametrize(
    ("cell", "to", "said"),
    [
        (small("fsdp1"), "deepspeed", "to deepspeed; it has one to torchrun.*: deepspeed, tiled"),
        (small("data_parallel"), "torchrun", "and these have one to torchrun"),
        (
            small("three_d", workload="gpt2-nano", devices=4, micro_batches=2),
            "torchrun",
            "torchrun: torch .*Linear.* a llama",
        ),
        (small("ddp", precision="fp16"), "accelerate", "in fp16 on cpu has no export"),
        (small("ddp", global_batch=3), "torchrun", "3.*2"),
        (small("ddp"), "kubernetes", "use one of spawn, torchrun, slurm"),
    ],
    ids=lambda value: value.label if isinstance(value, Cell) else None,
)
def test_a_missing_export_lists_alternatives(cell: Cell, to: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        export_files(cell, to)


def test_a_cell_on_several_nodes_is_exported_to_slurm_only() -> None:
    cell = small("ddp", devices=4, nodes=2, device="cuda", threads_per_device=3)
    job = export_files(cell, "slurm")[0]["job.sbatch"]
    for directive in ("nodes=2", "gpus-per-node=2", "cpus-per-task=6"):
        assert f"#SBATCH --{directive}\n" in job
    for to in sorted({*TARGETS} - {"slurm"}):
        assert plan_of(make_strategy(cell), cell, to) is None
        with pytest.raises(UsageError, match=rf"no export to {to}.*use slurm"):
            export_files(cell, to)


@pytest.mark.parametrize("model", ["roberta", "t5", "vit"])
def test_a_model_that_no_script_trains_has_no_export(model: str, tmp_path: Path) -> None:
    name = save_config(tmp_path, model)
    data = "images" if model == "vit" else "stdlib"
    with pytest.raises(UsageError, match="causal or classification"):
        export_files(small("ddp", workload=name, data=data), "torchrun")


def test_requirements_missing_here_are_noted() -> None:
    files, note = export_files(small("ddp", options={"comm_hook": "bf16"}), "torchrun")
    assert "NCCL" in note
    assert "bf16_compress_hook" in files["train.py"]


def test_files_are_written_whole_or_not_at_all(tmp_path: Path) -> None:
    write_files({"run.sh": "#!/bin/sh\n", "a": "b"}, tmp_path / "new" / "folder")
    assert (tmp_path / "new" / "folder" / "run.sh").stat().st_mode & 0o100
    with pytest.raises(UsageError, match="not empty"):
        write_files({"a": "c"}, tmp_path / "new" / "folder")
    assert (tmp_path / "new" / "folder" / "a").read_text() == "b"
    with pytest.raises(OSError, match="nowhere"):
        write_files({"a": "b", "nowhere/b": "c"}, tmp_path / "other")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=re.escape(str(tmp_path / "file" / "folder"))):
        write_files({"a": "b"}, tmp_path / "file" / "folder")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "new"]
    (tmp_path / "empty").mkdir()
    write_files({"a": "b"}, tmp_path / "empty")


def test_the_command_writes_and_says_so(tmp_path: Path) -> None:
    words = "export ddp --to torchrun --matrix smoke --set workload=llama-nano"
    arguments = [*words.split(), "--out", str(tmp_path / "set")]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert f"bash {tmp_path}/set/run.sh" in done.stdout
    told = json.loads(CliRunner().invoke(app, [*arguments[:-2], "--json"]).stdout)
    assert told["files"] == {path.name: path.read_text() for path in (tmp_path / "set").iterdir()}
    assert (told["folder"], told["note"]) == (None, None)
