"""The documents agree with the code. Run pytest with --update to rewrite the tables."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import pkgutil
import re
import textwrap
from collections.abc import Iterable
from pathlib import Path

import pytest

from bench.cluster.site import Nightly, Notify, Site
from bench.matrix import matrix_names, read_matrix
from harness.host.gpu_models import gpu_models
from harness.record.files import TABLES
from harness.record.table import Record
from harness.seam.differences import EVERY_STRATEGY, declared
from harness.seam.registry import strategies
from tests import pages

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    *(
        ROOT / f"{name}.md"
        for name in ("README", "AGENTS", "CONTRIBUTING", "CODE_OF_CONDUCT", "CHANGELOG", "SECURITY")
    ),
    *(ROOT / folder / "README.md" for folder in ("slurm", "results")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
MADE = {"slurm/site.yaml"}
"""Files that users create."""


def meanings(table: type[Record]) -> dict[str, str]:
    """Returns the description of each column: the docstring under its field."""
    by_column: dict[str, str] = {}
    for cls in reversed(table.__mro__):
        if dataclasses.is_dataclass(cls):
            (body,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
            assert isinstance(body, ast.ClassDef)
            by_column |= _field_docstrings(body.body)
    return {column.name: by_column.get(column.name, "") for column in table.columns()}


def _field_docstrings(body: Iterable[ast.stmt]) -> dict[str, str]:
    by_column, name = {}, ""
    for statement in body:
        match statement:
            case ast.AnnAssign(target=ast.Name(id=str(field))):
                name = field
            case ast.Expr(value=ast.Constant(value=str(text))) if name:
                by_column[name] = " ".join(text.split())
                name = ""
            case _:
                name = ""
    return by_column


def strategy_table() -> list[str]:
    rows = ["| strategy | what it does | options |", "|---|---|---|"]
    for name, cls in strategies().items():
        if not cls.__module__.startswith("harness."):
            continue
        options = ", ".join(f"`{option}`" for option in cls.model_fields) or "none"
        said = " ".join((cls.__doc__ or "").split("\n\n")[0].split())
        rows.append(f"| `{name}` | {said} | {options} |")
    return rows


def differences_table() -> list[str]:
    rows = ["| strategy | setting | here | documented | why | when |", "|---|---|---|---|---|---|"]
    folder = Path(inspect.getfile(strategies()["single"])).parent
    for strategy, found in declared(folder).items():
        name = "every strategy" if strategy == EVERY_STRATEGY else f"`{strategy}`"
        if not found:
            rows.append(f"| {name} | none | | | | |")
        for one in found:
            when = ", ".join(f"{k}={json.dumps(v)}" for k, v in one.when.items()).replace('"', "")
            rows.append(
                f"| {name} | {one.name} | {one.value} | {one.documented} | {one.why} | {when} |"
            )
    return rows


def schema_table() -> list[str]:
    rows = []
    for table, record in TABLES.items():
        meaning = meanings(record)
        rows += [f"### {table}", "", "| column | type | meaning |", "|---|---|---|"]
        rows += [
            f"| `{column.name}` | {column.type}{'?' if column.nullable else ''}"
            f" | {meaning[column.name]} |"
            for column in record.columns()
        ]
        rows.append("")
    return rows[:-1]


def matrix_table() -> list[str]:
    return [
        "| matrix | what it runs |",
        "|---|---|",
        *(f"| `{name}` | {read_matrix(name).description} |" for name in matrix_names()),
    ]


def site_table() -> list[str]:
    rows = ["| key | default | meaning |", "|---|---|---|"]
    sections = {"": Site, "nightly.": Nightly, "nightly.notify.": Notify}
    for prefix, model in sections.items():
        for name, field in model.model_fields.items():
            if name in ("nightly", "notify", "pods"):
                continue
            default = json.dumps(field.get_default(call_default_factory=True))
            said = " ".join((field.description or f"`--{name}` of sbatch.").split()).replace(
                "|", "\\|"
            )
            rows.append(f"| `{prefix}{name}` | `{default}` | {said} |")
    return rows


def gpu_table() -> list[str]:
    rows = [
        "| `--host` | memory (GiB) | fp32 peak (TFLOP/s) | bf16 peak (TFLOP/s) |",
        "|---|---|---|---|",
    ]
    for name, model in gpu_models().items():
        peaks = [
            f"{peak / 1e12:g}" if (peak := model.peak_flops_per_second(p)) else "unknown"
            for p in ("fp32", "bf16")
        ]
        rows.append(f"| `{name}` | {model.memory_bytes / 2**30:.1f} | {' | '.join(peaks)} |")
    return rows


@pytest.mark.parametrize(
    ("file", "mark", "table"),
    [
        ("docs/hosts.md", "gpus", gpu_table),
        ("slurm/README.md", "site", site_table),
        ("docs/reference/strategies.md", "strategies", strategy_table),
        ("docs/reference/strategies.md", "differences", differences_table),
        ("docs/reference/matrices.md", "matrices", matrix_table),
        ("docs/reference/schema.md", "schema", schema_table),
    ],
)
def test_tables_are_those_of_the_code(file: str, mark: str, table, update: bool) -> None:
    path = ROOT / file
    begin, end = f"<!-- {mark} -->\n", f"\n<!-- end of {mark} -->"
    text = path.read_text()
    before, rest = text.split(begin)
    now, after = rest.split(end)
    wanted = "\n".join(table())
    if update:
        path.write_text(before + begin + wanted + end + after)
        return
    assert now == wanted, "rewrite it: pytest tests/unit/test_docs.py --update"


def prose(document: Path) -> str:
    """Returns the document without code blocks."""
    return re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.M | re.S)


def anchors(document: Path) -> set[str]:
    """Returns the anchors that GitHub gives the document's headings."""
    headings = re.findall(r"^#+ (.*)$", prose(document), flags=re.M)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_to_documents_and_headings() -> None:
    for document in DOCUMENTS:
        for file, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]+))?\)", prose(document)):
            target = document.parent / file if file else document
            if file.startswith("../../actions/"):  # GitHub's page of a workflow
                target = (
                    ROOT
                    / ".github"
                    / file.removeprefix("../../actions/").removesuffix("/badge.svg")
                )
            assert target.exists(), f"{document.name} links to {file}"
            assert not anchor or anchor in anchors(target), f"{document.name}: {file}#{anchor}"


def python_files() -> list[Path]:
    folders = ("bench", "harness", "reports", "scripts", "tests")
    return [file for folder in folders for file in sorted((ROOT / folder).rglob("*.py"))]


def test_files_that_are_named_exist() -> None:
    """Files move, so paths in documents, docstrings and comments are checked."""
    folders = "bench|docs|harness|reports|scripts|slurm|tests"
    named = re.compile(rf"(?<![\w./<{{-])(?:{folders})/[\w./-]*\.(?:py\.j2|py|md|yaml|sh)\b")
    for file in [*DOCUMENTS, *python_files()]:
        text, made = file.read_text(), set(MADE)
        if file in DOCUMENTS:  # code blocks may describe files yet to be created
            text, made = prose(file), made | {block.path for block in pages.blocks(text)}
        for path in set(named.findall(text)) - made:
            assert (ROOT / path).exists(), f"{file.relative_to(ROOT)} names {path}"


def test_names_of_the_code_in_documents_exist() -> None:
    """Checks dotted names such as `harness.record.store.load`."""
    for document in DOCUMENTS:
        for name in re.findall(r"`((?:bench|harness|reports)(?:\.\w+)+)`", document.read_text()):
            pkgutil.resolve_name(name)


def test_every_environment_variable_of_the_user_is_described() -> None:
    """Users' variables are in docs/reference/commands.md; launchers set the internal ones."""
    internal = {f"PARALLELISM_BENCH_{name}" for name in ("ALONE", "LAUNCHER", "PRELOAD")}
    files = [file for file in python_files() if file.relative_to(ROOT).parts[0] != "tests"]
    files += [*(ROOT / "scripts").glob("*.sh"), *(ROOT / "bench" / "cluster" / "slurm").iterdir()]
    used = {
        name
        for file in files
        for name in re.findall(r"\bPARALLELISM_BENCH_[A-Z_]+\b", file.read_text())
    }
    page = (ROOT / "docs" / "reference" / "commands.md").read_text()
    said = set(re.findall(r"^\| `(PARALLELISM_BENCH_[A-Z_]+)` \|", page, re.M))
    assert said == used - internal
