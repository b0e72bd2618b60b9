"""Errors reported to a user or recorded in a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


class UsageError(Exception):
    """A user's mistake: one sentence that says what is wrong, where, and what would be right.

    Names no command or option. If one is the remedy, a subclass identifies the case and the command
    line adds it (see bench/cli/__init__.py). Exit code 2.
    """


class NotWritable(UsageError):
    """The results folder is not writable."""


class NotRecorded(UsageError):
    """Results could not be written: the disk is full, or the results folder is gone."""


class NoRuns(UsageError):
    """The results folder has no runs yet."""


class DamagedRun(UsageError):
    """A run's file cannot be read."""


class NothingToResume(UsageError):
    """The results folder has no run to resume."""


class DamagedFileWarning(UserWarning):
    """A damaged file was skipped."""


class BadCheckpoint(Exception):
    """A checkpoint's files are not those that were saved."""


class Refused(Exception):
    """The cell can run on no host: a batch that does not divide, options that exclude each
    other."""


class Unavailable(Exception):
    """The cell could run on another host; the message names the missing library or hardware."""


def first_error(error: ValidationError) -> str:
    """Returns pydantic's first error: the field, what is wrong, and the value given."""
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"])
    return f"{field}: {first['msg']}, got {first['input']!r}"
