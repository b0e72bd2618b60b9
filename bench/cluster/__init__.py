"""Runs on clusters: SLURM jobs, and manifests for Kubernetes, Kubeflow and SkyPilot."""

from __future__ import annotations

from enum import Enum


class Target(str, Enum):
    SLURM = "slurm"
    KUBERNETES = "kubernetes"
    TRAINJOB = "trainjob"
    SKYPILOT = "skypilot"
