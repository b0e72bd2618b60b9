"""Questions that only the device can answer, each in its own process.

A probe is a function `probe(device) -> Finding`, which on a CPU may say that the question makes no
sense.
"""
