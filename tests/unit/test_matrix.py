"""Matrix files expand into cells, and mistakes in them are reported."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from bench.expand import expand
from bench.matrix import Host, matrix_names, parse_bytes, parse_changes, read_matrix
from harness.cell.cell import Cell
from harness.cell.errors import UsageError

CPU = Host("cpu", 2, 24 * 2**30)
GPU = Host("cuda", 1, 80 * 2**30)


def written(tmp_path: Path, text: str):
    file = tmp_path / "my.yaml"
    file.write_text(text)
    return read_matrix(str(file))


def test_lists_are_combined(tmp_path: Path) -> None:
    matrix = written(
        tmp_path,
        "defaults: {workload: llama-nano}\ncells: [{strategy: ddp, devices: [1, 2], precision:"
        " [fp32, bf16]}]",
    )
    cells = expand(matrix, CPU).cells
    combined = [(1, "fp32"), (1, "bf16"), (2, "fp32"), (2, "bf16")]
    assert [(c.devices, c.precision) for c in cells] == combined
    assert {c.global_batch for c in cells} == {8}
    assert {c.parity_steps for c in cells} == {13}


def test_weak_scaling_multiplies_the_batch(tmp_path: Path) -> None:
    axes = "strategy: ddp, workload: llama-nano, batch: 4, devices: [1, 2], regime: weak"
    matrix = written(tmp_path, f"cells: [{{{axes}}}]")
    assert [c.global_batch for c in expand(matrix, CPU).cells] == [4, 8]


def test_the_host_chooses_sizes(tmp_path: Path) -> None:
    matrix = written(
        tmp_path,
        "workloads: {main: llama-nano}\ndefaults: {workload: main}\nhosts: [{device: cuda,"
        " memory_at_least: 60GiB, workloads: {main: llama-1b}, defaults: {batch: 32}}]\ncells:"
        " [{strategy: single}]",
    )
    on_cpu, on_gpu = expand(matrix, CPU).cells[0], expand(matrix, GPU).cells[0]
    assert (on_cpu.workload, on_cpu.device, on_cpu.global_batch) == ("llama-nano", "cpu", 8)
    assert (on_gpu.workload, on_gpu.device, on_gpu.global_batch) == ("llama-1b", "cuda", 32)


def test_cells_that_cannot_run_are_left_out_with_the_reason(tmp_path: Path) -> None:
    matrix = written(
        tmp_path,
        "defaults: {workload: llama-nano}\ncells: [{strategy: [single, ddp], devices: 2},"
        " {strategy: ddp, devices: 3}]",
    )
    expanded = expand(matrix, CPU)
    assert [c.label for c in expanded.cells] == ["ddp"]
    left = {(x.cell.strategy, x.cell.devices): x.status for x in expanded.left_out}
    assert left == {("single", 2): "refused", ("ddp", 3): "refused"}


def test_ranks_that_save_a_checkpoint_need_gpus_too(tmp_path: Path) -> None:
    matrix = written(
        tmp_path,
        "defaults: {workload: llama-nano, checkpoint: full}\ncells: [{strategy: single,"
        " checkpoint_from: [fsdp2 x2, single x1]}]",
    )
    expanded = expand(matrix, GPU)
    assert [c.checkpoint_from for c in expanded.cells] == ["single x1"]
    assert [(left.status, left.reason) for left in expanded.left_out] == [
        ("unavailable", "needs 2 GPUs, this host has 1")
    ]


def test_many_devices_are_what_the_host_has(tmp_path: Path) -> None:
    matrix = written(
        tmp_path, "defaults: {workload: llama-nano}\ncells: [{strategy: ddp, devices: [1, many]}]"
    )
    assert [c.devices for c in expand(matrix, CPU).cells] == [1, 2]
    assert [c.devices for c in expand(matrix, GPU).cells] == [1]
    assert [c.devices for c in expand(matrix, Host("cuda", 6, 2**34)).cells] == [1, 4]


def test_equal_cells_are_run_once(tmp_path: Path) -> None:
    matrix = written(
        tmp_path,
        "defaults: {workload: llama-nano}\ncells: [{strategy: ddp}, {strategy: [ddp, single]}]",
    )
    assert len(expand(matrix, CPU).cells) == 2


def test_only_and_skip(tmp_path: Path) -> None:
    matrix = written(
        tmp_path,
        "defaults: {workload: llama-nano}\ncells: [{strategy: [single, ddp]}, {strategy: ddp,"
        " devices: 2}]",
    )
    assert len(expand(matrix, CPU, only=["ddp"]).cells) == 2
    assert [c.strategy for c in expand(matrix, CPU, skip=["ddp"]).cells] == ["single"]
    assert [c.devices for c in expand(matrix, CPU, only=["ddp*x2*"]).cells] == [2]


def test_set_changes_all_cells(tmp_path: Path) -> None:
    matrix = written(tmp_path, "defaults: {workload: llama-nano}\ncells: [{strategy: single}]")
    cells = expand(matrix, CPU, changes=parse_changes(["batch=16", "precision=[fp32, bf16]"])).cells
    assert [(c.global_batch, c.precision) for c in cells] == [(16, "fp32"), (16, "bf16")]


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        ("strategy: dpp", "unknown strategy 'dpp'.*ddp"),
        ("options: {bucket: 1}", "no option 'bucket'.*bucket_cap_mb"),
        ("options: {bucket_cap_mb: big}", "bucket_cap_mb.*number.*'big'"),
        ("strategi: ddp", r"cells\[0\].*'strategi'.*'strategy'"),
        ("workload: gpt3", "unknown workload 'gpt3'.*gpt2-mini"),
        ("precision: fp8", r"cells\[0\].*precision.*'fp8'"),
        ("devices: two", "whole numbers.*'two'"),
        ("data: 'text:/no/such'", "no file '/no/such'"),
        ("data: 'novel'", "unknown data 'novel'.*stdlib"),
        ("sequence_length: 5000", "5000.*positions"),
        ("memory_limit_bytes: lots", "'lots'.*2GiB"),
    ],
)
def test_mistakes_in_a_cell_name_the_key_and_the_fix(tmp_path: Path, axes: str, said: str) -> None:
    plain = {"strategy": "ddp", "workload": "llama-nano"}
    text = yaml.safe_dump({"cells": [plain | yaml.safe_load(f"{{{axes}}}")]})
    with pytest.raises(UsageError, match=said):
        expand(written(tmp_path, text), CPU, name="my.yaml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cels: []", "unknown key 'cels'.*'cells'"),
        ("cells: [", "is not valid YAML"),
        ("[]", "mapping"),
        ("cells: []", "cells"),
        ("trials: 0\ncells: [{strategy: single}]", "trials"),
        ("defaults: {wrokload: x}\ncells: [{strategy: single}]", "defaults.*'workload'"),
        ("hosts: [{device: tpu}]\ncells: [{strategy: single}]", "hosts.0.device"),
    ],
)
def test_mistakes_in_a_matrix_name_the_key(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        written(tmp_path, text)


@pytest.mark.parametrize("setting", ["batch", "bach=3", "batch=[1"])
def test_bad_settings(setting: str) -> None:
    with pytest.raises(UsageError, match="--set"):
        parse_changes([setting])


@pytest.mark.parametrize("pattern", ["nonsense", "ddp*x7*"])
def test_patterns_that_match_nothing(tmp_path: Path, pattern: str) -> None:
    matrix = written(tmp_path, "defaults: {workload: llama-nano}\ncells: [{strategy: ddp}]")
    for option in ("only", "skip"):
        with pytest.raises(UsageError, match=re.escape(pattern)):
            expand(matrix, CPU, **{option: [pattern]})


@pytest.mark.slow
@pytest.mark.parametrize("name", matrix_names())
def test_every_matrix_of_the_suite_expands(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # As if the host could make namespaces.
    monkeypatch.setattr("harness.links.emulated.unsupported_reason", lambda: "")
    gpus = [Host("cuda", count, size * 2**30) for count, size in ((8, 80), (1, 16), (1, 8))]
    for host in (CPU, *gpus):
        expanded = expand(read_matrix(name), host, name=name)
        assert expanded.cells
        assert all(left.reason for left in expanded.left_out)


def test_full_names_every_strategy_of_the_suite() -> None:
    from harness.seam.registry import strategies

    expanded = expand(read_matrix("full"), CPU)
    ours = {name for name, cls in strategies().items() if cls.__module__.startswith("harness.")}
    cells = [*expanded.cells, *(left.cell for left in expanded.left_out)]
    assert {cell.strategy for cell in cells} == ours


SYSTEMS = {*range(1, 31)} - {25}
"""Numbers of the systems in docs that `full` must cover. The largest model is another command's."""


@pytest.mark.skipif(find_spec("horovod") is None, reason="make setup builds Horovod")
def test_full_and_quick_have_cells_of_every_system_that_run_here() -> None:
    full, quick = (expand(read_matrix(name), CPU) for name in ("full", "quick"))
    runs = {cell.system for cell in full.cells}
    assert {int(system.split()[0]) for system in runs} == SYSTEMS
    assert {left.cell.system for left in full.left_out} <= runs
    # Without libaio or enough locked memory, its offload to disk is left out.
    every = (*quick.cells, *(left.cell for left in quick.left_out))
    assert sorted(cell.system for cell in every) == sorted(runs), "one cell of each"


def test_amounts_of_memory() -> None:
    assert parse_bytes("2GiB") == 2**31
    assert parse_bytes("500MB") == 500_000_000
    assert parse_bytes(7) == 7
    for text in ("lots", "1.2.3GiB", ".", "2iB", "9" * 400):
        with pytest.raises(UsageError, match="is not an amount of memory"):
            parse_bytes(text)


def test_cells_that_train_the_same_share_a_reference() -> None:
    one = Cell(strategy="ddp", devices=2, micro_batches=2, launcher="spawn")
    other = Cell(strategy="single")
    assert one.reference().id == other.reference().id
    assert one.reference().id != Cell(strategy="single", seed=1).reference().id
    half = one.model_copy(update={"precision": "bf16"})
    assert half.reference().id != other.reference().id, "compared in its own precision"
