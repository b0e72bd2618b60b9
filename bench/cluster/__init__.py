"""Runs on SLURM clusters: jobs, sites and nights."""
