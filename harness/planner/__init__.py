"""Predicts step time and memory of trainings before they run.

`cluster` ranks layouts on many devices by closed forms, `local` predicts this machine from its own
measurements, and `rehearsal` runs a strategy's code on tensors without data.
"""
