"""Recorded facts about the host; tests/gpu covers its GPUs."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from harness.host.environment import environment, git_commit
from harness.record.run_record import RunRecord


def test_the_environment_is_an_allow_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SECRET_TOKEN", "hunter2")
    found = environment()
    assert set(found) <= {column.name for column in RunRecord.columns()}
    assert "hunter2" not in str(found)
    assert found["cpu_cores"] >= 1
    assert found["torch_version"].startswith(torch.__version__.partition("+")[0])


def test_the_commit_is_that_of_this_checkout() -> None:
    root = Path(__file__).parents[2]
    head = subprocess.run(
        ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True
    )
    commit = git_commit()
    if head.returncode:  # a copy of the source without its history
        assert commit is None
    else:
        assert commit is not None
        assert commit.removesuffix("+") == head.stdout.strip()
