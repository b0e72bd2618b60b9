"""Checks the suite on a GPU: probes, a gate step that must train, lanes of steps in parallel, and
timed steps one at a time."""
