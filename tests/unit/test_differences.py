"""Settings that differ from what libraries document: declared, recorded and shown."""

from __future__ import annotations

import inspect
from pathlib import Path

from harness.analysis.answer import answer
from harness.analysis.summary import summarised
from harness.cell.cell import Cell
from harness.record.store import load
from harness.record.trial import TrialRecord
from harness.seam.differences import EVERY_STRATEGY, declared, differences_of
from harness.seam.registry import make_strategy, strategies, with_defaults
from harness.strategies._horovod import documented
from harness.strategies.deepspeed import Deepspeed
from harness.workloads import make_workload
from harness.workloads.counts import model_facts
from tests.unit.made_results import trial_rows

HOME = Path(inspect.getfile(strategies()["single"])).parent
TUNED = {"controller": "mpi", "mpi_yield_when_idle": True}
NEVER_SLOWER = {"stage", "steps_per_print", "wall_clock_breakdown"}
"""Keys of DeepSpeed's config with its defaults, or that only print."""
OF_THE_CELL = {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"}
NECESSARY = {"zero_allow_untested_optimizer"}
"""Without it, DeepSpeed refuses torch's optimizers."""


def horovod(**options: object) -> Cell:
    return Cell(strategy="horovod", devices=2, options=options)


def test_all_strategies_declare_their_differences() -> None:
    ours = {name for name, kind in strategies().items() if kind.__module__.startswith("harness.")}
    assert declared(HOME).keys() == {EVERY_STRATEGY, *ours}


def test_conditions_name_options_or_fields_of_a_cell() -> None:
    for name, differences in declared(HOME).items():
        options = {} if name == EVERY_STRATEGY else strategies()[name].model_fields
        for difference in differences:
            assert difference.when.keys() <= {*options, *Cell.model_fields}, (name, difference)


def test_every_key_of_deepspeeds_config_is_declared() -> None:
    cell, strategy = Cell(strategy="deepspeed", devices=2), Deepspeed(stage=3)
    sizes = model_facts(make_workload(cell.workload)).sizes
    config = dict(strategy.config(cell, strategy.layout(2), sizes))
    zero = config.pop("zero_optimization")
    assert isinstance(zero, dict)
    keys = (config.keys() | zero.keys()) - NEVER_SLOWER - OF_THE_CELL - NECESSARY
    names = " ".join(difference.name for difference in declared(HOME)["deepspeed"])
    assert {key for key in keys if key not in names} == set()


def test_horovod_over_mpi_starts_as_documented() -> None:
    plain = documented(2, tuned=False)
    assert " ".join(plain) == (
        "-np 2 --host localhost:2 --bind-to none --map-by slot --mca pml ob1 --mca btl ^openib"
    )
    assert documented(2, tuned=True) == [*plain, "--mca", "mpi_yield_when_idle", "1"]


def test_a_setting_is_recorded_only_if_it_applies() -> None:
    def names(**options: object) -> set[str]:
        cell = horovod(**options)
        return {text.partition("=")[0] for text in differences_of(make_strategy(cell), cell)}

    assert names() == {"rendezvous"}
    assert names(**TUNED) - names(controller="mpi") == {"mpi_yield_when_idle"}


def test_advice_names_the_setting_and_what_the_cell_loses_without_it() -> None:
    set_ = {"differences": ["mpi_yield_when_idle=1 (documented: 0)"]}
    rows = trial_rows(Cell(strategy="ddp", devices=2), [100.0, 101.0, 99.0], wraps_ddp="torchrun")
    rows += trial_rows(horovod(controller="mpi"), [69.0, 70.0, 69.5])
    rows += trial_rows(horovod(**TUNED), [120.0, 121.0, 119.0], **set_)
    found = answer(summarised(TrialRecord(**row) for row in rows))
    assert found is not None
    assert found.advice[0].cell.cell.options == TUNED
    said = found.advice[0].explanation
    assert " With mpi_yield_when_idle=1 (documented: 0); without mpi_yield_when_idle, 30." in said
    assert "slower than ddp" in said


def test_kept_runs_name_the_setting_that_they_were_measured_with() -> None:
    """It was no option then, so the cell keeps its label and id."""
    trials = TrialRecord.from_frame(load(HOME.parents[1] / "results" / "reference").trials)
    measured = {result.cell.label: result for result in summarised(trials)}
    result = measured["horovod(controller=mpi)"]
    assert result.placement.differences == ("mpi_yield_when_idle=true",)
    assert result.cell.id == result.cell_id
    assert make_strategy(result.cell).model_dump()["mpi_yield_when_idle"] is True
    assert measured["horovod"].placement.differences == ()
    now = with_defaults(horovod(controller="mpi"))
    assert make_strategy(now).model_dump()["mpi_yield_when_idle"] is False
    assert now.id != result.cell_id
