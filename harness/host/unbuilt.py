"""Libraries that set-up could not build here, and why: written by scripts/native.sh, read by plans.

python -m harness.host.unbuilt LIBRARY
    prints the file in which the reason is kept
python -m harness.host.unbuilt LIBRARY VERSION LOG FOLDER REMEDY
    keeps the reason there, and prints the log's first error
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

# Lines of a log that say why a build failed, the most telling first: of a compiler or linker, of
# CMake, of Python, of pip.
_ERRORS = (
    re.compile(
        r"\S: (?:fatal )?error: |undefined reference|^(?:nvcc|g\+\+|gcc|c\+\+)\S* ?:"
        r" (?:fatal|error)|^\S*ld: cannot|^Fatal Python error"
    ),
    re.compile(r"^CMake Error"),
    re.compile(r"^[\w.]*(?:Error|Exception)\b:? "),
    re.compile(r"^(?:ERROR|error): (?!subprocess-exited)"),
)


@dataclass(frozen=True)
class Unbuilt:
    """A library that could not be built in this environment."""

    library: str
    version: str
    error: str
    """The first error of the log."""
    mend: str
    """What would help, as a clause: `use another compiler`."""
    log: str
    """Path of the file with the build's output."""

    @property
    def reason(self) -> str:
        failure = f"set-up could not build {self.library} {self.version}: {self.error}"
        return f"{failure}; {self.mend}, then `make setup` tries again; log: {self.log}"


def reason_file(library: str) -> Path:
    """The file that keeps the reason, inside the Python environment that lacks the library."""
    return Path(sys.prefix) / "share" / "parallelism-bench" / "unbuilt" / f"{library}.json"


def unbuilt(library: str) -> Unbuilt | None:
    """Why set-up could not build a library here; None where it did not fail or did not try."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Unbuilt(**json.loads(reason_file(library).read_text()))
    return None


def first_error(log: str, folder: str = "") -> str:
    """The line of a build's log that says best what went wrong, with paths relative to the build's
    folder."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    for pattern in _ERRORS:
        for index, line in enumerate(lines):
            if pattern.search(line):
                if line.startswith("CMake Error") and lines[index + 1 :]:
                    line = f"{line} {lines[index + 1]}"
                prefix = rf"{re.escape(folder)}/(?:[^/\s]+-[\d.]+/)?"
                return re.sub(prefix, "", line) if folder else line
    return lines[-1] if lines else "its log is empty"


def keep(library: str, version: str, log: Path, folder: str, mend: str) -> Unbuilt:
    """Keeps the reason why a library could not be built in `folder`."""
    error = first_error(log.read_text(errors="replace"), folder)
    failure = Unbuilt(library=library, version=version, error=error, mend=mend, log=str(log))
    reason_file(library).parent.mkdir(parents=True, exist_ok=True)
    reason_file(library).write_text(json.dumps(asdict(failure), indent=1) + "\n")
    return failure


def main(library: str, *details: str) -> None:
    if not details:
        print(reason_file(library))
        return
    version, log, folder, mend = details
    print(keep(library, version, Path(log), folder, mend).error)


if __name__ == "__main__":
    main(*sys.argv[1:])
