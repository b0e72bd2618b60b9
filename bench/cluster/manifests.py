"""Manifests of a run on Kubernetes (plain or with Kubeflow's TrainJob) and SkyPilot."""

from __future__ import annotations

import json
import re
import shlex
from functools import partial

from bench.cluster.jobs import ClusterJob, templates
from bench.cluster.site import Site
from bench.cluster.target import Target
from harness.nodes.rendezvous import KEY, KEY_FILE
from harness.spec.errors import UsageError

SECRET_FOLDER = "/run/parallelism-bench"


def manifests(target: Target, site: Site, job: ClusterJob) -> str:
    """Returns a target's manifests as YAML; raises UsageError if the site lacks a setting."""
    if not site.pods.image:
        raise UsageError(
            f"--to {target.value} needs an image that has the suite: set pods.image in the site"
            " file"
        )
    if target is Target.KUBERNETES and not site.pods.claim:
        raise UsageError(
            "--to kubernetes needs a volume for results: set pods.claim in the site file to the"
            " name of a PersistentVolumeClaim"
        )
    if target is Target.SKYPILOT and site.gpus_per_node and not site.pods.accelerator:
        raise UsageError(
            "--to skypilot needs the name of the GPU: set pods.accelerator in the site file,"
            " such as H100"
        )
    environment = templates()
    # JSON is YAML in which every string is quoted.
    environment.filters["yaml"] = partial(json.dumps, ensure_ascii=False)
    return environment.get_template(f"{target.value}.yaml.j2").render(
        site=site,
        name=re.sub("[^a-z0-9-]", "-", f"bench-{job.run_id}".lower())[:50].strip("-"),
        command=partial(_command, site, job),
        limits=_limits(site),
        folder=SECRET_FOLDER,
        key=KEY,
        key_file=KEY_FILE,
    )


def start_command(target: Target, file: str) -> str:
    if target is Target.SKYPILOT:
        return f"sky launch --secret {KEY} {shlex.quote(file)}"
    return f"kubectl apply -f {shlex.quote(file)}"


def _command(site: Site, job: ClusterJob, host: str, number: str, listen: str = "") -> str:
    """Returns a node's shell command.

    `listen`: address for node 0's listener; if empty, all addresses of the node.
    """
    python, port = site.python, site.pods.port
    wait = ["--timeout", str(site.pods.wait_seconds)]
    wait += ["--interface", site.interface] if site.interface else []
    run = ["-m", "bench", "run", "--matrix", job.matrix, "--run", job.run_id, *job.options]
    run += ["--results", site.pods.results]
    enter = f"cd {shlex.quote(site.pods.folder)} || exit 2"
    if site.nodes == 1:
        return f"{enter}\n{shlex.join(['exec', python, *run])}"
    run += ["--nodes", str(site.nodes), *wait]
    agent = f'{shlex.quote(python)} -m harness.agent "$host:{port}" {shlex.join(wait)}'
    return "\n".join(
        [
            enter,
            f"host={host} number={number}",
            f'[ "$number" = 0 ] || exec {agent} --node "$number"',
            f"{{ until {agent} --node 0; do [ $? != 2 ] || break; sleep 1; done }} &",
            f'exec {shlex.join([python, *run])} --rendezvous "{listen}:{port}"',
        ]
    )


def _limits(site: Site) -> dict[str, str | int]:
    limits: dict[str, str | int] = {}
    if site.gpus_per_node:
        limits[site.pods.gpu_resource] = site.gpus_per_node
    if site.cpus_per_node:
        limits["cpu"] = site.cpus_per_node
    if site.memory.strip("0"):
        limits["memory"] = site.memory
    return limits
