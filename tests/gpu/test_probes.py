"""The probes of `bench doctor`, with the CPU as a stand-in, and the matrix `gpu`."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from bench import probes
from bench.checks import Trouble
from bench.cli import app
from bench.expand import expand
from bench.matrix import Host, read_matrix
from bench.probes import PROBES, ProbeAnswer, answer, probe
from harness.host.process import Ended


@pytest.mark.parametrize(
    ("name", "state"),
    [("rounding", "works"), ("peer access", "does not apply"), ("float8", "does not apply")],
)
def test_a_probe_answers_on_a_cpu(name: str, state: str) -> None:
    assert answer(name, "cpu").state == state


@pytest.mark.thorough
def test_each_probe_answers_in_a_process_of_its_own() -> None:
    answers = {found.name: found for found in probe("cpu")}
    assert list(answers) == list(PROBES)
    states = {name: found.state for name, found in answers.items()}
    assert {states[name] for name in ("forked rank", "collectives", "rounding")} == {"works"}
    assert states["peer access"] == states["float8"] == "does not apply"


def test_an_import_that_initialises_cuda_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = iter((False, True))
    monkeypatch.setattr("harness.host.environment.cuda_is_initialized", lambda: next(asked))
    monkeypatch.setattr("harness.host.environment.to_preload", lambda names, with_gpus: ["json"])
    assert answer("forked rank", "cpu").text == "importing json initialises CUDA"


def test_lowered_precision_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """bf16's products are off by 2e-3, more than TF32's."""
    monkeypatch.setattr(
        probes, "_error", lambda value, exact: float((value.bfloat16().double() - exact).norm())
    )
    found = answer("rounding", "cpu")
    assert found.state == "fails"
    assert "NVIDIA_TF32_OVERRIDE" in found.text


def test_gpus_without_access_to_each_other_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: a > b)
    found = answer("peer access", "cuda")
    assert (found.state, found.text[-6:]) == ("works", "0 to 1")


def test_a_probe_without_an_answer_fails_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.probes.call_apart", lambda *_, limit: Ended("exit code -11"))
    assert {(found.state, found.text) for found in probe("cpu")} == {("fails", "exit code -11")}


@pytest.mark.parametrize(("state", "code"), [("works", 0), ("does not apply", 0), ("fails", 1)])
def test_doctor_shows_them_and_troubles(
    state: probes.ProbeState,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = ProbeAnswer("rounding", state, "as it is")
    monkeypatch.setattr("bench.probes.probe", lambda device: [found])
    trouble = Trouble("GPU 0", "is hot", "clocks fall", "wait")
    monkeypatch.setattr("bench.checks.troubles", lambda: [trouble])
    monkeypatch.setattr(sys.modules["bench.cli.doctor"], "_strategies", dict)
    exits = [app(["doctor", "--probes", "--json"], standalone_mode=False)]
    assert exits == [code or None]
    told = json.loads(capsys.readouterr().out)
    assert (told["probes"], told["troubles"]) == ([vars(found)], [vars(trouble)])
    app(["doctor"], standalone_mode=False)
    assert "GPU 0: is hot; clocks fall" in capsys.readouterr().out


@pytest.mark.parametrize("number", [1, 2, 4, 8])
def test_the_matrix_gpu_begins_with_what_all_cells_need(number: int) -> None:
    host = Host("cuda", number, int(79.6 * 2**30), name="NVIDIA H100 80GB HBM3", elsewhere=True)
    found = expand(read_matrix("gpu"), host, name="gpu")
    assert found.left_out == ()
    assert {cell.precision for cell in found.cells[:2]} == {"fp32", "bf16"}
    assert {cell.devices for cell in found.cells} <= {1, number}
