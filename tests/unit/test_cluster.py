"""Site files: the batch script, its directives, and messages for mistakes. No job is run."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from bench.cluster.jobs import SCRIPTS as JOBS
from bench.cluster.jobs import ClusterJob, batch_script, parse
from bench.cluster.site import Nightly, Notify, Site, read_site
from bench.execution import REQUEUED_SECONDS
from harness.cell.errors import UsageError
from tests.waiting import LONG, until

ROOT = Path(__file__).parents[2]
SITES = sorted((ROOT / "slurm" / "sites").glob("*.yaml"))
SCRIPTS = [*sorted(JOBS.iterdir()), *sorted((ROOT / "scripts").glob("*.sh"))]


def script(site: Site, **more: object) -> str:
    fields: dict[str, Any] = {
        "matrix": "smoke",
        "run_id": "run-1",
        "results": Path("/shared/results"),
    }
    return batch_script(site, ClusterJob(**{**fields, **more}))


def directives(text: str) -> list[str]:
    return re.findall(r"^#SBATCH (.*)$", text, re.MULTILINE)


def test_every_value_of_a_site_is_in_its_script() -> None:
    site = Site(
        partition="p1",
        account="a1",
        qos="q1",
        constraint="c1",
        reservation="r1",
        time="01:00:00",
        nodes=3,
        gpus_per_node=4,
        gpu_directive="--gres=gpu:h100:{gpus}",
        cpus_per_node=48,
        memory="64G",
        switches="1@10:00",
        exclude=["n17", "n18"],
        directives=["--mail-type=FAIL"],
        modules=["cuda/13.0"],
        prologue=["ulimit -l unlimited"],
        container="apptainer exec --nv 'my image.sif'",
        python="python3",
        srun=["--export=ALL", "--label"],
        interface="ib0",
        warn_seconds=77,
        requeues=5,
    )
    text = script(site, options=("--set", "batch=16"), tasks=4)
    wanted = """--partition=p1 --account=a1 --qos=q1 --constraint=c1 --reservation=r1
        --time=01:00:00 --nodes=3 --gres=gpu:h100:4
        --cpus-per-task=48 --mem=64G --switches=1@10:00 --mail-type=FAIL --exclusive
        --exclude=n17,n18 --signal=B:USR1@77 --requeue --no-kill
        --array=0-3 --output=/shared/results/slurm/run-1/slurm-%A_%a.log"""
    assert {*wanted.split()} <= {*directives(text)}
    assert "module load cuda/13.0" in text.splitlines()
    shown = "$BENCH_CONTAINER|$BENCH_OPTIONS|$BENCH_SRUN|$BENCH_INTERFACE|$BENCH_REQUEUES"
    assert prologue(text, f"{shown}|$BENCH_PYTHON") == (
        "apptainer exec --nv 'my image.sif'|--set batch=16|--export=ALL --label|ib0|5|python3"
    )


def prologue(text: str, shown: str) -> str:
    """Runs the script up to the job's own commands; returns what `shown` has become by then."""
    begin = text.split("cd ")[0].replace("module load", ":")
    done = subprocess.run(
        ["bash", "-c", f'{begin}echo "{shown}"'], capture_output=True, text=True, check=True
    )
    assert "unbound" not in done.stderr
    return done.stdout.strip()


def test_a_prologue_may_use_variables_that_are_not_set() -> None:
    """conda's activation scripts do, and some modules."""
    assert prologue(script(Site(prologue=[': "$NOT_SET_IN_ANY_JOB"'])), "done") == "done"


def test_each_nightly_matrix_has_its_own_folder() -> None:
    text = script(Site(nightly=Nightly(again="tomorrow")), nightly=True, run_id="")
    other = script(Site(), nightly=True, run_id="", matrix="/home/me/full.yaml")
    assert "--output=/shared/results/slurm/nightly/smoke/slurm-%j.log" in text
    assert "--output=/shared/results/slurm/nightly/full/slurm-%j.log" in other
    assert 'exec bash "$BENCH_SCRIPTS"/nightly.sbatch' in text
    assert prologue(text, "$BENCH_AGAIN|$BENCH_RUN|$BENCH_WORK") == (
        "tomorrow||/shared/results/slurm/nightly/smoke"
    )


def test_a_webhook_is_not_in_the_job() -> None:
    """It may hold a secret, which ranks would see in their environment."""
    notify = Notify(webhook="https://example.org/planted", command="planted")
    assert "planted" not in script(Site(nightly=Nightly(notify=notify)), nightly=True, run_id="")


def test_unset_site_keys_are_left_to_slurm() -> None:
    text = script(Site(exclusive=False))
    named = {line.split("=")[0].lstrip("-") for line in directives(text)}
    always = "job-name output open-mode requeue no-kill ntasks-per-node signal nodes"
    assert named == {*always.split()}


@pytest.mark.parametrize("file", SITES, ids=lambda file: file.stem)
def test_the_examples_are_read_and_use_their_own_keys(file: Path) -> None:
    site = read_site(file)
    assert set(yaml.safe_load(file.read_text())) <= site.model_fields_set


def test_options_take_the_place_of_the_files_values(tmp_path: Path) -> None:
    file = tmp_path / "site.yaml"
    file.write_text("partition: slow\naccount: mine\nnodes: 2\n")
    site = read_site(file, partition="fast", nodes=None)
    assert (site.partition, site.account, site.nodes) == ("fast", "mine", 2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("partitoin: gpu", r"unknown key 'partitoin'; did you mean 'partition'\?"),
        ("- gpu", "must be a mapping"),
        ("nodes: none", "nodes"),
        ("nightly: {matrx: full}", "nightly"),
        ("gpu_directive: '--gres=gpu:{n}'", r"gpu_directive: .*\{gpus\}.*, got '--gres=gpu:\{n\}'"),
        ("gpu_directive: '--gpus={'", "gpu_directive: "),
        ("a: [", "is not valid YAML"),
        (None, "site.yaml"),
    ],
)
def test_a_mistake_in_a_site_file_is_one_sentence(
    tmp_path: Path, text: str | None, said: str
) -> None:
    file = tmp_path / "site.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UsageError, match=said) as raised:
        read_site(file)
    assert "\n" not in str(raised.value)


def test_slurms_own_lines_are_read() -> None:
    line = (
        "JobId=12 ArrayJobId=11 ArrayTaskId=3 JobName=bench Requeue=1 Restarts=2 JobState=PENDING"
        " Reason=BeginTime RunTime=00:00:07 TimeLimit=01:00:00 NodeList=(null) Comment=a b"
    )
    job = parse(line)
    assert (job.job_id, job.state, job.reason) == ("11_3", "PENDING", "BeginTime")
    assert (job.nodes, job.restarts, job.elapsed) == ("", 2, "00:00:07")


def test_nothing_of_a_site_is_in_the_scripts() -> None:
    for file in SCRIPTS:
        assert not re.search(
            r"#SBATCH --(partition|account|qos|constraint|reservation|time)|module load",
            file.read_text(),
        ), file


@pytest.mark.skipif(
    shutil.which("shellcheck") is None,
    reason="shellcheck is missing: install Debian's package shellcheck, or run make test as root",
)
def test_scripts_pass_shellcheck(tmp_path: Path) -> None:
    rendered = []
    for file in SITES:
        for nightly in (False, True):
            rendered.append(tmp_path / f"{file.stem}-{nightly}.sh")
            rendered[-1].write_text(script(read_site(file), nightly=nightly))
    done = subprocess.run(
        ["shellcheck", "-x", *map(str, [*SCRIPTS, *rendered])],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def in_job(folder: Path, words: str, program: str, text: str) -> dict[str, Any]:
    """Returns arguments of Popen that call a function of lib.sh, with a stub of a program."""
    (folder / program).write_text(f"#!/bin/sh\n{text}\n")
    (folder / program).chmod(0o755)
    job = {"SLURM_JOB_ID": "1", "BENCH_RESULTS": str(folder), "BENCH_INTERFACE": "ib0"}
    return {
        "args": ["bash", "-uc", f"set -o pipefail; . {JOBS}/lib.sh; {words}"],
        "cwd": ROOT,
        "env": {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", **job},
    }


def test_nothing_outlives_a_job_that_went_back_into_the_queue(tmp_path: Path) -> None:
    """SLURM kills the processes it has listed. With some plugins, one that the job's shell is just
    starting escapes."""
    shell = psutil.Popen(**in_job(tmp_path, "requeue", "scontrol", f"touch {tmp_path}/asked"))

    def running() -> list[psutil.Process]:
        return [one for one in shell.children() if one.status() != psutil.STATUS_ZOMBIE]

    try:
        ended = (tmp_path / "asked").exists
        until(lambda: ended() and not running(), "something would outlive the job")
        assert shell.poll() is None, "the shell must wait until SLURM kills it"
    finally:
        for process in [*running(), shell]:
            process.terminate()
    assert shell.wait(LONG) == -signal.SIGTERM


def test_agents_outwait_a_requeued_coordinator(tmp_path: Path) -> None:
    """It waits for processes of its previous start. An agent that gives up is not restarted."""
    job = in_job(tmp_path, "keep_agent /shared/file 3 n3", "srun", 'printf "%s\\n" "$@"')
    words = subprocess.run(**job, capture_output=True, text=True, check=True).stdout.splitlines()
    agent = words[words.index("harness.agent") + 1 :]
    assert agent == ["/shared/file", "--node", "3", "--timeout", agent[4], "--interface", "ib0"]
    assert float(agent[4]) > 2 * REQUEUED_SECONDS
