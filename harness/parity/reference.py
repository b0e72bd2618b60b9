from __future__ import annotations

import errno
import hashlib
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from harness.cell import durable
from harness.seam.checkpoints import MOMENTS_UP_TO, full_moments, full_parameters
from harness.seam.job import TrainState

if TYPE_CHECKING:
    from torch import Tensor, nn

    from harness.workloads import Workload


Facts: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Deviations:
    """Deviations by tensor; infinite if a tensor cannot be compared."""

    updates: Mapping[str, float] = field(default_factory=dict)
    """|parameters - reference| / |reference's update|."""
    elements: Mapping[str, float] = field(default_factory=dict)
    """Largest |parameter - reference| of an element over the root mean square of the update."""
    decays: Mapping[str, float] = field(default_factory=dict)
    """Error along the weights over the norm of the update: wrong weight decay has this direction,
    rounding has none. In half precision, without the part expected by chance."""
    directions: Mapping[str, float] = field(default_factory=dict)
    """Error along the weights in half precision, in standard deviations of an error without
    direction; 0 below `LEAST_DECAY` of the decay."""
    buffers: Mapping[str, float] = field(default_factory=dict)
    """|buffer - reference| / |reference's change|."""
    moments: Mapping[str, float] = field(default_factory=dict)
    """Norm of (optimizer state - reference's state) over the norm of the reference's state."""
    coarse: Mapping[str, float] = field(default_factory=dict)
    """Share of an optimizer state's numbers that fit in 16 bits, beyond the reference's share."""
    scales: Mapping[str, float] = field(default_factory=dict)
    """Error of an optimizer state along the reference's, over the norm of the reference's: the
    median tensor's by kind of state. Gradients of another scale have this direction."""

    def merged(self, other: Deviations) -> Deviations:
        return Deviations(
            **{f.name: _larger(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)}
        )

    @property
    def finite(self) -> bool:
        return all(
            math.isfinite(value) for f in fields(self) for value in getattr(self, f.name).values()
        )


def all_ranks(ranks: Iterable[Deviations]) -> Deviations:
    merged = Deviations()
    for of_rank in ranks:
        merged = merged.merged(of_rank)
    return merged


def largest(deviations: Iterable[float]) -> float | None:
    return max((v for v in deviations if math.isfinite(v)), default=None)


def _larger(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
    values = {name: (a.get(name, 0.0), b.get(name, 0.0)) for name in (*a, *b)}
    return {n: max(v) if all(map(math.isfinite, v)) else math.inf for n, v in values.items()}


UNIT = 2.0**-23
"""Relative distance between neighbouring fp32 numbers just above a power of two, where it is
largest. Rounding errs by half of it."""
VERSION = 11  # raise it when the contents of reference files change meaning


@dataclass(frozen=True)
class Noise:
    """Deviation between two reference runs that round differently."""

    loss: float
    """Largest |difference| / |loss| in the segment."""
    deviations: Deviations = field(default_factory=Deviations)
    norm: float = 0.0
    """Largest |difference| / |gradient norm| in the segment; 0 if norms are unknown."""

    @property
    def update(self) -> float:
        return max(self.deviations.updates.values(), default=0.0)


@dataclass(frozen=True)
class Reference:
    """Reference run on disk: losses of the parity segment, trained tensors after it, update norms.

    Keeps digests of frozen tensors, which must stay bitwise identical, and `update_shares`:
    updates' components along the final weights, over their norm.
    """

    folder: str

    @property
    def facts(self) -> Facts:
        if (text := durable.read_cached(self._file)) is None:
            raise FileNotFoundError(errno.ENOENT, "it was removed or damaged", str(self._file))
        loaded: Facts = json.loads(text)
        return loaded

    @property
    def _file(self) -> Path:
        return Path(self.folder) / "reference.json"

    @property
    def final_file(self) -> Path:
        return Path(self.folder) / "final.safetensors"

    @property
    def ahead_file(self) -> Path:
        return Path(self.folder) / "ahead.safetensors"

    @property
    def exists(self) -> bool:
        return durable.read_cached(self._file) is not None

    def remove_if_damaged(self) -> None:
        """Removes the reference if a file of tensors is damaged, so that it is trained again."""
        for file, digest in (self.facts if self.exists else {}).get("digests", {}).items():
            if durable.file_digest(Path(self.folder, file)) != digest:
                durable.remove_damaged(Path(self.folder, file))
                self._file.unlink(missing_ok=True)

    def save(
        self,
        workload: Workload,
        train_state: TrainState,
        initial: nn.Module,
        losses: list[float],
        gradient_norms: list[float],
        buffers: Mapping[str, Tensor],
    ) -> None:
        """Writes the JSON last, because it marks the files as complete.

        `buffers`: floating-point buffers by number of replicas and name (see RunningStatistics).
        """
        Path(self.folder).mkdir(parents=True, exist_ok=True)
        before = dict(initial.named_parameters())
        parameters = dict(full_parameters(train_state))
        final = {
            name: parameters[name].cpu().contiguous()
            for name, initially in before.items()
            if initially.requires_grad
        }
        frozen = {name: digest(p) for name, p in parameters.items() if name not in final}
        first = dict(initial.named_buffers())
        changed = {
            key: (float((buffer - first[key.partition("/")[2]]).norm()), buffer)
            for key, buffer in buffers.items()
        }
        self._save_tensors(
            (train_state, *train_state.replicas),
            frozen,
            {f"buffers/{key}": buffer.cpu() for key, (moved, buffer) in changed.items() if moved},
            self.final_file,
        )
        norms, shares = dict.fromkeys(frozen, 0.0), dict.fromkeys(frozen, 0.0)
        for name, tensor in final.items():
            weights = workload.without_zero_gradient(name, in_fp32(tensor))
            moved = weights - workload.without_zero_gradient(
                name, in_fp32(before[name].detach()).cpu()
            )
            norms[name], squared = float(moved.norm()), float(weights.norm()) ** 2
            along = float(moved.flatten().dot(weights.flatten()))
            shares[name] = along / squared if squared else 0.0
        roundings = {
            name: len(losses) * UNIT * float(in_fp32(tensor).norm()) / norms[name]
            for name, tensor in final.items()
            if norms[name]
        }
        self._write(
            {"losses": losses, "update_norms": norms, "roundings": roundings, "frozen": frozen}
            | {"update_shares": shares, "gradient_norms": gradient_norms}
            | {"replicas": 1 + len(train_state.replicas)}
            | {"digests": {self.final_file.name: durable.file_digest(self.final_file)}}
            | {"buffer_norms": {key: moved for key, (moved, _) in changed.items() if moved}}
        )

    def save_ahead(self, train_state: TrainState, losses: list[float]) -> None:
        """Writes the result of replaying the segment's end with optimizers and schedules ahead."""
        facts = self.facts
        states = (train_state, *train_state.replicas)
        self._save_tensors(states, facts["frozen"], {}, self.ahead_file)
        digests = facts["digests"] | {self.ahead_file.name: durable.file_digest(self.ahead_file)}
        self._write(facts | {"ahead_losses": losses, "digests": digests})

    def _save_tensors(
        self,
        replicas: Sequence[TrainState],
        frozen: Collection[str],
        others: Mapping[str, Tensor],
        file: Path,
    ) -> None:
        """Writes the replicas' parameters and optimizer states, and the other tensors. Array tasks
        may do so concurrently."""
        from safetensors.torch import save_file

        tensors = dict(others)
        for number, state in enumerate(replicas):
            parameters = {
                name: tensor.cpu().contiguous()
                for name, tensor in full_parameters(state)
                if name not in frozen
            }
            for name, tensor in parameters.items():
                tensors[of_replica(number, f"parameters/{name}")] = tensor
            shapes = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
            if sum(tensor.nbytes for tensor in parameters.values()) <= MOMENTS_UP_TO:
                for name, kind, tensor in full_moments(state, shapes.get):
                    key = of_replica(number, f"{kind}/{name}")
                    tensors[key] = tensor.cpu().contiguous()
        with durable.replacing(file) as temporary:
            save_file(tensors, temporary)

    @property
    def ahead_losses(self) -> list[float]:
        """Losses of the replay ahead; empty if there was none."""
        losses: list[float] = self.facts.get("ahead_losses", [])
        return losses

    @property
    def roundings(self) -> dict[str, float]:
        """Rounding error of fp32 by tensor, relative to its update: each step rounds a weight
        twice, when it decays and when it is updated. At a learning rate of 1e-4, two
        implementations of AdamW thus differ by 2e-3 of the update of weights near 1."""
        roundings: dict[str, float] = self.facts["roundings"]
        return roundings

    @property
    def all_losses(self) -> list[float]:
        """Losses of the segment and all later steps requested so far."""
        facts = self.facts
        losses: list[float] = facts.get("all_losses") or facts["losses"]
        return losses

    @property
    def gradient_norms(self) -> list[float]:
        norms: list[float] = self.facts.get("gradient_norms", [])
        return norms

    @property
    def drift(self) -> list[float] | None:
        """Relative loss deviation by step of a run that rounds differently. Empty if it shows
        nothing, None if there is no such run."""
        deviations: list[float] | None = self.facts.get("drift")
        return deviations

    @property
    def sketches(self) -> list[list[dict[str, float]]]:
        """Sketches of the parameters after each step, by replica; empty without a long run."""
        return list(json.loads(durable.read_cached(Path(self.folder, "sketches.json")) or "[]"))

    def note_losses(self, losses: Sequence[float], sketches: Sequence[object] = ()) -> None:
        """Saves the losses and sketches of a longer reference run, and resets the drift."""
        if sketches:
            durable.write_cached(Path(self.folder, "sketches.json"), json.dumps(sketches))
        self._write(self.facts | {"all_losses": list(losses), "drift": None})

    def note_drift(self, drift: Sequence[float]) -> None:
        self._write(self.facts | {"drift": list(drift)})

    def no_exchange(self, ranks: int) -> Noise | None:
        """Returns the deviations of this many ranks that exchange nothing; None if not measured."""
        measured = self.facts.get("no_exchange", {}).get(str(ranks))
        return _noise_of(**measured) if measured else None

    def note_no_exchange(self, ranks: int, deviations: Noise) -> None:
        measured = self.facts.get("no_exchange", {}) | {str(ranks): asdict(deviations)}
        self._write(self.facts | {"no_exchange": measured})

    def note(self, noise: Noise) -> None:
        self._write(self.facts | {"noise": asdict(noise)})

    @property
    def noise(self) -> Noise | None:
        stored = self.facts.get("noise")
        return _noise_of(**stored) if stored else None

    def _write(self, facts: Facts) -> None:
        durable.write_cached(self._file, json.dumps(facts))


def _noise_of(loss: float, deviations: Mapping[str, Mapping[str, float]], norm: float) -> Noise:
    return Noise(loss, Deviations(**deviations), norm)


def of_replica(number: int, key: str) -> str:
    """Returns the key of a replica's tensor in the files of a reference that emulates several."""
    return f"replica {number}/{key}" if number else key


def in_fp32(tensor: Tensor) -> Tensor:
    """Converts a tensor to fp32, a complex one with real and imaginary parts in a new last
    dimension."""
    import torch

    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).float()


def digest(tensor: Tensor) -> str:
    """Returns a digest of the values as fp32, from a copy, because NumPy would hold on to a storage
    that FSDP1 resizes."""
    import torch

    numbers = tensor.detach().to("cpu", torch.float32, copy=True).contiguous().numpy()
    return hashlib.blake2b(numbers.data, digest_size=16).hexdigest()
