"""python -m tests.ranks.stranger ADDRESS PORT RECORDED: what somebody on the nodes' network may try
who does not know the run's key, against the port of its coordinator. Prints what each attempt was
answered, as JSON.

RECORDED is a file with the bytes that an agent sent when it joined, overheard on the network.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from harness.nodes.protocol import HANDSHAKE_SECONDS, secure
from harness.nodes.rendezvous import new_key

Attempt = Callable[[socket.socket, bytes], None]
_NONCE = 32
"""Bytes that each side of a connection sends first."""


@dataclass(frozen=True)
class Answer:
    """What became of an attempt."""

    heard_bytes: int
    """That the coordinator sent, its nonce among them."""
    closed: bool
    """Whether it closed the connection."""
    seconds: float
    """Until then."""


def no_key(raw: socket.socket, recorded: bytes) -> None:
    raw.sendall(b"GET / HTTP/1.1\r\nHost: head\r\n\r\n" * 4)


def wrong_key(raw: socket.socket, recorded: bytes) -> None:
    """Speaks the protocol, with a key of its own."""
    with contextlib.suppress(OSError, EOFError):
        secure(raw.dup(), bytes.fromhex(new_key()), coordinator=False)


def replayed(raw: socket.socket, recorded: bytes) -> None:
    """Sends what an agent of the run has sent, byte for byte."""
    raw.sendall(recorded)


def noise(raw: socket.socket, recorded: bytes) -> None:
    raw.sendall(random.Random(1).randbytes(10_000_000))


def half_a_message(raw: socket.socket, recorded: bytes) -> None:
    """And then silence."""
    raw.sendall(recorded[: _NONCE // 2])


ATTEMPTS: dict[str, Attempt] = {
    "no key": no_key,
    "wrong key": wrong_key,
    "replayed message": replayed,
    "10 MB of noise": noise,
    "half a message and silence": half_a_message,
}


def attempt(address: tuple[str, int], act: Attempt, recorded: bytes) -> Answer:
    """Connects, acts, and listens until the coordinator closes the connection."""
    began, heard, closed = time.monotonic(), 0, False
    with socket.create_connection(address, timeout=10) as raw:
        raw.settimeout(HANDSHAKE_SECONDS + 5)
        with contextlib.suppress(OSError):  # closed while it was talking
            act(raw, recorded)
        try:
            while part := raw.recv(2**16):
                heard += len(part)
            closed = True
        except TimeoutError:
            pass
        except OSError:
            closed = True
    return Answer(heard, closed, time.monotonic() - began)


def main() -> None:
    address, recorded = (sys.argv[1], int(sys.argv[2])), Path(sys.argv[3]).read_bytes()
    answers = {name: asdict(attempt(address, act, recorded)) for name, act in ATTEMPTS.items()}
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
