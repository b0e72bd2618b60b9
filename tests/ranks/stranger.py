"""python -m tests.ranks.stranger ADDRESS PORT RECORDED: attacks a coordinator without its key.

It tries what somebody on the nodes' network could try, and prints the answers as JSON. RECORDED is
a file with the bytes that an agent sent when it joined, overheard on the network.
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
"""Size of the nonce that each side of a connection sends first, in bytes."""


@dataclass(frozen=True)
class Answer:
    """Outcome of an attempt."""

    heard_bytes: int
    """Number of bytes received from the coordinator, including its nonce."""
    closed: bool
    """Whether the coordinator closed the connection."""
    seconds: float
    """Seconds until the connection was closed or the attempt gave up."""


def no_key(raw: socket.socket, recorded: bytes) -> None:
    raw.sendall(b"GET / HTTP/1.1\r\nHost: head\r\n\r\n" * 4)


def wrong_key(raw: socket.socket, recorded: bytes) -> None:
    """Speaks the protocol with a different key."""
    with contextlib.suppress(OSError, EOFError):
        secure(raw.dup(), bytes.fromhex(new_key()), coordinator=False)


def replayed(raw: socket.socket, recorded: bytes) -> None:
    """Replays the bytes that an agent of the run sent."""
    raw.sendall(recorded)


def noise(raw: socket.socket, recorded: bytes) -> None:
    raw.sendall(random.Random(1).randbytes(10_000_000))


def half_a_message(raw: socket.socket, recorded: bytes) -> None:
    """Sends half a nonce, then stays silent."""
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
        with contextlib.suppress(OSError):  # closed while sending
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
