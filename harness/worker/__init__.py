"""Code inside each rank: setup, training loop, profile."""
