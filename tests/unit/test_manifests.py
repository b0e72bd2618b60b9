"""Manifests of `bench submit --to`: references resolve, and commands start the right processes."""

from __future__ import annotations

import copy
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from bench.cli.slurm import submit
from bench.cluster import Target
from bench.cluster.jobs import ClusterJob, manifests
from bench.cluster.site import Pods, Site
from harness.cell.errors import UsageError
from harness.nodes.rendezvous import KEY, KEY_FILE
from tests.commands import ask, told

ROOT = Path(__file__).parents[2]
PODS = Pods(image="example.org/bench:1", claim="kept", accelerator="H100")
NO_NAMES = ("index", "my run", "../../x")
ABSENT = "not installed: make setup"
SITE = Site(nodes=3, gpus_per_node=8, memory="64G", interface="eth0", pods=PODS)


def documents(target: Target, site: Site = SITE) -> list[dict[str, Any]]:
    job = ClusterJob("smoke", "Run_1", Path("results"), ("--set", "batch=16"), target=target.value)
    return list(yaml.safe_load_all(manifests(target, site, job)))


def started(command: str, folder: Path, **environment: str) -> list[str]:
    """Runs a node's command with a stub of Python; returns the Python commands it starts."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\necho "$@" >>{folder}/said\n')
    python.chmod(0o755)
    command = command.replace(".venv/bin/python", str(python)).replace(PODS.folder, str(folder))
    subprocess.run(["sh", "-ec", f"{command}\n"], env={**os.environ, **environment}, check=True)
    deadline, said = 50, folder / "said"
    while deadline and len(said.read_text().splitlines()) < 2 and "bench run" in said.read_text():
        deadline -= 1
        subprocess.run(["sleep", "0.1"], check=True)
    lines = sorted(said.read_text().splitlines())
    said.unlink()
    return lines


def test_a_service_and_two_indexed_jobs_fit_each_other() -> None:
    service, head, agents = documents(Target.KUBERNETES)
    assert (service["kind"], service["spec"]["clusterIP"]) == ("Service", "None")
    pods = [job["spec"]["template"] for job in (head, agents)]
    assert service["spec"]["selector"] == pods[0]["metadata"]["labels"]
    assert service["spec"]["selector"] != pods[1]["metadata"]["labels"]
    assert [job["spec"]["completions"] for job in (head, agents)] == [1, 2]
    for job, template in zip((head, agents), pods, strict=True):
        spec, (container,) = template["spec"], template["spec"]["containers"]
        assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
        assert job["spec"]["completionMode"] == "Indexed"
        assert job["spec"]["parallelism"] == job["spec"]["completions"]
        # The API server refuses a failure policy with any other restart policy.
        assert spec["restartPolicy"] == "Never"
        volumes = {volume["name"] for volume in spec["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        assert container["resources"]["limits"] == {"nvidia.com/gpu": 8, "memory": "64G"}
        (variable,) = container["env"]
        assert variable["name"] == KEY_FILE
    assert "results" in {volume["name"] for volume in pods[0]["spec"]["volumes"]}
    assert "results" not in {volume["name"] for volume in pods[1]["spec"]["volumes"]}


RUN = (
    "-m bench run --matrix smoke --run Run_1 --set batch=16 --results /results --nodes 3 --timeout"
    " 1800 --interface eth0 --rendezvous {listen}:29400"
)
AGENT = "-m harness.agent {host}:29400 --timeout 1800 --interface eth0 --node {number}"


def test_node_0_runs_the_coordinator_and_every_node_an_agent(tmp_path: Path) -> None:
    _, head, agents = documents(Target.KUBERNETES)
    commands = [
        job["spec"]["template"]["spec"]["containers"][0]["command"] for job in (head, agents)
    ]
    assert commands[0][:2] == ["/bin/sh", "-c"]
    host = "bench-run-1"
    assert started(commands[0][2], tmp_path) == [
        RUN.format(listen=""),
        AGENT.format(host=host, number=0),
    ]
    for index in range(2):
        assert started(commands[1][2], tmp_path, JOB_COMPLETION_INDEX=str(index)) == [
            AGENT.format(host=host, number=index + 1)
        ]


def test_a_train_job_takes_the_address_of_its_runtime(tmp_path: Path) -> None:
    (made,) = documents(Target.TRAINJOB)
    assert made["apiVersion"].startswith("trainer.kubeflow.org/")
    trainer = made["spec"]["trainer"]
    assert (made["spec"]["runtimeRef"]["name"], trainer["numNodes"]) == ("torch-distributed", 3)
    assert trainer["env"][0]["name"] == KEY
    assert trainer["env"][0]["valueFrom"]["secretKeyRef"]["name"] == PODS.secret
    command = trainer["command"][2]
    given = {"PET_MASTER_ADDR": "h", "PET_NODE_RANK": "2"}
    assert started(command, tmp_path, **given) == [AGENT.format(host="h", number=2)]
    given["PET_NODE_RANK"] = "0"
    assert RUN.format(listen="") in started(command, tmp_path, **given)


def test_a_sky_task_takes_the_first_address(tmp_path: Path) -> None:
    (made,) = documents(Target.SKYPILOT)
    assert made["num_nodes"] == 3
    assert made["resources"]["accelerators"] == "H100:8"
    assert made["secrets"] == {KEY: None}
    given = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NODE_RANK": "0"}
    assert started(made["run"], tmp_path, **given) == [
        RUN.format(listen="10.0.0.1"),
        AGENT.format(host="10.0.0.1", number=0),
    ]


@pytest.mark.parametrize("target", [Target.KUBERNETES, Target.TRAINJOB, Target.SKYPILOT])
def test_every_node_starts_in_the_checkout(target: Target) -> None:
    """The image of Containerfile starts in another folder."""
    for nodes, commands in ((3, 2 if target is Target.KUBERNETES else 1), (1, 1)):
        made = str(documents(target, SITE.model_copy(update={"nodes": nodes})))
        assert made.count(f"cd {PODS.folder} || exit 2\\n") == commands
        assert ("--rendezvous" in made) == ("harness.agent" in made) == (nodes > 1)


@pytest.mark.parametrize(
    ("target", "lacking"),
    [
        (Target.KUBERNETES, "image"),
        (Target.KUBERNETES, "claim"),
        (Target.TRAINJOB, "image"),
        (Target.SKYPILOT, "accelerator"),
    ],
)
def test_a_missing_site_key_is_named(target: Target, lacking: str) -> None:
    site = SITE.model_copy(update={"pods": PODS.model_copy(update={lacking: ""})})
    with pytest.raises(UsageError, match=f"pods.{lacking}"):
        documents(target, site)


def misspelt(document: dict[str, Any], *path: str) -> dict[str, Any]:
    """Returns a copy with an x appended to the key at `path`."""
    changed = copy.deepcopy(document)
    *parents, key = path
    inner = changed
    for name in parents:
        inner = inner[name]
    inner[f"{key}x"] = inner.pop(key)
    return changed


def holds(read: Any, given: Any) -> bool:
    """Returns whether `read` has everything in `given`; it may add defaults."""
    if isinstance(given, dict):
        return all(key in read and holds(read[key], value) for key, value in given.items())
    if isinstance(given, list):
        return len(read) == len(given) and all(map(holds, read, given))
    return bool(read == given)


def accepted(model: Any, document: dict[str, Any]) -> bool:
    """Returns whether the API knows all keys of the document; it ignores unknown ones."""
    try:
        return holds(model.from_dict(document).to_dict(), document)
    except ValueError:
        return False


def test_kubernetes_and_kubeflow_accept_the_manifests() -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models", reason=ABSENT)
    service, *jobs = documents(Target.KUBERNETES)
    (train_job,) = documents(Target.TRAINJOB)
    assert accepted(models.IoK8sApiCoreV1Service, service)
    assert all(accepted(models.IoK8sApiBatchV1Job, job) for job in jobs)
    assert accepted(models.TrainerV1alpha1TrainJob, train_job)
    pod = ("spec", "template", "spec")
    for path in (("spec", "completionMode"), (*pod, "containers"), (*pod, "restartPolicy")):
        assert not accepted(models.IoK8sApiBatchV1Job, misspelt(jobs[0], *path))
    for path in (("spec", "runtimeRef"), ("spec", "trainer", "numNodes")):
        assert not accepted(models.TrainerV1alpha1TrainJob, misspelt(train_job, *path))


def test_skypilot_accepts_a_task() -> None:
    schemas = pytest.importorskip("sky.utils.schemas", reason="skypilot is not installed")
    jsonschema = pytest.importorskip("jsonschema", reason=ABSENT)
    (made,) = documents(Target.SKYPILOT)
    jsonschema.validate(made, schemas.get_task_schema())
    for path in (("num_nodes",), ("resources", "accelerators")):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(misspelt(made, *path), schemas.get_task_schema())


def test_submit_writes_a_file_and_starts_nothing(tmp_path: Path) -> None:
    site = tmp_path / "site.yaml"
    site.write_text(yaml.safe_dump({"nodes": 2, "pods": PODS.model_dump()}))
    words = [str(site), "--to", "kubernetes", "--matrix", "smoke", "--results", str(tmp_path / "r")]
    shown = told(submit, *words, "--run", "r1", "--dry-run")
    assert not (tmp_path / "r").exists()
    told(submit, *words, "--run", "r1")
    assert (tmp_path / "r/kubernetes/r1/manifests.yaml").read_text() == shown
    before = sorted(tmp_path.rglob("*"))
    for refused in (["--run", "r1", "--array", "2"], *(["--run", name] for name in NO_NAMES)):
        with pytest.raises(UsageError):
            ask(submit, *words, *refused)
    assert sorted(tmp_path.rglob("*")) == before
