"""python -m tests.ranks.tap INTERFACE FROM TO FILE: records the start of a TCP connection.

It overhears, on this process's network, what one address sends to another, and writes it to a file.
It prints `listening` once it is ready, and ends when it has enough.
"""

from __future__ import annotations

import socket
import struct
import sys
from pathlib import Path

ENOUGH_BYTES = 200
"""Bytes to record: more than the nonce, the proof and the start of the first message."""
_ETH_P_ALL = 3
_IP, _TCP = 14, 6
"""Length of an Ethernet header in bytes, and TCP's protocol number."""


def payload(frame: bytes, source: bytes, target: bytes) -> tuple[int, int, bytes] | None:
    """Returns the port, sequence number and payload of a TCP segment from source to target.

    Returns None for any other frame. Header layouts follow RFC 791 and RFC 9293.
    """
    if frame[12:14] != b"\x08\x00" or frame[_IP + 9] != _TCP:
        return None
    if frame[_IP + 12 : _IP + 16] != source or frame[_IP + 16 : _IP + 20] != target:
        return None
    segment = _IP + 4 * (frame[_IP] & 0x0F)
    (length,) = struct.unpack_from("!H", frame, _IP + 2)
    port, _, number = struct.unpack_from("!HHI", frame, segment)
    begin = segment + 4 * (frame[segment + 12] >> 4)
    return port, number, frame[begin : _IP + length]


def main() -> None:
    interface, source, target, file = sys.argv[1:]
    heard: dict[int, bytes] = {}
    first = 0
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETH_P_ALL)) as tap:
        tap.bind((interface, _ETH_P_ALL))
        print("listening", flush=True)
        while sum(map(len, heard.values())) < ENOUGH_BYTES:
            found = payload(tap.recv(2**17), socket.inet_aton(source), socket.inet_aton(target))
            if found and found[2] and found[0] == (first := first or found[0]):
                heard.setdefault(found[1], found[2])
    Path(file).write_bytes(b"".join(part for _, part in sorted(heard.items())))


if __name__ == "__main__":
    main()
