"""Runs on a SLURM cluster: the site's settings, the batch script made from them, and the state of
jobs."""
