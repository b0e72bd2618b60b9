"""Specification of cells, links, and the layout of a training."""
