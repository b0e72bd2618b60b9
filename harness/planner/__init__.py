"""Predicts step time and memory before training.

`cluster` ranks layouts on many devices, `local` predicts this machine from its own measurements,
and `rehearsal` runs a strategy's code on fake tensors.
"""
