"""Matrix files expand into cells, and mistakes in them are reported."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from bench.expand import expand
from bench.matrix import HOME, Host, matrix_names, parse_bytes, parse_changes, read_matrix
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
    assert [(c.devices, c.precision) for c in cells] == [
        (1, "fp32"),
        (1, "bf16"),
        (2, "fp32"),
        (2, "bf16"),
    ]
    assert {c.global_batch for c in cells} == {8}
    assert {c.parity_steps for c in cells} == {13}


def test_weak_scaling_multiplies_the_batch(tmp_path: Path) -> None:
    matrix = written(
        tmp_path,
        "cells: [{strategy: ddp, workload: llama-nano, batch: 4, devices: [1, 2], regime: weak}]",
    )
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
    reasons = {(x.cell.strategy, x.cell.devices): (x.status, x.reason) for x in expanded.left_out}
    assert reasons["single", 2] == ("refused", "single runs on 1 device, not on 2")
    assert reasons["ddp", 3][0] == "refused"
    assert "use a multiple of 3" in reasons["ddp", 3][1]
    assert (
        "host has 1" in expand(matrix, GPU).left_out[0].reason
        or "single" in expand(matrix, GPU).left_out[0].reason
    )


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
    ("text", "said"),
    [
        ("cells: [{strategy: dpp, workload: llama-nano}]", ["unknown strategy 'dpp'", "ddp"]),
        (
            "cells: [{strategy: ddp, workload: llama-nano, options: {bucket: 1}}]",
            ["no option 'bucket'", "bucket_cap_mb"],
        ),
        (
            "cells: [{strategy: ddp, workload: llama-nano, options: {bucket_cap_mb: big}}]",
            ["bucket_cap_mb", "number", "'big'"],
        ),
        (
            "cells: [{strategi: ddp}]",
            ["cells[0]", "unknown key 'strategi'", "did you mean 'strategy'"],
        ),
        ("cels: []", ["unknown key 'cels'", "did you mean 'cells'"]),
        ("cells: [{strategy: ddp, workload: gpt3}]", ["unknown workload 'gpt3'", "gpt2-mini"]),
        (
            "cells: [{strategy: ddp, workload: llama-nano, precision: fp8}]",
            ["cells[0]", "precision", "'fp8'"],
        ),
        (
            "cells: [{strategy: ddp, workload: llama-nano, devices: two}]",
            ["whole numbers", "'two'"],
        ),
        (
            "cells: [{strategy: ddp, workload: llama-nano, data: 'text:/no/such'}]",
            ["no file '/no/such'"],
        ),
        (
            "cells: [{strategy: ddp, workload: llama-nano, data: 'novel'}]",
            ["unknown data 'novel'", "stdlib"],
        ),
        (
            "cells: [{strategy: ddp, workload: llama-nano, sequence_length: 5000}]",
            ["5000", "positions"],
        ),
        (
            "cells: [{strategy: ddp, workload: llama-nano, memory_limit_bytes: lots}]",
            ["'lots'", "2GiB"],
        ),
        ("cells: [", ["is not valid YAML"]),
        ("[]", ["mapping"]),
        ("cells: []", ["cells"]),
        ("trials: 0\ncells: [{strategy: single}]", ["trials"]),
        (
            "defaults: {wrokload: x}\ncells: [{strategy: single}]",
            ["defaults", "'wrokload'", "'workload'"],
        ),
        ("hosts: [{device: tpu}]\ncells: [{strategy: single}]", ["hosts.0.device"]),
    ],
)
def test_mistakes_name_the_place_and_the_fix(tmp_path: Path, text: str, said: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        expand(written(tmp_path, text), CPU, name="my.yaml")
    for word in said:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


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
    monkeypatch.setattr(
        "harness.links.emulated.unsupported_reason", lambda: ""
    )  # as if the host could make namespaces
    for host in (
        CPU,
        Host("cuda", 8, 80 * 2**30),
        Host("cuda", 1, 16 * 2**30),
        Host("cuda", 1, 8 * 2**30),
    ):
        expanded = expand(read_matrix(name), host, name=name)
        assert expanded.cells
        assert all(left.reason for left in expanded.left_out)


def test_full_names_every_strategy_of_the_suite() -> None:
    from harness.seam.registry import strategies

    expanded = expand(read_matrix("full"), CPU)
    ours = {name for name, cls in strategies().items() if cls.__module__.startswith("harness.")}
    assert {
        c.strategy for c in (*expanded.cells, *(left.cell for left in expanded.left_out))
    } == ours


# Systems that the suite must cover; a change here changes its scope.
SYSTEMS = {
    "1 single process",
    "2 DataParallel",
    "3 DDP by spawn",
    "4 DDP by torchrun",
    "5 apex-style AMP",
    "6 Horovod",
    "7 Accelerate",
    "8 ZeRO",
    "9 ZeRO offload",
    "10 memory-centric tiling",
    "11 FSDP",
    "12 fairscale",
    "13 vertical model parallel",
    "14 pipeline parallel",
    "15 tensor parallel",
    "16 3D parallel",
    "17 parameter server",
    "18 parameter averaging",
    "19 gradient accumulation",
    "20 Trainer",
    "21 PEFT",
    "22 lower precision",
    "23 synchronised batch norm",
    "24 uneven memory",
    "26 sequence parallel",
    "27 expert parallel",
    "28 optimizers",
    "29 float8",
    "30 DiLoCo",
}


@pytest.mark.skipif(find_spec("horovod") is None, reason="make setup builds Horovod")
def test_full_and_quick_have_cells_of_every_system_that_run_here() -> None:
    full, quick = (expand(read_matrix(name), CPU) for name in ("full", "quick"))
    assert {cell.system for cell in full.cells} == SYSTEMS
    assert {left.cell.system for left in full.left_out} <= SYSTEMS
    # Without libaio or enough locked memory, its offload to disk is left out.
    every = (*quick.cells, *(left.cell for left in quick.left_out))
    assert sorted(cell.system for cell in every) == sorted(SYSTEMS), "one cell of each"
    families = yaml.safe_load((HOME.parent / "maxsize.yaml").read_text())["cells"]
    assert {family["system"] for family in families} == {"25 largest trainable model"}


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
