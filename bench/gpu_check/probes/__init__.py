"""Questions that only the device can answer, each in its own process.

A module's `probe(device)` returns a Finding. On a CPU it answers for the CPU, or says why the
question makes no sense there.
"""
