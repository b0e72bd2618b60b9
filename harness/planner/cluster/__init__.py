"""Predicts layouts of a training on a cluster by closed forms: pure arithmetic, without torch."""
