from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bench.gpu_check.probes.finding import Attempt, ProbeFinding, attempt, failed

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module


TOKENS = 64


@dataclass(frozen=True)
class ProbeSizes:
    workload: str
    steps: int
    batch: int
    rows: int
    """Matrix rows; an image's side is 1/32 of this."""


SIZES = {
    "cuda": ProbeSizes("llama-512x16", 8, 64, 1536),
    "cpu": ProbeSizes("llama-micro", 2, 8, 128),
}


@dataclass(frozen=True)
class Numerics:
    matmul_error: float
    """Relative error of an fp32 product against fp64."""
    matmul_depends_on_rows: float
    """Largest change of an element if half the rows are multiplied separately."""
    attention_errors: tuple[Attempt, ...]
    """Relative errors of fp32 attention against fp64, by backend."""
    convolution_error: float
    same_twice: bool
    same_twice_update: float
    """Largest difference between equal runs, relative to the update."""
    split_update: float
    """Largest such difference between whole and halved batches."""
    split_loss: float


def numerics(device: str) -> ProbeFinding:
    """How large are differences from rounding on this device?"""
    import torch

    from harness.spec.training import EXACT

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    sizes = SIZES[device]
    rows, side = sizes.rows, sizes.rows // 32
    left, right = (torch.randn(rows, rows, device=device) for _ in range(2))
    image = torch.randn(8, 64, side, side, device=device)
    kernel = torch.randn(64, 64, 3, 3, device=device)
    convolve = torch.nn.functional.conv2d
    start = {name: p.detach() for name, p in _model(sizes, device).named_parameters()}
    one, losses = _train(sizes, device, 1)
    again, losses_again = _train(sizes, device, 1)
    split, losses_split = _train(sizes, device, 2)
    facts = Numerics(
        _error(left @ right, left.double() @ right.double()),
        float(((left @ right)[: rows // 2] - left[: rows // 2] @ right).abs().max()),
        _attention(device),
        _error(
            convolve(image, kernel, padding=1),
            convolve(image.double(), kernel.double(), padding=1),
        ),
        losses == losses_again and all(torch.equal(one[name], again[name]) for name in one),
        _largest(one, again, start),
        _largest(one, split, start),
        max(abs(a - b) / abs(a) for a, b in zip(losses, losses_split, strict=True)),
    )
    holds = facts.split_update <= EXACT.update and facts.split_loss <= EXACT.loss
    reason = (
        f"a split batch changes losses by {facts.split_loss:.1e} (limit {EXACT.loss:.0e}) and"
        f" updates by {facts.split_update:.1e} (limit {EXACT.update:.0e})"
    )
    return ProbeFinding.of(holds, reason, facts)


def _error(value: Tensor, exact: Tensor) -> float:
    return float((value.double() - exact).norm() / exact.norm())


def _attention(device: str) -> tuple[Attempt, ...]:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    attend = torch.nn.functional.scaled_dot_product_attention
    q, k, v = (torch.randn(8, 8, 64, 64, device=device) for _ in range(3))
    exact = attend(q.double(), k.double(), v.double(), is_causal=True)

    def error(backend: SDPBackend | None) -> float:
        if backend is None:
            return _error(attend(q, k, v, is_causal=True), exact)
        with sdpa_kernel(backend):
            return _error(attend(q, k, v, is_causal=True), exact)

    backends = (None, SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION)
    return tuple(
        attempt(backend.name if backend else "default", partial(error, backend))
        for backend in backends
    )


def _model(sizes: ProbeSizes, device: str) -> Module:
    import torch

    from harness.workloads import make_workload

    return make_workload(sizes.workload).build(0, torch.device(device))


def _train(sizes: ProbeSizes, device: str, parts: int) -> tuple[dict[str, Tensor], list[float]]:
    import torch

    from harness.workloads import make_workload

    workload, model = make_workload(sizes.workload), _model(sizes, device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, betas=(0.9, 0.95), eps=1e-5)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(sizes.steps):
        tokens = torch.randint(0, 256, (sizes.batch, TOKENS + 1), generator=generator).to(device)
        total = 0.0
        for part in tokens.chunk(parts):
            loss = workload.loss(workload.logits(model, part[:, :-1]), part[:, 1:]) / parts
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return {name: p.detach() for name, p in model.named_parameters()}, losses


def _largest(one: dict[str, Tensor], other: dict[str, Tensor], start: dict[str, Tensor]) -> float:
    return max(
        float((one[name] - other[name]).norm() / (one[name] - start[name]).norm()) for name in one
    )


WORKLOAD = "llama-micro"
VARIANTS = (
    *("lora", "prompt", "prefix", "p_tuning", "ia3", "bf16"),
    *("nf4+lora", "int8+lora", "float8"),
)


@dataclass(frozen=True)
class Weights:
    digest: str
    """Digest of all initial weights; differs between kinds of GPU."""
    same_on_cpu: bool
    variants: tuple[Attempt, ...]


def weights(device: str) -> ProbeFinding:
    """Are initial weights identical on every device, and does each model variant train?"""
    import torch

    from harness.parity.reference import digest
    from harness.workloads import make_workload

    target, workload = torch.device(device), make_workload(WORKLOAD)

    def drawn(kept_on: torch.device) -> str:
        model = workload.build(0, kept_on, drawn_on=target)
        return digest(torch.cat([p.detach().flatten() for p in model.parameters()]))

    def train(variant: str) -> str:
        made = make_workload(f"{WORKLOAD}+{variant}")
        model = made.build(0, target)
        tokens = torch.randint(0, 256, (4, 32), device=target)
        loss = made.loss(made.logits(model, tokens), tokens)
        loss.backward()
        return f"{sorted({str(p.device) for p in model.parameters()})} {float(loss.detach()):.4f}"

    variants = tuple(attempt(v, partial(train, v)) for v in VARIANTS)
    facts = Weights(drawn(target), drawn(torch.device("cpu")) == drawn(target), variants)
    holds = facts.same_on_cpu and not failed(variants)
    same = "the same" if facts.same_on_cpu else "other weights"
    return ProbeFinding.of(
        holds, failed(variants) or f"{same} when they are kept on the CPU", facts
    )


@dataclass(frozen=True)
class CollectiveFacts:
    backend: str
    attempts: tuple[Attempt, ...]


def collectives(device: str) -> ProbeFinding:
    """Do collectives and what is built on them run with one rank?"""
    import torch
    import torch.distributed as dist

    from harness.host.packages import is_installed
    from harness.host.tcp_store import listening_on
    from harness.worker.reporting import group_states

    os.environ |= listening_on("lo")
    backend = "nccl" if device == "cuda" else "gloo"
    if device == "cuda":
        torch.cuda.set_device(0)

    def all_reduce() -> float:
        tensor = torch.ones(4, device=device)
        dist.all_reduce(tensor)
        return float(tensor.sum())

    with tempfile.TemporaryDirectory() as folder:
        rendezvous = f"file://{Path(folder) / 'group'}"
        attempts = [
            attempt(
                f"{backend} process group",
                lambda: dist.init_process_group(
                    backend, init_method=rendezvous, rank=0, world_size=1
                ),
            ),
            attempt("all_reduce", all_reduce),
            attempt("barrier", dist.barrier),
            attempt("broadcast_object_list", lambda: dist.broadcast_object_list([1])),
            attempt("all_gather_object", lambda: dist.all_gather_object([None], "x")),
            attempt("flight recorder", group_states),
        ]
        if device == "cuda":  # GPU only
            attempts += [attempt("ring attention", _ring), attempt("FSDP1 with offload", _fsdp1)]
            if is_installed("fairscale"):
                attempts.append(attempt("fairscale FSDP", _fairscale))
        dist.destroy_process_group()
    facts = CollectiveFacts(backend, tuple(attempts))
    return ProbeFinding.of(
        not failed(facts.attempts), failed(facts.attempts) or f"{len(attempts)} calls ran", facts
    )


def _fsdp1() -> str:
    import torch
    from torch.distributed.fsdp import CPUOffload, FullyShardedDataParallel
    from torch.nn import Linear, Sequential

    model = FullyShardedDataParallel(
        Sequential(Linear(64, 64), Linear(64, 64)).cuda(),
        device_id=torch.device("cuda", 0),
        cpu_offload=CPUOffload(offload_params=True),
        use_orig_params=True,
    )
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.randn(4, 64, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        return ", ".join(sorted({str(p.device) for p in model.parameters()}))


def _ring() -> float:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    set_rotate_method("allgather")
    mesh = init_device_mesh("cuda", (1,))
    q, k, v = (
        torch.randn(2, 4, 64, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    )
    positions = torch.arange(64, device="cuda")[None]
    with context_parallel(
        mesh, buffers=[positions], buffer_seq_dims=[1], no_restore_buffers={positions}
    ):
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        attended.sum().backward()
    assert q.grad is not None
    return float(q.grad.norm())


def _fairscale() -> str:
    import torch
    from fairscale.nn.data_parallel import FullyShardedDataParallel
    from torch.nn import Linear, Sequential

    model = FullyShardedDataParallel(
        Sequential(FullyShardedDataParallel(Linear(64, 64).cuda()), Linear(64, 64).cuda()),
        compute_device=torch.device("cuda", 0),
    )
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.randn(4, 64, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return "3 steps"
