"""Runs, measures, verifies and records one cell."""
