"""What is known of torch's DistributedDataParallel from outside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from harness.spec.training import Retained

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel


def ddp_buckets(model: DistributedDataParallel) -> Iterator[Retained]:
    """DDP's gradient buckets, which live in C++ and are known by their sizes only."""
    data = model._get_ddp_logging_data()
    sizes = (
        data.get("rebuilt_bucket_sizes") or data["bucket_sizes"]
    )  # told a step after they were rebuilt
    views = (
        sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
        if model.gradient_as_bucket_view
        else 0
    )
    yield (
        "library",
        "gradient buckets of DDP's reducer",
        sum(int(size) for size in sizes.split(",")) - views,
    )
