"""Libraries that setup could not build, and why: written by scripts/native.sh, read by plans.

python -m harness.host.unbuilt LIBRARY
    prints the path of the file with the reason
python -m harness.host.unbuilt LIBRARY VERSION LOG FOLDER REMEDY
    saves the reason there, and prints the log's first error
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

# Log lines that explain a failed build, most specific first: compiler or linker, CMake, Python,
# pip.
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
    library: str
    version: str
    error: str
    """First error in the log."""
    mend: str
    """Suggested remedy, as a clause: `use another compiler`."""
    log: str

    @property
    def reason(self) -> str:
        failure = f"set-up could not build {self.library} {self.version}: {self.error}"
        return f"{failure}; {self.mend}, then `make setup` tries again; log: {self.log}"


def reason_file(library: str) -> Path:
    """Returns the reason file's path, in the environment that lacks the library."""
    return Path(sys.prefix) / "share" / "parallelism-bench" / "unbuilt" / f"{library}.json"


def unbuilt(library: str) -> Unbuilt | None:
    """Returns why setup could not build a library; None if it did not fail or try."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Unbuilt(**json.loads(reason_file(library).read_text()))
    return None


def first_error(log: str, folder: str = "") -> str:
    """Returns the log line that best explains a failure, with paths relative to `folder`."""
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
