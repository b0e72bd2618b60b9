"""What is recorded of the host; of its GPUs see tests/gpu."""

from __future__ import annotations

import pytest

from harness.host.environment import environment
from harness.record.schema import RUNS


def test_the_environment_is_an_allow_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET_TOKEN", "hunter2")
    found = environment()
    assert set(found) <= {name for name, _, _ in RUNS}
    assert "hunter2" not in str(found)
    assert found["cpu_cores"] >= 1
    assert found["torch_version"].startswith("2.13")
