"""Cells over several nodes: a coordinator, and an agent per node."""
