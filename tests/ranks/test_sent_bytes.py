"""Ranks send the bytes per step that their algorithms need, as the kernel counts them."""

from __future__ import annotations

from typing import Any

import pytest

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
