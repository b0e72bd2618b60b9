"""The options of a run, declared once for the command, the Python interface and submitted jobs."""

from __future__ import annotations

import copy
import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TypeAlias, TypeVar, get_type_hints

import typer

from harness.cell.errors import UsageError

if TYPE_CHECKING:
    from bench.matrix import Axes
    from harness.cell.cell import Cell

P = ParamSpec("P")
Record = TypeVar("Record")
Returned = TypeVar("Returned")


def parse_share(text: str) -> tuple[int, int]:
    """Parses `1/4` to (1, 4): index from 0, and number of shares. Raises UsageError."""
    match = re.fullmatch(r"(\d+)/(\d+)", text or "0/1")
    if not match or int(match[1]) >= int(match[2]):
        raise UsageError(
            f"--share {text!r}: write it as I/N, counted from 0; 1/4 is the second of four"
        )
    return int(match[1]), int(match[2])


def parse_time(text: str) -> float:
    """Parses `45min` to 2700.0 seconds; raises UsageError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|min|h)", text.strip())
    if not match or not float(match[1]):
        raise UsageError(f"--time-budget {text!r}: give a number with s, min or h, such as 45min")
    return float(match[1]) * {"s": 1, "min": 60, "h": 3600}[match[2]]


_ONLY = typer.Option(
    "--only", help="Only these cells: strategy, id or pattern such as 'ddp*x2*'; may be repeated."
)
_SKIP = typer.Option("--skip", help="Skip these cells, named as for --only; may be repeated.")
_SCRIPTS = typer.Option(
    "--script",
    help="Training script as it is, with its arguments, such as 'train.py lr=0.1'; may be"
    " repeated, to compare. Set batch to the number of samples per step.",
)
_SETTINGS = typer.Option(
    "--set", help="Set an axis of all cells, as axis=value, such as batch=16; may be repeated."
)
_RESULTS = typer.Option("--results", help="Results folder.")

Matrix: TypeAlias = Annotated[
    str,
    typer.Option(
        "--matrix", "-m", help="Matrix: a name (see: python -m bench list matrices) or a YAML file."
    ),
]
Only: TypeAlias = Annotated[list[str] | None, _ONLY]
Skip: TypeAlias = Annotated[list[str] | None, _SKIP]
Scripts: TypeAlias = Annotated[list[str] | None, _SCRIPTS]
Settings: TypeAlias = Annotated[list[str] | None, _SETTINGS]
Trials: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--trials", min=1, help="Number of trials of each cell; by default the matrix's, else 10."
    ),
]
RunId: TypeAlias = Annotated[
    str,
    typer.Option(
        "--run",
        help="Id of the run to start, or to continue if it exists. With --resume, a prefix or"
        " latest works too.",
    ),
]
Nodes: TypeAlias = Annotated[
    int | None, typer.Option("--nodes", min=1, help="Number of nodes (see docs/cluster.md).")
]
Resume: TypeAlias = Annotated[
    bool,
    typer.Option("--resume", help="Continue the newest run, or the one that --run names."),
]
DryRun: TypeAlias = Annotated[
    bool, typer.Option("--dry-run", help="Show what would run, and run nothing.")
]
WriteReport: TypeAlias = Annotated[
    bool, typer.Option("--report/--no-report", help="Write the HTML report at the end.")
]
Results: TypeAlias = Annotated[Path, _RESULTS]
BaselineCell: TypeAlias = Annotated[
    str,
    typer.Option(
        "--baseline",
        help=(
            "What to compare the other cells of a setting with: a strategy, a cell's id or a"
            " pattern, and the simplest cell if several match; by default ddp, else single."
        ),
    ),
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options of the command and of Python."""

    cells: Sequence[Cell | Mapping[str, object]] = field(default=(), kw_only=False)
    """Cells, or axes of cells, to run instead of a matrix; only in Python."""
    matrix: Matrix = ""
    only: Annotated[Sequence[str], _ONLY] = ()
    skip: Annotated[Sequence[str], _SKIP] = ()
    settings: Annotated[Mapping[str, object] | Sequence[str], _SETTINGS] = field(
        default_factory=dict
    )
    """Axes set in all cells: by name, or as texts such as `batch=16`."""
    model: Annotated[
        str,
        typer.Option(
            "--model",
            help="Model to train in every cell: a workload (see: python -m bench list workloads),"
            " hf:PATH of a config.json, or your own as FILE.py:CLASS.",
        ),
    ] = ""
    scripts: Annotated[Sequence[str], _SCRIPTS] = ()
    data: Annotated[
        str, typer.Option("--data", help="Dataset to train on in every cell, such as text:FILE.")
    ] = ""
    trials: Trials = None
    time_budget_seconds: Annotated[
        float | None,
        typer.Option(
            "--time-budget",
            metavar="<str>",
            parser=parse_time,
            help=(
                "Time budget, such as 45min, in which cells that may be the best get further"
                " trials. Once it is spent, planned rounds from the third on are skipped. By"
                " default the matrix's, else a quarter more than the planned rounds take; none"
                " with --trials."
            ),
        ),
    ] = None
    baseline: BaselineCell = ""
    timed_seconds: Annotated[
        float | None,
        typer.Option(
            "--timed-seconds",
            min=0,
            help=(
                "Seconds of timed steps per trial on CPUs, interleaved with a control that corrects"
                " for changes in the machine's speed; by default the matrix's. With 0, trials have"
                " the matrix's number of steps and no control."
            ),
        ),
    ] = None
    results: Annotated[str | Path, _RESULTS] = Path("results")
    run_id: RunId = ""
    profile: Annotated[
        bool,
        typer.Option(
            "--profile",
            help="Run each cell once more at the end, to record where its time and memory go.",
        ),
    ] = False

    @property
    def changes(self) -> Axes:
        """Axes set in all cells."""
        from bench.matrix import known_axes, parse_changes

        given = self.settings
        axes = known_axes(given) if isinstance(given, Mapping) else parse_changes(given)
        return axes | ({"data": self.data} if self.data else {})

    @property
    def chooses_cells(self) -> bool:
        chosen = self.only or self.skip or self.cells or self.changes or self.model
        return bool(chosen or self.scripts)

    @property
    def changes_a_plan(self) -> bool:
        """Whether an option is set that cannot apply to a run that has begun."""
        return bool(
            self.chooses_cells
            or self.trials
            or self.time_budget_seconds is not None
            or self.timed_seconds is not None
        )


@dataclass(frozen=True, kw_only=True)
class CommandOptions(RunOptions):
    """Further options, of the command alone."""

    resume: Resume = False
    share: Annotated[
        str,
        typer.Option(
            "--share",
            help="I/N: run only every N-th cell, beginning with cell I (counted from 0).",
        ),
    ] = ""
    dry_run: DryRun = False
    host: Annotated[
        str,
        typer.Option(
            "--host",
            help="With --dry-run: plan for another host, such as '8 x h100-80gb, 112 cores'.",
        ),
    ] = ""
    nodes: Nodes = None
    rendezvous: Annotated[
        str,
        typer.Option(
            "--rendezvous",
            metavar="FILE|[HOST]:PORT",
            help=(
                "Where agents find this run: a file in a folder that all nodes share, or the"
                " address to listen on, with the run's key in PARALLELISM_BENCH_KEY or a file"
                " named by PARALLELISM_BENCH_KEY_FILE."
            ),
        ),
    ] = ""
    interface: Annotated[
        str, typer.Option("--interface", help="Network interface that reaches all nodes.")
    ] = ""
    timeout: Annotated[
        float,
        typer.Option(
            "--timeout",
            min=0,
            help="Seconds to wait for agents; the run then starts without the rest.",
        ),
    ] = 120.0
    with_parent: Annotated[
        bool, typer.Option("--with-parent", hidden=True, help="End when the parent process ends.")
    ] = False
    """Whether to end with the parent process; another job then continues the run."""
    report: WriteReport = True
    json_output: Json = False

    @property
    def part(self) -> tuple[int, int]:
        """Number of this process's share of the cells, and number of shares."""
        return parse_share(self.share)


def taking(
    record: Callable[P, Record],
) -> Callable[[Callable[[Record], Returned]], Callable[P, Returned]]:
    """Makes a function of a record into one of the record's fields."""

    def decorated(function: Callable[[Record], Returned]) -> Callable[P, Returned]:
        @functools.wraps(function)
        def call(*args: P.args, **options: P.kwargs) -> Returned:
            return function(record(*args, **options))

        signature, hints = inspect.signature(record), _hints(record)
        parameters = [
            parameter.replace(annotation=hints[name].__origin__)
            if hasattr(hints[name], "__metadata__")
            else parameter
            for name, parameter in signature.parameters.items()
        ]
        returned = inspect.signature(function).return_annotation
        vars(call)["__signature__"] = inspect.Signature(parameters, return_annotation=returned)
        return call

    return decorated


PANELS = {
    "How long": ("trials", "time_budget_seconds", "timed_seconds", "profile"),
    "Output": ("results", "run_id", "report", "json_output"),
    "Several nodes": ("share", "nodes", "rendezvous", "interface", "timeout"),
}
"""Options by panel of the help; all others are in the panel `What`."""
_TYPED: dict[str, object] = {
    "only": Only,
    "skip": Skip,
    "scripts": Scripts,
    "settings": Settings,
    "results": Results,
}
"""Types of options that Python takes in more forms than the command line."""


def command(run: Callable[[CommandOptions], None]) -> Callable[..., None]:
    """Makes a function of these options into a command with an option for each annotated field."""
    hints = _hints()
    options = {
        name: _in_panel(name, _TYPED.get(name, hint))
        for name, hint in hints.items()
        if hasattr(hint, "__metadata__")
    }

    @functools.wraps(run)
    def call(**given: Any) -> None:
        run(CommandOptions(**{name: value for name, value in given.items() if value is not None}))

    call.__annotations__ = options
    vars(call)["__signature__"] = inspect.Signature(
        [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=_default(name),
                annotation=kind,
            )
            for name, kind in options.items()
        ]
    )
    return call


def _in_panel(name: str, hint: Any) -> object:
    option = copy.copy(hint.__metadata__[0])
    panels = [panel for panel, names in PANELS.items() if name in names]
    option.rich_help_panel = panels[0] if panels else "What"
    return Annotated[hint.__origin__, option]


def _hints(record: object = CommandOptions) -> dict[str, Any]:
    # Importing these types would slow every command down.
    unknown = {"Cell": object, "ProgressListener": object}
    return get_type_hints(record, localns=unknown, include_extras=True)


def _default(name: str) -> object:
    """Returns the default of an option; Typer takes None in place of an empty list."""
    default = getattr(CommandOptions, name, None)
    return None if default == () else default


def command_line(**given: object) -> list[str]:
    """Returns options of `bench run` as arguments; leaves out options that are not set."""
    hints = _hints()
    arguments: list[str] = []
    for name, value in given.items():
        # Typer's Option takes the first name of an annotated parameter as its default.
        option = str(hints[name].__metadata__[0].default)
        if isinstance(value, bool):
            arguments += [] if value else [option.partition("/")[2]]
        elif value:
            for item in value if isinstance(value, list) else [value]:
                arguments += [option, str(item)]
    return arguments
