"""Do collectives and what is built on them run with one rank?"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from bench.gpu_check.probes.finding import Attempt, Finding, attempt, failed


@dataclass(frozen=True)
class CollectiveFacts:
    backend: str
    attempts: tuple[Attempt, ...]


def probe(device: str) -> Finding:
    import torch
    import torch.distributed as dist

    from harness.host.hidden_packages import is_installed
    from harness.worker.heartbeat import group_states

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
    return Finding.of(
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
