"""The site of several machines' runs: its filters, and records with impossible values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.cell.cell import Cell
from harness.cell.errors import DamagedRun
from harness.record.store import Store
from reports.site import INDEX, write_site
from tests.unit.html_page import Page
from tests.unit.made_results import stored, trial_rows

DDP = Cell(strategy="ddp", devices=2)


def test_every_machine_is_a_choice_of_its_filter(tmp_path: Path) -> None:
    """Some processors' names have several spaces in a row, which a browser collapses in text."""
    stores = []
    for run_id, model in (("one", "Intel  Xeon   X5650"), ("two", "Other")):
        rows = [row | {"run_id": run_id} for row in trial_rows(DDP, [100.0, 101.0])]
        stored(tmp_path / run_id, rows, run_id=run_id, cpu_model=model)
        stores.append(Store(tmp_path / run_id))
    write_site(stores, tmp_path / "site")
    page = Page((tmp_path / "site" / INDEX).read_text())
    machines = {values["data-machine"] for _, values in page.tags if "data-machine" in values}
    choices = {values.get("value") for tag, values in page.tags if tag == "option"}
    assert len(machines) == 2
    assert machines <= choices


@pytest.mark.parametrize(
    ("of_trial", "of_run"),
    [({"status": "magic"}, {}), ({}, {"libraries": "[1"})],
    ids=["status", "libraries"],
)
def test_a_value_that_cannot_be_reported_names_the_folder(
    of_trial: dict[str, Any], of_run: dict[str, Any], tmp_path: Path
) -> None:
    folder = tmp_path / "of-a-colleague"
    stored(folder, trial_rows(DDP, [100.0, 101.0], **of_trial), **of_run)
    with pytest.raises(DamagedRun, match="of-a-colleague"):
        write_site([Store(folder)], tmp_path / "site")
