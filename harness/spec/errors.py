"""The errors that are answers: to a user, and to a plan."""

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


class NotRecorded(UsageError):
    """What was measured could not be written: the disk is full, or the results folder is gone."""


class NoRuns(UsageError):
    """The results folder has no run yet."""


class DamagedRun(UsageError):
    """The file of a run cannot be read."""


class NothingToResume(UsageError):
    """The results folder has no run to go on with."""


class DamagedFileWarning(UserWarning):
    """A damaged file was left out of what was read."""


class Refused(Exception):
    """The cell can run on no host: a batch that does not divide, options that exclude each
    other."""


class Unavailable(Exception):
    """The cell could run on another host: the message names the library or the hardware that is
    missing here."""


def first_error(error: ValidationError) -> str:
    """The first of pydantic's errors: the field, what is wrong with it, and what was given."""
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"])
    return f"{field}: {first['msg']}, got {first['input']!r}"
