"""Questions that only the device can answer, each in its own process.

A probe is a function `probe(device) -> Finding`. On a CPU it answers for the CPU, or says why the
question makes no sense there.
"""
