"""Measurements of a rank: time, memory, bytes sent, energy."""
