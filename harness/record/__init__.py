"""What is written down: plans, the schema of the tables, and the store that keeps them."""
