"""Trial files that an agent receives, and the key of nodes that rendezvous by address."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest

from harness.cell.cell import Cell
from harness.cell.errors import UsageError
from harness.nodes import protocol
from harness.nodes.protocol import FileFact, Offer, OwnFiles, in_own_cache
from harness.nodes.rendezvous import KEY, KEY_FILE, Rendezvous, new_key, parse_rendezvous
from harness.worker.spec import TrialSpec
from harness.workloads import DataSource


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrialSpec:
    """A trial whose files in the coordinator's cache have several chunks; the agent's is empty."""
    monkeypatch.setattr(protocol, "CHUNK_BYTES", 1000)
    monkeypatch.setenv("PARALLELISM_BENCH_CACHE", str(tmp_path / "agent"))
    head = tmp_path / "head"
    for name in ("references/k/final.safetensors", "references/k/reference.json", "data/d.npy"):
        (head / name).parent.mkdir(parents=True, exist_ok=True)
        (head / name).write_bytes(os.urandom(2500))
    data = DataSource("text", "t", "f", str(head / "data/d.npy"), ((0, 9),), 4)
    cell = Cell(strategy="ddp", devices=2, nodes=2)
    return TrialSpec(cell, data, 2, reference=str(head / "references/k"))


def test_an_agent_asks_only_for_files_that_differ(spec: TrialSpec, tmp_path: Path) -> None:
    asked = list[int]()
    offer, own = Offer.of(spec), OwnFiles()

    def chunk(number: int, offset: int) -> str:
        asked.append(number)
        return offer.chunk(number, offset)

    own.complete(offer.facts, chunk)
    assert (own.problem, asked) == ("", [0, 0, 0, 1, 1, 1, 2, 2, 2])
    for file, fact in zip(offer.files, offer.facts, strict=True):
        assert (tmp_path / "agent" / fact.name).read_bytes() == file.read_bytes()
    here = in_own_cache(spec)
    assert here.reference == str(tmp_path / "agent/references/k")
    assert here.data.tokens_file == str(tmp_path / "agent/data/d.npy")
    asked.clear()
    own.complete(offer.facts, chunk)
    assert asked == []
    os.utime(tmp_path / "agent/data/d.npy")  # read again and found unchanged
    own.complete(offer.facts, chunk)
    assert asked == []
    (tmp_path / "agent/references/k/reference.json").write_bytes(bytes(2500))
    own.complete(offer.facts, chunk)
    assert (own.problem, asked) == ("", [1, 1, 1])


@pytest.mark.parametrize("sent", [bytes(1000), b""], ids=["other bytes", "too few"])
def test_a_file_with_another_digest_is_not_kept(
    spec: TrialSpec, tmp_path: Path, sent: bytes
) -> None:
    own = OwnFiles()
    own.complete(Offer.of(spec).facts, lambda *_: base64.b64encode(sent).decode())
    assert own.problem
    assert [path for path in (tmp_path / "agent").rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("name", ["/etc/passwd", "../x", "data/../../x"])
def test_no_file_is_outside_the_cache(name: str) -> None:
    with pytest.raises(ValueError, match="outside"):
        FileFact(name, 1, 1, "")


def test_a_key_leaves_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    key = new_key()
    monkeypatch.setenv(KEY, key)
    found = parse_rendezvous("head.bench:29400")
    assert isinstance(found, Rendezvous)
    assert (found.addresses, found.port, found.key) == (("head.bench",), 29400, key)
    assert KEY not in os.environ
    assert parse_rendezvous("shared/x:29400") == Path("shared/x:29400")
    file = tmp_path / "key"
    file.write_text(key + "\n")
    file.chmod(0o440)
    monkeypatch.setenv(KEY_FILE, str(file))
    found = parse_rendezvous(":1")
    assert isinstance(found, Rendezvous)
    assert (found.addresses, found.key) == ((), key)
    file.chmod(0o444)
    with pytest.raises(UsageError, match="chmod"):
        parse_rendezvous(":1")


@pytest.mark.parametrize("key", ["", "0" * 31, "0" * 30, "g" * 64, "0" * 33])
def test_a_weak_key_is_refused(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.delenv(KEY_FILE, raising=False)
    monkeypatch.setenv(KEY, key)
    with pytest.raises(UsageError, match="openssl"):
        parse_rendezvous("h:1")
