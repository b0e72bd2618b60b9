"""What to do about a mistake, in words of the command line, which nothing below it knows."""

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
    """What is said to the user instead of a traceback: of a mistake, or of a file or folder that
    the system refuses; empty for an error of the suite's own."""
    if isinstance(error, UsageError):
        return with_remedy(error)
    if isinstance(error, OSError) and error.filename is not None:
        return f"{str(error.filename)!r} cannot be used: {error.strerror}"
    return ""


def with_remedy(error: UsageError) -> str:
    """The sentence of an error, with the command or option that helps where there is one."""
    remedy = REMEDIES.get(type(error))
    return f"{error}; {remedy}" if remedy else str(error)
