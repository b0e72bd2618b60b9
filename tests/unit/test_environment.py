"""What is recorded of the host; GPUs by a stand-in for NVML, since the tests need none."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from harness.environment import environment, gpus
from harness.schema import RUNS


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML as it would answer for two GPUs."""
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: ("A", "B")[index],
        nvmlDeviceGetHandleByUUID=lambda uuid: {"GPU-b": "B"}[uuid],
        nvmlDeviceGetName=lambda handle: f"GPU {handle}",
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(total=2**30),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("visible", "names"),
    [(None, ["GPU A", "GPU B"]), ("1", ["GPU B"]), ("1,0", ["GPU B", "GPU A"]), ("GPU-b", ["GPU B"]), ("", []), ("-1", [])],
)
def test_only_visible_gpus_count(monkeypatch: pytest.MonkeyPatch, visible: str | None, names: list[str]) -> None:
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [name for name, _ in gpus.__wrapped__()] == names


def test_no_driver_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver() -> None:
        raise RuntimeError("NVML shared library not found")

    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(nvmlInit=no_driver))
    assert gpus.__wrapped__() == ()


def test_the_environment_is_an_allow_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET_TOKEN", "hunter2")
    found = environment()
    assert set(found) <= {name for name, _, _ in RUNS}
    assert "hunter2" not in str(found)
    assert found["cpu_cores"] >= 1
    assert found["torch_version"].startswith("2.13")
