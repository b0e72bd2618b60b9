"""Prose rules, which `make lint` applies to the documents."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

from scripts import prose
from scripts.prose import Sentence, findings, long_subjects, markdown_sentences, vague_names


def broken(text: str, *, fragment: bool = False) -> list[bool]:
    """Returns whether each broken rule is fatal."""
    return [found.fatal for found in findings([Sentence("x.md", 1, text, fragment)])]


def test_coined_words_and_dangling_openings_are_rejected() -> None:
    for text in (
        "This was mended.",
        "It says nothing of real hardware.",
        "Where it fails, it stops.",
    ):
        assert broken(text) == [True], text
    for text in ("By default it stops.", "Where is the file?", "So many steps that it stops."):
        assert broken(text) == [], text


def test_telegrams_limits_and_spaces_before_percent_are_rejected() -> None:
    for text in ("Devices; 0: none.", "Fewest runs that count.", "Within 5 % of it."):
        assert [found.fatal for found in findings([Sentence("x.py", 1, text)])] == [True], text
    for text in ("Devices; 0 if none.", "Most of them.", "At 5% (5 %d)."):
        assert list(findings([Sentence("x.py", 1, text)])) == [], text
    assert broken("Most strategies need it.") == [], "the majority, in a document"


def test_names_that_say_nothing_are_found() -> None:
    code = "def kept(own):\n    for each in own:\n        x.shown = _ = each\nknown_ids = KNOWN = 1"
    found = sorted(vague_names(ast.parse(code)))
    assert found == [(1, "kept"), (1, "own"), (2, "each"), (3, "shown"), (4, "KNOWN")]


def test_long_subjects_of_commits_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    assert long_subjects() == [], "no repository"
    git = ("git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org")
    subprocess.run([*git, "init", "--quiet"], check=True)
    for subject in ("x" * 99, "x" * 72, "y" * 73):
        commit = [*git, "commit", "--quiet", "--allow-empty", "-m", subject]
        subprocess.run(commit, check=True)
    monkeypatch.setattr(prose, "SUBJECTS_SINCE", "HEAD~2")
    assert long_subjects() == ["y" * 73]


def test_long_sentences_are_reported_and_longer_ones_rejected() -> None:
    assert broken("word " * prose.LONG) == []
    assert broken("word " * (prose.LONG + 1)) == [False]
    assert broken("word " * (prose.TOO_LONG + 1)) == [True]
    assert broken("word " * (prose.TOO_LONG + 1), fragment=True) == []


def test_markdown_is_read_by_sentence_with_its_line() -> None:
    text = """# A title

First one. `code.py` is second, beside
[a link](x.md "beside").

| cell | mend it |
|---|---|

- an item
- another. And more.

```
mended = beside
```

<!-- made -->
mended
<!-- end of made -->
Last one.
"""
    read = [(s.line, s.text, s.fragment) for s in markdown_sentences(text, "x.md") if s.text]
    assert read == [
        (1, "A title", True),
        (3, "First one.", False),
        (3, "Code is second, beside a link.", False),
        (6, "cell", True),
        (6, "mend it", True),
        (6, "---", True),
        (6, "---", True),
        (9, "an item", False),
        (10, "another.", False),
        (10, "And more.", False),
        (19, "Last one.", False),
    ]


def test_docstrings_and_messages_are_read_with_their_lines() -> None:
    tree = ast.parse(
        '''"""A module.

    mended = code

Second sentence.
"""
LENGTH = 1
"""Of a thing."""
raise ValueError(f"{LENGTH} things are mended" " beside it", "two words", "--option")
'''
    )
    read = [(s.line, s.text) for s in prose.docstring_sentences(tree, "x.py")]
    assert read == [(1, "A module."), (5, "Second sentence."), (8, "Of a thing.")]
    assert [(s.line, s.text, s.fragment) for s in prose.messages(tree, "x.py")] == [
        (9, "X things are mended beside it", True)
    ]
