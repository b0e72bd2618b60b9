"""Training texts: the standard library's source, files, and hub datasets."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.spec.errors import UsageError

if TYPE_CHECKING:
    from harness.workloads.workload import Workload


def texts_of(name: str, workload: Workload) -> tuple[Callable[[], Iterable[bytes]], str]:
    """Returns a function that reads the dataset's texts, and a string that changes with their
    version.

    Causal models get one text, classifiers one per class. Raises UsageError for an unknown or
    unsuitable dataset; the function does so if the data cannot be read.
    """
    labelled = workload.kind == "classification"
    kind, _, where = name.partition(":")
    if name == "stdlib":
        return (lambda: _stdlib(workload.num_labels if labelled else 0)), sys.version
    if kind not in ("text", "parquet", "hf") or not where:
        raise UsageError(
            f"unknown data {name!r}; use stdlib, images, text:FILE, parquet:FILE or hf:DATASET"
        )
    if kind != "hf" and not Path(where).is_file():
        raise UsageError(f"data {name!r}: there is no file {where!r}")
    version = "" if kind == "hf" else str(Path(where).stat().st_mtime_ns)
    if kind == "text":
        if labelled:
            raise UsageError(
                f"data {name!r} has no labels, which {workload.name} needs; use parquet:FILE with"
                " columns text and label"
            )
        return (lambda: [Path(where).read_bytes()]), version
    read_rows = _parquet_rows if kind == "parquet" else _hub_rows
    rows = read_rows(name, where, labelled)
    return (lambda: _by_label(name, rows, workload.num_labels if labelled else 0)), version


def _stdlib(num_labels: int) -> Iterator[bytes]:
    """Yields Python's standard library as one text, or its `num_labels` largest packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "dist-packages", "test", "tests", "__pycache__", "lib2to3", "idlelib"}
    files = [p for p in sorted(root.rglob("*.py")) if not skip & set(p.relative_to(root).parts)]
    if not num_labels:
        yield b"\n".join(p.read_bytes() for p in files)
        return
    packages: dict[str, list[Path]] = {}
    for path in files:
        parts = path.relative_to(root).parts
        if len(parts) > 1:
            packages.setdefault(parts[0], []).append(path)
    largest = sorted(packages, key=lambda p: (-sum(f.stat().st_size for f in packages[p]), p))[
        :num_labels
    ]
    for package in sorted(largest):
        yield b"\n".join(p.read_bytes() for p in packages[package])


Rows = tuple[list[str], list[int] | None]
"""Texts, and their labels if the workload needs them."""


def _parquet_rows(name: str, where: str, labelled: bool) -> Rows:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(where)
    except (OSError, pa.ArrowInvalid) as error:
        raise UsageError(
            f"data {name!r} is not a readable parquet file: {str(error).splitlines()[0]}"
        ) from None
    return _columns(
        name, table.column_names, lambda column: table.column(column).to_pylist(), labelled
    )


def _hub_rows(name: str, where: str, labelled: bool) -> Rows:
    try:
        import datasets
    except ImportError:
        raise UsageError(
            f"data {name!r} needs the package datasets: pip install 'parallelism-bench[datasets]'"
        ) from None
    try:
        loaded = datasets.load_dataset(where, split="train")
    except Exception as error:  # the library's own, urllib's and OS errors
        raise UsageError(
            f"data {name!r} could not be loaded: {str(error).splitlines()[0]}"
        ) from None
    return _columns(name, loaded.column_names, lambda column: list(loaded[column]), labelled)


def _columns(
    name: str, present: Iterable[str], read: Callable[[str], list[Any]], labelled: bool
) -> Rows:
    """Returns the columns `text` and, if `labelled`, `label`."""
    for column in ("text", *(["label"] if labelled else [])):
        if column not in present:
            raise UsageError(
                f"data {name!r} has no column {column!r}; its columns are: {', '.join(present)}"
            )
    return read("text"), read("label") if labelled else None


def _by_label(name: str, rows: Rows, num_labels: int) -> Iterator[bytes]:
    """Yields the joined texts of each label, or of all rows without labels; raises UsageError for
    labels out of range."""
    texts, labels = rows
    if labels is None:
        yield "\n".join(texts).encode()
        return
    if min(labels, default=-1) < 0 or max(labels) >= num_labels:
        raise UsageError(
            f"data {name!r}: labels must be 0 to {num_labels - 1}, found {min(labels, default=-1)}"
            f" to {max(labels, default=-1)}"
        )
    for label in range(max(labels) + 1):
        yield "\n".join(t for t, of in zip(texts, labels, strict=True) if of == label).encode()
