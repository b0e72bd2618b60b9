"""What are this device's peak rates for matrix products, copies and kernel launches?"""

from __future__ import annotations

from bench.gpu_check.probes.finding import Finding


def probe(device: str) -> Finding:
    import torch

    from harness.measure.device_speed import measure_device_speed

    speed = measure_device_speed(
        torch.device(device, 0) if device == "cuda" else torch.device(device)
    )
    rates = speed.matmul_flops_per_second
    best = ", ".join(f"{name} {rate / 1e12:.3g} TFLOP/s" for name, rate in rates.items() if rate)
    return Finding.of(any(rates.values()), best or "no matrix product ran", speed)
