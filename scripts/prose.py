"""Checks prose for coined words, telegrams and length, and names and commit subjects.

`.venv/bin/python -m scripts.prose` exits with 1 if something must be fixed.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[1]
LONG, TOO_LONG = 30, 40
"""Words in a sentence above which it is reported, and rejected."""

MESSAGE_FOLDERS = ("bench", "harness", "reports", "scripts")
LEAST_WORDS = 4
"""Minimum number of words of a string literal that is a message."""
VAGUE = {"own", "known", "kept", "shown", "words", "each", "one"}
"""Names that say nothing about what they hold."""
SUBJECT_LENGTH, SUBJECTS_SINCE = 72, "44921a51"
"""Maximum length of commit subjects, and the last commit that may have longer ones."""

COINED = {
    r"\bt(?:ells?|old|elling)\b.{0,40}\bapart\b": "is tied with; no significant difference from",
    r"\bbeside\b": "next to; alongside; in addition to",
    r"\bmend(?:s|ed|ing)?\b": "fix",
    r"\bfalsif(?:y|ies|ied|ying)\b": "skew results",
    r"\b(?:say|tell|know)s? nothing of\b": "says nothing about; tells you nothing about",
    r"\bas makes no matter\b": "within 2%",
    r"(?:[\dX}]|^) %(?![\w(.])": "a number and % without a space between them",
    r"(?:^|[;.,(] )(?:None|null|empty|0|-1|False|True): ": "what it is, then `None if ...`",
    r"\bso (?:many|long|wide|precise)\b(?!.*\bthat\b)": "the number itself; this long",
    r"\bhow far (?:is|it is|a run is)\b": "how far along",
    r"\bfiles? (?:is|are) whole\b|\bare (?:its|the) files whole\b": "intact",
    r"\bset(?:s|ting)? back\b": "rewind",
    r"\bby turns\b|\btime slices?\b": "interleaved",
    r"\bmeetings?\b": "rendezvous",
    r"\b(?:is|are|be) no part of\b": "is not part of",
    r"\bnews\b": "warnings; what is new",
    r"\bperson can act on\b": "the user can act on",
}
OPENINGS = {
    r"Of\b": "start with the subject",
    r"By (?!default\b)": "start with the subject",
    r"That (?!is\b|was\b|means\b)": "name what `that` is",
    r"The same(?= (?:of|as|for|in|with|without|where|by|if|when)\b|[,.:;]|$)": "name what it is",
    r"Where\b(?!.*\?$)": "use If or When; keep Where for places",
}
LIMITS = {r"(?:Most|Least|Fewest) (?!of\b)": "Maximum or Minimum number of ..."}
"""Openings that docstrings must not have; in a document, `Most` is the majority."""


@dataclass(frozen=True)
class Sentence:
    """A sentence, or a fragment such as a table's cell, and where it begins."""

    file: str
    line: int
    text: str
    fragment: bool = False
    """Whether only its words are checked."""


@dataclass(frozen=True)
class Finding:
    sentence: Sentence
    message: str
    fatal: bool = True

    def __str__(self) -> str:
        kind = "error" if self.fatal else "warning"
        return f"{self.sentence.file}:{self.sentence.line}: {kind}: {self.message}"


def findings(sentences: Iterable[Sentence]) -> Iterator[Finding]:
    for sentence in sentences:
        for pattern, instead in COINED.items():
            if found := re.search(pattern, sentence.text, re.IGNORECASE):
                yield Finding(sentence, f"not {found[0]!r}, but: {instead}")
        if sentence.fragment:
            continue
        openings = OPENINGS if sentence.file.endswith(".md") else OPENINGS | LIMITS
        for pattern, instead in openings.items():
            if found := re.match(pattern, sentence.text):
                yield Finding(sentence, f"opens with {found[0]!r}: {instead}")
        length = len(re.findall(r"\S*\w\S*", sentence.text))
        if length > LONG:
            yield Finding(
                sentence, f"{length} words: {sentence.text[:60]}...", fatal=length > TOO_LONG
            )


def documents() -> list[Path]:
    folders = (ROOT, ROOT / "slurm", ROOT / "results")
    files = [file for folder in folders for file in sorted(folder.glob("*.md"))]
    files += sorted((ROOT / "docs").rglob("*.md"))
    return [file for file in files if "studies" not in file.relative_to(ROOT).parts]


def markdown_sentences(text: str, file: str) -> Iterator[Sentence]:
    """Yields a document's sentences, without code, addresses and generated tables."""
    blank = lambda found: re.sub(r"[^\n]", "", found[0])  # noqa: E731 - keeps line numbers
    text = re.sub(r"^( *)```.*?^\1```$", blank, text, flags=re.M | re.S)
    text = re.sub(r"^<!-- (\w+) -->$.*?^<!-- end of \1 -->$", blank, text, flags=re.M | re.S)
    text = re.sub(r"`[^`]*`", lambda found: "Code" + "\n" * found[0].count("\n"), text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("*", "").replace(">", "")
    for block in re.finditer(r"(?:(?!\n\n|\n *(?:[-|#]|\d+\.) ).)+", text, re.S):
        line = text.count("\n", 0, block.start()) + 1
        line += len(block[0]) - len(block[0].lstrip("\n"))
        paragraph = " ".join(block[0].split())
        if paragraph.startswith("|"):
            for cell in paragraph.split("|"):
                yield Sentence(file, line, cell.strip(), fragment=True)
        elif paragraph.startswith("#"):
            yield Sentence(file, line, paragraph.lstrip("# "), fragment=True)
        else:
            paragraph = re.sub(r"^(?:-|\d+\.) ", "", paragraph)
            for sentence in re.split(r"(?<=[.!?]) +(?=[A-Z(\"'])", paragraph):
                yield Sentence(file, line, sentence)


def docstring_sentences(tree: ast.Module, file: str) -> Iterator[Sentence]:
    """Yields sentences of all docstrings, including attributes', without indented code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            text = re.sub(r"^ {4}.*$", "", inspect.cleandoc(str(node.value.value)), flags=re.M)
            for sentence in markdown_sentences(text, file):
                yield replace(sentence, line=node.lineno + sentence.line - 1)


def messages(tree: ast.Module, file: str) -> Iterator[Sentence]:
    """Yields string literals of at least LEAST_WORDS words, with `X` for an f-string's values."""
    skipped: set[int] = set()
    for node in ast.walk(tree):
        text = ""
        if isinstance(node, ast.Expr):
            skipped.add(id(node.value))
        elif isinstance(node, ast.JoinedStr):
            skipped |= {id(part) for part in node.values}
            text = "".join(
                str(part.value) if isinstance(part, ast.Constant) else "X" for part in node.values
            )
        elif isinstance(node, ast.Constant) and id(node) not in skipped:
            text = str(node.value)
        if len(re.findall(r"\w+", text)) >= LEAST_WORDS:
            yield Sentence(file, node.lineno, text, fragment=True)


def vague_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields line and name of each variable, parameter, function and field that is VAGUE."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                pass
            case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                pass
            case _:
                continue
        if name.strip("_").lower() in VAGUE:
            yield node.lineno, name


def long_subjects() -> list[str]:
    """Returns subjects of commits that are too long; empty without git or the first commit."""
    command = ("git", "log", "--no-merges", "--format=%s", f"{SUBJECTS_SINCE}..HEAD")
    with contextlib.suppress(OSError):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        return [line for line in done.stdout.splitlines() if len(line) > SUBJECT_LENGTH]
    return []


def sources() -> Iterator[tuple[str, ast.Module]]:
    for folder in MESSAGE_FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            if file != Path(__file__):
                yield str(file.relative_to(ROOT)), ast.parse(file.read_text())


def main() -> int:
    found: list[Finding] = []
    for file in documents():
        found += findings(markdown_sentences(file.read_text(), str(file.relative_to(ROOT))))
    for name, tree in sources():
        found += findings(docstring_sentences(tree, name))
        found += findings(messages(tree, name))
        for line, vague in vague_names(tree):
            found.append(Finding(Sentence(name, line, vague), f"name {vague!r}: say what it holds"))
    for subject in long_subjects():
        found.append(Finding(Sentence("git log", 0, subject), f"{len(subject)} letters: {subject}"))
    for finding in found:
        print(finding)
    return int(any(finding.fatal for finding in found))


if __name__ == "__main__":
    sys.exit(main())
