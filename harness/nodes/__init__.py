"""Cells over several nodes: an agent on each node runs its ranks, the head tells them what to run
and gathers what they left."""
