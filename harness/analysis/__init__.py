"""What recorded data says: statistics, summaries, comparisons, histories. Needs no torch."""
