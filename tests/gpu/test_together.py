"""Interleaved launches must fit one GPU together, and a ranking on one device says that nothing is
communicated."""

from types import SimpleNamespace
from typing import Any

import pytest

from bench.planning import require_few
from harness.record.plan import Plan
from harness.run.expected import device_bytes
from harness.spec.cell import Cell
from harness.spec.errors import UsageError
from tests.gpu import fake_nvml

GIB = 2**30


def planned(*strategies: str, **axes: Any) -> Plan:
    given: dict[str, Any] = {
        "workload": "llama-1b",
        "device": "cuda",
        "global_batch": 4,
        "sequence_length": 256,
        "precision": "bf16",
    }
    cells = [Cell(strategy=name, **(given | axes)) for name in strategies]
    return Plan.new("full", cells, 3, [], "")


def test_interleaving_refuses_launches_that_do_not_fit_one_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A launch of llama-1b keeps 16 bytes for each of 1.1 billion parameters: 16.4 of 24 GiB."""
    fake_nvml.install(monkeypatch, fake_nvml.rtx_4090())
    plan = planned("single", "ddp", "zero_redundancy", "fsdp2")
    with pytest.raises(UsageError) as refused:
        require_few(plan)
    assert "--interleave: all launches are in memory at once" in str(refused.value)
    assert "which has 24.0 GiB" in str(refused.value) or "which has 23." in str(refused.value)
    left_out = str(refused.value).partition("leave ")[2]
    kept = [cell for cell in plan.cells if repr(cell.name) not in left_out]
    assert sum(map(device_bytes, kept)) <= 24 * GIB, "the launches that it does not name fit"


def test_launches_that_fit_together_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvml.install(monkeypatch, fake_nvml.h100_node())
    require_few(planned("single", "ddp", "zero_redundancy"))
    on_cpu = planned("single", "ddp", device="cpu", workload="llama-micro")
    require_few(on_cpu)


def test_a_ranking_on_one_device_says_that_nothing_is_communicated() -> None:
    from reports.groups import Group

    def details(**changes: object) -> str:
        one = Cell(strategy="ddp", device="cuda", precision="bf16").model_copy(update=changes)
        speed = SimpleNamespace(tokens_per_second=1.0)
        row: Any = SimpleNamespace(cell=one, speed=speed)
        return Group((row,)).details

    assert "communicated" in details()
    assert "communicated" not in details(devices=2)
