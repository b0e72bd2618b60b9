"""What is found in a user's model: unused parameters, blocks, heads, and what libraries need."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from harness.cell.cell import Cell
from harness.cell.errors import UsageError
from harness.workloads import counts, make_workload
from harness.workloads.counts import model_facts
from tests.unit.test_user_batches import made, reasons

VECTORS = """
        def batch(self, samples):
            rows = [int(sample) % 64 for sample in samples]
            return self.x[rows], self.y[rows]

        def loss(self, output, labels):
            return F.cross_entropy(output, labels)
"""
LEVELS = f"""
        def build(self):
            class Levels(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.first, self.level = nn.Linear(4, 3), nn.Linear(3, 3)
                    self.late = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
                def forward(self, x):
                    h = self.first(x)
                    level = self.level(h)
                    for number, late in enumerate(self.late):
                        rows = (x[:, 0] > number).nonzero()[:, 0]
                        if len(rows):
                            h = h.index_add(0, rows, late(h[rows]))
                    return h
            return Levels()
{VECTORS}
"""


def test_parameters_without_a_loss_are_not_trained_and_named(tmp_path: Path) -> None:
    workload = made(tmp_path, LEVELS)
    assert workload.unused == ("level.weight", "level.bias")
    assert workload.skipped[0].startswith("late.")
    trained = {name for name, p in workload.build(0).named_parameters() if p.requires_grad}
    assert trained == {"first.weight", "first.bias", *workload.skipped}
    assert "level.weight, level.bias, 2 in all, took part in no loss" in workload.notes[1]
    (reason,) = reasons(workload, strategy="fsdp2")
    assert "takes part in the losses of some samples only" in reason
    assert "use ddp" in reason
    assert not reasons(workload, strategy="ddp")
    assert not reasons(workload, strategy="single", devices=1)


def test_batches_that_read_numbers_are_counted_without_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counts, "MOST_WITH_MEMORY", 0)
    text = f"""
        def build(self):
            return nn.Linear(4, 3)
{VECTORS}
    """
    assert model_facts(made(tmp_path, text), 64).flops_per_sample == 2 * 2 * 4 * 3


CONVOLUTIONS = """
        def build(self):
            convolutions = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))
            net = nn.Module()
            net.layers, net.forward = convolutions, lambda x: self.run(net, x)
            return net.to(memory_format=torch.channels_last)

        def run(self, net, x):
            for layer in net.layers:
                x = layer(x).relu()
            return x.mean((2, 3))

        def batch(self, samples):
            return self.x[samples % 64][:, :, None, None].expand(-1, -1, 4, 4)[:, :3], self.y[
                samples % 64
            ]

        def loss(self, output, labels):
            return F.cross_entropy(output, labels)
"""


def test_strides_and_missing_matrices_are_refused_before_launch(tmp_path: Path) -> None:
    workload = made(tmp_path, CONVOLUTIONS)
    assert (
        "layers.0.weight in mine.py:Mine is not contiguous"
        in reasons(workload, strategy="fsdp2")[0]
    )
    assert (
        "no parameter with two dimensions" in reasons(workload, strategy="ddp", optimizer="muon")[0]
    )
    assert not reasons(workload, strategy="ddp")


def test_fp64_models_are_refused_where_they_cannot_train(tmp_path: Path) -> None:
    text = """
        def build(self):
            return nn.Linear(4, 3).double()

        def batch(self, samples):
            return self.x[samples % 64].double(), self.y[samples % 64]

        def loss(self, output, labels):
            return F.cross_entropy(output, labels)
    """
    workload = made(tmp_path, text)
    (reason,) = reasons(workload, strategy="deepspeed")
    assert "weight is in fp64" in reason
    (reason,) = reasons(workload, strategy="ddp", precision="bf16")
    assert "stays fp64 in bf16" in reason
    assert not reasons(workload, strategy="fsdp2")


@pytest.mark.parametrize("inputs", [32, 4])
def test_a_forward_that_changes_the_next_one_gets_a_tolerance(tmp_path: Path, inputs: int) -> None:
    """With four inputs, its power iteration has nearly converged from the start."""
    text = f"""
        def build(self):
            normed = nn.utils.parametrizations.spectral_norm(nn.Linear({inputs}, 32))
            return nn.Sequential(nn.Linear(4, {inputs}), normed, nn.Linear(32, 3))
{VECTORS}
    """
    workload = made(tmp_path, text)
    tolerance = workload.tolerance(Cell(strategy="fsdp2", workload=workload.name, devices=2))
    assert tolerance is not None
    assert "changes what the next one computes" in tolerance.reason
    (tmp_path / "plain").mkdir()
    assert not made(tmp_path / "plain", LEVELS).stateful


HEADS = f"""
        hidden_size = 6

        def build(self):
            class Heads(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
                    self.blocks = nn.ModuleList(
                        nn.ModuleDict({{"q": nn.Linear(6, 6), "o": nn.Linear(6, 6)}})
                        for _ in range(2)
                    )
                    self.others = nn.Sequential(nn.Linear(3, 3))
                def forward(self, x):
                    h = self.first(x)
                    for block in self.blocks:
                        q = block["q"](h).view(len(h), -1, HEAD)
                        h = h + block["o"](q.softmax(2).flatten(1))
                    return self.others(self.last(h))
            return Heads()

        @property
        def split(self):
            from harness.workloads import Split

            class Mine(Split):
                blocks, embedding, head = "blocks", ("first",), ("last", "others")
                by_column, by_row = ("blocks.*.q",), ("blocks.*.o",)

                def stage(self, model, blocks, hidden, tokens, *, first, last):
                    raise NotImplementedError
            return Mine()
{VECTORS}
"""


@pytest.mark.parametrize(("head", "fits"), [(3, True), (2, False)])
def test_heads_must_divide_among_tensor_parallel_ranks(
    tmp_path: Path, head: int, fits: bool
) -> None:
    workload = made(tmp_path, HEADS.replace("HEAD)", f"{head})"))
    refused = reasons(workload, strategy="tensor")
    assert fits == (not refused)
    assert fits or "must divide by 2" in refused[0]


def test_blocks_are_shown_and_chosen_by_name(tmp_path: Path) -> None:
    workload = made(tmp_path, HEADS.replace("HEAD)", "3)"))
    assert workload.notes == ["blocks: blocks, 2"]
    other = make_workload(f"{workload.name}+blocks=others")
    assert other.notes == ["blocks: others, 1"]
    assert other.block_paths == ("others",)
    model = other.build(0)
    inputs, labels = other.sample(2, 1)
    assert torch.isfinite(other.loss(other.logits(model, inputs), labels))
    with pytest.raises(UsageError, match="its lists of modules are: blocks, others"):
        make_workload(f"{workload.name}+blocks=layers")


def test_gradients_within_forward_are_counted_as_unknown(tmp_path: Path) -> None:
    text = f"""
        def build(self):
            class Penalised(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.first = nn.Linear(4, 3)
                def forward(self, x):
                    with torch.enable_grad():
                        x = x.detach().requires_grad_()
                        out = self.first(x).tanh()
                        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
                    return out + slope.square().sum(1, keepdim=True)
            return Penalised()
{VECTORS}
    """
    facts = model_facts(made(tmp_path, text), 64)
    assert facts.parameters == 15
    assert facts.flops_per_sample == 0
