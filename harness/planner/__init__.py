"""Predictions: how much memory a training needs and how fast it is, before it runs."""
