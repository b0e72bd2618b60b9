"""What to run: the command line and its matrices."""
