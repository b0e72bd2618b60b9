from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from bench.gpu_check.probes.finding import Attempt, ProbeFinding, attempt, only_on_gpus

if TYPE_CHECKING:
    import torch
    from torch import Tensor


BUDGET_BYTES = 4 * 2**20


@dataclass(frozen=True)
class MemoryFacts:
    listed: bool
    """Whether NVML lists this process, whose id differs in some containers."""
    context_bytes: int | None
    over_budget: Attempt
    """Allocation that must fail."""
    product_in_budget: Attempt
    """Product whose workspace may not fit."""
    afterwards: Attempt


def memory(device: str) -> ProbeFinding:
    """Is a GPU memory budget enforced, and does NVML list this process?"""
    if device != "cuda":
        return only_on_gpus("torch cannot limit host memory")
    import torch

    from harness.host.nvml import nvml

    gpu = torch.device("cuda", 0)
    torch.zeros(1, device=gpu)
    properties = torch.cuda.get_device_properties(gpu)
    mine: int | None = None
    with nvml() as library:
        handle = library and library.handle("nvmlDeviceGetHandleByUUID", f"GPU-{properties.uuid}")
        if library and handle:
            processes = library.processes(handle) or ()
            mine = next((p.memory_bytes for p in processes if p.pid == os.getpid()), None)
    torch.cuda.set_per_process_memory_fraction(BUDGET_BYTES / properties.total_memory, gpu)
    over = attempt("64 MiB", lambda: torch.zeros(2**24, device=gpu).device)
    product = attempt(
        "product", lambda: (torch.ones(64, 64, device=gpu) @ torch.ones(64, 64, device=gpu)).sum()
    )
    torch.cuda.set_per_process_memory_fraction(1.0, gpu)
    after = attempt("64 MiB again", lambda: torch.zeros(2**24, device=gpu).device)
    context = None if mine is None else mine - torch.cuda.memory_reserved(gpu)
    facts = MemoryFacts(mine is not None, context, over, product, after)
    holds = over.error.startswith("OutOfMemoryError") and not after.error
    return ProbeFinding.of(holds, over.error or "an allocation above the budget succeeded", facts)


MOST_NAMES = 30
METHODS = ("start_thread_id", "scope", "activity_type", "is_user_annotation")


@dataclass(frozen=True)
class ProfilerFacts:
    host_events: int
    device_events: int
    device_names: tuple[str, ...]
    methods: tuple[str, ...]


def profiler(device: str) -> ProbeFinding:
    """Does torch's profiler see what runs on the device?"""
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    on_gpu = device == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    factor = torch.randn(1024, 1024, device=device, requires_grad=True)
    with profile(activities=activities, record_shapes=True) as profiler:
        with record_function("bench:step"):
            (factor @ factor).sum().backward()
        if on_gpu:
            torch.cuda.synchronize()
    assert profiler.profiler is not None
    assert profiler.profiler.kineto_results is not None
    events = profiler.profiler.kineto_results.events()
    on_host = [event for event in events if event.device_type().name == "CPU"]
    names = {event.name()[:60] for event in events if event.device_type().name != "CPU"}
    facts = ProfilerFacts(
        len(on_host),
        len(events) - len(on_host),
        tuple(sorted(names)[:MOST_NAMES]),
        tuple(method for method in METHODS if hasattr(events[0], method)),
    )
    counted = facts.device_events if on_gpu else facts.host_events
    return ProbeFinding.of(
        counted > 0, f"{counted} events of the {'GPU' if on_gpu else 'CPU'}", facts
    )


def speed(device: str) -> ProbeFinding:
    """What are this device's peak rates for products, copies and kernel launches?"""
    import torch

    from harness.measure.hardware_benchmark import measure_device_speed

    speed = measure_device_speed(
        torch.device(device, 0) if device == "cuda" else torch.device(device)
    )
    rates = speed.matmul_flops_per_second
    best = ", ".join(f"{name} {rate / 1e12:.3g} TFLOP/s" for name, rate in rates.items() if rate)
    return ProbeFinding.of(any(rates.values()), best or "no matrix product ran", speed)


LARGEST = 448.0
LARGEST_ERROR = 0.1


@dataclass(frozen=True)
class Float8Facts:
    """Relative error of the product, or why there is none, by output type."""

    errors: tuple[Attempt, ...]


def float8(device: str) -> ProbeFinding:
    """Which output types do float8 products with a scale per row support?"""
    import torch

    torch.manual_seed(0)
    left, right = torch.randn(64, 128, device=device), torch.randn(32, 128, device=device)
    exact = left @ right.t()
    quantised_left, scale_left = _quantise(left)
    quantised_right, scale_right = _quantise(right)

    def error(dtype: torch.dtype) -> float:
        product = torch._scaled_mm(
            quantised_left,
            quantised_right.t(),
            scale_a=scale_left,
            scale_b=scale_right.t(),
            out_dtype=dtype,
            use_fast_accum=device == "cuda",
        )
        return float((product.float() - exact).norm() / exact.norm())

    types = (torch.bfloat16, torch.float32, torch.float16)
    errors = tuple(attempt(str(t), partial(error, t)) for t in types)
    bf16 = errors[0]
    holds = not bf16.error and float(bf16.answer) < LARGEST_ERROR
    if bf16.error and device == "cpu":
        return ProbeFinding(
            "not checked", f"this CPU does not support this matrix product: {bf16.error}"
        )
    reason = "; ".join(
        f"{one.name} {one.error or f'error {float(one.answer):.3f}'}" for one in errors
    )
    return ProbeFinding.of(holds, reason, Float8Facts(errors))


def _quantise(tensor: Tensor) -> tuple[Tensor, Tensor]:
    import torch

    scale = tensor.abs().amax(1, keepdim=True).float() / LARGEST
    return (tensor / scale).to(torch.float8_e4m3fn), scale
