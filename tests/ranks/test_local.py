"""Strategies that differ by design are exact if they follow their algorithm, else diverged."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from harness.cell.cell import Cell
from tests.ranks.conftest import RunCells, cell

RIGHT = ["post_local_sgd", "collectives", "powersgd", *(["diloco"] if find_spec("torchft") else [])]
WRONG = {
    "post_local_sgd": ["longer_period", "later_start"],
    "collectives": ["longer_period"],
    "diloco": ["longer_period", "no_momentum", "other_rate", "plain_momentum"],
    "powersgd": ["uncompressed", "no_feedback", "lower_rank", "cold_start"],
}
LATE = {
    "post_local_sgd": ["no_average"],
    "collectives": ["no_sum", "one_tensor_apart"],
    "diloco": ["no_outer_step"],
    "powersgd": ["no_exchange", "feedback_lost"],
}
"""Mistakes that begin after some exchanges."""


def local(right: str, mistake: str = "none", from_step: int = 0, **axes: object) -> Cell:
    options = {"right": right, "mistake": mistake, "from_step": from_step}
    return cell("local_traps", options=options, **axes)


@pytest.mark.parametrize("right", RIGHT)
def test_it_is_exact_or_diverged(run_cells: RunCells, right: str) -> None:
    follows = [
        local(right),
        local(right, micro_batches=2, clip_norm=0.6, schedule="warmup_cosine", labels="padded"),
        local(right, workload="gpt2-nano", seed=1),
    ]
    wrong = [local(right, mistake) for mistake in WRONG[right]]
    wrong += [local(right, mistake, from_step=1) for mistake in LATE[right]]
    trials = run_cells(*follows, *wrong).trials.set_index("cell_id")
    for one in follows:
        trial = trials.loc[one.id]
        assert (trial["status"], trial["parity_verdict"]) == ("ok", "exact"), trial["reason"]
    found = {one.options["mistake"]: trials.loc[one.id, "parity_verdict"] for one in wrong}
    assert found == dict.fromkeys(found, "diverged")


@pytest.mark.parametrize("right", RIGHT)
def test_it_is_diverged_if_wrong_after_the_segment(run_cells: RunCells, right: str) -> None:
    calls = 12 if right in ("powersgd", "post_local_sgd") else 4  # others are called every 3 steps
    late = [local(right, mistake, calls, timed_steps=24) for mistake in LATE[right]]
    trials = run_cells(local(right, timed_steps=24), *late, timed_seconds=0.05).trials
    verdicts = dict(zip(trials["options"], trials["parity_verdict"], strict=True))
    assert {o: v for o, v in verdicts.items() if '"none"' in o}.popitem()[1] == "exact"
    assert {v for o, v in verdicts.items() if '"none"' not in o} == {"diverged"}
