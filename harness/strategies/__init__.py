"""One file per strategy; its file name is its name."""
