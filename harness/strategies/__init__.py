"""One file per strategy; the name of the file is the name of the strategy."""
