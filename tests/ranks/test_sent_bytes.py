"""Ranks send the bytes per step that their algorithms need, as the kernel counts them."""

from __future__ import annotations

from typing import Any

import pytest

from harness.analysis.summary import summarised
from harness.record.trial import TrialRecord
from tests.ranks.conftest import RunCells, cell

FP16_REDUCED = {"reduce_fp16": True, "reduce_buffer_size": 0}
SENT: list[tuple[str, dict[str, Any], list[float]]] = [
    # Each of N ranks of a ring sends 2(N-1)/N of the gradients.
    ("ddp", {"devices": 4}, [6] * 4),
    ("horovod", {"devices": 4}, [6] * 4),
    ("horovod", {"options": {"compression": "fp16"}}, [2] * 2),
    ("ddp", {"workload": "llama-micro+lora"}, [4] * 2),
    # On 2 ranks gloo's reduce sends 0.75 and its broadcast 0.5 of the payload per rank.
    ("fairscale_oss", {"options": {"broadcast_fp16": True}}, [4] * 2),
    ("fairscale_oss", {"options": FP16_REDUCED}, [3.5] * 2),
    # Each worker sends its gradients and gets the parameters.
    ("parameter_server", {"options": {"transport": "tcp"}}, [4, 4, 8]),
]
"""Cells, and the bytes that each rank sends per trained parameter."""


def test_ranks_send_what_their_algorithm_needs(run_cells: RunCells) -> None:
    for library in ("horovod", "fairscale"):
        pytest.importorskip(library)
    cells = [cell(strategy, **{"workload": "llama-micro", **axes}) for strategy, axes, _ in SENT]
    trials = run_cells(*cells).trials.set_index("cell_id")
    for one, (_, _, sent) in zip(cells, SENT, strict=True):
        trial = trials.loc[one.id]
        assert trial["status"] == "ok", trial["log_tail"]
        expected = [times * trial["trained_parameters"] for times in sent]
        assert list(trial["sent_bytes_per_step"]) == pytest.approx(expected, rel=0.06), one.name


SUMMED: list[tuple[str, dict[str, Any], str, bool]] = [
    ("ddp", {}, "all_reduce float32", False),
    ("ddp", {"precision": "bf16"}, "all_reduce float32", False),
    ("ddp", {"options": {"comm_hook": "fp16"}}, "all_reduce float16", True),
    ("fsdp2", {}, "reduce_scatter float32", False),
    ("horovod", {"options": {"compression": "fp16"}}, "all_reduce float16", True),
    ("subtle", {"precision": "bf16"}, "all_reduce float32", False),
    (
        "subtle",
        {"precision": "bf16", "options": {"mistake": "half_exchange"}},
        "all_reduce bfloat16",
        True,
    ),
    ("tensor", {"precision": "bf16"}, "all_reduce bfloat16", False),
]
"""Cells, what their record says of the collective that adds up, and whether a warning says that it
is narrower than gradients. Tensor parallelism adds up activations."""


def test_records_say_in_which_dtype_ranks_add_up(run_cells: RunCells) -> None:
    pytest.importorskip("horovod")
    cells = [cell(strategy, **axes) for strategy, axes, *_ in SUMMED]
    trials = TrialRecord.from_frame(run_cells(*cells).trials)
    recorded = {trial.cell_id: trial for trial in trials}
    results = {result.cell_id: result for result in summarised(trials)}
    for one, (_, _, collective, narrow) in zip(cells, SUMMED, strict=True):
        trial = recorded[one.id]
        assert trial.status == "ok", trial.reason
        assert collective in trial.collectives, one.name
        warning = results[one.id].narrow_sums
        assert bool(warning) is narrow, (one.name, warning)
        assert collective.split()[1] in (warning or collective)
