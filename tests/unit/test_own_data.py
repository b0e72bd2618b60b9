"""Invalid user data is refused before a run; valid data gives batches of its kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from harness.cell.cell import Cell
from harness.cell.errors import UsageError
from harness.workloads import make_workload, prepare_data
from tests.ranks.test_own_data import LABELS, TEXTS, pictures, table

Write = Callable[[Path], None]


def saved(file: Path, **columns: Any) -> None:
    datasets = pytest.importorskip("datasets", reason="a saved dataset needs the package datasets")
    datasets.Dataset.from_dict(columns).save_to_disk(file)


def folders(*classes: str) -> Write:
    def write(folder: Path) -> None:
        for name in classes:
            (folder / name).mkdir(parents=True)
            Image.new("L", (9, 9)).save(folder / name / "0.png")

    return write


def damaged_picture(folder: Path) -> None:
    pictures(folder)
    (folder / "cats" / "1.png").write_text("not an image")


def no_picture(folder: Path) -> None:
    pictures(folder)
    (folder / "birds").mkdir()


def name_that_is_no_text(file: Path) -> None:
    table(file, text=TEXTS, bodybody=TEXTS)
    file.write_bytes(file.read_bytes().replace(b"bodybody", b"\xff" * 8))


def damaged_dataset(folder: Path) -> None:
    saved(folder, text=TEXTS)
    next(folder.glob("*.arrow")).write_text("not arrow")


WRONG: list[tuple[str, str, Write]] = [
    ("text", "llama-nano", lambda file: file.write_text("") and None),
    ("text", "llama-nano", lambda file: file.mkdir()),
    ("text", "bert-micro", lambda file: file.write_text(TEXTS[0] * 9) and None),
    ("text", "resnet-micro", lambda file: file.write_text(TEXTS[0]) and None),
    ("parquet", "llama-nano", lambda file: table(file, body=TEXTS)),
    ("parquet", "llama-nano", lambda file: table(file, text=[None, TEXTS[0]])),
    ("parquet", "llama-nano", lambda file: table(file, text=[1, 2])),
    ("parquet", "llama-nano", lambda file: table(file, text=np.zeros(0, str))),
    ("parquet", "llama-nano", lambda file: file.write_text("") and None),
    ("parquet", "llama-nano", name_that_is_no_text),
    ("parquet", "bert-micro", lambda file: table(file, text=TEXTS)),
    ("parquet", "bert-micro", lambda file: table(file, text=TEXTS, label=[0, None])),
    ("parquet", "bert-micro", lambda file: table(file, text=TEXTS, label=["neg", "pos"])),
    ("parquet", "bert-micro", lambda file: table(file, text=TEXTS, label=[0, 99])),
    ("hf", "llama-nano", lambda file: saved(file, body=TEXTS)),
    ("hf", "llama-nano", lambda file: saved(file, text=[None, TEXTS[0]])),
    ("hf", "llama-nano", lambda file: saved(file, text=LABELS)),
    ("hf", "llama-nano", lambda file: saved(file, text=[])),
    ("hf", "llama-nano", damaged_dataset),
    ("hf", "bert-micro", lambda file: saved(file, text=TEXTS)),
    ("images", "resnet-micro", lambda file: None),
    ("images", "resnet-micro", lambda file: file.mkdir()),
    ("images", "resnet-micro", lambda file: file.write_text("") and None),
    ("images", "resnet-micro", folders(*"abcdefghijk")),
    ("images", "resnet-micro", damaged_picture),
    ("images", "resnet-micro", no_picture),
    ("images", "llama-nano", pictures),
]


@pytest.mark.filterwarnings("ignore")  # from package datasets
@pytest.mark.parametrize("number", range(len(WRONG)))
def test_wrong_data_is_refused(number: int, tmp_path: Path) -> None:
    kind, workload, write = WRONG[number]
    write(tmp_path / "data")
    with pytest.raises(UsageError, match=str(tmp_path / "data")):
        prepare_data(f"{kind}:{tmp_path / 'data'}", make_workload(workload), 32)


def test_images_of_folders_are_scaled_and_labelled(tmp_path: Path) -> None:
    for name, grey in (("black", 0), ("white", 255)):
        (tmp_path / name).mkdir()
        Image.new("L", (20, 30), grey).save(tmp_path / name / "0.png")
    name, workload = f"images:{tmp_path}", make_workload("resnet-micro")
    data = prepare_data(name, workload, 32)
    images, labels = data.batch(0, 0, 16, slice(0, 16))
    assert images.shape == (16, 3, 32, 32)
    assert set(labels.tolist()) == {0, 1}
    np.testing.assert_array_equal(
        images, np.where(labels, 1.0, -1.0)[:, None, None, None] + 0 * images
    )
    some, _ = data.batch(0, 0, 16, slice(4, 8))
    np.testing.assert_array_equal(some, images[4:8])
    assert not Cell(strategy="single", workload="resnet-micro", data=name).has_tokens


@pytest.mark.filterwarnings("ignore")  # from package datasets
def test_a_changed_dataset_is_read_again(tmp_path: Path) -> None:
    fingerprints = []
    for text in TEXTS:
        saved(tmp_path / "set", text=[text])
        prepare_data.cache_clear()
        data = prepare_data(f"hf:{tmp_path / 'set'}", make_workload("llama-nano"), 32)
        fingerprints.append(data.fingerprint)
    assert len(set(fingerprints)) == 2
