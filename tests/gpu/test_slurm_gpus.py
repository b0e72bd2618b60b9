"""A job that asks for no GPUs says so."""

import os
import subprocess
from pathlib import Path

import pytest

from bench.cluster.jobs import ClusterJob, batch_script
from bench.cluster.site import Site

ROOT = Path(__file__).parents[2]


def run_of(site: Site, folder: Path, **variables: str) -> str:
    """Returns the message of a job of this site, on a node with two GPUs."""
    for name in ("gpus/0000:01:00.0", "gpus/0000:02:00.0"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    script = batch_script(site, ClusterJob("smoke", "run-1", folder / "results"))
    exports = [line for line in script.splitlines() if line.startswith("export BENCH_")]
    lines = [*exports, '. "$BENCH_SCRIPTS/lib.sh"', "say_without_gpus"]
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("SLURM_", "BENCH_"))
    }
    environment |= {"BENCH_DRIVER": str(folder), "SLURM_JOB_ID": "1", **variables}
    done = subprocess.run(
        ["bash", "-euc", "\n".join(lines)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_job_without_gpus_on_a_node_with_gpus_says_so(tmp_path: Path) -> None:
    """If cgroups confine devices, that job sees no GPU and would silently run CPU cells."""
    assert "this node has 2 GPUs and the job asked for none" in run_of(Site(), tmp_path)
    assert run_of(Site(gpus_per_node=2), tmp_path) == ""
    assert run_of(Site(directives=["--gres=gpu:2"]), tmp_path) == ""
    assert run_of(Site(), tmp_path, SLURM_JOB_GPUS="0,1") == "", (
        "the partition gives GPUs without being asked"
    )


def test_submit_says_what_a_job_without_gpus_runs_on(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The message comes before the job is submitted."""
    from bench.cli import app

    site = tmp_path / "site.yaml"
    for gpus, says in (("0", True), ("8", False)):
        site.write_text(f"gpus_per_node: {gpus}\n")
        words = ["submit", str(site), "--matrix", "smoke", "--dry-run"]
        app(words, standalone_mode=False)
        printed = capsys.readouterr()
        assert ("GPUs" in printed.err) == says
        assert printed.out.startswith("#!/bin/bash"), "stdout is the script alone, for a file"
