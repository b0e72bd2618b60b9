"""Recorded facts about the host; tests/gpu covers its GPUs."""

from __future__ import annotations

import pytest
import torch

from harness.host.environment import environment
from harness.record.run_record import RunRecord


def test_the_environment_is_an_allow_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET_TOKEN", "hunter2")
    found = environment()
    assert set(found) <= {column.name for column in RunRecord.columns()}
    assert "hunter2" not in str(found)
    assert found["cpu_cores"] >= 1
    assert found["torch_version"].startswith(torch.__version__.partition("+")[0])
