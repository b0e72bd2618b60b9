"""Checks for conditions on this host that skew results, each with a fix."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import psutil

from harness.cell.errors import plural
from harness.host.amd import rocm_version
from harness.host.environment import unused_gpus
from harness.host.gpu_inventory import Gpu, GpuFacts, gpu_facts, gpu_topology, visible_gpus
from harness.host.gpu_models import gpu_model
from harness.host.gpu_state import GpuState, heat, states_of
from harness.host.nvml import nvml

GIB = 2**30
MOST_SWAP_BYTES = 256 * 2**20
BUSY_SHARE = 0.1
"""Load of other processes, as a share of all cores, from which it is reported."""
LOOK_SECONDS = 0.5
SHARED_MEMORY_BYTES = GIB
"""Minimum size of /dev/shm. NCCL takes tens of MiB per pair of ranks, and containers get only 64
MiB unless they ask for more."""
LOCKED_BYTES = GIB
HOT_CELSIUS = 83
"""Idle temperature from which it is reported. Typical GPUs throttle between 83 and 90 degrees."""


@dataclass(frozen=True)
class Trouble:
    subject: str
    what: str
    why: str
    fix: str
    """A command, or advice."""


def troubles() -> list[Trouble]:
    return [*gpu_troubles(), *host_troubles()]


def gpu_troubles() -> list[Trouble]:
    devices = visible_gpus()
    if not devices:
        return list(_unused())
    troubles = [trouble for facts in gpu_facts() for trouble in _settings(facts)]
    with nvml() as library:
        states = list(states_of(library, devices)) if library else []
    troubles += [trouble for state in states for trouble in _state(state)]
    return [*troubles, *_unproven(), *_software(), *_surroundings(devices)]


def _settings(facts: GpuFacts) -> Iterator[Trouble]:
    subject, number = f"GPU {facts.index}", facts.index
    limit, default = facts.power_limit_watts, facts.default_power_limit_watts
    if limit is not None and default is not None and limit < 0.99 * default:
        yield Trouble(
            subject,
            f"its power limit is {limit:.0f} W; the default is {default:.0f} W",
            "it runs at lower clocks than other GPUs of this model, so results look slower",
            f"sudo nvidia-smi -i {number} -pl {default:.0f}",
        )
    if facts.persistence is False:
        yield Trouble(
            subject,
            "persistence mode is off",
            "the driver unloads between trials, so each one starts seconds later and at"
            " different clocks",
            f"sudo nvidia-smi -i {number} -pm 1",
        )
    if facts.ecc is False:
        yield Trouble(
            subject,
            "error correction (ECC) is off",
            "memory is slightly faster and larger than with ECC, and bit errors go unnoticed",
            f"sudo nvidia-smi -i {number} -e 1, then restart the host",
        )
    if facts.mig:
        yield Trouble(
            subject,
            f"{facts.name} is a slice of a GPU (MIG)",
            "other slices share its power and PCIe link; its peak rate is unknown, so there is"
            " no MFU",
            f"sudo nvidia-smi -i {number} -mig 0",
        )


def _state(state: GpuState) -> Iterator[Trouble]:
    subject, number = f"GPU {state.index}", state.index
    others = [process for process in state.processes or () if process.pid != os.getpid()]
    if others:
        sizes = [process.memory_bytes for process in others if process.memory_bytes is not None]
        taken = f" with {sum(sizes) / GIB:.1f} GiB" if sizes else ""
        pids = " ".join(str(process.pid) for process in others)
        yield Trouble(
            subject,
            f"other processes are using it{taken}: {pids}",
            "they compete for its time and memory, so cells run slower or run out of memory",
            f"stop them (kill {pids}), or choose other GPUs with CUDA_VISIBLE_DEVICES",
        )
    if "clocks set by the user" in (state.reasons or ()):
        yield Trouble(
            subject,
            f"its clocks are locked, or application clocks are set (now {state.sm_mhz} MHz)",
            "it cannot reach the clocks of other GPUs of this model",
            f"sudo nvidia-smi -i {number} -rgc; sudo nvidia-smi -i {number} -rac",
        )
    hot = state.temperature_celsius is not None and state.temperature_celsius >= HOT_CELSIUS
    if state.slowed or hot:
        idle = f"it is at {state.temperature_celsius} °C while no rank is using it"
        yield Trouble(
            subject,
            heat(state) if state.slowed else idle,
            "its clocks drop during a run",
            "improve cooling, or wait; check with:"
            f" nvidia-smi -i {number} -q -d TEMPERATURE,PERFORMANCE",
        )
    if state.uncorrected_errors:
        yield Trouble(
            subject,
            f"{state.uncorrected_errors} memory errors could not be corrected",
            "results may be wrong and ranks may crash",
            f"restart the host; list them with: nvidia-smi -i {number} -q -d ECC",
        )


def _unproven() -> Iterator[Trouble]:
    if not (version := rocm_version()):
        return
    yield Trouble(
        "ROCm",
        f"the suite has never run on an AMD GPU (HIP {version})",
        "forked ranks, memory limits, CUDA graphs, RCCL, float8 and bitwise parity are unproven;"
        " energy, clocks and other processes' memory are unknown",
        "python -m bench run --matrix gpu, which tries each of them",
    )


def _unused() -> Iterator[Trouble]:
    if reason := unused_gpus():
        fix = "make setup, on this host, once the above is fixed"
        yield Trouble("GPUs", reason, "every cell runs on the CPU", fix)


def _software() -> Iterator[Trouble]:
    import torch

    if unused := list(_unused()):
        yield from unused
        return
    if not torch.distributed.is_nccl_available():
        what = f"torch {torch.__version__} is built without NCCL"
        yield Trouble(
            "torch", what, "GPUs cannot communicate with each other", "make setup, on this host"
        )
    yield from _stand_ins()


def _stand_ins() -> Iterator[Trouble]:
    from importlib.util import find_spec

    from harness.cell.cell import Cell
    from harness.seam.registry import strategies

    for name, cls in strategies().items():
        required = any(field.is_required() for field in cls.model_fields.values())
        if not required and all(map(find_spec, cls.requires)):
            cell = Cell(strategy=name, workload="llama-mini", devices=2, device="cuda")
            if reason := cls().stand_in(cell):
                yield Trouble(
                    name,
                    reason,
                    "its times tell you nothing about the real library",
                    "make setup, on this host",
                )


def _surroundings(devices: Sequence[Gpu]) -> Iterator[Trouble]:
    from harness.host.cores import allowed_cores

    cores = len(allowed_cores())
    if cores < len(devices):
        yield Trouble(
            "CPU",
            f"{plural(cores, 'core')} for {plural(len(devices), 'GPU')}",
            "ranks share cores, so GPUs wait for kernels to be launched",
            "request more from the scheduler (cpus_per_node) or container (docker run --cpus or"
            " --cpuset-cpus), or use taskset",
        )
    if len(devices) < 2:
        return
    yield from filter(None, (shared_memory_trouble(), locked_memory_trouble()))
    topology = gpu_topology()
    for a, b in combinations(range(len(devices)), 2):
        model, between = gpu_model(devices[a].name), topology[a][b]
        if model and model.nvlink_bytes_per_second and "NVLink" not in between:
            yield Trouble(
                f"GPUs {devices[a].index} and {devices[b].index}",
                f"no NVLink is active between them ({between})",
                "they communicate over PCIe, which is many times slower than NVLink",
                "systemctl status nvidia-fabricmanager; nvidia-smi nvlink -s",
            )
        elif between == "system":
            yield Trouble(
                f"GPUs {devices[a].index} and {devices[b].index}",
                "they are connected only through the link between the two sockets",
                "copies between them go through host memory",
                "check with: nvidia-smi topo -m; choose GPUs of one socket with"
                " CUDA_VISIBLE_DEVICES",
            )


def host_troubles(root: Path = Path("/")) -> list[Trouble]:
    checked = (_governor(root), _turbo(root), _siblings(root), _neighbours(), _swap(), _disk())
    return [trouble for trouble in checked if trouble]


def _governor(root: Path) -> Trouble | None:
    files = (root / "sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor")
    kinds = Counter(text for file in files if (text := _read(file)) != "performance" and text)
    if not kinds:
        return None
    return Trouble(
        "CPU",
        f"{plural(sum(kinds.values()), 'core')} with frequency governor {', '.join(kinds)}",
        "their clocks drop between steps and take time to recover, so trials differ",
        "sudo cpupower frequency-set -g performance",
    )


def _turbo(root: Path) -> Trouble | None:
    system = root / "sys/devices/system/cpu"
    for file, on, off in (
        (system / "intel_pstate/no_turbo", "0", "1"),
        (system / "cpufreq/boost", "1", "0"),
    ):
        if _read(file) == on:
            return Trouble(
                "CPU",
                "turbo is on",
                "clocks depend on heat and on how many cores are busy, so a rank alone looks"
                " faster than one of many",
                f"echo {off} | sudo tee {file}",
            )
    return None


def _siblings(root: Path) -> Trouble | None:
    if _read(root / "sys/devices/system/cpu/smt/active") != "1":
        return None
    return Trouble(
        "CPU",
        "two hardware threads share each core (SMT)",
        "two ranks that share a core are slower than on two cores",
        "echo off | sudo tee /sys/devices/system/cpu/smt/control",
    )


def _neighbours() -> Trouble | None:
    processes = psutil.process_iter(["name"])
    others = [process for process in processes if process.pid != os.getpid()]
    for process in others:
        _share(process)
    psutil.cpu_percent(None)
    busy_share = psutil.cpu_percent(LOOK_SECONDS) / 100
    if busy_share < BUSY_SHARE:
        return None
    busiest = sorted(((_share(process), process) for process in others), key=lambda pair: -pair[0])[
        :3
    ]
    names = ", ".join(
        f"{process.info['name']} ({process.pid})" for share, process in busiest if share >= 0.05
    )
    return Trouble(
        "CPU",
        f"other processes keep {busy_share:.0%} of all cores busy"
        + (f": {names}" if names else ""),
        "they take time from the ranks",
        "stop them, or wait; list them with: top",
    )


def _share(process: psutil.Process) -> float:
    try:
        return float(process.cpu_percent(None)) / 100
    except psutil.Error:
        return 0.0


def _swap() -> Trouble | None:
    used = psutil.swap_memory().used
    if used < MOST_SWAP_BYTES:
        return None
    return Trouble(
        "memory",
        f"{used / GIB:.1f} GiB are swapped out",
        "a step that needs them waits for the disk",
        "sudo swapoff -a && sudo swapon -a",
    )


def _disk() -> Trouble | None:
    from harness.host.folders import cache_folder
    from harness.parity.reference_runs import DEFAULT_LIMIT_GIB

    folder = cache_folder()
    free = shutil.disk_usage(folder).free
    if free >= DEFAULT_LIMIT_GIB * GIB:
        return None
    return Trouble(
        "disk",
        f"the cache in {folder} has only {free / GIB:.1f} GiB free",
        f"reference runs may need up to {DEFAULT_LIMIT_GIB:.0f} GiB; without them parity is unknown"
        " and nothing is ranked",
        "export PARALLELISM_BENCH_CACHE=/a/larger/disk",
    )


def shared_memory_trouble(folder: Path = Path("/dev/shm")) -> Trouble | None:
    try:
        size = shutil.disk_usage(folder).total
    except OSError:
        size = 0
    if size >= SHARED_MEMORY_BYTES:
        return None
    return Trouble(
        "memory",
        f"{folder} has {size / 2**20:.0f} MiB",
        "when it is full, NCCL and data loaders fail or take a slower path",
        f"docker run --shm-size=8g ..., or: sudo mount -o remount,size=8G {folder}",
    )


def locked_memory_trouble(root: Path = Path("/"), limit: int | None = None) -> Trouble | None:
    """Reports a limit of lockable memory that is too low for InfiniBand. `limit`: bytes; -1 means
    no limit."""
    import resource

    allowed = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
    if (
        not any((root / "sys/class/infiniband").glob("*"))
        or allowed in (-1, resource.RLIM_INFINITY)
        or allowed >= LOCKED_BYTES
    ):
        return None
    return Trouble(
        "memory",
        f"a process may lock only {allowed / 2**20:.1f} MiB of memory",
        "NCCL cannot register buffers with InfiniBand, so it fails or falls back to TCP",
        "ulimit -l unlimited (docker run --ulimit memlock=-1)",
    )


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
