"""Whether a strategy trained the same as the reference run."""
