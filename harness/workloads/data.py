"""Datasets: real text by bytes, labelled pieces of it, generated images; step k of seed s is one
global batch."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.spec.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from harness.workloads.workload import Workload
from harness.host.cache import cache_folder


@dataclass(frozen=True)
class DataSource:
    """A dataset prepared for a workload: small enough to send to every rank, opened there."""

    kind: str
    name: str
    fingerprint: str
    """sha256 of the tokens (text) or of the generator's parameters (images)."""
    tokens_file: str | None
    token_dtype: str
    ranges: tuple[tuple[int, int], ...]
    """Start and stop of each class's tokens; one range for causal models."""
    sequence_length: int
    image_size: int = 0
    num_labels: int = 0

    @functools.cached_property
    def tokens(self) -> NDArray[Any]:
        assert self.tokens_file is not None
        return np.asarray(
            np.load(self.tokens_file, mmap_mode="r")
        )  # a plain view: a memmap's own slices cost ten times theirs

    def batch(
        self, seed: int, step: int, global_batch: int, rows: slice
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Rows of the global batch of this step: inputs and labels.

        All random numbers of the global batch are drawn before rows are chosen, so it does not
        depend on who asks. Causal: ids (rows, tokens) and the same shifted by one. Classification:
        ids and (rows,) class numbers. Images: (rows, 3, size, size) float32 and (rows,) class
        numbers.
        """
        rng = np.random.default_rng([seed, step])
        if self.kind == "image":
            return self._images(rng, global_batch, rows)
        length = self.sequence_length
        labels = rng.integers(0, len(self.ranges), global_batch)
        starts = np.array([r[0] for r in self.ranges])[labels]
        stops = np.array([r[1] for r in self.ranges])[labels]
        offsets = starts + (rng.random(global_batch) * (stops - starts - length)).astype(np.int64)
        pieces = np.stack([self.tokens[o : o + length + 1] for o in offsets[rows]]).astype(np.int64)
        if self.kind == "causal":
            return pieces[:, :-1], pieces[:, 1:]
        return pieces[:, :-1], labels[rows]

    def _images(
        self, rng: np.random.Generator, global_batch: int, rows: slice
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Gratings whose angle and frequency tell the class, with a random phase and noise."""
        labels = rng.integers(0, self.num_labels, global_batch)
        phases = rng.random(global_batch) * 2 * np.pi
        noise_seeds = rng.integers(0, 2**63, global_batch)
        axis = np.linspace(-1, 1, self.image_size, dtype=np.float32)
        images = []
        for label, phase, noise in zip(labels[rows], phases[rows], noise_seeds[rows], strict=True):
            angle = np.pi * label / self.num_labels
            wave = np.sin(
                (4 + label % 5)
                * np.pi
                * (np.cos(angle) * axis[:, None] + np.sin(angle) * axis[None])
                + phase
            )
            shape = (3, self.image_size, self.image_size)
            images.append(
                wave + 0.5 * np.random.default_rng(noise).standard_normal(shape, dtype=np.float32)
            )
        return np.stack(images).astype(np.float32), labels[rows]


@functools.cache
def prepare_data(name: str, workload: Workload, sequence_length: int) -> DataSource:
    """Reads, tokenises and caches a dataset for a workload; raises UsageError where the data is not
    usable."""
    if workload.kind == "image":
        if name not in ("stdlib", "images"):
            raise UsageError(
                f"data {name!r}: image workload {workload.name} takes generated images only; use"
                " data: images"
            )
        said = f"gratings-1 {workload.image_size} {workload.num_labels}"
        fingerprint = hashlib.sha256(said.encode()).hexdigest()
        return DataSource(
            "image",
            "images",
            fingerprint,
            None,
            "",
            (),
            0,
            workload.image_size,
            workload.num_labels,
        )
    if workload.max_tokens and sequence_length > workload.max_tokens:
        raise UsageError(
            f"sequence_length {sequence_length} is longer than the {workload.max_tokens} positions"
            f" of {workload.name}"
        )
    texts, mark = _texts(name, workload)
    encode, coder = _encoder(workload)
    key = hashlib.blake2s(
        f"2 {name} {mark} {coder} {workload.kind} {workload.num_labels}".encode(), digest_size=8
    ).hexdigest()
    folder = cache_folder() / "data"
    folder.mkdir(exist_ok=True)
    tokens_file, facts_file = folder / f"{key}.npy", folder / f"{key}.json"
    if not (tokens_file.exists() and facts_file.exists()):
        parts = [encode(text) for text in texts()]
        tokens = np.concatenate(parts) if parts else np.zeros(0, np.uint8)
        edges = np.cumsum([0, *(len(part) for part in parts)]).tolist()
        facts = {
            "ranges": list(itertools.pairwise(edges)),
            "fingerprint": hashlib.sha256(tokens.tobytes()).hexdigest(),
        }
        temporary = folder / f"{key}.{os.getpid()}.tmp.npy"
        np.save(temporary, tokens)
        temporary.replace(tokens_file)
        temporary.write_text(json.dumps(facts))
        temporary.replace(facts_file)
    facts = json.loads(facts_file.read_text())
    ranges = tuple((a, b) for a, b in facts["ranges"])
    short = min((b - a for a, b in ranges), default=0)
    if short < sequence_length + 2:
        raise UsageError(
            f"data {name!r}: {short} tokens are too few for sequence_length {sequence_length}; it"
            f" needs {sequence_length + 2}"
        )
    return DataSource(
        workload.kind, name, facts["fingerprint"], str(tokens_file), coder, ranges, sequence_length
    )


def _encoder(workload: Workload) -> tuple[Any, str]:
    """Bytes as tokens; the model's own tokenizer where an `hf:` model brings one."""
    if workload.pretrained:
        try:
            import transformers

            tokenizer = transformers.AutoTokenizer.from_pretrained(
                workload.pretrained, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError, ImportError):
            tokenizer = None
        if tokenizer is not None and tokenizer.vocab_size > 0:
            return (
                lambda text: np.asarray(
                    tokenizer(text.decode("utf-8", "replace"))["input_ids"], np.int32
                ),
                f"tokenizer of {workload.pretrained}",
            )
    if workload.vocabulary < 256:
        raise UsageError(
            f"workload {workload.name!r}: its {workload.vocabulary} tokens are too few for bytes"
            " and it brings no tokenizer; 256 would do"
        )
    return lambda text: np.frombuffer(text, np.uint8), "bytes"


def _texts(name: str, workload: Workload) -> tuple[Any, str]:
    """A function that gives one text per class (one in all for causal models), and what tells
    versions of it apart."""
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
    mark = "" if kind == "hf" else str(Path(where).stat().st_mtime_ns)
    if kind == "text":
        if labelled:
            raise UsageError(
                f"data {name!r} has no labels, which {workload.name} needs; use parquet:FILE with"
                " columns text and label"
            )
        return (lambda: [Path(where).read_bytes()]), mark
    rows = (
        _parquet_rows(name, where, labelled)
        if kind == "parquet"
        else _hub_rows(name, where, labelled)
    )
    return (lambda: _by_label(name, rows, workload.num_labels if labelled else 0)), mark


def _stdlib(num_labels: int) -> Iterator[bytes]:
    """The standard library's source: one text, or the `num_labels` largest packages, a class
    each."""
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
    except Exception as error:  # the library raises its own, urllib's and the file system's errors
        raise UsageError(
            f"data {name!r} could not be loaded: {str(error).splitlines()[0]}"
        ) from None
    return _columns(name, loaded.column_names, lambda column: list(loaded[column]), labelled)


def _columns(name: str, present: Iterable[str], read: Any, labelled: bool) -> Rows:
    for column in ("text", *(["label"] if labelled else [])):
        if column not in present:
            raise UsageError(
                f"data {name!r} has no column {column!r}; its columns are: {', '.join(present)}"
            )
    return read("text"), read("label") if labelled else None


def _by_label(name: str, rows: Rows, num_labels: int) -> Iterator[bytes]:
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
        yield "\n".join(t for t, k in zip(texts, labels, strict=True) if k == label).encode()
