"""Checks that a strategy trains the same as the reference run."""
