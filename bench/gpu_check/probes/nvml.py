"""Does NVML give a forked rank the same answers as its parent?"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from bench.gpu_check.probes.finding import Finding, begin_in_fork, end_of_fork, only_on_gpus


@dataclass(frozen=True)
class RankView:
    """NVML's answers to one process on GPU 0; None: no answer."""

    joules: float | None
    sm_mhz: int | None
    process_bytes: int | None
    """Memory in bytes; None if NVML does not list this process, as in some containers."""
    counts_throttling: bool
    processes: tuple[int, ...] | None


@dataclass(frozen=True)
class NvmlAnswers:
    driver: dict[str, object]
    gpu_kind: str
    child: dict[str, object]
    parent: dict[str, object]


def probe(device: str) -> Finding:
    import os

    if device != "cuda":
        return only_on_gpus("NVML knows no CPUs")
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # as the launcher sets it
    import torch

    from harness.host.gpu import driver
    from harness.parity.reference_runs import gpu_kind

    kind, installed = gpu_kind(), asdict(driver())  # initialises NVML in this process
    assert torch.cuda.device_count()
    child = end_of_fork(begin_in_fork(_view))
    answers = NvmlAnswers(installed, kind, child, _view())
    lost = [name for name, value in answers.parent.items() if value and not child.get(name)]
    reason = f"a forked rank is not told {', '.join(lost)}" if lost else "both are told the same"
    return Finding.of(not lost and "error" not in child, str(child.get("error") or reason), answers)


def _view() -> dict[str, object]:
    import torch

    from harness.measure.gpu_use import RankGpus

    device = torch.device("cuda", 0)
    factor = torch.ones(4096, 4096, device=device)
    gpus = RankGpus([device])
    gpus.start()
    for _ in range(20):
        factor = factor @ factor * 0
    torch.cuda.synchronize()
    gpus.stop()
    joules, use = gpus.joules(), gpus.use()
    state = use.states[0] if use and use.states else None
    processes = state.processes if state else None
    return asdict(
        RankView(
            next(iter(joules.values()))[0] if joules else None,
            state.sm_mhz if state else None,
            use.process_bytes if use else None,
            bool(use and use.throttled_seconds is not None),
            None if processes is None else tuple(process.pid for process in processes),
        )
    )
