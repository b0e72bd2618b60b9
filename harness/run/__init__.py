"""What runs a plan: references, trials in order, searches; and the rows that it records."""
