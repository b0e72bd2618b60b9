"""A parameter server over RPC."""

from __future__ import annotations

import dataclasses
from typing import Literal

from harness.spec.training import EXACT, Layout, States, Tolerance, TrainStep
from harness.strategy import Capabilities, Cell, CostModel, Job, Strategy
from harness.strategy.formulas import model_states
from harness.workloads import Workload
from harness.workloads.counts import ModelFacts


class ParameterServer(Strategy):
    """A parameter server over torch.distributed.rpc, with its optimizer in host memory.

    There is one worker per device. The server computes in its training step; its RPC threads only
    wait. In asynchronous mode it updates once per worker and step (see `server_optimizer`), and no
    worker gets more than a step ahead of the slowest. Staleness remains: a worker's parameters lack
    up to (N-1)/N of a step's gradients, so its losses lag. Parameters with gradients from only one
    worker, such as a rare token's embedding, move by 1/N of an AdamW step.
    """

    capabilities = Capabilities(
        process_group=False,
        # A worker must know its last step to wait for its last message.
        fixed_steps=True,
    )

    mode: Literal["synchronous", "asynchronous"] = "synchronous"
    """Update once a step with the average of all gradients, or with each worker's as they arrive.
    """
    transport: Literal["auto", "tcp"] = "auto"
    """Transport of TensorPipe; auto: shared memory within a node, where bytes sent are unknown."""

    def layout(self, devices: int) -> Layout:
        return Layout(data=devices, servers=1)

    def tolerance(self, cell: Cell, workload: Workload) -> Tolerance:
        if self.mode == "synchronous" or cell.devices == 1:
            return EXACT
        lacking = 1 - 1 / cell.devices
        return Tolerance(
            0.2 * lacking,
            0.5 + 0.25 * lacking,
            "each worker's gradients are applied alone, to parameters that have moved on",
        )

    @property
    def costs(self) -> ParameterServerCosts:
        return ParameterServerCosts(self)

    def setup(self, job: Job) -> TrainStep:
        from harness.strategies import _parameter_server as processes

        model, tcp = job.model(), self.transport == "tcp"
        together = job.layout.data if self.mode == "synchronous" else 1
        if job.rank < job.layout.data:
            job.register(model, over_tcp=tcp, waits=processes.waits())
            processes.join(job, tcp)
            return processes.work(job, model)
        optimizer = processes.server_optimizer(job, model, updates=job.layout.data // together)
        job.register(model, optimizer, over_tcp=tcp, waits=processes.waits())
        processes.join(job, tcp)
        return processes.serve(job, optimizer, together)


class ParameterServerCosts(CostModel[ParameterServer]):
    def states(self, cell: Cell, layout: Layout, facts: ModelFacts) -> States:
        """Returns the server's states with all workers' gradients; a worker keeps only
        parameters."""
        return dataclasses.replace(
            model_states(cell, facts), transient=float(layout.data * facts.trained_bytes)
        )

    def disk_or_host_bytes(self, cell: Cell, layout: Layout, facts: ModelFacts) -> float:
        """Returns bytes through the server: all gradients in, all parameters out."""
        return 2.0 * layout.data * facts.trained_bytes
