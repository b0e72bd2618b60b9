"""The lock file has a hash for every pinned version that has a wheel, and no other versions."""

from __future__ import annotations

import importlib.metadata
import re

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from scripts.lock import ROOT, locked, with_wheels


def test_a_report_of_pip_becomes_requirements_with_hashes() -> None:
    def item(name: str, digest: str) -> dict[str, object]:
        archive = {"hashes": {"sha256": digest}}
        return {
            "metadata": {"name": name, "version": "1.0"},
            "download_info": {"archive_info": archive},
        }

    report = {"install": [item("PyYAML", "b" * 64), item("absl-py", "a" * 64)]}
    assert locked(report) == [
        f"absl-py==1.0 --hash=sha256:{'a' * 64}",
        f"pyyaml==1.0 --hash=sha256:{'b' * 64}",
    ]


def test_the_lock_file_is_that_of_the_pinned_versions() -> None:
    pins = with_wheels((ROOT / "constraints.txt").read_text().splitlines())
    pinned = {pin.partition(";")[0].strip() for pin in pins}
    assert not any("horovod" in pin for pin in pinned)
    lines = (ROOT / "requirements.lock").read_text().splitlines()[1:]
    assert len(lines) > 100
    for line in lines:
        match = re.fullmatch(r"(\S+==[^\s+]+)(\+\S+)? --hash=sha256:[0-9a-f]{64}", line)
        assert match, line
        assert match[1] in pinned, f"{match[1]} is not in constraints.txt: run make lock"


def test_every_package_that_the_project_brings_along_is_pinned() -> None:
    """Follows the requirements of installed packages, from those that pyproject.toml names."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {canonicalize_name(re.split("[=;]", line)[0]) for line in lines if "==" in line}
    project = (ROOT / "pyproject.toml").read_text().partition("[project.scripts]")[0]
    named = re.findall(r'^    "([\w-]+)[^"]*",$|(?<=[\[ ])"([\w-]+)[<>=\d.,]*"', project, re.M)
    assert len(named) > 30
    waiting = [Requirement(one or other) for one, other in named]
    seen: set[tuple[str, str]] = set()
    while waiting:
        need = waiting.pop()
        for extra in {"", *need.extras} - {extra for name, extra in seen if name == need.name}:
            seen.add((need.name, extra))
            try:
                requires = importlib.metadata.requires(need.name) or ()
            except importlib.metadata.PackageNotFoundError:
                continue
            further = map(Requirement, requires)
            waiting += [
                r for r in further if r.marker is None or r.marker.evaluate({"extra": extra})
            ]
    found = {canonicalize_name(name) for name, _ in seen}
    # torch decides on these versions, as constraints.txt says.
    found -= {"parallelism-bench", "cuda-toolkit", "cuda-bindings"}
    installed = {canonicalize_name(d.metadata["Name"]) for d in importlib.metadata.distributions()}
    assert found & installed - pinned == set()
