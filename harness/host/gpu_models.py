"""Data-sheet peaks of GPUs, from gpu_models.yaml."""

from __future__ import annotations

import contextlib
import difflib
import functools
import re
from dataclasses import dataclass
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict

from harness.cell.errors import UsageError

MEBIBYTE = 2**20
TERA = 1e12
MESH = 8
"""Maximum number of GPUs in a node that Infinity Fabric joins directly."""
GIGA = 1e9
NVIDIA = "NVIDIA"
EXAMPLE = "48GiB,864GB/s,181TFLOPS"
"""GPU that is described, not named."""


@dataclass(frozen=True)
class GpuModel:
    """One product. Figures that its data sheet does not state, or states inconsistently, are
    None."""

    product_name: str
    """Exact name by NVML, or by torch for ROCm, without the maker."""
    maker: str
    host_name: str
    also: tuple[str, ...]
    """Other names that people write."""
    memory_bytes: int
    fp32_flops_per_second: float | None
    """Dense peak without tensor cores, so without TF32."""
    bf16_flops_per_second: float | None
    """Dense peak of tensor cores with fp32 sums. None for GPUs before Ampere."""
    fp16_flops_per_second: float | None
    memory_bytes_per_second: float
    nvlink_bytes_per_second: float | None
    """Bandwidth of one GPU's NVLink, both directions. None if it has none, or only as an optional
    bridge."""
    fabric_bytes_per_second: float | None
    """Bandwidth of the Infinity Fabric link between two GPUs, both directions; None unless each
    pair of a node has one."""
    source: str

    @property
    def device_name(self) -> str:
        return f"{self.maker} {self.product_name}"

    def peak_flops_per_second(self, precision: str) -> float | None:
        """Returns the dense peak of matrix products in `fp32`, `bf16` or `fp16`."""
        peaks = {
            "fp32": self.fp32_flops_per_second,
            "bf16": self.bf16_flops_per_second,
            "fp16": self.fp16_flops_per_second,
        }
        return peaks[precision]

    @property
    def half_flops_per_second(self) -> float:
        """Dense peak in bf16, else in fp16; raises UsageError if neither is published."""
        peak = self.bf16_flops_per_second or self.fp16_flops_per_second
        if not peak:
            raise UsageError(
                f"GPU {self.host_name!r} has no published bf16 peak: describe it by its memory,"
                f" bandwidth and measured peak, such as {EXAMPLE}"
            )
        return peak

    def peer_bytes_per_second(self, gpus: int) -> float | None:
        """Returns the bandwidth between one GPU and the other GPUs among `gpus` in a node, both
        directions. None without NVLink and Infinity Fabric. NVLink's switch gives each pair all
        links of a GPU; Infinity Fabric gives it one link."""
        fabric = self.fabric_bytes_per_second
        return self.nvlink_bytes_per_second or (fabric and fabric * (min(gpus, MESH) - 1))


class _Row(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str
    host: str
    also: tuple[str, ...] = ()
    maker: str = NVIDIA
    memory: int
    fp32: float | None = None
    half: float | None = None
    bf16: bool = True
    bandwidth: float
    nvlink: float | None = None
    fabric: float | None = None
    source: str


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid")

    sources: dict[str, str]
    models: list[_Row]


@functools.cache
def gpu_models() -> dict[str, GpuModel]:
    """Returns the table's products by short name, such as `h100-80gb`."""
    text = Path(__file__).with_name("gpu_models.yaml").read_text(encoding="utf-8")
    table = _Table.model_validate(yaml.safe_load(text))
    return {row.host: _model(row, table.sources[row.source]) for row in table.models}


def _model(row: _Row, source: str) -> GpuModel:
    half = row.half and row.half * TERA
    return GpuModel(
        product_name=row.name,
        maker=row.maker,
        host_name=row.host,
        also=row.also,
        memory_bytes=row.memory * MEBIBYTE,
        fp32_flops_per_second=row.fp32 and row.fp32 * TERA,
        bf16_flops_per_second=half if row.bf16 else None,
        fp16_flops_per_second=half,
        memory_bytes_per_second=row.bandwidth * GIGA,
        nvlink_bytes_per_second=row.nvlink and row.nvlink * GIGA,
        fabric_bytes_per_second=row.fabric and row.fabric * GIGA,
        source=source,
    )


@functools.cache
def _by_name() -> dict[str, GpuModel]:
    models = gpu_models().values()
    short = {model.product_name: model for model in models if model.maker == NVIDIA}
    return short | {model.device_name: model for model in models}


def gpu_model(device_name: str | None) -> GpuModel | None:
    """Returns the product with exactly this name; None if unknown. Slices (MIG, vGPU) have other
    names."""
    if not device_name:
        return None
    return _by_name().get(device_name)


def peak_flops_per_second(device_name: str | None, precision: str) -> float | None:
    model = gpu_model(device_name)
    return model.peak_flops_per_second(precision) if model else None


_IGNORED = re.compile(
    r"nvidia|amd|instinct|geforce|tesla|quadro|generation|hbm3|hbm2e|sxm\d?(?!\d)|[^a-z0-9]|"
    "(?<=g)i(?=b)"
)
"""Parts of a GPU's name that do not matter; GiB counts as GB."""


@functools.cache
def _by_plain_name() -> dict[str, GpuModel]:
    names = {
        name: model
        for model in gpu_models().values()
        for name in (model.host_name, model.product_name, *model.also)
    }
    return {_plain(name): model for name, model in names.items()}


def _plain(name: str) -> str:
    return _IGNORED.sub("", name.lower())


def parse_gpus(text: str) -> tuple[int, GpuModel]:
    """Returns number and model of GPUs such as `2 x rtx-4090`, `4090x2` or `h100`; raises
    UsageError."""
    plain = text.strip()
    if last := re.fullmatch(r"(\S.*?)\s*[x*]\s*([1-9]\d?)", plain, re.IGNORECASE):
        with contextlib.suppress(UsageError):
            return int(last[2]), gpu_named(last[1])
    match = re.fullmatch(r"(?:(\d+)\s*[x*]\s*)?(\S.*)", plain, re.IGNORECASE)
    if match is None or not int(match[1] or 1):
        raise UsageError(f"gpus {text!r}: write it like '2 x rtx-4090'")
    return int(match[1] or 1), gpu_named(match[2])


def gpu_named(text: str) -> GpuModel:
    """Returns the GPU called `4090`, `rtx-4090-24gb`, `h100` or `A100 80GB` (gpu_models.yaml), or
    described by memory, bandwidth and bf16 peak, such as `48GiB,864GB/s,181TFLOPS`.
    Raises UsageError with the nearest names if no GPU or several GPUs match."""
    if match := re.fullmatch(_DESCRIBED, re.sub(r"\s", "", text.lower())):
        return _described(match[0], *(float(match[name]) for name in ("memory", "rate", "peak")))
    plain = _plain(text)
    if model := _by_plain_name().get(plain):
        return model
    hosts = list(gpu_models())
    near = [host for host in hosts if plain and _plain(host).startswith(plain)]
    near = near or difflib.get_close_matches(text.lower(), hosts, 3, 0.4) or hosts
    raise UsageError(
        f"GPU {text!r} is not in the table; the nearest are {', '.join(near)}; describe another GPU"
        f" by its memory, bandwidth and bf16 peak, such as {EXAMPLE}"
    )


_DESCRIBED = (
    r"(?P<memory>\d+(\.\d+)?)gi?b,(?P<rate>\d+(\.\d+)?)gb/s,(?P<peak>\d+(\.\d+)?)tflops(/s)?"
)


def _described(text: str, gibibytes: float, rate: float, peak: float) -> GpuModel:
    if not min(gibibytes, rate, peak):
        raise UsageError(f"GPU {text!r}: memory, bandwidth and peak must be above 0")
    row = _Row(
        name=text,
        host=text,
        memory=round(gibibytes * 1024),
        half=peak,
        bandwidth=rate,
        source="described on the command line",
    )
    return _model(row, row.source)
