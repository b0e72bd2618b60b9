"""A parameter server over RPC: workers send it gradients, it holds the optimizer and answers with
new parameters."""

from __future__ import annotations

import dataclasses
from typing import Literal

from harness.spec.training import EXACT, Layout, States, Tolerance, TrainStep
from harness.strategy import Capabilities, Cell, CostModel, Job, Strategy
from harness.strategy.formulas import model_states
from harness.workloads import Workload
from harness.workloads.counts import ModelFacts


class ParameterServer(Strategy):
    """A parameter server over torch.distributed.rpc: one worker a device, and one server with the
    optimizer, in host memory.

    The server's arithmetic is all done in its training step; its RPC threads only wait.
    Asynchronously, it updates once for each worker and step (see `server_optimizer`), and no worker
    gets more than a step ahead of the slowest. What remains is staleness: a worker's parameters
    lack up to (N-1)/N of a step's gradients, so its losses lag by part of a step; and AdamW moves
    by 1/N of a step what only one worker has gradients for, such as the embedding of a rare token.
    """

    capabilities = Capabilities(
        process_group=False,
        # a worker waits for its last message
        fixed_steps=True,
    )

    mode: Literal["synchronous", "asynchronous"] = "synchronous"
    """Update once a step with the average of all gradients, or with each worker's as they come."""
    transport: Literal["auto", "tcp"] = "auto"
    """What TensorPipe carries bytes by; auto: shared memory within a node, where the bytes sent are
    not known."""

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
        """The server's: a worker keeps parameters alone.

        Within a step, the server has the gradients of all.
        """
        return dataclasses.replace(
            model_states(cell, facts), transient=float(layout.data * facts.trained_bytes)
        )

    def disk_or_host_bytes(self, cell: Cell, layout: Layout, facts: ModelFacts) -> float:
        """All gradients in and all parameters out, through the server."""
        return 2.0 * layout.data * facts.trained_bytes
