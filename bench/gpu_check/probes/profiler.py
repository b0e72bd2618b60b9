"""Does torch's profiler see what runs on the device?"""

from __future__ import annotations

from dataclasses import dataclass

from bench.gpu_check.probes.finding import Finding

MOST_NAMES = 30
METHODS = ("start_thread_id", "scope", "activity_type", "is_user_annotation")


@dataclass(frozen=True)
class ProfilerFacts:
    host_events: int
    device_events: int
    device_names: tuple[str, ...]
    methods: tuple[str, ...]
    """Methods of events in this torch version."""


def probe(device: str) -> Finding:
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
    return Finding.of(counted > 0, f"{counted} events of the {'GPU' if on_gpu else 'CPU'}", facts)
