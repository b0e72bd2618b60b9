"""Starts the ranks of a trial, watches them, and says how they ended."""
