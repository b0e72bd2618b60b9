"""Predicts the memory and speed of fine-tuning by counting tensors, without NumPy."""
