"""Runs a strategy's own code on tensors without data, as one rank of a world that is not there."""
