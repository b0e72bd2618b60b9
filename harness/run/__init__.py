"""Runs a plan: references, trials in order, searches; and makes the rows that it records."""
