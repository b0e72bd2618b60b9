"""Commands in a network that has only loopback, if the system allows it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

ENTER = """
import os, sys
from harness.host import process

def namespaces():
    return [os.readlink(f"/proc/self/ns/{kind}") for kind in ("user", "net")]

def denied(**how):
    raise PermissionError(1, "Operation not permitted")

if sys.argv[1] != "allowed":
    setattr(process, sys.argv[1], denied)
before = namespaces()
print(process.enter_loopback_only(), namespaces() == before)
"""
ANSWER = """
import os, socket
with socket.create_server(("127.0.0.1", 0)) as server:
    socket.create_connection(server.getsockname()).close()
print(os.readlink("/proc/self/ns/net"))
"""


def output(*words: str) -> str:
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.parametrize("denied", ["own_network", "bring_up_loopback"])
def test_a_process_that_may_not_have_its_own_network_keeps_the_hosts(denied: str) -> None:
    """With AppArmor's default on Ubuntu 24.04, a user may create the namespace but not use it."""
    assert output("-c", ENTER, denied) == "False True"


def test_a_command_reaches_itself_over_loopback() -> None:
    """Also if the system denies it a network of its own."""
    allowed = output("-c", ENTER, "allowed") == "True False"
    network = output("-m", "harness.host.process", sys.executable, "-c", ANSWER)
    assert (network != os.readlink("/proc/self/ns/net")) == allowed
