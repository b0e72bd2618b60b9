from __future__ import annotations

import dataclasses
import inspect
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeAlias

import typer
import yaml

from bench.cli.options import PRECISIONS, Gpus, Json, OwnRuns
from harness.cell.errors import UsageError

if TYPE_CHECKING:
    from harness.planner.fits import FitAnswer, FitQuestion

MATRIX = "finetune"
COMPARED = Path(__file__).parents[1] / "fits.yaml"
UNKNOWN = "hf:PATH"
"""Model in a printed command if only the planner has its sizes."""
GIB = 2**30
SUITE_FIELDS = {"accumulation", "recompute", "sharding", "base"}
"""Fields of a recipe that the suite's cells can follow."""
ADAPTED_CELLS = {
    "lora": ("+bf16+lora", "fp32"),
    "dora": ("+bf16+dora", "fp32"),
    "qlora": ("+nf4+lora", "bf16"),
    "qdora": ("+nf4+dora", "bf16"),
}
"""Workload suffix and precision for each method."""
EXIT_CODES = {"yes": 0, "no": 1, "uncertain": 3}

Text: TypeAlias = str | None
Model: TypeAlias = Annotated[
    Text,
    typer.Argument(
        metavar="[MODEL]",
        help="Model: a name such as llama-8b, hf:PATH of a config.json, or sizes. \\[default: the"
        " model of --config]",
    ),
]
FitLink: TypeAlias = Annotated[
    Text,
    typer.Option(
        "--link",
        help="Link between the GPUs: nvlink (or Infinity Fabric), pcie (through host memory),"
        " pcie-p2p, or each GPU's rate, such as 450gbyte; for several nodes of 8 also each"
        " GPU's rate to other nodes. \\[default: nvlink if the GPU has it, else pcie, and 400gbit]",
    ),
]
FIELD_HELP = {
    "method": "full, lora, dora, qlora or qdora. \\[default: lora]",
    "seq": "Sequence length in tokens, such as 32k. \\[default: 2048]",
    "micro_batch": "Sequences that each GPU processes at once. \\[default: 1]",
    "accumulation": "Micro-batches of each GPU per step. \\[default: 1]",
    "precision": f"{PRECISIONS} \\[default: bf16]",
    "lora_rank": "LoRA rank. \\[default: 16]",
    "targets": "Matrices with adapters, such as q,v. \\[default: all]",
    "loss": "plain, fused, in-place or chunked (Liger). \\[default: chunked if needed]",
    "optimizer": "adamw, adamw-8bit, paged-adamw-8bit, adafactor, muon and others in docs/fits.md."
    " \\[default: adamw]",
    "recompute": "none, selective or full. \\[default: full if needed]",
    "sharding": "none (DDP), optimizer (ZeRO-1), grad (ZeRO-2) or full (FSDP, ZeRO-3)."
    " \\[default: full if needed]",
    "offload": "Whether sharded states are in host memory: yes or no. \\[default: no]",
}
"""Help of the options that set fields of the recipe."""
Like: TypeAlias = Annotated[
    Text,
    typer.Option(
        help="Training tool whose defaults apply, such as trl, axolotl, unsloth, torchtune,"
        " llama-factory or deepspeed."
    ),
]
ConfigFile: TypeAlias = Annotated[
    Path | None, typer.Option(help="A training tool's file to read: YAML, JSON or arguments.")
]
FieldSettings: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Another field (docs/fits.md)."),
]


def _with_fields(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command's keyword arguments the names and options of FIELD_HELP."""
    options = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[Text, typer.Option(help=text)],
        )
        for name, text in FIELD_HELP.items()
    ]
    stated = inspect.signature(command, eval_str=True)
    parameters = [p for p in stated.parameters.values() if p.kind != p.VAR_KEYWORD]
    command.__signature__ = stated.replace(parameters=[*parameters, *options])  # type: ignore[attr-defined]
    command.__annotations__ |= {option.name: option.annotation for option in options}
    return command


@_with_fields
def fits(
    gpus: Gpus,
    model: Model = None,
    like: Like = None,
    config: ConfigFile = None,
    settings: FieldSettings = None,
    link: FitLink = None,
    results: OwnRuns = None,
    json_output: Json = False,
    **fields: Text,
) -> None:
    """Say whether fine-tuning fits, how fast it is, and what to turn on.

    Exits with 0 for yes, 1 for no and 3 for uncertain.

    Example: [bold]python -m bench fits llama-8b --gpus '2 x 4090' --method qlora[/bold]
    """
    from bench.api import fit_question
    from harness.planner.fits import answer

    for setting in settings or []:
        name, _, fields[name] = setting.partition("=")
    question = fit_question(
        gpus,
        link=link,
        results=results,
        like=like,
        config=config,
        fields={"model": model, **fields},
    )
    result = answer(question)
    _print(question, result, _command(model or question.shape.name, question, result), json_output)
    raise typer.Exit(EXIT_CODES[result.verdict])


def _print(question: FitQuestion, result: FitAnswer, command: str, as_json: bool) -> None:
    if not as_json:
        for line in _lines(question, result, command):
            print(line)
        return
    document = (
        {"model": question.shape.name}
        | dataclasses.asdict(result)
        | {
            "margin_bytes": result.margin_bytes,
            "parameters": question.shape.parameters,
            "warning": _warning(question),
            "command": command,
            "command_differs": _differences(question) if command else [],
        }
    )
    print(json.dumps(document))


def _lines(question: FitQuestion, result: FitAnswer, command: str) -> list[str]:
    recipe = result.recipe
    on = f" with {', '.join(result.turn_on)}" if result.turn_on else ""
    offloaded = (
        f" and {host:.0f} GiB of host memory" if (host := result.host_bytes / GIB) > 1 else ""
    )
    first = (
        f"{result.verdict}: {question.shape.name}, {question.method}, on {question.gpus} x"
        f" {question.gpu.host_name}{on} needs {result.peak_bytes / GIB:.1f} of"
        f" {result.usable_bytes / GIB:.1f} GiB on each GPU{offloaded} (reserved by torch, which"
        f" allocates {result.allocated_bytes / GIB:.1f}; margin"
        f" {result.margin_bytes / GIB:+.1f} GiB, {result.fits:.0%} likely to fit)"
    )
    lines = [first]
    if result.verdict != "no":
        lines.append(
            f"speed: about {result.tokens_per_second:,.0f} tokens/s in total (sequences of"
            f" {recipe.sequence}, micro-batch {recipe.micro_batch} x {recipe.accumulation}); 80%"
            " interval:"
            f" {result.tokens_low:,.0f} to {result.tokens_high:,.0f}"
        )
    if question.measured:
        lines.append(f"rates of products and copies: as measured in {question.measured}")
    if result.anchor:
        lines.append(f"anchor: {result.anchor.text}")
    if warning := _warning(question):
        lines.append(f"warning: {warning}")
    alone = result.one_gpu_tokens_per_second
    if alone and alone > result.tokens_per_second:
        lines.append(f"one GPU alone is faster: about {alone:,.0f} tokens/s")
    lines.append(
        f"longest sequence that fits: {result.longest_sequence or 'none'}; largest micro-batch:"
        f" {result.largest_batch or 'none'} (unless set: chunked loss, sharding)"
    )
    lines += [
        f"to make it fit: --{option.name} {shlex.quote(option.value)} (margin"
        f" {option.margin_bytes / GIB:+.1f} GiB, about"
        f" {option.tokens_per_second:,.0f} tokens/s)"
        for option in result.remedies
    ]
    if offload := result.offload:
        reduced = ", gradients reduced in each micro-batch" if recipe.accumulation > 1 else ""
        lines.append(
            f"to make it fit: offload states to host memory (FSDP2's CPUOffloadPolicy{reduced}):"
            f" {offload.peak_bytes / GIB:.1f} GiB on each GPU, {offload.host_bytes / GIB:.0f} GiB"
            " of host memory; the speed depends on the host"
        )
    if command:
        lines.append(f"run: {command}")
        if UNKNOWN in command:
            lines.append("replace PATH by the model's hub id, or by the folder of its config.json")
        if differences := _differences(question):
            lines.append(f"this run differs from your question: {', '.join(differences)}")
    return lines


def _warning(question: FitQuestion) -> str:
    from harness.planner.cluster.device_rates import missing_bf16

    # Adapters' frozen weights are always in bf16.
    in_fp32 = question.method == "full" and question.precision == "fp32"
    warnings = ["" if in_fp32 else missing_bf16(question.gpu), question.shape.undescribed]
    return "; ".join(filter(None, warnings))


def _differences(question: FitQuestion) -> list[str]:
    """Returns how the suite's cell differs from the question."""
    from harness.workloads.workload_variants import RANK

    differences = []
    if question.method != "full" and question.rank != RANK:
        differences.append(f"rank {RANK} instead of {question.rank}")
    if question.method.startswith("q"):
        single = question.fixed.get("base") == "nf4"
        differences += ["fp32 embeddings", *([] if single else ["no double quantisation"])]
    return differences


def _command(model: str, question: FitQuestion, result: FitAnswer) -> str:
    from harness.planner.cluster.recipe import SUITE_CELLS
    from harness.planner.fits import PER_NODE
    from harness.workloads import make_workload

    recipe = result.recipe
    # The suite has no fused code, without which the training may not fit, and adapts no experts.
    unsupported = question.method != "full" and question.shape.experts > 1
    unsupported |= bool({*question.fixed} - SUITE_FIELDS) or recipe.base in ("int8", "gptq4")
    unsupported |= question.gpus > PER_NODE
    if result.verdict == "no" or recipe.library == "fused" or unsupported:
        return ""
    if recipe.sharding not in ("none", "full"):
        return ""
    full = question.method == "full"
    cell = SUITE_CELLS.get(question.precision) if full else ADAPTED_CELLS[question.method]
    if cell is None:
        return ""
    variant, precision = cell
    try:
        make_workload(f"{model}{variant}")
    except UsageError:
        model = UNKNOWN
    sharding: str = recipe.sharding if question.gpus > 1 else "one"
    if full and sharding == "full" and precision == "bf16":
        sharding = "full-bf16"
    compared = yaml.safe_load(COMPARED.read_text(encoding="utf-8"))[sharding]
    only = " ".join(f"--only {strategy}" for strategy in compared["only"])
    axes = {
        "devices": question.gpus,
        "workload": f"main{variant}",
        "sequence_length": recipe.sequence,
        "regime": "strong",
        "batch": recipe.micro_batch * question.gpus * recipe.accumulation,
        **({"micro_batches": recipe.accumulation} if recipe.accumulation > 1 else {}),
        "recompute": recipe.recompute,
        "precision": precision,
    }
    settings = " ".join(f"--set {name}={value}" for name, value in axes.items())
    return (
        f"python -m bench run --matrix {MATRIX} --model {shlex.quote(model)} {only}"
        f" --baseline {shlex.quote(compared['baseline'])} {settings}"
    )
