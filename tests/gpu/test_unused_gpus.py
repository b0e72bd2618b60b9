"""GPUs that this torch cannot use, and how runs, reports and doctor mention them."""

from __future__ import annotations

import json
from pathlib import Path

import pynvml
import pytest
import torch

from bench.cli import app
from harness.host.environment import device_type, environment, unused_gpus
from tests.gpu.fake_nvml import h100_node, install, rtx_4090

REMEDY = "PARALLELISM_BENCH_TORCH_CUDA=12 make setup"
ARCHITECTURES = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]
"""Architectures of torch 2.13 for CUDA 13.0."""


@pytest.fixture
def cuda_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes torch look like a build for CUDA 13.0."""
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    code = " ".join(ARCHITECTURES)
    monkeypatch.setattr(torch._C, "_cuda_getArchFlags", lambda: code, raising=False)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))


def reason_with(monkeypatch: pytest.MonkeyPatch, driver: str, cuda: int) -> str:
    host = h100_node()
    host.driver, host.cuda = driver, cuda
    install(monkeypatch, host)
    reason = unused_gpus()
    assert device_type() == ("cpu" if reason else "cuda")
    return reason or ""


@pytest.mark.usefixtures("cuda_build")
def test_an_old_driver_means_cpu_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an old driver, every rank on device `cuda` would fail."""
    assert reason_with(monkeypatch, "580.95.05", 13000) == ""
    assert reason_with(monkeypatch, "590.10", 13010) == ""
    assert reason_with(monkeypatch, "570.86.15", 12080) == (
        "driver 570.86.15 supports CUDA up to 12.8, torch 2.13.0+cu130 needs CUDA 13.0;"
        f" install driver 580 or newer, or run `{REMEDY}`"
    )
    older_than_any_build = reason_with(monkeypatch, "470.256.02", 11040)
    assert "driver 580 or newer" in older_than_any_build
    assert REMEDY not in older_than_any_build


@pytest.mark.usefixtures("cuda_build")
@pytest.mark.parametrize(
    ("capability", "built", "usable"),
    [
        ((7, 0), ARCHITECTURES, False),
        ((7, 5), ARCHITECTURES, True),
        ((8, 9), ARCHITECTURES, True),
        ((9, 0), ["sm_90a"], True),
        ((12, 1), ["sm_120a"], False),
        ((12, 1), ["sm_120", "compute_120"], True),
        ((13, 0), ["sm_120"], False),
        ((13, 0), ["sm_80", "compute_120"], True),
        ((8, 0), ["sm_86"], False),
    ],
)
def test_a_gpu_that_torch_has_no_code_for_means_cpu(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    built: list[str],
    usable: bool,
) -> None:
    """For example, torch 2.13 for CUDA 13 has no code for Volta (7.0)."""
    host = rtx_4090()
    host.gpus[0].capability = capability
    install(monkeypatch, host)
    monkeypatch.setattr(torch._C, "_cuda_getArchFlags", lambda: " ".join(built), raising=False)
    assert device_type() == ("cuda" if usable else "cpu")
    reason = unused_gpus() or ""
    assert (f"capability {'.'.join(map(str, capability))} of GPU 0" in reason) == (not usable)
    assert (REMEDY in reason) == (capability == (7, 0))


def test_a_torch_without_cuda_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, rtx_4090())
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    row = environment()
    assert (row["gpus"], device_type()) == ([], "cpu")
    assert "CUDA" in str(row["gpus_unused"])
    assert "NVIDIA GeForce RTX 4090" in str(row["gpus_unused"])
    (facts,) = json.loads(str(row["gpu_facts"]))
    settings = [facts[name] for name in ("ecc", "persistence", "power_limit_watts")]
    assert settings == [None, False, 450.0]


def test_a_driver_that_does_not_answer_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example, after an update of the driver without a restart."""

    def start() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)

    monkeypatch.setattr(install(monkeypatch, rtx_4090()), "nvmlInit", start)
    reason = unused_gpus() or ""
    assert "version mismatch" in reason
    assert "nvidia-smi" in reason
    assert device_type() == "cpu"


@pytest.fixture
def reason(cuda_build: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Why eight H100 with an old driver are not used; the working folder is empty."""
    monkeypatch.chdir(tmp_path)
    return reason_with(monkeypatch, "550.54", 12040)


def test_a_dry_run_says_so_on_stderr_and_to_machines(
    reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A plan for another host says nothing about this one."""
    words = ["run", "--matrix", "smoke", "--dry-run", "--json"]
    app(words, standalone_mode=False)
    out, err = capsys.readouterr()
    assert reason in err
    assert json.loads(out)["gpus_unused"] == reason
    app([*words, "--host", "8 x h100-80gb"], standalone_mode=False)
    out, err = capsys.readouterr()
    assert (err, json.loads(out)["gpus_unused"]) == ("", None)


def test_a_run_and_its_report_say_so(reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its cells are left out, so nothing is launched."""
    words = ["run", "--matrix", "smoke", "--only", "ddp", "--set", "device=cuda", "--json"]
    app(words, standalone_mode=False)
    out, err = capsys.readouterr()
    ended = json.loads(out)
    assert "driver 550.54" in err.splitlines()[0]
    assert ended["gpus_unused"] == reason
    head = Path(ended["report"]).read_text().partition("<main>")[0].replace("<wbr>", "")
    assert "driver 550.54" in head
    assert REMEDY in head
    assert "no GPU<" not in head
