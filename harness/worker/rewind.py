"""Rewinds a rank's state, at steps that only the harness knows."""

from __future__ import annotations

import os
import random
import weakref
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from harness.cell.cell import Cell
from harness.cell.training import REPLAYED_STEPS, first_replayed
from harness.measure.memory_kinds import local_part, retained
from harness.parity.reference import Reference
from harness.seam.checkpoints import Counter as StepCounter
from harness.seam.checkpoints import counters_of, set_counters
from harness.seam.job import TrainState
from harness.worker.spec import TrialSpec

if TYPE_CHECKING:
    from torch import Tensor


AHEAD = 1000
"""Number of steps by which some replays move optimizers and schedules ahead. Otherwise an error
that begins at some step would vanish in a rewind."""
STEP = "step"
"""Name of the step number in torch's optimizer states."""
PIECE_BYTES = 2**24


class MemoryCheckpoint:
    """Copy of a rank's parameters, buffers, optimizer states and schedules, in an anonymous memory
    file.

    The strategy's step counters continue, or an error at some step would vanish in its replay.
    Rewinds span whole cycles, so that counters keep their phase.
    """

    def __init__(self, train_state: TrainState) -> None:
        """Call between two steps."""
        self._file = os.memfd_create("state of a rank")
        weakref.finalize(self, os.close, self._file)
        self._places: dict[Hashable, tuple[int, int]] = {}
        self._counters: dict[Hashable, dict[str, int]] = {}
        offset, copied = 0, set[tuple[str, int]]()
        for key, tensor in _tensors(train_state):
            storage = tensor.untyped_storage()
            owner = (str(storage.device), storage.data_ptr())
            if owner in copied:
                continue  # a view of a storage that is copied as a whole
            if tensor.nbytes == storage.nbytes():
                copied.add(owner)
            self._places[key] = offset, tensor.nbytes
            offset += tensor.nbytes
            for piece in _bytes_of(tensor).split(PIECE_BYTES):
                with memoryview(_numbers(piece.cpu())) as numbers:
                    _write(self._file, numbers)
        for key, record in _records(train_state):
            self._counters[key] = dict(_counters(record))
        self._scheduled = counters_of(_schedules(train_state))

    def restore(self, train_state: TrainState, ahead: int = 0) -> None:
        """Restores the state in place, and drops newer optimizer states. `ahead`: added to step
        numbers. Raises RuntimeError if a tensor is missing or has another size."""
        self._forget_later_states(train_state)
        restored = set()
        for key, tensor in _tensors(train_state):
            if key not in self._places:
                continue
            offset, size = self._places[key]
            if size == tensor.nbytes:
                restored.add(key)
                self._fill(tensor, offset)
        if restored != self._places.keys():
            raise RuntimeError(
                "the state cannot be rewound: the rank keeps other tensors than when it was saved;"
                " if the strategy intends this, it must give a `rewind_skipped_reason`"
            )
        for key, record in _records(train_state):
            record.update(self._counters.get(key, {}))
            if ahead and STEP in record:
                record[STEP] += ahead  # in place if a tensor
        set_counters(_schedules(train_state), [step + ahead for step in self._scheduled])

    def _fill(self, tensor: Tensor, offset: int) -> None:
        import torch

        contiguous = tensor if tensor.is_contiguous() else torch.empty_like(tensor).contiguous()
        for piece in _bytes_of(contiguous).split(PIECE_BYTES):
            on_host = piece if piece.device.type == "cpu" else torch.empty_like(piece, device="cpu")
            with memoryview(_numbers(on_host)) as numbers:
                offset = _read(self._file, numbers, offset)
            if on_host is not piece:
                piece.copy_(on_host)
        if contiguous is not tensor:
            tensor.copy_(contiguous)

    def _forget_later_states(self, train_state: TrainState) -> None:
        for number, optimizer in enumerate(train_state.optimizers):
            for parameter, state in list(optimizer.state.items()):
                key = ("state", number, id(parameter))
                if isinstance(state, dict) and key not in self._counters:
                    del optimizer.state[parameter]


def _tensors(train_state: TrainState) -> Iterator[tuple[Hashable, Tensor]]:
    """Yields all state that determines further training, with stable keys."""
    seen: Counter[Hashable] = Counter()
    for kind, name, tensor in retained(train_state):
        if kind != "gradients" and not isinstance(tensor, int):
            seen[kind, name] += 1
            yield (kind, name, seen[kind, name]), local_part(tensor).detach()
    for number, optimizer in enumerate(train_state.optimizers):
        for group, parameters in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(parameters["params"]):
                yield ("group", number, group, index), local_part(parameter).detach()
    for key, record in _records(train_state):
        for name, value in record.items():
            if hasattr(value, "untyped_storage"):
                yield (key, name), local_part(value).detach()


def _records(train_state: TrainState) -> Iterator[tuple[Hashable, dict[str, Any]]]:
    for number, optimizer in enumerate(train_state.optimizers):
        for group, record in enumerate(optimizer.param_groups):
            yield ("group", number, group), record
        for parameter, state in optimizer.state.items():
            if isinstance(state, dict):
                yield ("state", number, id(parameter)), state


def _schedules(train_state: TrainState) -> list[StepCounter]:
    return [(schedule, "steps") for schedule in train_state.schedules]


def numbers_steps(train_state: TrainState, cell: Cell) -> bool:
    """Returns whether the optimizer is AdamW, and its states have the step number for bias
    correction."""
    return cell.optimizer.startswith("adamw") and all(
        STEP in state or any(STEP in group for group in optimizer.param_groups)
        for optimizer in train_state.optimizers
        for state in optimizer.state.values()
        if isinstance(state, dict)
    )


def _counters(record: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yields integers such as step counts; restored floats would hide wrong learning rates."""
    return ((key, value) for key, value in record.items() if type(value) is int)


def _bytes_of(tensor: Tensor) -> Tensor:
    """Returns a tensor's bytes, shape (bytes,). Copies only tensors that are not contiguous."""
    import torch

    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _numbers(data: Tensor) -> Any:
    return data.numpy()


def _write(file: int, numbers: memoryview) -> None:
    while numbers:
        numbers = numbers[os.write(file, numbers) :]


def _read(file: int, numbers: memoryview, offset: int) -> int:
    while numbers:
        count = os.preadv(file, [numbers], offset)
        if not count:
            raise RuntimeError("the state cannot be rewound: its copy is shorter than the original")
        numbers, offset = numbers[count:], offset + count
    return offset


FIRST_WITHIN = 8
"""Maximum number of steps from the end of the parity segment to the first rewind."""
LEAST_BETWEEN, MOST_BETWEEN = 8, 24
"""Minimum and maximum number of steps from a replay to the next rewind, too few for rounding to
matter (docs/explanation/parity.md)."""


class Rewinds:
    """Rewind schedule of one rank."""

    def __init__(self, seed: int, parity_steps: int, cycle: int, ahead: bool = False) -> None:
        """`seed`: equal on all ranks. `parity_steps`: at least 2. `cycle`: steps after which the
        strategy's work repeats. `ahead`: whether to replay AHEAD."""
        self.cycle, self._ahead = cycle, ahead
        self.random = random.Random(seed)
        self.from_step = first_replayed(parity_steps)
        """Training step before which the state is saved."""
        self.replays_ahead: list[bool] = []
        """Whether optimizers and schedules were moved AHEAD in each replay."""
        self._checkpoint: MemoryCheckpoint | None = None
        self._kept_at = 0
        self._at: int | None = None
        """Number of the step before which to rewind next; None if none is chosen."""

    @classmethod
    def of(cls, spec: TrialSpec, cycle: int) -> Rewinds | None:
        seed = spec.rewind_seed
        if seed is None or spec.reference is None:
            return None
        ahead = bool(Reference(spec.reference).ahead_losses)
        return cls(seed, spec.cell.parity_steps, cycle, ahead)

    @property
    def count(self) -> int:
        return len(self.replays_ahead)

    @property
    def is_ahead(self) -> bool:
        return bool(self.replays_ahead) and self.replays_ahead[-1]

    @property
    def enough(self) -> bool:
        """Returns whether a plain rewind, which follows one AHEAD, is done."""
        return False in self.replays_ahead

    def keeps(self, training_step: int) -> bool:
        return self._checkpoint is None and training_step == self.from_step

    def keep(self, train_state: TrainState, cell: Cell, number: int) -> None:
        self._checkpoint, self._kept_at = MemoryCheckpoint(train_state), number
        self._ahead = self._ahead and numbers_steps(train_state, cell)

    def due(self, number: int, steps_left: int) -> bool:
        """Returns whether to rewind before this step. `steps_left`: steps still to be timed."""
        if self._at is None:
            most = max(0, min(FIRST_WITHIN, steps_left - REPLAYED_STEPS))
            between = (LEAST_BETWEEN, MOST_BETWEEN) if self.count else (0, most)
            # Training after a replay AHEAD differs from the reference, so rewind at once.
            self._at = number if self.is_ahead else number + self.random.randint(*between)
        return number >= self._at and (number - self._kept_at) % self.cycle == 0

    def rewind(self, train_state: TrainState) -> None:
        assert self._checkpoint is not None
        ahead = self._ahead and not self.is_ahead
        self._checkpoint.restore(train_state, AHEAD if ahead else 0)
        self.replays_ahead.append(ahead)
        self._at = None
