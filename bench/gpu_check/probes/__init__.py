"""Questions that only the device can answer, each in its own process.

A probe is a function `probe(device) -> Finding`; on a CPU it may decline.
"""
