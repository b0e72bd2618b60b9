from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import Any

from harness.launch.outcome import Outcome, RankOutputs, classify_end
from harness.nodes.agent import Node
from harness.nodes.protocol import LEAST_READ_RATE, Offer
from harness.worker.spec import TrialSpec

OTHERS_SECONDS = 3.0
"""Seconds that other nodes have to report a failure before their ranks are killed."""
END_SECONDS = 2.0
"""Seconds to wait after losing a node, for an interrupt if the job is ending."""
ANSWER_SECONDS = 15.0
"""Seconds for a node to answer after a kill or the time limit."""


class Trial:
    """Runs the part of every node, which all end if one fails, and shifts times to the
    coordinator's clock."""

    def __init__(
        self,
        lose: Callable[[Node, str], None],
        nodes: Sequence[Node],
        specs: Sequence[TrialSpec],
        on_progress: Callable[[int, float], None] | None,
    ) -> None:
        self.lose, self.on_progress = lose, on_progress
        self.nodes, self.specs = list(nodes), list(specs)
        self.cell = specs[0].cell
        self.left = RankOutputs()
        self.lost: list[str] = []
        self.open: dict[Any, Node] = {}
        self.sent_at = 0.0

    def run(self) -> Outcome:
        started_at, begin = time.time(), time.perf_counter()
        interrupted = False
        try:
            if self._start():
                self._gather(self.cell.time_limit_seconds + ANSWER_SECONDS)
            if self.lost:
                time.sleep(END_SECONDS)
        except KeyboardInterrupt:
            interrupted = True
        while self.open:
            self._stop()
            with contextlib.suppress(KeyboardInterrupt):  # repeated request, already in progress
                self._gather(ANSWER_SECONDS)
        self.left.interrupted |= interrupted
        end = classify_end(self.cell, self.specs[0].processes, self.left, "; ".join(self.lost))
        return dataclasses.replace(
            end,
            started_at=started_at,
            wall_seconds=time.perf_counter() - begin,
            launcher=self.cell.launcher,
            nodes=[node.facts for node in self.nodes],
        )

    def _start(self) -> bool:
        """Starts all nodes' parts. Returns False if a node was lost before it began."""
        first, offer = self.nodes[0], Offer.of(self.specs[0])
        if not all(self._provide(node, offer) for node in self.nodes if offer.facts):
            return False
        if not self._say(first, "meet"):
            return False
        try:
            if not wait([first.line.connection], ANSWER_SECONDS):
                self._lose(first, f"did not answer for {ANSWER_SECONDS:g} s")
                return False
            _, port = first.line.receive()
        except (EOFError, OSError):
            self._lose(first, "its agent is gone")
            return False
        except KeyboardInterrupt:
            # A late answer would be taken for the answer to a later message.
            self._lose(first, "interrupted")
            raise
        self.sent_at = time.time()
        for node, spec in zip(self.nodes, self.specs, strict=True):
            self.open[node.line.connection] = node
            if not self._say(
                node, "run", dataclasses.replace(spec, rendezvous=(first.facts["address"], port))
            ):
                return False
        return True

    def _provide(self, node: Node, offer: Offer) -> bool:
        if not self._say(node, "files", list(offer.facts)):
            return False
        try:
            # The agent may have to read its copies first.
            while wait([node.line.connection], ANSWER_SECONDS + offer.bytes / LEAST_READ_RATE):
                word, what = node.line.receive()
                if word == "kept":
                    return True
                if word == "want" and not self._say(node, "chunk", offer.chunk(*what)):
                    return False
        except (EOFError, OSError):
            self._lose(node, "its agent is gone")
            return False
        except KeyboardInterrupt:
            self._lose(node, "interrupted")
            raise
        self._lose(node, "stopped answering while it checked the trial's files")
        return False

    def _say(self, node: Node, word: str, what: object = None) -> bool:
        try:
            node.line.send(word, what)
        except OSError:
            self._lose(node, "its agent is gone")
            return False
        except KeyboardInterrupt:
            # After half a message, the node could not parse the next one.
            self._lose(node, "interrupted")
            raise
        return True

    def _gather(self, seconds: float) -> None:
        deadline, hurried = time.monotonic() + seconds, False
        while self.open:
            ready = wait(list(self.open), max(0.0, deadline - time.monotonic()))
            if not ready:
                if not hurried:
                    for node in list(self.open.values()):
                        self._lose(
                            node,
                            f"did not answer for {seconds:g} s: it hangs or cannot be reached",
                        )
                return
            for connection in ready:
                if not self._receive(self.open[connection]) and not hurried:
                    deadline, hurried = (
                        min(deadline, time.monotonic() + (0.0 if self.lost else OTHERS_SECONDS)),
                        True,
                    )

    def _receive(self, node: Node) -> bool:
        try:
            word, what = node.line.receive()
        except (EOFError, OSError):
            self._lose(node, "its agent is gone: it was killed, or its machine went down")
            return False
        except KeyboardInterrupt:  # half a message may have been read
            self._lose(node, "interrupted")
            raise
        if word == "step":
            if self.on_progress:
                self.on_progress(*what)
            return True
        received_at, left = what
        del self.open[node.line.connection]
        index, machine = self.nodes.index(node), node.facts["machine"]
        for rank, answer in left.answers.items():
            left.answers[rank] = answer.on_node(index, machine, self.sent_at - received_at)
        self.left.add(left)
        return left.succeeded and len(left.answers) == len(self.specs[self.nodes.index(node)].ranks)

    def _stop(self) -> None:
        for node in list(self.open.values()):
            self._say(node, "stop")

    def _lose(self, node: Node, why: str) -> None:
        self.open.pop(node.line.connection, None)
        self.lost.append(f"node {node.name} was lost: {why}")
        self.lose(node, why)
