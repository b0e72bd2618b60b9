"""The house rules of strategies: small files, options as documented fields, found by file name,
none named elsewhere."""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from harness.spec.cell import Cell
from harness.spec.errors import Refused, Unavailable, UsageError
from harness.spec.training import Layout
from harness.strategy.base import Strategy
from harness.strategy.registry import make_strategy, strategies, validate
from harness.workloads import make_workload

HOME = Path(__file__).parents[2]
# Names that are also words of the field (columns, axes, the reference), or of a package.
_WORDS = {
    "single",
    "collectives",
    "tensor",
    "pipeline",
    "vertical",
    "data_parallel",
    "accelerate",
    "deepspeed",
    "horovod",
}
FILES = sorted(
    p for p in (HOME / "harness" / "strategies").glob("*.py") if not p.stem.startswith("_")
)


def test_strategy_files_are_small() -> None:
    lengths = {p.stem: len(p.read_text().splitlines()) for p in FILES}
    assert min(lengths.values()) <= 35
    assert statistics.median(lengths.values()) <= 110, (
        "a wrapper around other wrappers may take more"
    )
    assert max(lengths.values()) <= 260, lengths


@pytest.mark.parametrize("file", FILES, ids=lambda p: p.stem)
def test_a_strategy_is_described_and_needs_one_method(file: Path) -> None:
    cls = strategies()[file.stem]
    assert (cls.__doc__ or "").strip()
    assert all(field.description for field in cls.model_fields.values()), (
        "a docstring under each option"
    )
    assert cls.setup is not Strategy.setup
    assert not re.search(
        r"\bprint\(|os\.getenv|os\.environ(?! \|= |\.update\()|perf_counter|logging\.",
        file.read_text(),
    ), (
        "it never times, logs, prints or reads the environment; it may set what a library reads"
        " from there"
    )


def test_no_strategy_is_named_outside_its_file() -> None:
    names = "|".join(p.stem for p in FILES if p.stem not in _WORDS)
    for folder in ("bench", "harness", "reports"):
        for source in (HOME / folder).rglob("*.py"):
            if source.parent.name != "strategies":
                found = re.findall(rf"[\"']({names})[\"']", source.read_text())
                assert not found, f"{source} names {found}"


def test_listing_strategies_imports_no_torch() -> None:
    code = (
        "import sys; from harness.strategy.registry import strategies; strategies();"
        " sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=HOME).returncode == 0


def test_layouts_deal_out_the_batch() -> None:
    layout = Layout(data=2, pipeline=2, tensor=2)
    assert (layout.devices, layout.processes, layout.shares) == (8, 8, 2)
    assert [layout.share(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    one_process = Layout(data=4, devices_per_process=4)
    assert (one_process.processes, one_process.shares) == (1, 1)


def test_a_missing_package_makes_the_cell_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    cell = Cell(strategy="ddp", devices=2, workload="llama-nano")
    monkeypatch.setattr(type(make_strategy(cell)), "requires", ("no_such_package",))
    with pytest.raises(Unavailable, match="no_such_package is not installed"):
        validate(cell, make_workload("llama-nano"))


def test_an_entry_point_that_is_no_strategy_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata as metadata

    point = metadata.EntryPoint("mine", "json:dumps", "parallelism_bench.strategies")
    monkeypatch.setattr(metadata, "entry_points", lambda group: [point])
    with pytest.raises(UsageError, match=r"'mine'.*must name a Strategy class.*json:dumps"):
        strategies.__wrapped__()


def test_powersgd_gets_one_bucket_on_cpus() -> None:
    """The gradients of the model are 3.5 MiB; several buckets abort on gloo."""
    workload = make_workload("llama-micro")
    one = Cell(
        strategy="ddp",
        devices=2,
        workload="llama-micro",
        options={"comm_hook": "powersgd", "bucket_cap_mb": 3},
    )
    with pytest.raises(Refused, match="give bucket_cap_mb 4 or more"):
        validate(one, workload)
    validate(
        one.model_copy(update={"options": {"comm_hook": "powersgd", "bucket_cap_mb": 4}}), workload
    )
