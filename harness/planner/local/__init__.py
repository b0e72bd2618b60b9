"""Predicts the suite's cells on this machine's CPU cores, from cells that were measured on it."""
