"""What runs inside each rank: set-up, the training loop, the profile."""
