"""Scores what `bench fits` says about tools against published fine-tunings.

`.venv/bin/python -m docs.studies.fine_tuning_scores --data RUNS.csv` prints the scores of
docs/studies/fine-tuning-fits.md. Columns of the table: source, model, gpu, gpus, method, base,
states, rank, targets, sequence, micro_batch, accumulation, sharding, recompute, library, extra,
tokens_per_second_per_gpu, peak_allocated, peak_reserved, ran.
"""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from bench.api import fit_question
from harness.planner.cluster.footprint import footprint
from harness.planner.fits import probability, speed

TOOLS = {
    "fms": "fms",
    "Qwen": "transformers",
    "LLaMA-Factory": "llama-factory",
    "fsdp_qlora": "transformers",
    "litgpt": "litgpt",
    "torchtune": "torchtune",
    "PEFT": "peft",
    "axolotl": "axolotl",
}
"""Tools by the start of a source's name."""
EXTRAS = {
    "compile": {"compiled": "yes"},
    "chunked loss": {"loss": "chunked"},
    "activation offload": {"offloaded_activations": "yes"},
    "8-bit AdamW": {"optimizer": "adamw-8bit"},
    "adamw_torch": {"optimizer": "adamw"},
    "fp32-stream": {"fp32_stream": "yes"},
    "no recomputation": {"recompute": "none"},
    "unsloth": {"library": "fused", "loss": "in-place"},
    "liger": {"loss": "in-place"},
}
"""Fields that words in the column `extra` set."""
WITHIN = 1.25
"""Factor of time that counts as close."""
RAN, FAILED = 0.2, 0.9
"""Odds below which no run should have worked, and above which none should have failed."""


@dataclass(frozen=True)
class FineTuningScore:
    """Prediction of a row over its measurement."""

    row: dict[str, str]
    tool: str
    odds: float
    memory: float | None
    """None if the row has no peak."""
    speed: float | None
    """None if the row has no speed."""
    inside: bool
    """Whether the speed is in the 80% interval."""


def fields_of(row: dict[str, str]) -> tuple[str, dict[str, str]]:
    """Returns the tool of a row, and what the row says about its training."""
    source, extra = row["source"], row["extra"]
    tool = next(name for start, name in TOOLS.items() if source.startswith(start))
    named = ("model", "method", "sequence", "micro_batch", "accumulation", "sharding", "recompute")
    fields = {name: row[name] for name in (*named, "rank", "targets") if row[name]}
    fields |= {"precision": row["states"] or "pure-bf16"}
    if row["method"] != "full":
        fields |= {"base": row["base"]}
    if tool == "litgpt":
        # Its configs accumulate, but the table has the size of a micro-batch alone.
        del fields["accumulation"]
    old = row["library"] == "transformers-2024"
    if tool == "torchtune":
        fields |= {"loss": "plain"}
    if source == "fms a100_80gb":
        fields |= {"library": "transformers-2024"} if old else {"loss": "fused-2024"}
    elif old:
        fields |= {"library": "transformers" if tool == "fms" else "transformers-2024"}
    # Liger did not replace the loss of Mistral.
    for words, more in EXTRAS.items():
        if words in extra and (words, row["model"]) != ("liger", "mistral-7b"):
            fields |= more
    if "zero3" in extra:
        return "deepspeed", fields | {
            "sharding": "full",
            "library": "deepspeed",
            "loss": "plain-2024",
        }
    return tool, fields


def scores(data: Path) -> Iterator[FineTuningScore]:
    for row in csv.DictReader(data.read_text(encoding="utf-8").splitlines()):
        tool, fields = fields_of(row)
        question = fit_question(f"{row['gpus']} x {row['gpu']}", like=tool, fields=fields)
        recipe = question.recipe()
        # PEFT's comparison states the peak of its longest batch, and the speed of the mean one.
        longest = replace(recipe, sequence=768) if "768 tokens" in row["extra"] else recipe
        needed = footprint(question.shape, longest)
        memory = rate = None
        if row["peak_allocated"]:
            memory = needed.peak / float(row["peak_allocated"])
        elif row["peak_reserved"]:
            memory = needed.demand / float(row["peak_reserved"])
        predicted, within = speed(question, recipe)
        if row["tokens_per_second_per_gpu"]:
            rate = predicted / recipe.gpus / float(row["tokens_per_second_per_gpu"])
        inside = rate is not None and abs(math.log(rate)) <= math.log(within)
        yield FineTuningScore(row, tool, probability(question, recipe), memory, rate, inside)


def table(found: list[FineTuningScore]) -> Iterator[str]:
    yield "| tool | peaks | median error | wrong odds | speeds | within 1.25 | in the interval |"
    yield "|---|---|---|---|---|---|---|"
    for tool in [*sorted({score.tool for score in found}), "all"]:
        part = [score for score in found if tool in (score.tool, "all")]
        errors = [abs(score.memory - 1) for score in part if score.memory]
        logs = [abs(math.log(score.speed)) for score in part if score.speed]
        near = sum(log < math.log(WITHIN) for log in logs) / max(1, len(logs))
        inside = sum(score.inside for score in part) / max(1, len(logs))
        shares = f"{near:.0%} | {inside:.0%}" if logs else "|"
        middle, wrong = f"{statistics.median(errors):.1%}", len(wrong_odds(part))
        yield f"| {tool} | {len(errors)} | {middle} | {wrong} | {len(logs)} | {shares} |"


def wrong_odds(found: list[FineTuningScore]) -> list[FineTuningScore]:
    """Returns rows that ran with odds below RAN, and those that failed with odds above FAILED."""
    return [
        score
        for score in found
        if (score.odds < RAN if score.row["ran"] == "1" else score.odds > FAILED)
    ]


def main(data: Annotated[Path, typer.Option(help="Table of published runs.")]) -> None:
    found = list(scores(data))
    for line in table(found):
        print(line)
    for score in wrong_odds(found):
        print(f"wrong: row {score.row['id']}, ran {score.row['ran']}, odds {score.odds:.2f}")


if __name__ == "__main__":
    typer.run(main)
