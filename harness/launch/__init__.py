"""Starts the ranks of a trial, watches them, and reports how they ended."""
