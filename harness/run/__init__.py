"""Runs a plan: references, trials in order, searches; builds their rows."""
