"""Command lines of the documents and of `--help`, and what a user who follows them has."""

from __future__ import annotations

import datetime
import json
import re
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from typer.testing import CliRunner

from bench.cli import COMMANDS, app
from tests import pages

ROOT = pages.ROOT
REFERENCE = ROOT / "results" / "reference"
RUN, EARLIER, JOB = "20261128T064652-090b", "20261125T120000-aaaa", "4711"
"""The kept run, an earlier one that measured the same, and the latter's job."""
PROMPT = re.compile(r"^(?:\w+\$ |[\d* ]+\* +|[A-Z_]+=\S+ )+")
END = re.compile(r" #| &$| > ")
PROGRAM = re.compile(r"^(?:\S*python3? -m bench|parallelism-bench|bench)(?: |$)")
COMMAND_NAMES = {name for panel in COMMANDS.values() for name in panel}
INCOMPLETE = {"run", "submit", "bench"}
"""Words that alone name a command or the program in a sentence."""
FILLED_IN = {"COMMAND": "run", "JOB": JOB, "RUN": RUN}
ENDINGS = {"fits": {0, 1, 3}, "compare": {0, 1}, "maxsize": {130}}
"""Exit codes with which a command answers, otherwise 0. A search is stopped at its beginning."""
ADDED = {
    "run": ["--dry-run"],
    "submit": ["--dry-run"],
    "profile": ["--set", "workload=llama-nano"],
    "maxsize": ["--results", "searches"],
    "bisect": ["--help"],
}
"""Options added to commands that would submit a job, train for minutes, begin another run, or
install several GB."""


@dataclass(frozen=True)
class CommandLine:
    """A command of the suite, with its arguments, or `make` and a target."""

    text: str
    words: tuple[str, ...]

    @property
    def arguments(self) -> list[str]:
        """The arguments with which a test runs the command in the folder of `user_folder`."""
        words = [FILLED_IN.get(word, word) for word in self.words]
        words = [word.lstrip("/") if "/" in word else word for word in words]
        asked = {"--help", "--dry-run", "--list"} & {*words}
        return words if asked else words + ADDED.get(words[0], [])

    @property
    def endings(self) -> set[int]:
        return ENDINGS.get(self.words[0], {0})


def command_line(text: str) -> CommandLine | None:
    """Parses a line or a span of code without prompt and comment. Returns None for other programs,
    for a command's name in a sentence, and for what would change the user's shell."""
    text = PROMPT.sub("", " ".join(END.split(text, maxsplit=1)[0].split("&&")[-1].split()))
    if text.startswith("make "):
        return CommandLine(text, ("make", *shlex.split(text)[1:]))
    if not PROGRAM.match(text) or "--install-completion" in text:
        return None
    words = shlex.split(PROGRAM.sub("", text))
    is_name = not text.startswith("bench") or (len(words) > 1 and not any(map(str.isupper, words)))
    complete = is_name and (len(words) > 1 or not INCOMPLETE & {*words}) and words
    return CommandLine(text, tuple(words)) if complete else None


def of_document(text: str) -> list[CommandLine]:
    """Returns the command lines in a document's blocks and spans of code."""
    parts = re.split(r"^ *```(.*)\n", text, flags=re.M)
    blocks = zip(parts[1::4], parts[2::4], strict=True)
    lines = [line for kind, block in blocks if kind in ("", "bash") for line in block.splitlines()]
    spans = re.findall(r"`([^`]+)`", "".join(parts[0::4]))
    return [line for line in map(command_line, [*lines, *spans]) if line]


def of_help() -> list[CommandLine]:
    """Returns the examples in the help of all commands."""
    runner, found = CliRunner(env={"COLUMNS": "400"}), []
    for name in sorted(COMMAND_NAMES):
        shown = runner.invoke(app, [name, "--help"]).stdout
        found += re.findall(r"Example: (.*?) *$", shown, re.M)
    return [line for line in map(command_line, found) if line]


def of_makefile(target: str = "") -> list[str]:
    """Returns the lines that the target, or every target, runs, with its variables' defaults."""
    text = (ROOT / "Makefile").read_text()
    variables = dict(re.findall(r"^(\w+) \??:?= ?(.*)$", text, re.M)) | {"PY": "python"}
    if target:
        text = re.split(rf"^{target}:.*\n", text, maxsplit=1, flags=re.M)[1]
        text = re.match(r"(?:\t.*\n?)*", text)[0]  # type: ignore[index]
    lines = re.findall(r"^\t@?(.*)$", text, re.M)
    return [
        re.sub(r"\$\((\w+)\)", lambda found: variables.get(found[1], ""), line) for line in lines
    ]


def user_folder(folder: Path) -> Path:
    """Fills a folder with what the documents speak of: two runs, a baseline, colleagues' results,
    a model, a matrix, and site files."""
    shutil.copytree(REFERENCE, folder / "results")
    earlier = folder / "results-of-others"
    for file in (file for file in REFERENCE.rglob("*.parquet") if RUN in str(file)):
        copy = str(file.relative_to(REFERENCE)).replace(RUN, EARLIER)
        for target in (
            folder / "results" / copy,
            folder / "results" / "mine" / copy,
            earlier / copy,
        ):
            target.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(_earlier(pq.read_table(file)), target)
    shutil.copytree(earlier, folder / "results-of-a-colleague")
    for name in (".", "release", "h100-80gb"):
        shutil.copytree(REFERENCE, folder / "results" / "reference" / name, dirs_exist_ok=True)
    for block in pages.blocks((ROOT / "docs" / "your_model.md").read_text()):
        if block.path:
            block.apply(folder)
    shutil.copy(ROOT / "bench" / "matrices" / "smoke.yaml", folder / "my.yaml")
    shutil.copy(ROOT / "tests" / "scripts" / "mingpt_ddp.py", folder / "train.py")
    (folder / "site.yaml").write_text("partition: gpu\n")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 512}
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **sizes, **heads}
    (folder / "my-model").mkdir()
    for file in (folder / "config.json", folder / "my-model" / "config.json"):
        file.write_text(json.dumps(config))
    return folder


def _earlier(table: pa.Table) -> pa.Table:
    """Returns rows of a table as an earlier run, which a job made, has them."""
    values = {"run_id": EARLIER, "allocation": json.dumps({"job": JOB})}
    columns = {name: pa.array([value] * len(table)) for name, value in values.items()}
    if "started_at" in table.column_names:
        days = pa.scalar(datetime.timedelta(days=3))
        columns["started_at"] = pc.subtract(table["started_at"], days)
    for name in set(columns) & {*table.column_names}:
        at, field = table.column_names.index(name), table.schema.field(name)
        table = table.set_column(at, field, columns[name].cast(field.type))
    return table
