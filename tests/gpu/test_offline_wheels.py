"""Wheels for a GPU machine without a network, as far as they can be checked offline."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from scripts.slim_wheel import slim

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "offline_wheels.sh"


def test_it_names_only_packages_that_are_pinned_and_never_torch() -> None:
    names = set(re.findall(r"^([A-Za-z0-9_.-]+)==", (ROOT / "constraints.txt").read_text(), re.M))
    text = SCRIPT.read_text().replace("\\\n", " ")
    wanted = {
        word
        for line in re.findall(r"< <\(pins (.*)\)", text)
        for word in line.split()
        if not word.startswith('"')
    }
    assert {"pydantic", "transformers", "bitsandbytes"} <= wanted
    assert wanted <= names
    assert "torch" not in wanted
    assert "--no-deps" in text


@pytest.mark.parametrize(
    ("before", "after", "code"),
    [(["--native", "{python}"], [], 2), ([], ["no-such-package"], 1)],
    ids=["a native Python without torch", "a package without a pin"],
)
def test_what_cannot_be_fetched_ends_it_before_any_download(
    tmp_path: Path, before: list[str], after: list[str], code: int
) -> None:
    """Without torch, it ends even before it removes older wheels."""
    wheel, python = tmp_path / "kept.whl", tmp_path / "python"
    wheel.touch()
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] || touch {tmp_path}/called\nexit 1\n')
    python.chmod(0o755)
    words = [*(word.format(python=python) for word in before), str(tmp_path), *after]
    environment = os.environ | {"PYTHON": str(python)}
    done = subprocess.run(
        [str(SCRIPT), *words], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == code
    assert all(word in done.stderr for word in after)
    assert wheel.exists() or "--native" not in before
    assert not (tmp_path / "called").exists()


def line_of(name: str, data: bytes) -> str:
    """Returns a line of a wheel's RECORD."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(data)}\n"


def test_a_slim_wheel_has_what_is_kept_and_says_so(tmp_path: Path) -> None:
    files = {
        "demo/__init__.py": b"value = 1\n",
        "demo/libdemo_cuda130.so": os.urandom(2000),
        "demo/libdemo_cuda126.so": os.urandom(5000),
        "demo-1.0.dist-info/METADATA": b"Metadata-Version: 2.1\nName: demo\nVersion: 1.0\n",
        "demo-1.0.dist-info/WHEEL": b"Wheel-Version: 1.0\nTag: py3-none-any\n",
    }
    record = "demo-1.0.dist-info/RECORD"
    wheel = tmp_path / "demo-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(
            record, "".join(line_of(*file) for file in files.items()) + f"{record},,\n"
        )
        for name, data in files.items():
            archive.writestr(name, data)
    slim(wheel, ("cuda130",), strip=False)
    with zipfile.ZipFile(wheel) as archive:
        kept = {name: archive.read(name) for name in archive.namelist()}
    recorded = kept.pop(record).decode()
    assert kept.keys() == files.keys() - {"demo/libdemo_cuda126.so"}
    assert recorded == "".join(line_of(*file) for file in kept.items()) + f"{record},,\n"
    target = tmp_path / "site"
    install = ["-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", str(target)]
    subprocess.run([sys.executable, *install, str(wheel)], check=True)
    assert (target / "demo" / "libdemo_cuda130.so").exists()
