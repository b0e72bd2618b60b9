"""Runs on clusters: SLURM jobs, and manifests for Kubernetes, Kubeflow and SkyPilot."""
