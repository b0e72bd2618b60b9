"""Runs on a SLURM cluster: what a site says of itself, the batch script made of it, and what SLURM
says of its jobs."""
