"""Cells over several nodes: a coordinator, and an agent on each node that runs its ranks."""
