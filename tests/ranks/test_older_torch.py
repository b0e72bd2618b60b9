"""The suite does without what older versions of torch lack."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.ranks.conftest import RunCells, cell

INIT, SHUTDOWN = LocalElasticAgent.__init__, LocalElasticAgent._shutdown


def test_the_agent_before_torch_2_12_is_stopped_without_a_time_limit(
    run_cells: RunCells, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent's constructor and shutdown take no time limit before torch 2.12."""

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


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("axis", ["all_reduce", "zero1"])
def test_split_parameters_train_after_a_first_forward_without_gradients(axis: str) -> None:
    """A pipeline stage infers its shapes by a forward pass without gradients."""
    from harness.strategies.three_d import wrap_stage

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        stage: Any = nn.Sequential(nn.Linear(4, 6))
        parallelize_module(stage, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel()})
        wrapped = wrap_stage(stage, axis, dist.group.WORLD)
        trained = list(wrapped.parameters())
        with torch.no_grad():
            wrapped(torch.ones(2, 4))
        wrapped(torch.ones(2, 4)).sum().backward()
        assert [parameter.grad is not None for parameter in trained] == [True, True]
    finally:
        dist.destroy_process_group()
