"""python -m scripts.lock [FILE]: writes a lock file, by default requirements.lock.

It has the SHA-256 of the wheel that pip picks for each version in constraints.txt on this platform
and Python. Installs nothing. Leaves out packages built from source, whose SHA-256 scripts/native.sh
checks.
"""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FROM_SOURCE = {"deepspeed", "horovod", "fairscale"}


def with_wheels(lines: Iterable[str]) -> list[str]:
    """Returns a constraints file's lines, without comments and packages that have no wheel."""
    pins = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    return [pin for pin in pins if re.split("[=;@ ]", pin)[0] not in FROM_SOURCE]


def locked(report: Mapping[str, Any]) -> list[str]:
    """Returns requirements with hashes, by name, from pip's "Installation Report"."""
    lines = []
    for item in report["install"]:
        name = re.sub("[-_.]+", "-", item["metadata"]["name"]).lower()
        version = item["metadata"]["version"]
        digest = item["download_info"]["archive_info"]["hashes"]["sha256"]
        lines.append(f"{name}=={version} --hash=sha256:{digest}")
    return sorted(lines)


def asked(pins: Sequence[str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        requirements, report = Path(folder, "pins.txt"), Path(folder, "report.json")
        requirements.write_text("\n".join(pins) + "\n")
        arguments = ["install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps"]
        arguments += ["--only-binary", ":all:", "--report", str(report), "-r", str(requirements)]
        subprocess.run([sys.executable, "-m", "pip", *arguments], check=True)
        document: dict[str, Any] = json.loads(report.read_text())
        return document


def main() -> None:
    file = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "requirements.lock"
    lines = locked(asked(with_wheels((ROOT / "constraints.txt").read_text().splitlines())))
    version = ".".join(platform.python_version_tuple()[:2])
    head = f"# Python {version} on {platform.system()} {platform.machine()}; written by make lock"
    file.write_text("\n".join([head, *lines]) + "\n")
    print(f"{len(lines)} packages in {file}")


if __name__ == "__main__":
    main()
