"""A user's own package of strategies, found by its entry points."""
