"""`python -m tests.faults.no_ports COMMAND...` runs a command in a separate network whose ephemeral
ports are all in use."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

from harness.host.process import bring_up_loopback, own_network

FIRST, LAST = 40_000, 40_019


def main() -> None:
    own_network()
    bring_up_loopback()
    Path("/proc/sys/net/ipv4/ip_local_port_range").write_text(f"{FIRST} {LAST}")
    listeners = [socket.create_server(("", port)) for port in range(FIRST, LAST + 1)]
    code = subprocess.call(sys.argv[1:])
    assert len(listeners) == LAST - FIRST + 1
    sys.exit(code)


if __name__ == "__main__":
    main()
