"""A user's text, tables and images train models in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.ranks.conftest import RunCells, cell

TEXTS = ["call me ishmael " * 9, "it was the best of times " * 9]
LABELS = [0, 1]


def pictures(folder: Path) -> None:
    chance = np.random.default_rng(0)
    for name in ("cats", "dogs"):
        (folder / name).mkdir(parents=True)
        for number in range(3):
            pixels = chance.integers(0, 256, (20, 30, 3), np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")


def table(file: Path, **columns: Any) -> None:
    import pandas as pd

    pd.DataFrame(columns).to_parquet(file)


def test_each_kind_of_data_trains(run_cells: RunCells, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="a saved dataset needs the package datasets")
    (tmp_path / "book.txt").write_text(TEXTS[0])
    table(tmp_path / "text.parquet", text=TEXTS)
    table(tmp_path / "labelled.parquet", text=TEXTS, label=LABELS)
    datasets.Dataset.from_dict({"text": TEXTS}).save_to_disk(tmp_path / "saved")
    pictures(tmp_path / "pets")
    chosen = [
        (f"text:{tmp_path / 'book.txt'}", "llama-nano"),
        (f"parquet:{tmp_path / 'text.parquet'}", "llama-nano"),
        (f"parquet:{tmp_path / 'labelled.parquet'}", "bert-micro"),
        (f"hf:{tmp_path / 'saved'}", "llama-nano"),
        (f"images:{tmp_path / 'pets'}", "resnet-micro"),
    ]
    axes: dict[str, Any] = {"warmup_steps": 1, "timed_steps": 2, "parity_steps": 3}
    cells = [cell("single", 1, workload, data=data, **axes) for data, workload in chosen]
    trials = run_cells(*cells).trials
    assert list(trials["status"]) == ["ok"] * len(cells), list(trials["log_tail"])
    assert list(trials["parity_verdict"]) == ["exact"] * len(cells)
