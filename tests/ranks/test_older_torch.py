"""What an older torch lacks is done without."""

from __future__ import annotations

import signal
from typing import Any

import pytest
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from tests.ranks.conftest import RunCells, cell

INIT, SHUTDOWN = LocalElasticAgent.__init__, LocalElasticAgent._shutdown


def test_the_agent_before_torch_2_12(run_cells: RunCells, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its constructor and its end take no time limit."""

    def init(
        self: LocalElasticAgent, spec: Any, logs_specs: Any, start_method: str = "spawn"
    ) -> None:
        INIT(self, spec, logs_specs, start_method)

    def shutdown(self: LocalElasticAgent, death_sig: signal.Signals = signal.SIGTERM) -> None:
        SHUTDOWN(self, death_sig)

    monkeypatch.setattr(LocalElasticAgent, "__init__", init)
    monkeypatch.setattr(LocalElasticAgent, "_shutdown", shutdown)
    row = run_cells(cell("ddp", launcher="elastic")).trials.iloc[0]
    assert row["status"] == "ok"
