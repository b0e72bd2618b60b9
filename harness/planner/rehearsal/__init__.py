"""Runs a strategy's code on fake tensors as one rank of a simulated world."""
