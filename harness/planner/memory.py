"""Memory of a rank: model states and activations of its stage, and what the allocator makes of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harness.planner.cluster import Cluster
from harness.planner.constants import MemoryConstants
from harness.planner.layouts import Floats, Layouts
from harness.planner.shape import ModelShape
from harness.planner.stages import Stage, stages


@dataclass(frozen=True)
class Memory:
    """Bytes by layout (shape [layouts]), of the stage that needs most."""

    states: Floats
    activations: Floats
    working: Floats
    reserved: Floats


def stage_memory(
    shape: ModelShape, sequence: int, layouts: Layouts, stage: Stage, c: MemoryConstants
) -> tuple[Floats, Floats, Floats]:
    L = layouts
    h, f, v = shape.hidden, shape.feed_forward, shape.vocabulary
    t = L.tensor.astype(float)
    d = L.data.astype(float) * L.context
    params = stage.layers * shape.layer_parameters / t
    params = params + (stage.embedding * 1.0 + (stage.head and not (shape.tied and stage.embedding))) * v * h / t
    shard1 = np.where(L.zero >= 1, d, 1.0)
    shard2 = np.where(L.zero >= 2, d, 1.0)
    shard3 = np.where(L.zero >= 3, d, 1.0)
    states = params * (2.0 / shard3 + 4.0 / shard2 + 12.0 / shard1)
    tokens = L.micro_batch * float(sequence) / L.context
    flight = np.minimum(L.pipeline - stage.first, L.accumulation)
    gathered = np.where(t > 1, c.gathered, 0.0)
    layer = tokens * (h * (c.layer_hidden / t + gathered) + f * c.layer_feed / t)
    act = flight * (stage.layers * layer + stage.embedding * tokens * h * 2 / t)
    act = act + stage.head * tokens * v * c.logit / t
    work = params * np.where(d > 1, c.bucket, 0.0)
    upd = params * (c.update / shard1 + np.where((L.zero == 1) & (d > 1), c.gather, 0))
    return states, np.maximum(act * c.fragmentation, upd), work


def capped(demand: Floats, cluster: Cluster, knee: float) -> Floats:
    lim = cluster.memory_bytes
    k = knee * lim
    return np.where(demand <= k, demand, k + (lim - k) * (1 - np.exp(-(demand - k) / (lim - k))))


def rank0(shape, sequence, layouts, cluster, c, all_stages=False):
    out = np.zeros(len(layouts)); dem = np.zeros(len(layouts))
    for p in np.unique(layouts.pipeline):
        m = layouts.pipeline == p
        sub = layouts.take(m)
        for st in stages(shape, int(p)):
            if st.first and not all_stages: continue
            a, b, w = stage_memory(shape, sequence, sub, st, c)
            d = a + b + w + c.overhead
            dem[m] = np.maximum(dem[m], d)
    return capped(dem, cluster, c.knee), dem
