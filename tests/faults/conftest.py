"""Fixtures shared with tests that use ranks."""

from tests.ranks.conftest import launcher

__all__ = ["launcher"]
