"""Runs one node's ranks with torchrun's agent, over the warm fork server."""

from __future__ import annotations

import functools
import multiprocessing.connection
import signal
from typing import TYPE_CHECKING, Any

from harness.host.tcp_store import RENDEZVOUS_SECONDS, open_store
from harness.worker.spec import TrialSpec
from harness.worker.worker import run_rank

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

_AGENT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_SHUTDOWN_SECONDS = 2


@functools.cache
def _agent_class() -> type[LocalElasticAgent]:
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    class Agent(LocalElasticAgent):
        """Blocks until a rank ends or answers; torch's agent polls every 0.1 s."""

        def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
            context: Any = self._pcontext
            ends = [p.sentinel for p in context._pc.processes]
            answers = [
                q._reader
                for rank, q in context._ret_vals.items()
                if rank not in context._return_values
            ]
            multiprocessing.connection.wait(ends + answers)
            result: RunResult = super()._monitor_workers(worker_group)
            return result

        def _exit_barrier(self) -> None:
            """Skips torch's barrier, as the caller waits for all nodes."""

        def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, timeout: int = 0) -> None:
            """Stops the ranks within seconds; before torch 2.12, agents take no time limit."""
            if self._pcontext:
                self._pcontext.close(death_sig, _SHUTDOWN_SECONDS)
            super()._shutdown(death_sig)

    return Agent


def _rendezvous(spec: TrialSpec, store: Store | None) -> StaticTCPRendezvous:
    """Returns torch's static rendezvous over an open store, which cannot lose its port. c10d's
    would wait up to 0.3 s for an election."""
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

    if store is None and spec.node == 0:
        store = open_store(spec.rendezvous[0])
    address, port = spec.rendezvous[0], getattr(store, "port", spec.rendezvous[1])
    rendezvous = StaticTCPRendezvous(
        address, port, spec.node, spec.cell.nodes, spec.token, RENDEZVOUS_SECONDS
    )
    rendezvous._store = store
    return rendezvous


def run_elastic(spec: TrialSpec, store: Store | None = None) -> dict[int, int]:
    """Runs one node's ranks; returns exit codes by failed rank, in the order they were noticed.
    `store`: node 0's."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException

    rendezvous = _rendezvous(spec, store)
    worker_spec = WorkerSpec(
        role="rank",
        local_world_size=len(spec.ranks),
        entrypoint=run_rank,
        args=(spec,),
        rdzv_handler=rendezvous,
        max_restarts=spec.max_restarts,
        monitor_interval=0.001,
        local_addr="localhost",
    )
    logs = DefaultLogsSpecs(log_dir=spec.scratch)
    agent = _agent_class()(worker_spec, logs, start_method="forkserver")
    handlers = {number: signal.getsignal(number) for number in _AGENT_SIGNALS}
    try:
        result = agent.run()
        codes = {rank: failure.exitcode for rank, failure in result.failures.items()}
        # The agent names one rank, which may have failed because of another, and ends the others by
        # SIGTERM.
        context: Any = agent._pcontext
        for rank, process in zip(spec.ranks, context._pc.processes if codes else (), strict=False):
            if process.exitcode not in (None, -signal.SIGTERM):
                codes.setdefault(rank, process.exitcode)
        return codes
    except SignalException as stop:
        raise KeyboardInterrupt from stop
    finally:
        rendezvous.shutdown()
        for number, handler in handlers.items():  # the agent leaves its own behind
            signal.signal(number, handler)
