"""Small questions that only the device can answer, each asked in its own process.

Each module has a function `probe(device)` that returns a Finding. On a CPU it answers for the CPU
as a stand-in, or says why the question makes no sense there.
"""
