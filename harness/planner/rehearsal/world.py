"""Simulates one rank of a world of any size in one process and almost no memory.

The strategy's and torch's code run unchanged on fake tensors, which have no values (torch's
FakeTensorMode). harness/planner/rehearsal/substitutes.py replaces what cannot run this way.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import debug as tensor_caches
from torch.testing._internal.distributed.fake_pg import FakeStore

from harness.planner.rehearsal.substitutes import SUBSTITUTIONS, CopyableFakeMode, Substitution
from harness.spec.training import Batch
from harness.strategy.base import Strategy
from harness.strategy.job import Job


@contextlib.contextmanager
def fake_rank(strategy: Strategy, job: Job, more: Sequence[Substitution] = ()) -> Iterator[None]:
    """Makes this process rank `job.rank` of the job's world, with fake tensors, until the block
    ends.

    `more`: substitutions in addition to SUBSTITUTIONS.
    """
    if strategy.capabilities.process_group:
        size = job.layout.processes
        dist.init_process_group("fake", store=FakeStore(), rank=job.rank, world_size=size)
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.dict(os.environ, launcher_variables(job)))
            stack.enter_context(globals_put_back(strategy.requires))
            for substitution in (*SUBSTITUTIONS, *more):
                for patch in substitution.patches(job):
                    stack.enter_context(patch)
            stack.enter_context(CopyableFakeMode())
            yield
    finally:
        if strategy.capabilities.process_group:
            # Cached meshes name groups, whose names are reused.
            tensor_caches._clear_python_sharding_prop_cache()
            tensor_caches._clear_fast_path_sharding_prop_cache()
            dist.destroy_process_group()


def launcher_variables(job: Job) -> dict[str, str]:
    """Returns torchrun's environment variables, with all ranks on one node."""
    rank, world = str(job.rank), str(job.layout.processes)
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    return variables | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


@contextlib.contextmanager
def globals_put_back(packages: Sequence[str]) -> Iterator[None]:
    """Restores these packages' global variables when the block ends.

    Libraries keep the process groups of the first world that they see.
    """
    for package in packages:
        importlib.import_module(package)
    modules = [m for name, m in sys.modules.items() if name.partition(".")[0] in packages]
    before = [(vars(module), dict(vars(module))) for module in modules]
    try:
        yield
    finally:
        for variables, values_before in before:
            variables.update(values_before)


def fake_batch(job: Job, step: int) -> Batch:
    samples, length = job.cell.global_batch // job.layout.shares, job.cell.sequence_length
    inputs = job.workload.sample_inputs(samples, length).to(job.device)
    shape = (samples, length) if job.workload.kind == "causal" else (samples,)
    return Batch(step, inputs, torch.zeros(shape, dtype=torch.long, device=job.device))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hides deprecation warnings of libraries, and sends their output to stderr."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")
        yield
