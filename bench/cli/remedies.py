"""Remedies for mistakes, in terms of the command line."""

from __future__ import annotations

from harness.spec.errors import (
    DamagedRun,
    NoRuns,
    NothingToResume,
    NotRecorded,
    NotWritable,
    UsageError,
)

REMEDIES: dict[type[UsageError], str] = {
    DamagedRun: "see what is with: python -m bench check RESULTS",
    NoRuns: "make one with: python -m bench run --matrix smoke",
    NothingToResume: "leave --resume out to start one",
    NotRecorded: (
        "what was recorded before is kept: mend that, then go on with python -m bench run --resume"
    ),
    NotWritable: "choose another with --results DIR",
}


def refusal(error: Exception) -> str:
    """Returns the message for a user's mistake or a file that the system refuses; empty for the
    suite's own errors."""
    if isinstance(error, UsageError):
        return with_remedy(error)
    if isinstance(error, OSError) and error.filename is not None:
        return f"{str(error.filename)!r} cannot be used: {error.strerror}"
    return ""


def with_remedy(error: UsageError) -> str:
    """Returns an error's sentence, with the option that helps if there is one."""
    remedy = REMEDIES.get(type(error))
    return f"{error}; {remedy}" if remedy else str(error)
