"""Are initial weights identical on every device, and does each model variant train?"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from bench.gpu_check.probes.finding import Attempt, Finding, attempt, failed

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
    """Whether CPU weights are initialised to the device's values."""
    variants: tuple[Attempt, ...]
    """Device of each variant's weights, and first loss."""


def probe(device: str) -> Finding:
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
    return Finding.of(holds, failed(variants) or f"{same} when they are kept on the CPU", facts)
