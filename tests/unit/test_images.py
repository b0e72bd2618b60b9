"""Steps of the container images, checked without building or pulling one."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from scripts.apptainer import definition, instructions

ROOT = Path(__file__).parents[2]
CONTAINERFILE = (ROOT / "Containerfile").read_text()


def steps(word: str) -> list[str]:
    return [rest for name, rest in instructions(CONTAINERFILE) if name == word]


def parses(script: str) -> str:
    return subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True).stderr


def test_each_step_parses_and_the_last_is_the_set_up() -> None:
    scripts = steps("RUN")
    assert [parses(script) for script in scripts] == [""] * len(scripts)
    assert parses("if") != ""
    (source, target) = steps("COPY")[0].split()
    called = scripts[-1].split()[0]
    assert source == "."
    assert (ROOT / Path(called).relative_to(target)).samefile(ROOT / "scripts" / "image.sh")
    assert os.access(ROOT / "scripts" / "image.sh", os.X_OK)


def test_the_image_leaves_out_only_results() -> None:
    listed = (ROOT / ".dockerignore").read_text().split()
    tracked = subprocess.run(
        ["git", "ls-files", *listed], cwd=ROOT, capture_output=True, text=True, check=True
    )
    left_out = {name.split("/")[0] for name in tracked.stdout.split()}
    assert left_out <= {"results"}


@pytest.mark.parametrize(
    ("cuda", "expected"),
    [
        ("no", {"PARALLELISM_BENCH_CUDA": "no"}),
        ("12", {"PARALLELISM_BENCH_CUDA": "no", "PARALLELISM_BENCH_TORCH_CUDA": "12"}),
        ("13", {"PARALLELISM_BENCH_CUDA": "packages", "PARALLELISM_BENCH_TORCH_CUDA": "13"}),
    ],
)
def test_set_up_is_told_the_processor_and_cuda(
    tmp_path: Path, cuda: str, expected: dict[str, str]
) -> None:
    (tmp_path / ".venv").mkdir()
    seen = ran(tmp_path, cuda, "x86-64-v3")
    assert not (tmp_path / ".venv").exists(), "Apptainer copies the checkout's environment"
    prefix = "PARALLELISM_BENCH_"
    chosen = {name: value for name, value in seen.items() if name.startswith(prefix)}
    assert not Path(chosen.pop(f"{prefix}CACHE")).exists(), "the build's cache is removed"
    assert chosen == {**expected, f"{prefix}MARCH": "x86-64-v3"}
    assert ("PIP_EXTRA_INDEX_URL" in seen) == (cuda == "no")
    setup = (ROOT / "scripts" / "setup.sh").read_text()
    assert all(name in setup for name in chosen)


def ran(folder: Path, *words: str) -> dict[str, str]:
    """Returns the environment in which image.sh calls a stub setup.sh, unless it is misused."""
    scripts = folder / "scripts"
    scripts.mkdir()
    text = (ROOT / "scripts" / "image.sh").read_text().replace("/var/lib/apt", str(folder))
    (scripts / "image.sh").write_text(text)
    (scripts / "setup.sh").write_text("#!/bin/sh\nenv >env.txt\n")
    for file in scripts.iterdir():
        file.chmod(0o755)
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder)}
    wrong = subprocess.run([scripts / "image.sh", "11", "x86-64-v3"], env=environment)
    assert (wrong.returncode, (folder / "env.txt").exists()) == (2, False)
    subprocess.run([scripts / "image.sh", *words], env=environment, check=True)
    return dict(line.split("=", 1) for line in (folder / "env.txt").read_text().splitlines())


def test_apptainers_definition_is_made_from_the_containerfile() -> None:
    committed = (ROOT / "apptainer.def").read_text()
    assert committed == definition(CONTAINERFILE).replace("docker.io/library/", "")
    names = re.findall(r"\{\{ (\w+) \}\}", committed)
    given = re.findall(r"^    (\w+)=", committed.partition("%arguments")[2], re.MULTILINE)
    assert set(names) == set(given)
    post = committed.partition("%post\n")[2].partition("\n%")[0]
    assert parses(post) == ""
    with pytest.raises(ValueError, match="HEALTHCHECK"):
        definition(CONTAINERFILE + "HEALTHCHECK CMD true\n")
