"""Matrix files expand into cells, and mistakes in them are reported."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from bench.expand import expand
from bench.matrix import Host, Matrix, matrix_names, parse_bytes, parse_changes, read_matrix
from harness.cell.cell import Cell
from harness.cell.errors import UsageError
from harness.seam.registry import strategies

CPU = Host("cpu", 2, 24 * 2**30)
GPU = Host("cuda", 1, 80 * 2**30)


def matrix_of(*cells: str) -> Matrix:
    """Returns a matrix of ddp cells of llama-nano, with the given axes as a file has them."""
    plain = {"strategy": "ddp", "workload": "llama-nano"}
    return Matrix(cells=[plain | yaml.safe_load(f"{{{axes}}}") for axes in cells])


def read(tmp_path: Path, text: str) -> Matrix:
    file = tmp_path / "my.yaml"
    file.write_text(text)
    return read_matrix(str(file))


def test_lists_are_combined() -> None:
    cells = expand(matrix_of("devices: [1, 2], precision: [fp32, bf16]"), CPU).cells
    combined = [(1, "fp32"), (1, "bf16"), (2, "fp32"), (2, "bf16")]
    assert [(c.devices, c.precision) for c in cells] == combined
    assert {(c.global_batch, c.parity_steps) for c in cells} == {(8, 13)}


def test_weak_scaling_multiplies_the_batch() -> None:
    matrix = matrix_of("batch: 4, devices: [1, 2], regime: weak")
    assert [c.global_batch for c in expand(matrix, CPU).cells] == [4, 8]


def test_the_host_chooses_sizes(tmp_path: Path) -> None:
    matrix = read(
        tmp_path,
        "workloads: {main: llama-nano}\ndefaults: {workload: main}\nhosts: [{device: cuda,"
        " memory_at_least: 60GiB, workloads: {main: llama-1b}, defaults: {batch: 32}}]\ncells:"
        " [{strategy: single}]",
    )
    on_cpu, on_gpu = expand(matrix, CPU).cells[0], expand(matrix, GPU).cells[0]
    assert (on_cpu.workload, on_cpu.device, on_cpu.global_batch) == ("llama-nano", "cpu", 8)
    assert (on_gpu.workload, on_gpu.device, on_gpu.global_batch) == ("llama-1b", "cuda", 32)


def test_cells_that_cannot_run_are_left_out() -> None:
    expanded = expand(matrix_of("strategy: [single, ddp], devices: 2", "devices: 3"), CPU)
    assert [c.label for c in expanded.cells] == ["ddp"]
    left = {(x.cell.strategy, x.cell.devices): x.status for x in expanded.left_out}
    assert left == {("single", 2): "refused", ("ddp", 3): "refused"}


def test_ranks_that_save_a_checkpoint_need_gpus_too() -> None:
    axes = "strategy: single, checkpoint: full, checkpoint_from: [fsdp2 x2, single x1]"
    expanded = expand(matrix_of(axes), GPU)
    assert [c.checkpoint_from for c in expanded.cells] == ["single x1"]
    assert [left.status for left in expanded.left_out] == ["unavailable"]


def test_many_devices_are_what_the_host_has() -> None:
    matrix = matrix_of("devices: [1, many]")
    for host, devices in ((CPU, [1, 2]), (GPU, [1]), (Host("cuda", 6, 2**34), [1, 4])):
        assert [c.devices for c in expand(matrix, host).cells] == devices


def test_equal_cells_are_run_once() -> None:
    assert len(expand(matrix_of("", "strategy: [ddp, single]"), CPU).cells) == 2


def test_only_and_skip_choose_cells() -> None:
    matrix = matrix_of("strategy: [single, ddp]", "devices: 2")
    assert len(expand(matrix, CPU, only=["ddp"]).cells) == 2
    assert [c.strategy for c in expand(matrix, CPU, skip=["ddp"]).cells] == ["single"]
    assert [c.devices for c in expand(matrix, CPU, only=["ddp*x2*"]).cells] == [2]


def test_set_changes_all_cells() -> None:
    changes = parse_changes(["batch=16", "precision=[fp32, bf16]"])
    cells = expand(matrix_of(""), CPU, changes=changes).cells
    assert [(c.global_batch, c.precision) for c in cells] == [(16, "fp32"), (16, "bf16")]


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        ("strategy: dpp", "unknown strategy 'dpp'.*ddp"),
        ("options: {bucket: 1}", "no option 'bucket'.*bucket_cap_mb"),
        ("options: {bucket_cap_mb: big}", "bucket_cap_mb.*number.*'big'"),
        ("workload: gpt3", "unknown workload 'gpt3'.*gpt2-mini"),
        ("precision: fp8", r"cells\[0\].*precision.*'fp8'"),
        ("devices: two", "whole numbers.*'two'"),
        ("data: 'text:/no/such'", "no file '/no/such'"),
        ("data: 'novel'", "unknown data 'novel'.*stdlib"),
        ("sequence_length: 5000", "5000.*positions"),
        ("memory_limit_bytes: lots", "'lots'.*2GiB"),
    ],
)
def test_mistakes_in_a_cell_name_the_key_and_the_fix(axes: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        expand(matrix_of(axes), CPU, name="my.yaml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cells: [{strategi: ddp}]", r"cells\[0\].*'strategi'.*'strategy'"),
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
        read(tmp_path, text)


@pytest.mark.parametrize("setting", ["batch", "bach=3", "batch=[1"])
def test_bad_settings_are_refused(setting: str) -> None:
    with pytest.raises(UsageError, match="--set"):
        parse_changes([setting])


@pytest.mark.parametrize("option", ["only", "skip"])
@pytest.mark.parametrize("pattern", ["nonsense", "ddp*x7*"])
def test_patterns_that_match_nothing(option: str, pattern: str) -> None:
    with pytest.raises(UsageError, match=re.escape(pattern)):
        expand(matrix_of(""), CPU, **{option: [pattern]})


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.thorough] * read_matrix(name).only_what_fits)
        for name in matrix_names()
    ],
)
def test_every_matrix_of_the_suite_expands(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # As if the host could make namespaces.
    monkeypatch.setattr("harness.links.emulated.unsupported_reason", lambda: "")
    gpus = [Host("cuda", count, size * 2**30) for count, size in ((8, 80), (1, 16), (1, 8))]
    for host in (CPU, *gpus):
        expanded = expand(read_matrix(name), host, name=name)
        assert expanded.cells or name == "published", "which is about H100 and H200"
        assert all(left.reason for left in expanded.left_out)


SYSTEMS = {*range(1, 31)} - {25}
"""Numbers of the systems in docs that `full` must cover. The largest model is another command's."""


@pytest.mark.skipif(find_spec("horovod") is None, reason="make setup builds Horovod")
def test_full_and_quick_have_cells_of_every_system_and_full_of_every_strategy() -> None:
    full, quick = (expand(read_matrix(name), CPU) for name in ("full", "quick"))
    runs = {cell.system for cell in full.cells}
    assert {int(system.split()[0]) for system in runs} == SYSTEMS
    assert {left.cell.system for left in full.left_out} <= runs
    # Without libaio or enough locked memory, its offload to disk is left out.
    every, all_quick = (
        [*found.cells, *(left.cell for left in found.left_out)] for found in (full, quick)
    )
    assert sorted(cell.system for cell in all_quick) == sorted(runs), "one cell of each"
    ours = {name for name, cls in strategies().items() if cls.__module__.startswith("harness.")}
    assert {cell.strategy for cell in every} == ours


def test_amounts_of_memory_are_parsed() -> None:
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


def test_what_a_gpu_cannot_hold_is_refused_with_its_need() -> None:
    """Only the states count, so that nothing that might run is left out."""
    small = Host("cuda", 2, 24 * 2**30)
    expanded = expand(read_matrix("finetune"), small, model="llama-8b")
    reasons = {left.cell.label: left.reason for left in expanded.left_out}
    assert "needs at least 44.9 GiB per device by its formulas" in reasons["fsdp2"]
    assert {cell.workload for cell in expanded.cells} == {
        "llama-8b+lora",
        "llama-8b+nf4+lora",
        "llama-8b+int8+lora",
    }
