"""Predicts step time and memory before training."""
