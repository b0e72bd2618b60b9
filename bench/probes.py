"""Tries what ranks need from this host and what no cell shows on its own.

Each probe has a process of its own: most initialise CUDA, after which ranks cannot be forked.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from harness.host.process import Ended, call_apart

if TYPE_CHECKING:
    from torch import Tensor

LIMIT_SECONDS = 120.0
"""Limit of a probe, which may import every library from a slow disk."""
PRODUCT_ERROR = 1e-5
"""Maximum relative error of an fp32 product; TF32's is about 3e-4."""
FLOAT8_ERROR = 0.1
FLOAT8_LARGEST = 448.0

ProbeState = Literal["works", "fails", "does not apply"]


@dataclass(frozen=True)
class ProbeAnswer:
    name: str
    state: ProbeState
    text: str


class DoesNotApply(Exception):
    """This host lacks what a probe is about; the message says what."""


class ProbeFailed(Exception):
    """A probe ran and gave a wrong answer; the message says which."""


def forked_rank(device: str) -> str:
    """Forks a process after all imports, as the launcher does, and uses the device in it."""
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # as the launcher sets it
    import harness.worker.preload
    import harness.worker.worker
    from harness.host.environment import cuda_is_initialized, to_preload
    from harness.seam.registry import strategies

    needed = dict.fromkeys(
        name for cls in strategies().values() for name in (*cls.requires, *cls.capabilities.preload)
    )
    for name in ("", *to_preload(list(needed), device == "cuda")):
        harness.worker.preload.import_packages([name] if name else [])
        if cuda_is_initialized():
            raise ProbeFailed(f"importing {name or 'the suite'} initialises CUDA")
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        return pool.submit(_use, device).result()


def _use(device: str) -> str:
    """Multiplies matrices, and says what NVML tells this process about its GPU."""
    import torch

    from harness.measure.resource_use import RankGpus

    factor = torch.ones(1024, 1024, device=device)
    if float((factor @ factor).sum()) != 1024.0**3:
        raise ProbeFailed("a product of ones is wrong")
    if device == "cpu":
        return "multiplies matrices"
    if not torch.ones(2**20).pin_memory().is_pinned():
        raise ProbeFailed("memory cannot be pinned")
    gpus = RankGpus([torch.device("cuda", 0)])
    gpus.start()
    gpus.stop()
    use = gpus.use()
    answers = {
        "energy": gpus.joules(),
        "clocks": use and use.states and use.states[0].sm_mhz,
        "its memory": use and use.process_bytes,
    }
    lacking = [name for name, value in answers.items() if not value]
    told = f"NVML does not tell it {', '.join(lacking)}" if lacking else "NVML answers it"
    return f"multiplies matrices, pins memory; {told}"


def peer_access(device: str) -> str:
    import torch

    count = torch.cuda.device_count() if device == "cuda" else 0
    if count < 2:
        raise DoesNotApply("this host has fewer than two GPUs")
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    if apart:
        listed = ", ".join(f"{a} to {b}" for a, b in apart)
        return f"NCCL copies through host memory from GPU {listed}"
    return "each GPU reads the others' memory"


def collectives(device: str) -> str:
    """Runs collectives in a group of one, and reads the state that a hang would be explained by."""
    import torch
    import torch.distributed as dist

    from harness.host.tcp_store import listening_on
    from harness.worker.reporting import group_states

    os.environ |= listening_on("lo")
    backend = "nccl" if device == "cuda" else "gloo"
    if device == "cuda":
        torch.cuda.set_device(0)
    with tempfile.TemporaryDirectory() as folder:
        rendezvous = f"file://{Path(folder) / 'group'}"
        dist.init_process_group(backend, init_method=rendezvous, rank=0, world_size=1)
        ones = torch.ones(4, device=device)
        dist.all_reduce(ones)
        dist.broadcast_object_list([1])
        dist.barrier()
        states = group_states()
        dist.destroy_process_group()
    if float(ones.sum()) != 4:
        raise ProbeFailed("an all-reduce of one rank changes its tensor")
    recorder = "its flight recorder answers" if states else "without a flight recorder"
    return f"{backend} runs, {recorder}"


def rounding(device: str) -> str:
    """Compares products and attention in fp32 with fp64."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    left, right = (torch.randn(1024, 1024, device=device) for _ in range(2))
    errors = {"products": _error(left @ right, left.double() @ right.double())}
    attend = torch.nn.functional.scaled_dot_product_attention
    q, k, v = (torch.randn(8, 8, 64, 64, device=device) for _ in range(3))
    exact = attend(q.double(), k.double(), v.double(), is_causal=True)
    for backend in (SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION):
        try:
            with sdpa_kernel(backend):
                attended = attend(q, k, v, is_causal=True)
        except RuntimeError:  # no kernel on this device
            continue
        errors[f"attention ({backend.name.lower()})"] = _error(attended, exact)
    text = "fp32 is off by " + ", ".join(f"{error:.0e} in {what}" for what, error in errors.items())
    if max(errors.values()) > PRODUCT_ERROR:
        raise ProbeFailed(
            f"{text}, so something lowers its precision, such as NVIDIA_TF32_OVERRIDE"
        )
    return text


def _error(value: Tensor, exact: Tensor) -> float:
    return float((value.double() - exact).norm() / exact.norm())


def float8(device: str) -> str:
    """Multiplies float8 matrices with a scale per row, into each type of output."""
    import torch

    from harness.workloads.low_precision import has_float8

    if not has_float8(torch.device(device)):
        raise DoesNotApply("this device has no float8 products: cells emulate them")
    torch.manual_seed(0)
    left, right = torch.randn(64, 128, device=device), torch.randn(32, 128, device=device)
    scales = [x.abs().amax(1, keepdim=True) / FLOAT8_LARGEST for x in (left, right)]
    a, b = (
        (x / scale).to(torch.float8_e4m3fn) for x, scale in zip((left, right), scales, strict=True)
    )
    done = []
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        try:
            product = torch._scaled_mm(
                a,
                b.t(),
                scale_a=scales[0],
                scale_b=scales[1].t(),
                out_dtype=dtype,
                use_fast_accum=True,
            )
        except RuntimeError:  # this output is not supported
            continue
        if (error := _error(product, (left @ right.t()).double())) > FLOAT8_ERROR:
            raise ProbeFailed(f"products into {dtype} are off by {error:.2f}")
        done.append(str(dtype).removeprefix("torch."))
    if "bfloat16" not in done:
        raise ProbeFailed("products into bfloat16 do not run, which float8 training needs")
    return f"products into {', '.join(done)}"


PROBES: dict[str, Callable[[str], str]] = {
    "forked rank": forked_rank,
    "collectives": collectives,
    "peer access": peer_access,
    "rounding": rounding,
    "float8": float8,
}


def probe(device: str) -> list[ProbeAnswer]:
    return [_probed(name, device) for name in PROBES]


def _probed(name: str, device: str) -> ProbeAnswer:
    found = call_apart(answer, name, device, limit=LIMIT_SECONDS)
    return ProbeAnswer(name, "fails", found.reason) if isinstance(found, Ended) else found


def answer(name: str, device: str) -> ProbeAnswer:
    """Runs a probe in this process; errors of libraries are raised."""
    try:
        return ProbeAnswer(name, "works", PROBES[name](device))
    except DoesNotApply as reason:
        return ProbeAnswer(name, "does not apply", str(reason))
    except ProbeFailed as reason:
        return ProbeAnswer(name, "fails", str(reason))
