"""Messages between coordinator and agents: a word, and a value of the word's type.

They travel as JSON. Nothing received is executed or unpickled; a value of the wrong type ends the
connection.
"""

from __future__ import annotations

import functools
import json
from typing import Any, TypeAlias

from pydantic import TypeAdapter, ValidationError

from harness.launch.outcome import RankOutputs
from harness.worker.spec import TrialSpec

Message: TypeAlias = tuple[str, Any]

_NOTHING: Any = type(None)
_VALUES: dict[str, Any] = {
    # From agents:
    "hello": dict[str, Any],
    "met": int,
    "pong": _NOTHING,
    "listening": int,
    "measured": float,
    "received": float,
    "step": tuple[int, float],
    "left": tuple[float, RankOutputs],
    # From the coordinator:
    "warm": list[str],
    "meet": _NOTHING,
    "ping": _NOTHING,
    "listen": _NOTHING,
    "measure": tuple[str, int],
    "run": TrialSpec,
    "stop": _NOTHING,
    "quit": _NOTHING,
}


class ProtocolError(OSError):
    """The peer speaks another protocol or lacks the key; the connection is unusable."""


@functools.cache
def _adapter(word: str) -> TypeAdapter[Any]:
    return TypeAdapter(_VALUES[word])


def encoded(word: str, value: object = None) -> bytes:
    """Returns a message as JSON, which keeps non-finite floats."""
    return json.dumps([word, _adapter(word).dump_python(value)]).encode()


def decoded(body: bytes) -> Message:
    """Returns the message of `encoded`; raises ProtocolError for anything else."""
    try:
        word, value = json.loads(body)
        if word not in _VALUES:
            raise ProtocolError(f"unknown message {word!r}")
        return word, _adapter(word).validate_python(value)
    except (ValidationError, ValueError, TypeError, RecursionError) as error:
        raise ProtocolError(f"not a message of this protocol: {type(error).__name__}") from None
