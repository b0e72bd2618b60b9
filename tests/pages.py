"""Files, patches and commands in a document, to be applied and run unchanged."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]

IGNORED = shutil.ignore_patterns("__pycache__", "html")
BLOCK = re.compile(
    r"(?:`(?P<path>[\w./-]+)`:\n\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S
)


@dataclass(frozen=True)
class Block:
    """A block of code in a document."""

    path: str
    """File named in the line above (`path`:); empty if none."""
    language: str
    """`diff` for a patch of the file, else the file's whole text. Without a language and a file,
    the block is commands."""
    text: str

    @property
    def commands(self) -> list[str]:
        """Lines of a block of commands; empty for other blocks."""
        return [] if self.path or self.language else self.text.splitlines()

    def apply(self, checkout: Path) -> None:
        """Writes or patches the file."""
        file = checkout / self.path
        if self.language == "diff":
            file.write_text(_patched(file.read_text(), self.text, self.path))
        else:
            assert not file.exists(), f"{self.path} already exists"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(self.text)


def _patched(text: str, patch: str, path: str) -> str:
    """Applies each hunk (separated by `@@` lines) at the only place that matches."""
    for hunk in re.split(r"^@@.*\n", patch, flags=re.M):
        lines = [line or " " for line in hunk.splitlines()]
        before = "".join(line[1:] + "\n" for line in lines if line[0] in " -")
        after = "".join(line[1:] + "\n" for line in lines if line[0] in " +")
        assert lines
        assert text.count(before) == 1, f"{text.count(before)} places in {path} match:\n{hunk}"
        text = text.replace(before, after)
    return text


def section(page: Path, heading: str) -> str:
    """Returns the text of a page's section."""
    parts = re.split(r"^## (.*)\n", page.read_text(), flags=re.M)
    return dict(zip(parts[1::2], parts[2::2], strict=True))[heading]


def blocks(text: str) -> list[Block]:
    """Returns the blocks of a document, in order."""
    return [
        Block(found["path"] or "", found["language"], found["text"])
        for found in BLOCK.finditer(text)
    ]


def checkout(folder: Path) -> Path:
    """Copies this checkout's code, tests and documents, for tests that change them."""
    copy = folder / "checkout"
    folders = ("bench", "harness", "reports", "results/reference", "scripts", "slurm", "tests")
    for name in (*folders, "docs"):
        shutil.copytree(ROOT / name, copy / name, ignore=IGNORED)
    documents = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE")
    for name in (*documents, "pyproject.toml", "Makefile"):
        shutil.copy(ROOT / name, copy / name)
    return copy
