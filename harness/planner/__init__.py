"""Predicts step time and memory of parallel layouts before anything runs: pure arithmetic."""
