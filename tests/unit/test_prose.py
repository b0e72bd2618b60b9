"""Prose rules, which `make lint` applies to the documents."""

from __future__ import annotations

import ast

from scripts import prose
from scripts.prose import Sentence, findings, markdown_sentences


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
