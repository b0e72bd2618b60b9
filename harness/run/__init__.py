"""Runs a plan: reference runs, trials in order, searches; builds the rows to record."""
