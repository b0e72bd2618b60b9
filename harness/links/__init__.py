"""Emulated nodes: network namespaces of this machine with shaped links between them."""
