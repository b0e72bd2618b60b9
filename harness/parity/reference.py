"""A reference run on disk: losses, parameters after the parity segment, and its noise."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

    from harness.workloads import Workload


VERSION = 2  # of the reference files; raise it when what they hold changes meaning


@dataclass(frozen=True)
class Noise:
    """How far two reference runs are apart that differ only in how the batch is split: by rounding
    alone."""

    loss: float
    """Largest |difference| / |loss| at any step of the segment."""
    update: float
    """Largest norm of the difference of any tensor, relative to its update."""


@dataclass(frozen=True)
class Reference:
    """A reference run on disk: losses of the segment, trained tensors after it, the norm of each
    tensor's update.

    Of a tensor that is not trained a digest is kept: it must stay bit for bit what it was.
    """

    folder: str

    @property
    def facts(self) -> dict[str, Any]:
        loaded: dict[str, Any] = json.loads((Path(self.folder) / "reference.json").read_text())
        return loaded

    @property
    def exists(self) -> bool:
        return (Path(self.folder) / "reference.json").is_file()

    def save(
        self, workload: Workload, model: nn.Module, initial: nn.Module, losses: list[float]
    ) -> None:
        """Written by the reference run itself; the JSON comes last and makes it exist."""
        from safetensors.torch import save_file

        Path(self.folder).mkdir(parents=True, exist_ok=True)
        before = dict(initial.named_parameters())
        parameters = dict(model.named_parameters())
        final = {
            name: p.detach().cpu().contiguous() for name, p in parameters.items() if p.requires_grad
        }
        frozen = {name: digest(p) for name, p in parameters.items() if name not in final}
        mine = (  # tasks of an array may make the same reference at the same time
            f"{platform.node()}.{os.getpid()}.tmp"
        )
        save_file(final, Path(self.folder) / f"final.{mine}")
        norms = dict.fromkeys(frozen, 0.0)
        for name, tensor in final.items():
            moved = workload.without_zero_gradient(
                name, tensor.float()
            ) - workload.without_zero_gradient(name, before[name].detach().float().cpu())
            norms[name] = float(moved.norm())
        (Path(self.folder) / f"final.{mine}").replace(Path(self.folder) / "final.safetensors")
        self._write({"losses": losses, "update_norms": norms, "frozen": frozen})

    @property
    def all_losses(self) -> list[float]:
        """Those of the segment, and of as many steps after it as were asked for so far."""
        facts = self.facts
        losses: list[float] = facts.get("all_losses") or facts["losses"]
        return losses

    @property
    def drift(self) -> list[float] | None:
        """Relative deviation at each of these steps of the loss of a run that differs in rounding
        alone (see `rounded_differently`); empty where that tells nothing, None where there was no
        such run yet."""
        deviations: list[float] | None = self.facts.get("drift")
        return deviations

    def precision_drift(self, precision: str) -> list[float]:
        """Relative deviation at each of these steps of the loss in fp32 from that of the same
        training in a lower precision, the larger one of two runs; empty where there were none."""
        losses: list[float] = self.facts.get("precision_drift", {}).get(precision, [])
        return losses

    def note_precision_drift(self, precision: str, drift: Sequence[float]) -> None:
        """Keeps it."""
        all_drifts = self.facts.get("precision_drift", {}) | {precision: list(drift)}
        self._write(self.facts | {"precision_drift": all_drifts})

    def note_losses(self, losses: Sequence[float]) -> None:
        """Keeps the losses of a longer run of the same training, whose drift is not known."""
        self._write(self.facts | {"all_losses": list(losses), "drift": None})

    def note_drift(self, drift: Sequence[float]) -> None:
        """Keeps how far the losses of these steps are from those of a run that rounds otherwise."""
        self._write(self.facts | {"drift": list(drift)})

    def note(self, noise: Noise) -> None:
        """Keeps the run's own noise with it."""
        self._write(self.facts | {"noise": asdict(noise)})

    @property
    def noise(self) -> Noise | None:
        """None where it was not measured."""
        known = self.facts.get("noise")
        return Noise(**known) if known else None

    def _write(self, facts: dict[str, Any]) -> None:
        temporary = Path(self.folder) / f"reference.{platform.node()}.{os.getpid()}.tmp"
        temporary.write_text(json.dumps(facts))
        temporary.replace(Path(self.folder) / "reference.json")


def digest(tensor: Tensor) -> str:
    """Tells a tensor from every other, whichever device and precision it is kept in.

    Of a copy: NumPy takes a tensor's storage for good, and FSDP1 resizes the storage of what it
    gathered.
    """
    import torch

    numbers = tensor.detach().to("cpu", torch.float32, copy=True).contiguous().numpy()
    return hashlib.blake2b(numbers.data, digest_size=16).hexdigest()
