from __future__ import annotations

import functools
import re
from pathlib import Path

import yaml
from pydantic import TypeAdapter

from harness.cell.errors import UsageError
from harness.host.gpu_models import TERA, GpuModel

HOPPER = 600 * TERA
"""Operations per second that only Hopper and later GPUs reach in bf16."""
USUAL_SHARE = 0.8
"""Share of peak assumed for an unmeasured device's best matrix product."""
REDUCE_SHARE, GATHER_SHARE = 0.9, 0.55
"""Bus bandwidth relative to one direction of a node's links.

All-reduce: between 436 of 450 GB/s on H100 nodes (Ultra-Scale Playbook) and 230 to 240 of 300 on
A100 nodes. Gathers: 250 of 450 on H100 nodes (same source).
"""
WIRE_SHARE = 0.73
"""Share of the rate between nodes that a large all-reduce reaches: 36.5 of 50 GB/s on 4 nodes of 8
B200 (S. Bekman, Machine Learning Engineering, networks, 2026)."""
FABRIC_SHARE = 0.75
"""Maximum share of Infinity Fabric's rate that RCCL reaches (ROCm/rccl, issue 1210)."""
PCIE_BYTES_PER_SECOND = {"pcie": 12e9, "pcie-p2p": 24e9}
"""Bus bytes per second of collectives over PCI Express 4.0 x16. NCCL reaches 24 GB/s below a host
bridge (NVIDIA/nccl-tests, issue 307); half is assumed without peer-to-peer (GeForce)."""


@functools.cache
def best_products() -> dict[str, float]:
    """Reads the TFLOP/s of each device's best matrix product from hardware.yaml."""
    text = Path(__file__).parents[1].joinpath("hardware.yaml").read_text(encoding="utf-8")
    table = TypeAdapter(dict[str, float])
    return table.validate_python(yaml.safe_load(text)["best_products"])


def inside_node(gpu: GpuModel, gpus: int, link: str) -> tuple[float, float] | None:
    """Returns bus bytes per second of all-reduces and of gathers among a node's GPUs.

    `link` is `nvlink` (or Infinity Fabric), `pcie`, `pcie-p2p` or a rate per GPU and direction,
    such as `450gbyte`; anything else returns None. Raises UsageError for `nvlink` if the GPU has no
    such link.
    """
    if rate := PCIE_BYTES_PER_SECOND.get(link):
        return rate, rate
    one_way = bytes_per_second(link)
    if link == "nvlink":
        both_ways = gpu.peer_bytes_per_second(max(gpus, 2))
        if not both_ways:
            raise UsageError(
                f"no rate of NVLink or Infinity Fabric is known for GPU {gpu.host_name!r}; give"
                " pcie, or a rate such as 450gbyte"
            )
        one_way = both_ways / 2
        if not gpu.nvlink_bytes_per_second:
            return FABRIC_SHARE * one_way, GATHER_SHARE * one_way
    return (REDUCE_SHARE * one_way, GATHER_SHARE * one_way) if one_way else None


def bytes_per_second(text: str) -> float | None:
    """Parses `400gbit` or `450gbyte`; returns None if it is not a rate above 0."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(gbit|mbit|gbyte)", text)
    rates = {"gbit": 1e9 / 8, "mbit": 1e6 / 8, "gbyte": 1e9}
    return float(match[1]) * rates[match[2]] or None if match else None


def missing_bf16(model: GpuModel) -> str:
    """Returns a warning about predicted times if the GPU lacks bf16 arithmetic; empty if it has
    it."""
    if model.bf16_flops_per_second:
        return ""
    return (
        f"{model.host_name} has no bf16 arithmetic; predicted times assume its fp16 rate, so"
        " real times are longer."
    )
