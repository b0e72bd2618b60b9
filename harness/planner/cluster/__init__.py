"""Ranks layouts on a cluster by closed forms, without torch."""
