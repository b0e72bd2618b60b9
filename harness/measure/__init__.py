"""Measures a rank: time, memory, bytes sent, energy; each file answers one question."""
