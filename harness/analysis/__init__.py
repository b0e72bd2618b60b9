"""Statistics, summaries, comparisons and histories of recorded data. Needs no torch."""
