"""What the unsplit model is: parameter names, their number, FLOPs; counted once and kept."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from dataclasses import asdict, dataclass

from harness.environment import version_of
from harness.workloads.data import cache_folder
from harness.workloads.model import Workload


@dataclass(frozen=True)
class ModelFacts:
    """Facts of a workload's model at a sequence length."""

    trainable: tuple[str, ...]
    """Names of the parameters that are trained; a tied one appears once."""
    parameters: int
    flops_per_sample: int
    sizes: tuple[int, ...]
    """Elements of each trainable parameter, in the order of `trainable`."""


@functools.cache
def model_facts(workload: Workload, sequence_length: int) -> ModelFacts:
    """The facts, from the cache where another run has counted them for the same model and library versions."""
    versions = f"{version_of('torch')} {version_of('transformers')}"
    said = f"2 {workload.name} {workload.config} {sequence_length} {versions}"
    folder = cache_folder() / "facts"
    file = folder / f"{hashlib.blake2s(said.encode(), digest_size=8).hexdigest()}.json"
    if file.exists() and not workload.pretrained:
        known = json.loads(file.read_text())
        return ModelFacts(tuple(known["trainable"]), known["parameters"], known["flops_per_sample"], tuple(known["sizes"]))
    facts = _count(workload, sequence_length)
    folder.mkdir(exist_ok=True)
    temporary = file.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(json.dumps(asdict(facts)))
    temporary.replace(file)
    return facts


def _count(workload: Workload, sequence_length: int) -> ModelFacts:
    import transformers
    from torch._subclasses.fake_tensor import FakeTensorMode

    from harness.measure.flops import model_flops

    transformers.utils.logging.set_verbosity_error()
    with FakeTensorMode():
        model = workload.build(seed=0, saved_weights=False)
        flops = model_flops(model, lambda: workload.logits(model, workload.sample_inputs(1, sequence_length)))
    named = dict(model.named_parameters())
    trained = {name: p.numel() for name, p in named.items() if p.requires_grad}
    return ModelFacts(tuple(trained), sum(p.numel() for p in named.values()), flops, tuple(trained.values()))
