"""Files outside the results folder, damaged at any byte: made again, or refused by name."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.cluster.jobs import Submission, keep_submission, submissions
from harness.cell.cell import Cell
from harness.cell.durable import (
    file_digest,
    read_cached,
    replacing,
    sealed,
    unsealed,
    write_cached,
)
from harness.cell.errors import DamagedFileWarning, UsageError
from harness.nodes.rendezvous import Rendezvous
from harness.parity.reference import Noise, Reference
from harness.planner.rehearsal.rehearse import rehearse
from harness.workloads import make_workload, prepare_data
from harness.workloads.counts import model_facts

ROUNDS = int(os.environ.get("DAMAGES", "3"))
"""Random damages of each kind per file; DAMAGES=1000 makes 100,000 damages in minutes."""


def empty(content: bytes, chance: random.Random) -> bytes:
    return b""


def cut(content: bytes, chance: random.Random) -> bytes:
    return content[: chance.randrange(len(content))]


def zeros(content: bytes, chance: random.Random) -> bytes:
    return bytes(len(content))


def flipped(content: bytes, chance: random.Random) -> bytes:
    changed = bytearray(content)
    changed[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    return bytes(changed)


DAMAGES = (empty, cut, zeros, flipped)
damaged_in_each_way = pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
Damage = Callable[[bytes, random.Random], bytes]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PARALLELISM_BENCH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def data() -> object:
    text = Path("text.txt")
    if not text.exists():
        text.write_bytes(bytes(range(32, 127)) * 20)
        os.utime(text, (1, 1))
    prepare_data.cache_clear()
    found = prepare_data(f"text:{text}", make_workload("llama-nano"), 32)
    assert found.tokens_file
    return found.fingerprint, found.ranges, np.load(found.tokens_file).tobytes()


def facts() -> object:
    model_facts.cache_clear()
    return model_facts(make_workload("llama-nano"), 32)


def rehearsed() -> object:
    axes: dict[str, Any] = {"workload": "llama-nano", "sequence_length": 16, "global_batch": 2}
    ranks = rehearse(Cell(strategy="ddp", devices=2, **axes)).ranks
    return [dataclasses.replace(rank, seconds=0.0) for rank in ranks]


@damaged_in_each_way
@pytest.mark.parametrize("make", [data, facts, rehearsed], ids=lambda make: make.__name__)
def test_a_damaged_cache_file_is_made_again(
    make: Callable[[], object], damage: Damage, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(cache.parent)
    first, chance = make(), random.Random(7)
    files = [file for file in cache.rglob("*") if file.is_file()]
    assert files
    for file in files:
        content = file.read_bytes()
        for _ in range({rehearsed: 1, facts: max(ROUNDS // 10, 1)}.get(make, ROUNDS)):
            file.write_bytes(damage(content, chance))
            with pytest.warns(DamagedFileWarning, match=file.stem):
                assert make() == first
            assert file.read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert make() == first


@damaged_in_each_way
@pytest.mark.parametrize("name", ["reference.json", "final.safetensors", "ahead.safetensors"])
def test_a_damaged_reference_is_trained_again(name: str, damage: Damage, tmp_path: Path) -> None:
    chance = random.Random(7)
    for round_ in range(ROUNDS):
        reference = Reference(str(tmp_path / str(round_)))
        Path(reference.folder).mkdir()
        files = (reference.final_file, reference.ahead_file)
        for file in files:
            file.write_bytes(chance.randbytes(500))
        digests = {file.name: file_digest(file) for file in files}
        reference._write({"losses": [1.0, 2.0], "digests": digests})
        reference.note(Noise(0.1))
        reference.remove_if_damaged()
        assert reference.exists
        damaged = Path(reference.folder, name)
        damaged.write_bytes(damage(damaged.read_bytes(), chance))
        with pytest.warns(DamagedFileWarning, match=name):
            reference.remove_if_damaged()
        assert not reference.exists
        assert not damaged.exists()


@damaged_in_each_way
def test_damaged_sketches_are_taken_again(damage: Damage, tmp_path: Path) -> None:
    reference = Reference(str(tmp_path))
    reference._write({"losses": [1.0]})
    reference.note_losses([1.0, 2.0], [[{"w": 1.0}]])
    assert reference.sketches == [[{"w": 1.0}]]
    file = tmp_path / "sketches.json"
    file.write_bytes(damage(file.read_bytes(), random.Random(7)))
    with pytest.warns(DamagedFileWarning, match=r"sketches\.json"):
        assert reference.sketches == []
    assert reference.exists


@damaged_in_each_way
def test_a_damaged_rendezvous_file_is_refused_by_name(damage: Damage, tmp_path: Path) -> None:
    file, chance = tmp_path / "rendezvous", random.Random(7)
    for _ in range(10 * ROUNDS):
        Rendezvous("machine", ("10.0.0.1",), 4000, "ab" * 32).write(file)
        assert Rendezvous.read(file).port == 4000
        file.write_bytes(damage(file.read_bytes(), chance))
        with pytest.raises(UsageError, match=r"rendezvous.*damaged"):
            Rendezvous.read(file)


@damaged_in_each_way
def test_a_damaged_list_of_submissions_is_refused_by_name(damage: Damage, tmp_path: Path) -> None:
    folder, chance = tmp_path / "slurm" / "job", random.Random(7)
    folder.mkdir(parents=True)
    first, second = (Submission(str(n), f"run-{n}", "full", 2, 0) for n in (17, 18))
    for _ in range(10 * ROUNDS):
        file = folder / "submitted.jsonl"
        file.unlink(missing_ok=True)
        keep_submission(first, folder)
        keep_submission(second, folder)
        assert submissions(tmp_path) == [first, second]
        file.write_bytes(damage(file.read_bytes(), chance))
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            left = submissions(tmp_path)
        assert set(left) < {first, second}
        assert all(str(file) in str(warning.message) for warning in warned)
        assert warned or damage in (empty, cut)


def test_submissions_of_earlier_versions_are_read(tmp_path: Path) -> None:
    (tmp_path / "slurm" / "job").mkdir(parents=True)
    found = Submission("17", "run-17", "full", 2, 0)
    line = json.dumps({"job": "17", "run_id": "run-17", "matrix": "full", "nodes": 2, "tasks": 0})
    (tmp_path / "slurm" / "job" / "submitted.jsonl").write_text(f"{line}\n")
    assert submissions(tmp_path) == [found]


@pytest.mark.parametrize("text", ["", "a", "{}\n", "ä\nb\n\n", "\n"])
def test_a_sealed_text_is_read_as_it_was(text: str, tmp_path: Path) -> None:
    assert unsealed(sealed(text).encode()) == text
    write_cached(tmp_path / "new" / "file", text)
    assert read_cached(tmp_path / "new" / "file") == text
    assert read_cached(tmp_path / "missing") is None


def test_a_file_is_on_the_disk_before_it_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loss of power would otherwise leave the name with an empty file."""
    done: list[str] = []
    replace, fsync = Path.replace, os.fsync

    def named(source: Path, target: Path) -> Path:
        done.append("named")
        return replace(source, target)

    def synced(descriptor: int) -> None:
        done.append("synced")
        fsync(descriptor)

    monkeypatch.setattr(Path, "replace", named)
    monkeypatch.setattr(os, "fsync", synced)
    with replacing(tmp_path / "file") as temporary:
        temporary.write_text("content")
    assert done == ["synced", "named", "synced"]
