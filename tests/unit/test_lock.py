"""The lock file has a hash for every pinned version that has a wheel, and no other versions."""

from __future__ import annotations

import re

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
