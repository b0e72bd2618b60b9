"""Batches, losses and models in the forms that people have them, and refusals by cause."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import torch

from bench.expand import expand
from bench.matrix import Host, Matrix
from harness.cell.errors import UsageError
from harness.parity.reference import in_fp32
from harness.worker.batches import Batches
from harness.workloads import make_workload, prepare_data
from harness.workloads.counts import model_facts
from harness.workloads.user_workload import UserWorkload

HOST = Host("cpu", 2, 2**34)
BEGIN = """
import torch
from torch import nn
from torch.nn import functional as F


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x, scale):
        return {"logits": self.second(self.first(x).tanh() * scale)}


class Base:
    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(64, 4, generator=generator)
        self.y = torch.randint(0, 3, (64,), generator=generator)

    def build(self):
        return Two()

    def loss(self, output, labels):
        return F.cross_entropy(output["logits"], labels)
"""
FORMS = {
    "a dict and labels": """
        def batch(self, samples):
            rows = samples % 64
            return {"x": self.x[rows], "scale": torch.ones(len(rows), 1)}, self.y[rows]
    """,
    "a tuple and labels": """
        def batch(self, samples):
            rows = samples % 64
            return (self.x[rows], torch.ones(len(rows), 1)), self.y[rows]
    """,
    "one dict, whose labels forward does not take": """
        def batch(self, samples):
            rows = samples % 64
            return {"x": self.x[rows], "scale": torch.ones(len(rows), 1), "y": self.y[rows]}

        def loss(self, output, batch):
            return F.cross_entropy(output["logits"], batch["y"])
    """,
    "a dataset with torch's collate function, which returns lists": """
        @property
        def dataset(self):
            return [((x, torch.ones(1)), y) for x, y in zip(self.x, self.y)]
    """,
}


def made(folder: Path, text: str) -> UserWorkload:
    body = textwrap.indent(textwrap.dedent(text), "    ")
    (folder / "mine.py").write_text(f"{BEGIN}\n\nclass Mine(Base):\n{body}\n")
    workload = make_workload(f"{folder}/mine.py:Mine")
    assert isinstance(workload, UserWorkload)
    return workload


def reasons(workload: UserWorkload, **axes: object) -> list[str]:
    cells = [{"workload": workload.name, "devices": 2, **axes}]
    return [left.reason for left in expand(Matrix(cells=cells), HOST).left_out]


@pytest.mark.parametrize("form", FORMS)
def test_batches_come_in_the_forms_that_loaders_give(tmp_path: Path, form: str) -> None:
    workload = made(tmp_path, FORMS[form])
    workload.require_trainable(1)
    assert model_facts(workload, 64).flops_per_sample > 2 * (4 * 8 + 8 * 3)
    data = prepare_data("stdlib", workload, 64)
    batch = Batches(data, 0, 8, slice(4, 8), torch.device("cpu")).fetch(1)
    whole, halves = (
        workload.loss(workload.logits(workload.build(0), part.inputs), part.labels).item()
        for part in (batch, batch.part(1, 2))
    )
    model = workload.build(0)
    inputs, labels = workload.rows(range(12, 16))
    assert workload.loss(workload.logits(model, inputs), labels).item() == pytest.approx(whole)
    inputs, labels = workload.rows(range(14, 16))
    assert workload.loss(workload.logits(model, inputs), labels).item() == pytest.approx(halves)


def test_a_model_may_compute_its_own_loss(tmp_path: Path) -> None:
    text = """
        def build(self):
            class Own(Two):
                def forward(self, x, labels):
                    logits = self.second(self.first(x).tanh())
                    return {"loss": F.cross_entropy(logits, labels), "logits": logits}
            return Own()

        def batch(self, samples):
            rows = samples % 64
            return {"x": self.x[rows], "labels": self.y[rows], "index": rows}
    """
    folder = tmp_path / "a"
    folder.mkdir()
    workload = made(folder, text)
    with pytest.raises(UsageError, match="loss"):
        workload.require_trainable(1)  # Base has a loss, which expects other labels
    file = folder / "mine.py"
    without = file.read_text().replace(
        "    def loss(self, output, labels)", "    def no(self, o, l)"
    )
    other = tmp_path / "mine.py"
    other.write_text(without)
    lossless = make_workload(f"{other}:Mine")
    lossless.require_trainable(1)
    assert isinstance(lossless, UserWorkload)
    assert "in forward" in reasons(lossless, strategy="data_parallel")[0]
    assert not reasons(lossless, strategy="ddp")
    none = tmp_path / "none.py"
    none.write_text(file.read_text() + "\n    loss = None\n")
    make_workload(f"{none}:Mine").require_trainable(1)


@pytest.mark.parametrize(
    ("forward", "cause"),
    [
        ("self.second(self.first(x).tanh() + torch.randn(8))", "from a generator seeded"),
        ("self.second(self.first(x).tanh() * next(self.numbers))", "keeps a state in forward"),
        ("self.second(self.first(x).tanh() + random.random())", "from a generator seeded"),
        ("self.second(self.first(x).tanh() * next(COUNT))", "changes from call to call"),
    ],
)
def test_a_changing_loss_is_refused_by_its_cause(tmp_path: Path, forward: str, cause: str) -> None:
    text = f"""
        def build(self):
            import itertools, random
            global COUNT
            COUNT = globals().get("COUNT") or itertools.count(1)
            class Own(Two):
                def __init__(self):
                    super().__init__()
                    self.numbers = itertools.count(1)
                def forward(self, x):
                    return {{"logits": {forward}}}
            return Own()

        def batch(self, samples):
            return self.x[samples % 64], self.y[samples % 64]
    """
    with pytest.raises(UsageError, match=cause):
        made(tmp_path, text).require_trainable(1)


@pytest.mark.parametrize(("shards", "options"), [("fsdp2", {}), ("deepspeed", {"stage": 3})])
def test_a_parameter_without_elements_is_not_sharded(
    tmp_path: Path, shards: str, options: dict[str, int]
) -> None:
    text = """
        def build(self):
            class Own(nn.Linear):
                def __init__(self):
                    super().__init__(4, 3)
                    self.none = nn.Parameter(torch.zeros(0, 3))
                def forward(self, x):
                    return super().forward(x) + self.none.sum(0)
            return Own()

        def batch(self, samples):
            return self.x[samples % 64], self.y[samples % 64]

        def loss(self, output, labels):
            return F.cross_entropy(output, labels)
    """
    workload = made(tmp_path, text)
    (reason,) = reasons(workload, strategy=shards, options=options)
    assert "none in mine.py:Mine has no element" in reason
    assert not reasons(workload, strategy="ddp")


def test_a_compiled_model_is_refused(tmp_path: Path) -> None:
    text = """
        def build(self):
            return nn.Sequential(torch.compile(nn.Linear(4, 3), backend="eager"))

        def batch(self, samples):
            return self.x[samples % 64], self.y[samples % 64]

        def loss(self, output, labels):
            return F.cross_entropy(output, labels)
    """
    with pytest.raises(UsageError, match="return it uncompiled"):
        made(tmp_path, text).require_trainable(1)


def test_a_loss_over_the_whole_batch_trains_on_one_device(tmp_path: Path) -> None:
    text = """
        def batch(self, samples):
            rows = samples % 64
            return (self.x[rows], torch.ones(len(rows), 1)), self.y[rows]

        def loss(self, output, labels):
            logits = output["logits"]
            return F.cross_entropy(logits @ logits.T, torch.arange(len(labels)))
    """
    workload = made(tmp_path, text)
    workload.require_trainable(1)
    assert "depends on the other samples" in reasons(workload, strategy="ddp")[0]
    assert not reasons(workload, strategy="single", devices=1)


@pytest.mark.parametrize(
    ("layer", "strategy", "reason"),
    [
        ("self.gate = nn.Parameter(torch.tensor(1.0))", "fsdp2", "gate in mine.py:Mine has no"),
        ("self.gate = nn.Parameter(torch.ones(8, dtype=torch.cfloat))", "fsdp2", "is complex"),
        ("self.gate = nn.Parameter(torch.ones(8).bfloat16())", "fsdp2", "another dtype"),
        ("self.bag = nn.Embedding(9, 8, sparse=True)", "ddp", "bag.weight in mine.py:Mine is"),
    ],
)
def test_what_a_library_cannot_take_is_refused_by_name(
    tmp_path: Path, layer: str, strategy: str, reason: str
) -> None:
    text = f"""
        def build(self):
            class Own(Two):
                def __init__(self):
                    super().__init__()
                    {layer}
                def forward(self, x):
                    h = self.first(x)
                    h = h + self.bag(torch.zeros(len(x)).long()) if hasattr(self, "bag") else h
                    gate = getattr(self, "gate", torch.ones(())).real.float()
                    return {{"logits": self.second(h.tanh() * gate)}}
            return Own()

        def batch(self, samples):
            return self.x[samples % 64], self.y[samples % 64]
    """
    assert reason in reasons(made(tmp_path, text), strategy=strategy)[0]


def test_batch_norm_before_a_layer_and_lazy_sizes_are_counted_in_training_mode(
    tmp_path: Path,
) -> None:
    text = """
        def build(self):
            return nn.Sequential(
                nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.LazyLinear(3)
            )

        def batch(self, samples):
            return self.x[samples % 64], self.y[samples % 64]

        def loss(self, output, labels):
            return F.cross_entropy(output, labels)
    """
    workload = made(tmp_path, text)
    workload.require_trainable(1)
    assert model_facts(workload, 64).parameters == 4 * 8 + 8 + 16 + 8 * 3 + 3
    dropped = workload.without_zero_gradient("0.bias", torch.ones(8))
    assert not len(dropped), "BatchNorm subtracts the mean, and this bias with it"
    assert len(workload.without_zero_gradient("3.bias", torch.ones(3))) == 3
    assert "BatchNorm" in reasons(workload, strategy="ddp", micro_batches=4, global_batch=8)[0]


def test_a_bias_that_cancels_in_differences_is_found(tmp_path: Path) -> None:
    """In two samples its gradient is exactly zero, in 16 it is rounding."""
    text = """
        def build(self):
            class Triplets(nn.Linear):
                def forward(self, a, b, c):
                    return super().forward(a), super().forward(b), super().forward(c)
            return Triplets(4, 3)

        def batch(self, samples):
            return tuple(self.x[(samples + more) % 64] for more in range(3)), self.y[samples % 64]

        def loss(self, output, labels):
            return F.triplet_margin_loss(*output)
    """
    workload = made(tmp_path, text)
    assert not len(workload.without_zero_gradient("bias", torch.ones(3)))
    assert len(workload.without_zero_gradient("weight", torch.ones(12))) == 12


def test_imaginary_parts_are_compared() -> None:
    assert in_fp32(torch.tensor([1 + 2j])).tolist() == [[1.0, 2.0]]
    assert in_fp32(torch.tensor([1.5]).bfloat16()).tolist() == [1.5]


def test_key_biases_are_known_by_name_where_fp64_fails(tmp_path: Path) -> None:
    text = """
        def build(self):
            class Own(Two):
                def __init__(self):
                    super().__init__()
                    self.k_proj = nn.Linear(8, 8)
                def forward(self, x):
                    if x.dtype == torch.float64:
                        raise TypeError("fp32 only")
                    return {"logits": self.second(self.k_proj(self.first(x)).tanh())}
            return Own()

        def batch(self, samples):
            return self.x[samples % 64], self.y[samples % 64]
    """
    workload = made(tmp_path, text)
    assert not len(workload.without_zero_gradient("k_proj.bias", torch.ones(8)))
    assert len(workload.without_zero_gradient("first.bias", torch.ones(8))) == 8
