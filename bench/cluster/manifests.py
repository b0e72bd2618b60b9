"""Manifests of a run on Kubernetes (plain or with Kubeflow's TrainJob) and SkyPilot.

Node 0 runs the coordinator and an agent, other nodes an agent. Their key is in a secret.
"""

from __future__ import annotations

import re
import shlex
from typing import Literal, TypeAlias

import yaml
from pydantic import BaseModel, ConfigDict
from pydantic.alias_generators import to_camel

from bench.cluster.jobs import ClusterJob
from bench.cluster.site import Site
from bench.cluster.target import Target
from harness.nodes.rendezvous import KEY, KEY_FILE
from harness.spec.errors import UsageError

SECRET_FOLDER, SECRET_KEY = "/run/parallelism-bench", "key"
MISTAKE, FAILED_CELLS = 2, 1


class _Record(BaseModel):
    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, frozen=True, extra="forbid"
    )


class Metadata(_Record):
    name: str
    labels: dict[str, str]


class PodMetadata(_Record):
    labels: dict[str, str]


class Resources(_Record):
    limits: dict[str, str | int]


class SecretKey(_Record):
    name: str
    key: str


class ValueFrom(_Record):
    secret_key_ref: SecretKey


class Variable(_Record):
    name: str
    value: str | None = None
    value_from: ValueFrom | None = None


class Mount(_Record):
    name: str
    mount_path: str
    read_only: bool | None = None


class Container(_Record):
    name: str
    image: str
    command: list[str]
    env: list[Variable]
    resources: Resources
    volume_mounts: list[Mount]


class SecretVolume(_Record):
    secret_name: str
    default_mode: int


class ClaimVolume(_Record):
    claim_name: str


class EmptyVolume(_Record):
    medium: str


class Volume(_Record):
    name: str
    secret: SecretVolume | None = None
    persistent_volume_claim: ClaimVolume | None = None
    empty_dir: EmptyVolume | None = None


class PodSpec(_Record):
    restart_policy: Literal["Never"] = "Never"
    containers: list[Container]
    volumes: list[Volume]


class PodTemplate(_Record):
    metadata: PodMetadata
    spec: PodSpec


class ExitCodes(_Record):
    operator: Literal["In"] = "In"
    values: list[int]


class FailureRule(_Record):
    action: Literal["FailJob"] = "FailJob"
    on_exit_codes: ExitCodes


class FailurePolicy(_Record):
    rules: list[FailureRule]


class JobSpec(_Record):
    completion_mode: Literal["Indexed"] = "Indexed"
    completions: int
    parallelism: int
    backoff_limit: int
    pod_failure_policy: FailurePolicy
    template: PodTemplate


class KubernetesJob(_Record):
    api_version: Literal["batch/v1"] = "batch/v1"
    kind: Literal["Job"] = "Job"
    metadata: Metadata
    spec: JobSpec


class Port(_Record):
    name: str
    port: int


class ServiceSpec(_Record):
    cluster_ip: Literal["None"] = "None"
    publish_not_ready_addresses: bool = True
    selector: dict[str, str]
    ports: list[Port]

    model_config = ConfigDict(
        alias_generator=lambda name: {"cluster_ip": "clusterIP"}.get(name, to_camel(name))
    )


class Service(_Record):
    """Headless service, whose name is the address of node 0."""

    api_version: Literal["v1"] = "v1"
    kind: Literal["Service"] = "Service"
    metadata: Metadata
    spec: ServiceSpec


class RuntimeRef(_Record):
    name: str


class Trainer(_Record):
    image: str
    command: list[str]
    env: list[Variable]
    num_nodes: int
    resources_per_node: Resources


class TrainJobSpec(_Record):
    runtime_ref: RuntimeRef
    trainer: Trainer


class TrainJob(_Record):
    api_version: Literal["trainer.kubeflow.org/v1alpha1"] = "trainer.kubeflow.org/v1alpha1"
    kind: Literal["TrainJob"] = "TrainJob"
    metadata: Metadata
    spec: TrainJobSpec


class SkyTask(BaseModel):
    """SkyPilot task; keys are not in camel case."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    num_nodes: int
    resources: dict[str, str]
    secrets: dict[str, None]
    run: str


Manifest: TypeAlias = Service | KubernetesJob | TrainJob | SkyTask


def manifests(target: Target, site: Site, job: ClusterJob) -> list[Manifest]:
    """Returns a target's manifests; raises UsageError if the site lacks a setting."""
    if not site.pods.image:
        raise UsageError(
            f"--to {target.value} needs an image that has the suite: set pods.image in the site"
            " file"
        )
    if target is Target.KUBERNETES:
        return _kubernetes(site, job)
    return [_train_job(site, job) if target is Target.TRAINJOB else _sky_task(site, job)]


def as_yaml(made: list[Manifest]) -> str:
    """Returns a file's text; only SkyPilot's secrets are written as null."""
    documents = [
        one.model_dump(by_alias=True, exclude_none=not isinstance(one, SkyTask)) for one in made
    ]
    return yaml.safe_dump_all(documents, sort_keys=False, width=1000)


def start_command(target: Target, file: str) -> str:
    if target is Target.SKYPILOT:
        return f"sky launch --secret {KEY} {shlex.quote(file)}"
    return f"kubectl apply -f {shlex.quote(file)}"


def _name(job: ClusterJob) -> str:
    return re.sub("[^a-z0-9-]", "-", f"bench-{job.run_id}".lower())[:50].strip("-")


def _command(site: Site, job: ClusterJob, host: str, number: str, listen: str = "") -> str:
    """Returns a node's shell command. `listen`: address for node 0's listener; empty: its own."""
    python, port = site.python, site.pods.port
    wait = ["--timeout", str(site.pods.wait_seconds)]
    wait += ["--interface", site.interface] if site.interface else []
    run = ["-m", "bench", "run", "--matrix", job.matrix, "--run", job.run_id, *job.options]
    run += ["--results", site.pods.results]
    enter = f"cd {shlex.quote(site.pods.folder)} || exit {MISTAKE}"
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


def _resources(site: Site) -> Resources:
    limits: dict[str, str | int] = {}
    if site.gpus_per_node:
        limits[site.pods.gpu_resource] = site.gpus_per_node
    if site.cpus_per_node:
        limits["cpu"] = site.cpus_per_node
    if site.memory.strip("0"):
        limits["memory"] = site.memory
    return Resources(limits=limits)


def _kubernetes(site: Site, job: ClusterJob) -> list[Manifest]:
    if not site.pods.claim:
        raise UsageError(
            "--to kubernetes needs a volume for results: set pods.claim in the site file to the"
            " name of a PersistentVolumeClaim"
        )
    name = _name(job)
    head = _job(site, name, "head", 1, _command(site, job, name, "0"))
    if site.nodes == 1:
        return [head]
    number = "$((JOB_COMPLETION_INDEX + 1))"
    agents = _job(site, name, "agents", site.nodes - 1, _command(site, job, name, number))
    selector = head.spec.template.metadata.labels
    ports = [Port(name="rendezvous", port=site.pods.port)]
    spec = ServiceSpec(selector=selector, ports=ports)
    return [Service(metadata=Metadata(name=name, labels=selector), spec=spec), head, agents]


def _job(
    site: Site, name: str, role: Literal["head", "agents"], count: int, command: str
) -> KubernetesJob:
    labels = {"app.kubernetes.io/instance": name, "app.kubernetes.io/component": role}
    mounts = [
        Mount(name="key", mount_path=SECRET_FOLDER, read_only=True),
        # NCCL and gloo need more than a container's 64 MB.
        Mount(name="shm", mount_path="/dev/shm"),
    ]
    secret = SecretVolume(secret_name=site.pods.secret, default_mode=0o400)
    volumes = [
        Volume(name="key", secret=secret),
        Volume(name="shm", empty_dir=EmptyVolume(medium="Memory")),
    ]
    codes = [MISTAKE]
    if role == "head":
        codes.append(FAILED_CELLS)
        mounts.append(Mount(name="results", mount_path=site.pods.results))
        claim = ClaimVolume(claim_name=site.pods.claim)
        volumes.append(Volume(name="results", persistent_volume_claim=claim))
    container = Container(
        name=role,
        image=site.pods.image,
        command=["/bin/sh", "-c", command],
        env=[Variable(name=KEY_FILE, value=f"{SECRET_FOLDER}/{SECRET_KEY}")],
        resources=_resources(site),
        volume_mounts=mounts,
    )
    template = PodTemplate(
        metadata=PodMetadata(labels=labels), spec=PodSpec(containers=[container], volumes=volumes)
    )
    rule = FailureRule(on_exit_codes=ExitCodes(values=sorted(codes)))
    spec = JobSpec(
        completions=count,
        parallelism=count,
        backoff_limit=site.requeues * count,
        pod_failure_policy=FailurePolicy(rules=[rule]),
        template=template,
    )
    return KubernetesJob(metadata=Metadata(name=f"{name}-{role}", labels=labels), spec=spec)


def _train_job(site: Site, job: ClusterJob) -> TrainJob:
    """Agents read address and node number from PET_*, which Kubeflow sets for torchrun."""
    name = _name(job)
    key = SecretKey(name=site.pods.secret, key=SECRET_KEY)
    trainer = Trainer(
        image=site.pods.image,
        command=["/bin/sh", "-c", _command(site, job, '"$PET_MASTER_ADDR"', '"$PET_NODE_RANK"')],
        env=[Variable(name=KEY, value_from=ValueFrom(secret_key_ref=key))],
        num_nodes=site.nodes,
        resources_per_node=_resources(site),
    )
    spec = TrainJobSpec(runtime_ref=RuntimeRef(name=site.pods.runtime), trainer=trainer)
    labels = {"app.kubernetes.io/instance": name}
    return TrainJob(metadata=Metadata(name=name, labels=labels), spec=spec)


def _sky_task(site: Site, job: ClusterJob) -> SkyTask:
    resources = {"image_id": f"docker:{site.pods.image}"}
    if site.gpus_per_node:
        if not site.pods.accelerator:
            raise UsageError(
                "--to skypilot needs the name of the GPU: set pods.accelerator in the site file,"
                " such as H100"
            )
        resources["accelerators"] = f"{site.pods.accelerator}:{site.gpus_per_node}"
    if site.cpus_per_node:
        resources["cpus"] = f"{site.cpus_per_node}+"
    host, number = '"$(echo "$SKYPILOT_NODE_IPS" | head -n1)"', '"$SKYPILOT_NODE_RANK"'
    run = _command(site, job, host, number, "$host")
    return SkyTask(
        name=_name(job), num_nodes=site.nodes, resources=resources, secrets={KEY: None}, run=run
    )
