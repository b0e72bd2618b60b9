"""Calls of a function in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, TypeVar

from harness.host.process import caller_not_imported, die_with_parent

Value = TypeVar("Value")


@dataclass(frozen=True)
class Ended:
    """A call without a result."""

    reason: str


def call_apart(function: Callable[..., Value], *arguments: object, limit: float) -> Value | Ended:
    """Calls a function in a new process, in which it may crash, hang, or initialise CUDA.

    Its output is only used to explain how it ended: with an error, without an answer, or after
    `limit` seconds.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with receiver, NamedTemporaryFile() as output:
        call = (sender, output.name, function, arguments)
        process = context.Process(target=_answer, args=call)
        with sender, caller_not_imported():
            process.start()
        try:
            if not receiver.poll(limit):
                return Ended(f"did not finish within {limit:g} s")
            answer: Value | Ended = receiver.recv()
            return answer
        except EOFError:
            process.join()
            lines = Path(output.name).read_text(errors="replace").strip().splitlines()
            return Ended((lines or [f"exit code {process.exitcode}"])[-1])
        finally:
            process.kill()
            process.join()
            process.close()


def _answer(
    sender: Connection[Any, Any], output: str, function: Callable[..., object], arguments: Any
) -> None:
    die_with_parent()
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        answer = function(*arguments)
    except Exception as error:
        text = str(error).strip().splitlines()
        answer = Ended(f"{type(error).__name__}: {text[-1]}" if text else type(error).__name__)
    sender.send(answer)
