"""Predicts memory and speed of a fine-tuning recipe by counting tensors; imports no arrays."""
