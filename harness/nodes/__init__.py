"""Cells over several nodes: an agent on each node runs its ranks, the coordinator tells them what
to run and gathers what they left."""
