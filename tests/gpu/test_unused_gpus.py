"""A run's first line, doctor and the report mention GPUs that are not used."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from bench.cli import app, terminal
from harness.host.amd import amd_gpus
from harness.host.environment import unused_gpus
from harness.record.store import Store
from reports.run_report import ran
from reports.run_sections import run_text
from tests.gpu.fake_nvml import h100_node, install

DRIVER = "driver 550.54"
REMEDY = "PARALLELISM_BENCH_TORCH_CUDA=12 make setup"
NOTHING = ["run", "--matrix", "smoke", "--only", "ddp", "--set", "device=cuda"]
"""Command that launches nothing on a host without usable GPUs: its cells are left out."""


@pytest.fixture
def driver_550(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Eight H100 with a driver that is too old for torch, in an empty working folder."""
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 29, 7))
    host = h100_node()
    host.driver, host.cuda = "550.54", 12040
    install(monkeypatch, host)
    monkeypatch.chdir(tmp_path)


def call(*words: str) -> int:
    return int(app(list(words), standalone_mode=False) or 0)


@pytest.mark.usefixtures("driver_550")
def test_a_dry_run_says_so_on_stderr_and_to_machines(capsys: pytest.CaptureFixture[str]) -> None:
    call("run", "--matrix", "smoke", "--dry-run", "--json")
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert DRIVER in line
    assert REMEDY in line
    assert json.loads(out)["gpus_unused"] == unused_gpus()


@pytest.mark.usefixtures("driver_550")
def test_a_plan_for_another_host_says_nothing_about_this_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    call("run", "--matrix", "smoke", "--dry-run", "--json", "--host", "8 x h100-80gb")
    out, err = capsys.readouterr()
    assert (err, json.loads(out)["gpus_unused"]) == ("", None)


@pytest.mark.usefixtures("driver_550")
def test_on_a_terminal_it_is_the_first_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = io.StringIO()
    shown = Console(file=screen, force_terminal=True, color_system=None, soft_wrap=True)
    monkeypatch.setattr(terminal, "console", lambda quiet=False: shown)
    call("run", "--matrix", "smoke", "--dry-run")
    assert DRIVER in screen.getvalue().splitlines()[0]
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("driver_550")
def test_a_run_and_its_report_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    call(*NOTHING, "--json")
    out, err = capsys.readouterr()
    ended = json.loads(out)
    assert DRIVER in err.splitlines()[0]
    assert DRIVER in ended["gpus_unused"]
    head = Path(ended["report"]).read_text().partition("<main>")[0].replace("<wbr>", "")
    assert DRIVER in head
    assert REMEDY in head
    assert "no GPU<" not in head
    text = run_text(ran(Store(Path("results")).load())).text
    assert "driver 550" in text.partition("\n## ")[0]


@pytest.mark.usefixtures("driver_550")
def test_doctor_says_so_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bench.checks.troubles", list)
    monkeypatch.setattr(sys.modules["bench.cli.doctor"], "_strategies", dict)
    call("doctor", "--json")
    out, err = capsys.readouterr()
    assert DRIVER in err
    assert DRIVER in out


@pytest.mark.usefixtures("driver_550")
def test_a_driver_too_old_for_every_build_must_be_updated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    host = h100_node()
    host.driver, host.cuda = "470.256.02", 11040
    install(monkeypatch, host)
    reason = unused_gpus() or ""
    assert "driver 580 or newer" in reason
    assert REMEDY not in reason


def node(folder: Path, number: int, **facts: int) -> None:
    place = folder / "class/kfd/kfd/topology/nodes" / str(number)
    place.mkdir(parents=True)
    (place / "properties").write_text("".join(f"{k} {v}\n" for k, v in facts.items()))


def test_amds_gpus_are_found_in_the_kernels_topology(tmp_path: Path) -> None:
    node(tmp_path, 0, cpu_cores_count=64, simd_count=0, gfx_target_version=0)
    for number in (1, 2):
        node(tmp_path, number, cpu_cores_count=0, simd_count=1216, gfx_target_version=90402)
    node(tmp_path, 3, cpu_cores_count=0, simd_count=440, gfx_target_version=90010)
    assert amd_gpus(tmp_path) == {"gfx942": 2, "gfx90a": 1}
    assert amd_gpus(tmp_path / "nothing") == {}
