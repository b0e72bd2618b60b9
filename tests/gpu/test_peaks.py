"""A GPU is identified by its whole product name, never by a part of it."""

import pytest

from harness.host.gpu_models import peak_flops_per_second


@pytest.mark.parametrize(
    ("name", "fp32", "bf16"),
    [
        ("NVIDIA L4", 30.3e12, 121e12),
        ("NVIDIA L40S", 91.6e12, 362.05e12),
        ("NVIDIA A10G", 35e12, 70e12),
        ("NVIDIA A100 80GB PCIe", 19.5e12, 312e12),
        ("NVIDIA H100 80GB HBM3", 67e12, 989.5e12),
        ("NVIDIA H200 NVL", 60e12, 835.5e12),
        ("Tesla V100-SXM2-16GB", 15.7e12, None),
    ],
)
def test_each_product_has_its_own_peaks(name: str, fp32: float, bf16: float | None) -> None:
    """L40 is no L4, A10G no A10, NVL no SXM. GPUs before Ampere have no bf16 tensor cores."""
    assert peak_flops_per_second(name, "fp32") == fp32
    assert peak_flops_per_second(name, "bf16") == bf16


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA RTX A1000",  # not an A100
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb",  # a seventh of an A100
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        "GRID A100-10C",
        "NVIDIA H100",  # ambiguous
        "NVIDIA A100X",
        "NVIDIA L40G",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA H20",
        "NVIDIA T4G",
    ],
)
def test_unlisted_products_have_no_peak(name: str) -> None:
    """Names that only contain a product's name, and slices of GPUs, have no peak."""
    for precision in ("fp32", "bf16", "fp16"):
        assert peak_flops_per_second(name, precision) is None


def test_names_before_and_after_the_makers_prefix_are_the_same_product() -> None:
    """Drivers before 470 reported `A100-SXM4-40GB`; later ones prepend `NVIDIA `."""
    assert peak_flops_per_second("A100-SXM4-40GB", "bf16") == peak_flops_per_second(
        "NVIDIA A100-SXM4-40GB", "bf16"
    )


def test_the_table_is_plausible_and_its_names_are_unique() -> None:
    from harness.host.gpu_models import gpu_model, gpu_models

    models = gpu_models()
    assert len({model.product_name for model in models.values()}) == len(models) >= 28
    for host_name, model in models.items():
        assert gpu_model(model.device_name) is model
        assert host_name == host_name.lower()
        assert 14 * 2**30 < model.memory_bytes < 300 * 2**30
        assert model.source
        fp16, fp32 = model.fp16_flops_per_second, model.fp32_flops_per_second
        assert fp16, "every product of the table has tensor cores"
        assert fp32
        assert 1.9 < fp16 / fp32 < 32, (
            "a figure with sparsity, or of another column, would be outside"
        )
        assert model.bf16_flops_per_second in (None, fp16)
        assert model.memory_bytes_per_second
        assert model.nvlink_bytes_per_second is None or model.nvlink_bytes_per_second >= 300e9
        assert model.fabric_bytes_per_second is None or model.fabric_bytes_per_second >= 100e9
        assert None in (model.nvlink_bytes_per_second, model.fabric_bytes_per_second)
