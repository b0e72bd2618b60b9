from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from bench.gpu_check.outcomes import Verdict

MOST_OF_AN_ERROR = 300


@dataclass(frozen=True)
class ProbeFinding:
    verdict: Verdict
    reason: str
    facts: object = None

    @classmethod
    def of(cls, holds: bool, reason: str, facts: object) -> ProbeFinding:
        return cls("confirmed" if holds else "refuted", reason, facts)


def only_on_gpus(why: str) -> ProbeFinding:
    return ProbeFinding("not checked", f"it needs a GPU: {why}")


@dataclass(frozen=True)
class Attempt:
    """One library call: its answer, or its error."""

    name: str
    answer: str
    error: str
    """Error message; empty if it raised nothing."""
    seconds: float


def attempt(name: str, ask: Callable[[], object]) -> Attempt:
    began = time.perf_counter()
    try:
        answer, error = str(ask()), ""
    except Exception as raised:  # any exception is the answer
        answer, error = "", f"{type(raised).__name__}: {raised}"[:MOST_OF_AN_ERROR]
    return Attempt(name, answer, error, round(time.perf_counter() - began, 3))


def failed(attempts: tuple[Attempt, ...]) -> str:
    return "; ".join(f"{a.name}: {a.error}" for a in attempts if a.error)


def begin_in_fork(ask: Callable[[], dict[str, object]]) -> tuple[int, int]:
    """Forks a child that calls `ask`; returns its handle."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            answer = ask()
        except BaseException as error:  # the child always ends here
            answer = {"error": f"{type(error).__name__}: {error}"[:MOST_OF_AN_ERROR]}
        with os.fdopen(write, "w") as file:
            json.dump(answer, file, default=str)
        os._exit(0)
    os.close(write)
    return pid, read


def end_of_fork(child: tuple[int, int]) -> dict[str, object]:
    """Returns the child's answer, or `error` if it raised or died."""
    pid, read = child
    with os.fdopen(read) as file:
        text = file.read()
    _, status = os.waitpid(pid, 0)
    if not text:
        return {"error": f"the child died with wait status {status}"}
    answer: dict[str, object] = json.loads(text)
    return answer
