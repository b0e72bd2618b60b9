"""What is asked for: cells, links, and how a training is laid out."""
