"""Fixtures shared with tests that use ranks."""

import pytest

# Each fault says what did not hold.
for name in ("host_kinds", "kinds", "run_process", "side_kinds"):
    pytest.register_assert_rewrite(f"tests.faults.{name}")

from tests.ranks.conftest import launcher  # noqa: E402

__all__ = ["launcher"]
