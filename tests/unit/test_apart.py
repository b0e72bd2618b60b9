"""Functions in a process of their own: their result, error, crash or time limit."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest

from harness.host.process import Ended, call_apart


def shout(text: str, times: int) -> tuple[int, str]:
    print("said")
    return os.getpid(), text * times


def fail() -> None:
    raise ValueError("first\nno such device")


def crash(words: str) -> None:
    os.write(2, words.encode())
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    time.sleep(100)


def test_the_result_comes_from_another_process_without_its_output(
    capfd: pytest.CaptureFixture[str],
) -> None:
    answer = call_apart(shout, "ab", 2, limit=60)
    assert not isinstance(answer, Ended)
    pid, text = answer
    assert (pid == os.getpid(), text) == (False, "abab")
    assert capfd.readouterr() == ("", "")
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def leave(code: int) -> None:
    sys.exit(code)  # W&B replaces sys.exit itself


def test_a_call_without_a_result_says_how_it_ended() -> None:
    assert call_apart(fail, limit=60) == Ended("ValueError: no such device")
    assert call_apart(crash, "one\ncuda error\n", limit=60) == Ended("cuda error")
    assert call_apart(crash, "", limit=60) == Ended("exit code -9")
    assert call_apart(leave, 3, limit=60) == Ended("exit code 3")


def test_a_call_ends_at_its_limit() -> None:
    assert call_apart(hang, limit=0.5) == Ended("did not finish within 0.5 s")
