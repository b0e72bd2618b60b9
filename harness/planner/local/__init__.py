"""Predicts the suite's own cells on CPU cores of this machine, from cells measured on it."""
