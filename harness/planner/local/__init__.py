"""Predicts cells on this machine's CPU cores from cells measured on it."""
