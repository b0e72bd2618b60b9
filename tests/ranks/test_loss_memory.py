"""Peaks with and without whole logits, on a vocabulary of 128k, are those of the formula."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pages import ROOT

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
TWO_STEPS = """
import sys
import torch
from pathlib import Path
from harness.cell.cell import Cell
from harness.cell.training import Batch
from harness.measure.peak_memory import MemoryMeter
from harness.seam.job import Job
from harness.seam.peak_memory import peak_bytes
from harness.seam.registry import validate
from harness.workloads import make_workload

loss, name = sys.argv[1:]
torch.set_num_threads(1)
for name in ("llama-nano", name):  # the first one imports everything
    size = {"sequence_length": 128, "global_batch": 4}
    # AdamW's update has temporaries, and logits would no longer be the peak.
    plain = {"optimizer": "sgd", "weight_decay": 0.0}
    cell = Cell(strategy="single", workload=name, loss=loss, **size, **plain)
    workload = make_workload(name)
    counted = peak_bytes(cell)
    strategy, layout = validate(cell, workload)
    meter = MemoryMeter(torch.device("cpu"), None)
    step = strategy.setup(Job(cell, workload, layout, torch.device("cpu"), 0, Path()))
    tokens = torch.randint(0, workload.vocabulary, (4, 129))
    for number in range(2):
        step(Batch(number, tokens[:, :-1], tokens[:, 1:]))
print(meter.peak().allocated, counted)
"""


@pytest.mark.thorough
def test_the_memory_of_logits_is_counted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    peaks = {}
    for loss in ("plain", "torch_linear"):
        command = [sys.executable, "-c", TWO_STEPS, loss, f"hf:{tmp_path}"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        measured, counted = map(float, done.stdout.split())
        assert measured == pytest.approx(counted, rel=0.05), loss
        peaks[loss] = measured
    assert peaks["torch_linear"] < 0.6 * peaks["plain"]
