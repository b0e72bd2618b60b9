"""Sequence parallelism without ranks: token shares, traffic and refusals."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from harness.cell.cell import Cell
from harness.cell.errors import Refused, Unavailable
from harness.cell.training import Batch, Layout
from harness.seam.registry import make_strategy, validate
from harness.strategies._sequence import SequencePart, even_attention, exchanged_for_heads
from harness.workloads import make_workload
from harness.workloads.counts import ModelFacts, model_facts


def sequence_cell(strategy: str = "ulysses", **axes: Any) -> Cell:
    return Cell(**{"strategy": strategy, "devices": 2, "workload": "llama-nano", **axes})


def test_ranks_that_share_a_sequence_get_the_same_samples() -> None:
    layout = Layout(data=2, sequence=2)
    assert (layout.devices, layout.processes, layout.shares, layout.replicas) == (4, 4, 2, 4)
    assert [layout.share(rank) for rank in range(4)] == [0, 0, 1, 1]


def test_parts_of_a_batch_keep_their_labels() -> None:
    tokens = torch.arange(18).reshape(2, 9)
    batch = Batch(3, tokens[:, :-1], tokens[:, 1:])
    first, second = (SequencePart(number, 2).cut(batch) for number in (0, 1))
    assert first.inputs.tolist() == [[0, 1, 2, 3], [9, 10, 11, 12]]
    assert first.labels[:, -1].tolist() == second.inputs[:, 0].tolist() == [4, 13]
    assert second.step == 3


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_all_to_alls_send_the_bytes_counted_by_hand(recompute: str) -> None:
    """A rank has 32 of 64 tokens of 8 samples, in llama-nano's two blocks of width 32. It sends
    half of its queries, keys, values and outputs, and of their gradients; recomputation sends
    once more. Two or four ranks also all-reduce 10 gradients."""
    facts = ModelFacts(("a",), 10, 0, (10,))
    passes = {"none": 2, "full": 3}[recompute]
    for devices, sharing, samples, reduced in ((2, None, 8, 40), (4, 2, 4, 60)):
        options = {"sequence_ranks": sharing} if sharing else {}
        cell = sequence_cell(devices=devices, options=options, recompute=recompute)
        strategy = make_strategy(cell)
        sent = strategy.traffic(cell, strategy.layout(devices), facts)
        assert sent == 2 * passes * 4 * (4 * samples * 32 * 32) / 2 + reduced


def test_ranks_may_share_a_key_head_in_grouped_query_attention() -> None:
    """Only DeepSpeed's UlyssesSPAttentionHF repeats heads of keys and values."""
    shared = dataclasses.replace(make_workload("llama-nano"), heads=1)
    validate(sequence_cell("ulysses_zero"), shared, here=False)
    with pytest.raises(Refused, match="2 attention heads and 1 key and value heads"):
        validate(sequence_cell("ulysses"), shared, here=False)
    with pytest.raises(Refused, match="do not divide among 4 ranks"):
        validate(sequence_cell("ulysses_zero", devices=4), shared, here=False)


def test_repeated_heads_are_sent_as_often() -> None:
    """Each of 16 ranks has 4 of 64 tokens of 8 samples, in llama-1b's 16 blocks. It sends 15 of 16
    parts of 32 heads of queries and of outputs, 16 (twice 8) of keys and of values, and of their
    gradients. A head has 64 numbers."""
    one = sequence_cell("ulysses_zero", devices=16, workload="llama-1b")
    widths = 64 * (32 + 32 + 16 + 16)
    sent = exchanged_for_heads(one, Layout(sequence=16))
    assert sent == pytest.approx(16 * 2 * 4 * (8 * 4) * widths * 15 / 16)


def test_states_are_sharded_over_ranks_that_share_samples_too() -> None:
    cell = sequence_cell("ulysses_zero", options={"stage": 3}, workload="llama-micro")
    strategy, layout = validate(cell, make_workload("llama-micro"), here=False)
    facts = model_facts(make_workload("llama-micro"), 64)
    states = strategy.states(cell, layout, facts)
    assert states is not None
    assert layout.data == 1
    assert states.parameters == pytest.approx(facts.parameter_bytes / 2)


def test_grouped_query_attention_matches_transformers() -> None:
    from harness.strategies._sequence import whole_attention

    module = torch.nn.Module()
    module.num_key_value_groups, module.is_causal = 2, True  # type: ignore[assignment]
    query, (key, value) = torch.randn(1, 4, 6, 8), torch.randn(2, 1, 2, 6, 8)
    whole, _ = whole_attention()(module, query, key, value, None, scaling=0.3)
    even, _ = even_attention(module, query, key, value, None, scaling=0.3)
    torch.testing.assert_close(even, whole)


def test_without_a_compiler_compiled_cells_are_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = sequence_cell("ddp", compile="block")
    assert cell.label == "ddp(compile=block)"
    assert cell.reference().compile == "none"
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(Unavailable, match=r"no-such-compiler is not installed: install.*g\+\+"):
        validate(cell, make_workload(cell.workload))
