"""The three ways of saying no."""

from __future__ import annotations


class Mistake(Exception):
    """A user's mistake: one sentence that says what is wrong, where, and what would be right. Exit code 2."""


class Refused(Exception):
    """The cell cannot exist (a batch that does not divide, an option that excludes another)."""


class Unavailable(Exception):
    """The cell could run on another host: the message names the library or the hardware that is missing here."""
