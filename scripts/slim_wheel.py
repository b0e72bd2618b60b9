"""Makes a wheel smaller, in place.

python scripts/slim_wheel.py WHEEL KEEP...   removes shared libraries lib*.so without a word of KEEP
python scripts/slim_wheel.py WHEEL --strip   removes debug symbols from its shared libraries
"""

from __future__ import annotations

import base64
import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

RECORD = ".dist-info/RECORD"


def slim(wheel: Path, keep: tuple[str, ...], strip: bool) -> None:
    """Rewrites the wheel and its RECORD, so that pip installs it without complaint."""
    slimmer = wheel.with_suffix(".slim")
    lines: dict[str, bytes] = {}
    with (
        zipfile.ZipFile(wheel) as old,
        zipfile.ZipFile(slimmer, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for info in sorted(old.infolist(), key=lambda info: info.filename.endswith(RECORD)):
            name, data = info.filename, old.read(info.filename)
            if not strip and re.search(r"/lib[^/]*\.so$", name):
                if not any(word in name for word in keep):
                    lines[name] = b""
                    continue
            elif strip and name.endswith(".so"):
                data = _stripped(data)
                lines[name] = _record_line(name, data)
            elif name.endswith(RECORD):  # sorted last
                data = b"".join(
                    lines.get(line.split(b",")[0].decode(), line) for line in data.splitlines(True)
                )
            new.writestr(info, data, compress_type=zipfile.ZIP_DEFLATED)
    slimmer.replace(wheel)


def _stripped(data: bytes) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "library.so"
        file.write_bytes(data)
        subprocess.run(["strip", "--strip-unneeded", str(file)], check=True)
        return file.read_bytes()


def _record_line(name: str, data: bytes) -> bytes:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(data)}\n".encode()


if __name__ == "__main__":
    file, *arguments = sys.argv[1:]
    slim(Path(file), tuple(arguments), arguments == ["--strip"])
