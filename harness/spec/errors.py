"""The three ways of saying no."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


class UsageError(Exception):
    """A user's mistake: one sentence that says what is wrong, where, and what would be right.

    It names no command and no option of the command line. Where the remedy is one, a subclass says
    which case it is, and the command line adds the remedy (see bench/cli/remedies.py). Exit code 2.
    """


class NotWritable(UsageError):
    """The results folder cannot be written; another one is needed."""


class NoRuns(UsageError):
    """The results folder has no run yet."""


class NothingToResume(UsageError):
    """The results folder has no run to go on with."""


class Refused(Exception):
    """The cell cannot exist (a batch that does not divide, an option that excludes another)."""


class Unavailable(Exception):
    """The cell could run on another host: the message names the library or the hardware that is
    missing here."""


def first_error(error: ValidationError) -> str:
    """The first thing that pydantic found wrong: where, what, and what was given."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}, got {first['input']!r}"
