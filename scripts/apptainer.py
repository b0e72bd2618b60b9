"""python -m scripts.apptainer: writes apptainer.def, the Containerfile's steps for Apptainer."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
HEAD = """\
# Made from Containerfile by python -m scripts.apptainer.
# apptainer build parallelism-bench.sif apptainer.def
# apptainer build --build-arg CUDA=13 parallelism-bench.sif apptainer.def   for NVIDIA GPUs
"""


def instructions(text: str) -> Iterator[tuple[str, str]]:
    for line in text.replace("\\\n", " ").splitlines():
        if line and not line.startswith("#"):
            word, _, rest = line.partition(" ")
            yield word, rest.strip()


def definition(containerfile: str) -> str:
    """Returns apptainer.def; raises ValueError for an instruction without counterpart."""
    found = list(instructions(containerfile))
    arguments = dict(rest.split("=", 1) for word, rest in found if word == "ARG")

    def resolved(text: str) -> str:
        return re.sub(r"\$\{(\w+)\}", lambda name: "{{ " + name[1] + " }}", text)

    parts: dict[str, list[str]] = {
        name: [] for name in ("files", "post", "environment", "runscript")
    }
    base = ""
    for word, rest in found:
        if word == "FROM":
            base = resolved(rest)
        elif word == "COPY":
            parts["files"].append(rest)
        elif word == "RUN":
            parts["post"].append(resolved(rest))
        elif word == "ENV":
            parts["environment"].append(f"export {rest}")
        elif word == "ENTRYPOINT":
            parts["runscript"].append(f'exec {" ".join(json.loads(rest))} "$@"')
        elif word not in ("ARG", "WORKDIR"):  # Apptainer starts in the caller's folder
            raise ValueError(f"Containerfile: {word} is not known to scripts/apptainer.py")
    parts = {"arguments": [f"{name}={value}" for name, value in arguments.items()], **parts}
    sections = [f"%{name}\n" + "".join(f"    {line}\n" for line in parts[name]) for name in parts]
    return "\n".join([f"{HEAD}Bootstrap: docker\nFrom: {base}\n", *sections])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        sys.exit(f"{__doc__} It takes no arguments.")
    text = definition((ROOT / "Containerfile").read_text())
    (ROOT / "apptainer.def").write_text(text.replace("docker.io/library/", ""))
