"""What data sheets promise of each GPU: peaks of arithmetic, memory and NVLink, by the exact
product name that NVML reports."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


MEBIBYTE = 2**20


TERA = 1e12


GIGABYTE = 1e9


@dataclass(frozen=True)
class GpuModel:
    """One product.

    None: its maker's documents do not say, say it in two ways, or the board does not always have
    it.
    """

    product_name: str
    """Exactly as NVML reports it, without a leading `NVIDIA `."""
    host_name: str
    """Short name for the command line."""
    memory_bytes: int
    """As NVML reports it: less than the data sheet's round number, where error correction takes a
    share."""
    fp32_flops_per_second: float | None
    """Dense, without tensor cores (so without TF32)."""
    bf16_flops_per_second: float | None
    """Dense (no sparsity), tensor cores, sums in fp32; None before Ampere, which has no bf16 tensor
    cores."""
    fp16_flops_per_second: float | None
    """Dense (no sparsity), tensor cores, sums in fp32."""
    memory_bytes_per_second: float | None
    nvlink_bytes_per_second: float | None
    """Of one GPU, both directions together; None where NVLink is an optional bridge, or is not
    there."""
    source: str

    def peak_flops_per_second(self, precision: str) -> float | None:
        """The dense peak of matrix multiplications in `fp32`, `bf16` or `fp16`."""
        peaks = {
            "fp32": self.fp32_flops_per_second,
            "bf16": self.bf16_flops_per_second,
            "fp16": self.fp16_flops_per_second,
        }
        return peaks[precision]


def _model(
    product_name: str,
    host_name: str,
    mebibytes: int,
    *,
    fp32: float | None,
    half: float | None,
    gigabytes_per_second: float,
    source: str,
    nvlink: float | None = None,
    has_bf16: bool = True,
) -> GpuModel:
    """`fp32`, `half`: TFLOP/s as data sheets print them. `nvlink`: GB/s."""
    fp16 = half and half * TERA
    return GpuModel(
        product_name=product_name,
        host_name=host_name,
        memory_bytes=mebibytes * MEBIBYTE,
        fp32_flops_per_second=fp32 and fp32 * TERA,
        bf16_flops_per_second=fp16 if has_bf16 else None,
        fp16_flops_per_second=fp16,
        memory_bytes_per_second=gigabytes_per_second * GIGABYTE,
        nvlink_bytes_per_second=nvlink and nvlink * GIGABYTE,
        source=source,
    )


_VOLTA = "NVIDIA V100 Tensor Core GPU data sheet, 2020"


_TURING = "NVIDIA T4 Tensor Core GPU data sheet, 2019"


_A100 = "NVIDIA A100 Tensor Core GPU data sheet, 2021"


_HOPPER = "NVIDIA H100 Tensor Core GPU data sheet, 2024: half of what it prints with sparsity"


_HOPPER_PCIE = "NVIDIA H100 Tensor Core GPU data sheet, 2023: half of what it prints with sparsity"


_H200 = "NVIDIA H200 Tensor Core GPU data sheet, 2024: half of what it prints with sparsity"


_GRACE = (
    "NVIDIA GH200 Grace Hopper Superchip data sheet, 2023: half of what it prints with sparsity"
)


_BLACKWELL = "NVIDIA Blackwell data sheet, 2025: half of what it prints with sparsity"


# GeForce cards multiply half as fast where sums are kept in fp32, as training keeps them: not the
# figure that is advertised.
_GA102 = (
    "NVIDIA Ampere GA102 GPU Architecture white paper, 2021: FP16 and BF16 tensor with FP32"
    " accumulate"
)


_ADA = "NVIDIA Ada GPU Architecture white paper, 2023: FP16 and BF16 tensor with FP32 accumulate"


_RTX_50 = (
    "NVIDIA RTX Blackwell GPU Architecture white paper, 2025: FP16 and BF16 tensor with FP32"
    " accumulate"
)


_MODELS = (
    _model(
        "Tesla V100-SXM2-16GB",
        "v100-16gb",
        16384,
        fp32=15.7,
        half=125,
        gigabytes_per_second=900,
        nvlink=300,
        has_bf16=False,
        source=_VOLTA,
    ),
    _model(
        "Tesla V100-SXM2-32GB",
        "v100-32gb",
        32768,
        fp32=15.7,
        half=125,
        gigabytes_per_second=900,
        nvlink=300,
        has_bf16=False,
        source=_VOLTA,
    ),
    _model(
        "Tesla V100-PCIE-16GB",
        "v100-pcie-16gb",
        16384,
        fp32=14,
        half=112,
        gigabytes_per_second=900,
        has_bf16=False,
        source=_VOLTA,
    ),
    _model(
        "Tesla V100-PCIE-32GB",
        "v100-pcie-32gb",
        32768,
        fp32=14,
        half=112,
        gigabytes_per_second=900,
        has_bf16=False,
        source=_VOLTA,
    ),
    # 320 GB/s is what NVIDIA's page of the product says, 300 its data sheet.
    _model(
        "Tesla T4",
        "t4",
        15360,
        fp32=8.1,
        half=65,
        gigabytes_per_second=300,
        has_bf16=False,
        source=_TURING,
    ),
    _model(
        "A100-SXM4-40GB",
        "a100-40gb",
        40960,
        fp32=19.5,
        half=312,
        gigabytes_per_second=1555,
        nvlink=600,
        source=_A100,
    ),
    _model(
        "A100-SXM4-80GB",
        "a100-80gb",
        81920,
        fp32=19.5,
        half=312,
        gigabytes_per_second=2039,
        nvlink=600,
        source=_A100,
    ),
    _model(
        "A100-PCIE-40GB",
        "a100-pcie-40gb",
        40960,
        fp32=19.5,
        half=312,
        gigabytes_per_second=1555,
        source=_A100,
    ),
    _model(
        "A100 80GB PCIe",
        "a100-pcie-80gb",
        81920,
        fp32=19.5,
        half=312,
        gigabytes_per_second=1935,
        source=_A100,
    ),
    _model(
        "A10",
        "a10",
        23028,
        fp32=31.2,
        half=125,
        gigabytes_per_second=600,
        source="NVIDIA A10 data sheet, 2021",
    ),
    _model(
        "A10G",
        "a10g",
        23028,
        fp32=35,
        half=70,
        gigabytes_per_second=600,
        source="NVIDIA A10G data sheet, 2022",
    ),
    _model(
        "A30",
        "a30",
        24576,
        fp32=10.3,
        half=165,
        gigabytes_per_second=933,
        source="NVIDIA A30 data sheet, 2022",
    ),
    _model(
        "A40",
        "a40",
        46068,
        fp32=37.4,
        half=149.7,
        gigabytes_per_second=696,
        source="NVIDIA A40 data sheet, 2021",
    ),
    _model(
        "L4",
        "l4",
        23034,
        fp32=30.3,
        half=121,
        gigabytes_per_second=300,
        source="NVIDIA L4 data sheet, 2023: half of what it prints with sparsity",
    ),
    _model(
        "L40",
        "l40",
        46068,
        fp32=90.5,
        half=181.05,
        gigabytes_per_second=864,
        source="NVIDIA L40 data sheet, 2022",
    ),
    _model(
        "L40S",
        "l40s",
        46068,
        fp32=91.6,
        half=362.05,
        gigabytes_per_second=864,
        source="NVIDIA L40S data sheet, 2023",
    ),
    _model(
        "H100 80GB HBM3",
        "h100-80gb",
        81559,
        fp32=67,
        half=989.5,
        gigabytes_per_second=3350,
        nvlink=900,
        source=_HOPPER,
    ),
    _model(
        "H100 PCIe",
        "h100-pcie-80gb",
        81559,
        fp32=51,
        half=756.5,
        gigabytes_per_second=2000,
        source=_HOPPER_PCIE,
    ),
    _model(
        "H100 NVL",
        "h100-nvl-94gb",
        95830,
        fp32=60,
        half=835.5,
        gigabytes_per_second=3900,
        source=_HOPPER,
    ),
    _model(
        "H200",
        "h200-141gb",
        143771,
        fp32=67,
        half=989.5,
        gigabytes_per_second=4800,
        nvlink=900,
        source=_H200,
    ),
    _model(
        "H200 NVL",
        "h200-nvl-141gb",
        143771,
        fp32=60,
        half=835.5,
        gigabytes_per_second=4800,
        source=_H200,
    ),
    _model(
        "GH200 480GB",
        "gh200-96gb",
        97871,
        fp32=67,
        half=989.5,
        gigabytes_per_second=4000,
        nvlink=900,
        source=_GRACE,
    ),
    _model(
        "B200",
        "b200-180gb",
        183359,
        fp32=75,
        half=2250,
        gigabytes_per_second=7700,
        nvlink=1800,
        source=_BLACKWELL,
    ),
    _model(
        "GB200",
        "gb200-186gb",
        189471,
        fp32=80,
        half=2500,
        gigabytes_per_second=8000,
        nvlink=1800,
        source=_BLACKWELL,
    ),
    _model(
        "GeForce RTX 3090",
        "rtx-3090",
        24576,
        fp32=35.6,
        half=71,
        gigabytes_per_second=936,
        source=_GA102,
    ),
    _model(
        "GeForce RTX 4090",
        "rtx-4090",
        24564,
        fp32=82.6,
        half=165.2,
        gigabytes_per_second=1008,
        source=_ADA,
    ),
    _model(
        "GeForce RTX 5090",
        "rtx-5090",
        32607,
        fp32=104.8,
        half=209.5,
        gigabytes_per_second=1792,
        source=_RTX_50,
    ),
    _model(
        "RTX A6000",
        "rtx-a6000",
        49140,
        fp32=38.7,
        half=154.8,
        gigabytes_per_second=768,
        source=_GA102,
    ),
    _model(
        "RTX 6000 Ada Generation",
        "rtx-6000-ada",
        49140,
        fp32=91.1,
        half=364.2,
        gigabytes_per_second=960,
        source=_ADA,
    ),
)


@functools.cache
def _by_product() -> dict[str, GpuModel]:
    return {model.product_name: model for model in _MODELS}


def gpu_model(device_name: str | None) -> GpuModel | None:
    """The product of this NVML name, the whole name: `L40` is no `L4`, and a slice of a GPU (MIG,
    vGPU) is none of its products."""
    return _by_product().get(device_name.removeprefix("NVIDIA ")) if device_name else None


def gpu_models() -> dict[str, GpuModel]:
    """All products of the table by their short names, such as `h100-80gb`."""
    return {model.host_name: model for model in _MODELS}


def peak_flops_per_second(device_name: str | None, precision: str) -> float | None:
    """The data sheet's dense peak of one device; None for a device that is not in the table (every
    CPU)."""
    model = gpu_model(device_name)
    return model.peak_flops_per_second(precision) if model else None
