"""A user's package of strategies, found through its entry points."""
