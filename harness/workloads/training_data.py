"""Datasets: tokens of real text, and generated images. Seed and step determine the global batch."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import numpy as np

from harness.cell import durable
from harness.cell.errors import UsageError
from harness.host.folders import cache_folder
from harness.host.packages import how_to_install
from harness.host.user_code import one_line
from harness.workloads.family import HAS_DECODER

if TYPE_CHECKING:
    from numpy.typing import NDArray

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from harness.workloads.user_workload import UserWorkload
    from harness.workloads.workload import Workload

    Array: TypeAlias = NDArray[np.generic]

MASKED = 0.15
"""Fraction of a sample's tokens that are masked (BERT, arXiv 1810.04805, section 3.1)."""
NO_LABEL = -100
Number = TypeVar("Number", bound=np.generic)
DOCUMENTS = 4
"""Mean number of documents in a packed sample beyond those at its start and middle."""
SPREAD_STEPS = 20
"""Number of first steps with tokens from all over the vocabulary, at least a parity segment."""
SPREAD_EVERY = 8
"""Distance in tokens between these."""
Column = list[Any]
Rows = tuple[list[str], list[int] | None]
"""Texts, and their labels; None if labels are not needed."""


@dataclass(frozen=True)
class DataSource:
    """A dataset prepared for a workload. It is small, because every rank gets it."""

    kind: str
    name: str
    """Name as in a cell: `stdlib`, `text:FILE`, ..."""
    fingerprint: str
    """sha256 of the tokens, or of the parameters that generate images."""
    tokens_file: str | None
    """Path of the array of tokens or images; None for generated images."""
    ranges: tuple[tuple[int, int], ...]
    """Start and stop of each class's tokens or images; one range for causal models."""
    sequence_length: int
    image_size: int = 0
    num_labels: int = 0
    last_first: bool = False
    """Whether global batches are reversed, which only changes rounding."""
    mask_token: int = 0
    """Id that replaces masked tokens."""
    vocabulary: int = 0
    """Number of ids that the first steps spread tokens over; 0 if they do not."""

    @functools.cached_property
    def tokens(self) -> Array:
        """All tokens (shape [tokens]) or images (shape [images, 3, size, size]), memory-mapped."""
        assert self.tokens_file is not None
        # Slicing a plain array is ten times as fast as slicing a memmap.
        return np.asarray(np.load(self.tokens_file, mmap_mode="r"))

    def batch(self, seed: int, step: int, global_batch: int, rows: slice) -> tuple[Array, Array]:
        """Returns inputs and labels for these rows of the step's global batch. Random numbers are
        drawn for the whole batch, so that all ranks agree on it.

        Text has ids (rows, tokens), and labels by kind: next ids, original ids of masked tokens,
        next decoder ids (rows, tokens // 2), a class per token, or a class (rows,). Images are
        float32 (rows, 3, size, size), with classes (rows,).
        """
        rng = np.random.default_rng([seed, step])
        if self.kind == "image":
            images = self._images if self.tokens_file is None else self._stored_images
            return images(rng, global_batch, rows)
        length = self.sequence_length
        labels = rng.integers(0, len(self.ranges), global_batch)
        starts = np.array([r[0] for r in self.ranges])[labels]
        stops = np.array([r[1] for r in self.ranges])[labels]
        offsets = starts + (rng.random(global_batch) * (stops - starts - length)).astype(np.int64)
        labels, offsets = self._ordered(labels), self._ordered(offsets)
        pieces = np.stack([self.tokens[o : o + length + 1] for o in offsets[rows]]).astype(np.int64)
        if step < SPREAD_STEPS and self.vocabulary:
            pieces[:, ::SPREAD_EVERY] = self._spread(seed, step, global_batch)[rows]
        # Copies, because pipeline stages before torch 2.12 take only contiguous inputs.
        inputs = np.ascontiguousarray(pieces[:, :-1])
        if self.kind == "causal":
            return inputs, np.ascontiguousarray(pieces[:, 1:])
        if self.kind in HAS_DECODER:
            return inputs, np.ascontiguousarray(pieces[:, length - length // 2 + 1 :])
        if self.kind == "tokens":
            return inputs, inputs % self.num_labels
        if self.kind == "masked":
            return self._masked(inputs, self._ordered(rng.random((global_batch, length)))[rows])
        return inputs, labels[rows]

    def _spread(self, seed: int, step: int, global_batch: int) -> Array:
        """Returns ids that replace every SPREAD_EVERY-th token: shape (samples, replaced tokens).

        Text names few rows of an embedding, so a mistake in the others would not show. Successive
        ids run through the whole vocabulary in random order.
        """
        count = len(range(0, self.sequence_length + 1, SPREAD_EVERY)) * global_batch
        numbers = np.arange(step * count, (step + 1) * count) % self.vocabulary
        ids = _shuffled_ids(seed, self.vocabulary)[numbers]
        return self._ordered(ids.reshape(global_batch, -1))

    def _masked(self, inputs: Array, scores: Array) -> tuple[Array, Array]:
        """Masks the tokens with the lowest scores; only these have labels. All samples have equally
        many, so that the mean over ranks is the mean over tokens."""
        count = max(1, round(MASKED * inputs.shape[1]))
        places = np.argsort(scores, axis=1)[:, :count]
        labels = np.full_like(inputs, NO_LABEL)
        np.put_along_axis(labels, places, np.take_along_axis(inputs, places, 1), 1)
        masked = inputs.copy()
        np.put_along_axis(masked, places, self.mask_token, 1)
        return masked, labels

    def weight(self, step: int, global_batch: int) -> float | None:
        """Returns the total weight of a step's samples; None if all samples count equally."""
        return None

    def lengths(self, seed: int, step: int, global_batch: int) -> NDArray[np.int64]:
        """Returns each padded sample's number of labelled tokens: between an eighth and all."""
        rng = np.random.default_rng([seed, step, 1])
        least = max(1, self.sequence_length // 8)
        return self._ordered(rng.integers(least, self.sequence_length + 1, global_batch))

    def dropout_keys(self, seed: int, step: int, global_batch: int) -> NDArray[np.int64]:
        """Returns 32-bit keys for the tokens of a step's global batch (samples, tokens)."""
        rng = np.random.default_rng([seed, step, 2])
        return self._ordered(rng.integers(0, 2**32, (global_batch, self.sequence_length)))

    def positions(self, seed: int, step: int, global_batch: int) -> NDArray[np.int64]:
        """Returns each token's position in its document, shape (samples, tokens); None if samples
        are not packed."""
        rng, length = np.random.default_rng([seed, step, 3]), self.sequence_length
        begins = rng.random((global_batch, length)) < DOCUMENTS / length
        begins[:, [0, length // 2]] = True
        numbers = np.arange(length)
        positions = numbers - np.maximum.accumulate(np.where(begins, numbers, 0), axis=1)
        return self._ordered(positions)

    def _ordered(self, samples: NDArray[Number]) -> NDArray[Number]:
        return samples[::-1].copy() if self.last_first else samples  # torch rejects reversed views

    def _images(
        self, rng: np.random.Generator, global_batch: int, rows: slice
    ) -> tuple[Array, Array]:
        """Returns noisy gratings with class-dependent angle and frequency."""
        labels = self._ordered(rng.integers(0, self.num_labels, global_batch))
        phases = self._ordered(rng.random(global_batch)) * 2 * np.pi
        noise_seeds = self._ordered(rng.integers(0, 2**63, global_batch))
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

    def _stored_images(
        self, rng: np.random.Generator, global_batch: int, rows: slice
    ) -> tuple[Array, Array]:
        labels = self._ordered(rng.integers(0, len(self.ranges), global_batch))[rows]
        starts, stops = np.array(self.ranges)[labels].T
        numbers = starts + (
            self._ordered(rng.random(global_batch))[rows] * (stops - starts)
        ).astype(np.int64)
        return self.tokens[numbers].astype(np.float32) / 127.5 - 1, labels


@functools.lru_cache(1)
def _shuffled_ids(seed: int, vocabulary: int) -> Array:
    return np.random.default_rng([seed, 4]).permutation(vocabulary)


@dataclass(frozen=True)
class UserData(DataSource):
    """Batches of a user's class, which every rank imports itself."""

    workload: str = ""

    def batch(self, seed: int, step: int, global_batch: int, rows: slice) -> tuple[Array, Array]:
        """Returns the user's tensors, which may be nested."""
        return cast("tuple[Array, Array]", self._user.rows(self._numbers(step, global_batch)[rows]))

    def weight(self, step: int, global_batch: int) -> float | None:
        return self._user.weight(self._numbers(step, global_batch))

    @property
    def _user(self) -> UserWorkload:
        from harness.workloads.catalog import make_workload

        return cast("UserWorkload", make_workload(self.workload))

    def _numbers(self, step: int, global_batch: int) -> Sequence[int]:
        numbers = range(step * global_batch, (step + 1) * global_batch)
        return numbers[::-1] if self.last_first else numbers


def _user_source(name: str, workload: Workload) -> DataSource:
    if name != "stdlib":
        raise UsageError(f"data {name!r}: {workload.name} brings its own batches; leave data out")
    return UserData(
        kind=workload.kind,
        name=name,
        fingerprint=workload.version,
        tokens_file=None,
        ranges=(),
        sequence_length=0,
        workload=workload.name,
    )


@functools.cache
def prepare_data(name: str, workload: Workload, sequence_length: int) -> DataSource:
    """Reads, tokenises and caches a dataset. Raises UsageError if it does not suit the workload.

    `sequence_length`: tokens per sample; unused for images.
    """
    if workload.kind == "custom":
        return _user_source(name, workload)
    if workload.kind == "image":
        return _image_source(name, workload)
    if workload.max_tokens and sequence_length > workload.max_tokens:
        raise UsageError(
            f"sequence_length {sequence_length} is longer than the {workload.max_tokens} positions"
            f" of {workload.name}"
        )
    texts, version = texts_of(name, workload)
    encode, encoding = _encoder(workload)
    tokens_file, fingerprint, ranges = _cached(
        f"3 {name} {version} {encoding} {workload.kind} {workload.num_labels}",
        lambda: [encode(text) for text in texts()],
    )
    _check_ids(name, np.load(tokens_file, mmap_mode="r"), workload)
    short = min((b - a for a, b in ranges), default=0)
    if short < sequence_length + 2:
        raise UsageError(
            f"data {name!r}: {short} tokens are too few for sequence_length {sequence_length}; it"
            f" needs {sequence_length + 2}"
        )
    return DataSource(
        kind=workload.kind,
        name=name,
        fingerprint=fingerprint,
        tokens_file=str(tokens_file),
        ranges=ranges,
        sequence_length=sequence_length,
        num_labels=workload.num_labels if workload.kind == "tokens" else 0,
        mask_token=workload.vocabulary - 1 if workload.kind == "masked" else 0,
        vocabulary=workload.vocabulary,
    )


def _check_ids(name: str, tokens: Array, workload: Workload) -> None:
    largest = int(tokens.max()) if len(tokens) else 0
    if largest >= workload.vocabulary:
        raise UsageError(
            f"data {name!r}: the tokenizer of {workload.name} produces id {largest}, but the"
            f" model's vocabulary has only {workload.vocabulary} entries"
        )


def _image_source(name: str, workload: Workload) -> DataSource:
    kind, _, where = name.partition(":")
    if kind not in ("stdlib", "images") or (kind == "stdlib" and where):
        raise UsageError(
            f"data {name!r}: {workload.name} classifies images; use data: images, which generates"
            " some, or images:FOLDER"
        )
    generator = f"gratings-1 {workload.image_size} {workload.num_labels}"
    fingerprint, file = hashlib.sha256(generator.encode()).hexdigest(), None
    ranges: tuple[tuple[int, int], ...] = ()
    if where:
        files = image_files(name, Path(where), workload.num_labels)
        version = " ".join(_version(file) for of_class in files for file in of_class)
        identity = f"2 {name} {version} {workload.image_size}"
        file, fingerprint, ranges = _cached(
            identity, lambda: read_images(name, files, workload.image_size)
        )
    return DataSource(
        kind="image",
        name=name if where else "images",
        fingerprint=fingerprint,
        tokens_file=str(file) if file else None,
        ranges=ranges,
        sequence_length=0,
        image_size=workload.image_size,
        num_labels=workload.num_labels,
    )


def _version(file: Path) -> str:
    return f"{file} {file.stat().st_size} {file.stat().st_mtime_ns}"


def _cached(
    identity: str, read_parts: Callable[[], list[Array]]
) -> tuple[Path, str, tuple[tuple[int, int], ...]]:
    """Returns the cached file of the joined arrays, their fingerprint and ranges."""
    key = hashlib.blake2s(identity.encode(), digest_size=8).hexdigest()
    folder = cache_folder() / "data"
    folder.mkdir(exist_ok=True)
    tokens_file, facts_file = folder / f"{key}.npy", folder / f"{key}.json"
    text = durable.read_cached(facts_file)
    facts = json.loads(text) if text else {}
    if facts and durable.file_digest(tokens_file) != facts["digest"]:
        durable.remove_damaged(tokens_file)
        facts = {}
    if not facts:
        parts = read_parts()
        tokens = np.concatenate(parts) if parts else np.zeros(0, np.uint8)
        edges = np.cumsum([0, *(len(part) for part in parts)]).tolist()
        with durable.replacing(tokens_file) as temporary, open(temporary, "wb") as sink:
            np.save(sink, tokens)
        facts = {
            "ranges": list(itertools.pairwise(edges)),
            "fingerprint": hashlib.sha256(tokens.tobytes()).hexdigest(),
            "digest": durable.file_digest(tokens_file),
        }
        durable.write_cached(facts_file, json.dumps(facts))
    return tokens_file, facts["fingerprint"], tuple((a, b) for a, b in facts["ranges"])


def _encoder(workload: Workload) -> tuple[Callable[[bytes], Array], str]:
    if workload.pretrained and _has_tokenizer(workload.pretrained):
        try:
            import transformers

            tokenizer = transformers.AutoTokenizer.from_pretrained(
                workload.pretrained, trust_remote_code=False
            )
        except (OSError, ValueError, KeyError, ImportError):
            tokenizer = None
        if tokenizer is not None and tokenizer.vocab_size > 0:

            def encode(text: bytes) -> Array:
                return np.asarray(tokenizer(text.decode("utf-8", "replace"))["input_ids"], np.int32)

            return encode, f"tokenizer of {workload.pretrained}"
    if workload.vocabulary < 256:
        raise UsageError(
            f"workload {workload.name!r}: it has no tokenizer, and its vocabulary of"
            f" {workload.vocabulary} is too small for bytes; use one of at least 256"
        )
    return lambda text: np.frombuffer(text, np.uint8), "bytes"


def _has_tokenizer(path: str) -> bool:
    """Returns whether a local folder has a vocabulary; true for hub ids."""
    folder = Path(path)
    kinds = ("tokenizer.json", "*vocab*", "*.model", "*.tiktoken", "*.spm")
    return not folder.is_dir() or any(True for kind in kinds for _ in folder.glob(kind))


def texts_of(name: str, workload: Workload) -> tuple[Callable[[], Iterable[bytes]], str]:
    """Returns a function that reads the dataset's texts, one for causal models or one per class,
    and a string that changes with their version.

    Both functions raise UsageError for unsuitable data.
    """
    labelled = workload.kind == "classification"
    kind, _, where = name.partition(":")
    if name == "stdlib":
        return (lambda: _stdlib(workload.num_labels if labelled else 0)), sys.version
    if kind == "images":
        raise UsageError(
            f"data {name!r}: {workload.name} reads text; use stdlib, text:FILE, parquet:FILE or"
            " hf:DATASET"
        )
    if kind not in ("text", "parquet", "hf") or not where:
        raise UsageError(
            f"unknown data {name!r}; use stdlib, images, images:FOLDER, text:FILE, parquet:FILE or"
            " hf:DATASET"
        )
    if kind != "hf" and not Path(where).is_file():
        raise UsageError(f"data {name!r}: there is no file {where!r}")
    of_folder = sorted(Path(where).rglob("*")) if kind == "hf" and Path(where).is_dir() else []
    version = " ".join(_version(file) for file in ([Path(where)] if kind != "hf" else of_folder))
    if kind == "text":
        if labelled:
            raise UsageError(
                f"data {name!r} has no labels, which {workload.name} needs; use parquet:FILE with"
                " columns text and label"
            )
        return (lambda: [_read_text(name, Path(where))]), version
    read_rows = _parquet_rows if kind == "parquet" else _hub_rows
    rows = read_rows(name, where, labelled)
    return (lambda: _by_label(name, rows, workload.num_labels if labelled else 0)), version


def _read_text(name: str, file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise UsageError(f"data {name!r} cannot be read: {error.strerror}") from None


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


def _parquet_rows(name: str, where: str, labelled: bool) -> Rows:
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(where)
        names = table.column_names
    except Exception as error:  # pyarrow's own, OS errors, and Python's for names that are no text
        raise UsageError(
            f"data {name!r} is not a readable parquet file: {one_line(error)}"
        ) from None

    return _columns(name, names, lambda column: list(table.column(column).to_pylist()), labelled)


def _hub_rows(name: str, where: str, labelled: bool) -> Rows:
    try:
        import datasets
    except ImportError:
        raise UsageError(
            f"data {name!r} needs the package datasets: {how_to_install('datasets')}"
        ) from None
    try:
        if any(Path(where, file).is_file() for file in ("state.json", "dataset_dict.json")):
            loaded = datasets.load_from_disk(where)
            loaded = loaded["train"] if isinstance(loaded, datasets.DatasetDict) else loaded
        else:
            loaded = datasets.load_dataset(where, split="train")
    except Exception as error:  # the library's own errors, those of urllib, and OS errors
        raise UsageError(f"data {name!r} could not be loaded: {one_line(error)}") from None
    return _columns(name, loaded.column_names, lambda column: list(loaded[column]), labelled)


def _columns(
    name: str, present: Iterable[str], read: Callable[[str], Column], labelled: bool
) -> Rows:
    for column in ("text", *(["label"] if labelled else [])):
        if column not in present:
            raise UsageError(
                f"data {name!r} has no column {column!r}; its columns are: {', '.join(present)}"
            )
    try:
        return read("text"), read("label") if labelled else None
    except Exception as error:  # e.g. a duplicate column, or a value without a Python type
        raise UsageError(f"data {name!r}: a column cannot be read: {one_line(error)}") from None


def _require_kind(
    name: str, column: str, values: Iterable[object], kind: type, meaning: str
) -> None:
    """Raises UsageError for the first value not of `kind`; a bool is not a number."""
    for row, value in enumerate(values):
        if not isinstance(value, kind) or isinstance(value, bool):
            found = "nothing" if value is None else repr(value)
            raise UsageError(
                f"data {name!r}, column {column!r}, row {row}: expected {meaning}, found"
                f" {found if len(found) <= 40 else found[:40] + '...'}"
            )


def _by_label(name: str, rows: Rows, num_labels: int) -> Iterator[bytes]:
    """Yields each label's joined texts, or all texts without labels; raises UsageError for a label
    out of range."""
    texts, labels = rows
    _require_kind(name, "text", texts, str, "a text")
    if labels is None:
        yield "\n".join(texts).encode()
        return
    _require_kind(name, "label", labels, int, "a whole number")
    if min(labels, default=-1) < 0 or max(labels) >= num_labels:
        raise UsageError(
            f"data {name!r}: labels must be 0 to {num_labels - 1}, found {min(labels, default=-1)}"
            f" to {max(labels, default=-1)}"
        )
    for label in range(max(labels) + 1):
        yield "\n".join(t for t, of in zip(texts, labels, strict=True) if of == label).encode()


MOST_BYTES = 4 * 2**30
"""Maximum size in bytes of all scaled images together."""


def image_files(name: str, folder: Path, num_labels: int) -> list[list[Path]]:
    """Returns the files of each class, from the subfolder of its name. Raises UsageError if a
    folder is empty, or if there are no or too many folders."""
    if not folder.is_dir():
        raise UsageError(f"data {name!r}: there is no folder {str(folder)!r}")
    classes = sorted(path for path in folder.iterdir() if path.is_dir())
    if not classes or len(classes) > num_labels:
        raise UsageError(
            f"data {name!r} has {len(classes)} folders, but the model has {num_labels} classes;"
            " give one folder of images for each class"
        )
    files = [sorted(path for path in of.iterdir() if not path.is_dir()) for of in classes]
    for path, of_class in zip(classes, files, strict=True):
        if not of_class:
            raise UsageError(f"data {name!r}: folder {path.name!r} has no images; add at least one")
    return files


def read_images(
    name: str, classes: Sequence[Sequence[Path]], size: int
) -> list[NDArray[np.generic]]:
    """Returns each class's images as bytes (images, 3, size, size).

    Raises UsageError for the first file that is no image.
    """
    from PIL import Image

    if (needed := sum(map(len, classes)) * 3 * size**2) > MOST_BYTES:
        raise UsageError(
            f"data {name!r}: {sum(map(len, classes))} images of {size} x {size} pixels take"
            f" {needed / 2**30:.0f} GiB; give at most {MOST_BYTES // (3 * size**2)}"
        )
    arrays: list[NDArray[np.generic]] = []
    for files in classes:
        pixels = np.empty((len(files), 3, size, size), np.uint8)
        for number, file in enumerate(files):
            try:
                with Image.open(file) as image:
                    scaled = image.convert("RGB").resize((size, size), Image.Resampling.BILINEAR)
            except Exception as error:  # whatever Pillow's plugins raise for damaged files
                raise UsageError(
                    f"data {name!r}: {file.parent.name}/{file.name} is not a readable image:"
                    f" {one_line(error)}"
                ) from None
            pixels[number] = np.asarray(scaled).transpose(2, 0, 1)
        arrays.append(pixels)
    return arrays
