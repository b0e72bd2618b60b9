from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


class UsageError(Exception):
    """A user's mistake; the message says what is wrong, where, and what would be right."""


class NotWritable(UsageError):
    """The results folder is not writable."""


class NotRecorded(UsageError):
    """Results could not be written: a full disk, or no results folder."""


class UnknownModel(UsageError):
    """The planner has no sizes for a name."""


class NoRuns(UsageError):
    """The results folder has no runs yet."""


class DamagedRun(UsageError):
    """A run's file cannot be read."""


class NothingToResume(UsageError):
    """The results folder has no run to resume."""


class DamagedFileWarning(UserWarning):
    """A damaged file was skipped."""


class BadCheckpoint(Exception):
    """A checkpoint is incomplete or has changed since it was saved."""


class Refused(Exception):
    """The cell cannot run on any host, e.g. because its batch does not divide evenly."""


class Unavailable(Exception):
    """The cell cannot run on this host; the message names the missing part."""


def first_error(error: ValidationError) -> str:
    """Returns the first validation error: the field, what is wrong, and the value."""
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"])
    return f"{field}: {first['msg']}, got {first['input']!r}"


def plural(count: int, word: str) -> str:
    """Formats a count as `1 cell` or `2,000 cells`."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"
