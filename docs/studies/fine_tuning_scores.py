"""Scores what `bench fits` says about tools against published fine-tunings.

`.venv/bin/python -m docs.studies.fine_tuning_scores --data RUNS.csv` prints the scores of
docs/studies/fine-tuning-fits.md. The README of the table explains its columns; figures that a run
lacks are empty.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import typer
import yaml

from bench.api import fit_question
from harness.planner.cluster.footprint import footprint
from harness.planner.fits import probability, speed

TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
"""Tool of each source, and what words in the column `extra` mean."""
COLUMNS = (
    *("model", "method", "sequence", "micro_batch", "accumulation", "sharding", "recompute"),
    *("rank", "targets"),
)
WITHIN = 1.25
"""Factor of time that counts as close."""
RAN, FAILED = 0.2, 0.9
"""Odds below which no run should have worked, and above which none should have failed."""


def fields_of(row: pd.Series) -> tuple[str, dict[str, str]]:
    """Returns the tool of a row, and what the row says about its training."""
    tool = next(name for start, name in TABLE["tools"].items() if row.source.startswith(start))
    fields = {name: row[name] for name in COLUMNS if row[name]}
    fields |= {"precision": row.states or "pure-bf16"}
    if row.method != "full":
        fields |= {"base": row.base}
    usual = TABLE["libraries"].get(row.library, {})
    fields |= TABLE["sources"].get(f"{row.source}, {row.library}", usual)
    if tool == "litgpt":
        # Its configs accumulate, but the table has the size of a micro-batch alone.
        del fields["accumulation"]
    # Liger did not replace the loss of Mistral.
    extra = row.extra if row.model != "mistral-7b" else row.extra.replace("liger", "")
    for words, more in TABLE["extras"].items():
        fields |= more if words in extra else {}
    return ("deepspeed" if "zero3" in extra else tool), fields


def scores(data: Path) -> pd.DataFrame:
    """Returns for each row its tool, odds, whether it ran, and predictions over measurements."""
    table = pd.read_csv(data, dtype=str, keep_default_na=False)
    found = []
    for _, row in table.iterrows():
        tool, fields = fields_of(row)
        question = fit_question(f"{row.gpus} x {row.gpu}", like=tool, fields=fields)
        recipe = question.recipe()
        # PEFT's comparison states the peak of its longest batch, and the speed of the mean one.
        longest = replace(recipe, sequence=768) if "768 tokens" in row.extra else recipe
        needed = footprint(question.shape, longest)
        needs = needed.peak if row.peak_allocated else needed.demand
        rate, within = speed(question, recipe)
        measured = float(row.peak_allocated or row.peak_reserved or "nan")
        log = np.log(rate / recipe.gpus / float(row.tokens_per_second_per_gpu or "nan"))
        odds = probability(question, recipe)
        wrong = odds < RAN if row.ran == "1" else odds > FAILED
        near, inside = (
            np.nan if np.isnan(log) else float(abs(log) < np.log(most)) for most in (WITHIN, within)
        )
        found.append((row.id, tool, abs(needs / measured - 1), wrong, near, inside))
    return pd.DataFrame(found, columns=["id", "tool", "memory_error", "wrong", "near", "inside"])


def main(data: Annotated[Path, typer.Option(help="Table of published runs.")]) -> None:
    """Prints the number of figures, the median error of peaks, and shares of speeds."""
    found = scores(data)
    for name, part in [*found.groupby("tool"), ("all", found)]:
        peaks, speeds = part.memory_error.count(), part.near.count()
        shares = f"{part.near.mean():.0%} | {part.inside.mean():.0%}" if speeds else "|"
        middle = f"{part.memory_error.median():.1%}"
        print(f"| {name} | {peaks} | {middle} | {part.wrong.sum()} | {speeds} | {shares} |")
    print(f"rows with wrong odds: {', '.join(found.id[found.wrong]) or 'none'}")


if __name__ == "__main__":
    typer.run(main)
