"""One file per strategy, named after it."""
