"""Runs a strategy's own code on tensors without data, as one rank of a simulated world."""
