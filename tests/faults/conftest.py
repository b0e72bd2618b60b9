"""What tests with ranks share."""

from tests.ranks.conftest import launcher

__all__ = ["launcher"]
