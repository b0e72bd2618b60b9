"""Hand-written training: each strategy uses its library and nothing from the suite.

test_overhead.py runs it.

    torchrun --nproc-per-node 2 plain.py ddp FOLDER

Each rank pins itself to a core, computes with one thread like the suite's ranks, and writes its
step times in seconds to FOLDER/RANK.json. If FOLDER/wait exists, a rank that is ready first writes
FOLDER/RANK.pid and waits until FOLDER/wait is gone. The model is a Llama with 0.9 million
parameters, the batch is 8 samples of 64 tokens, and the optimizer is AdamW.
"""

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

BATCH, TOKENS, MICRO_BATCHES = 8, 64, 4
WARM_UP, STEPS = 5, 100
strategy, folder = sys.argv[1], Path(sys.argv[2])
rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
text = np.random.default_rng(0).integers(0, 256, 2_000_000, dtype=np.uint16)


def make_model():
    torch.manual_seed(0)
    size = {
        "num_hidden_layers": 4,
        "hidden_size": 128,
        "intermediate_size": 352,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    config = LlamaConfig(
        **size, vocab_size=256, max_position_embeddings=256, attention_dropout=0.0, use_cache=False
    )
    return LlamaForCausalLM(config).train()


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-5, weight_decay=0.1, betas=(0.9, 0.95))


def batch(step, rows):
    starts = (np.random.default_rng([0, step]).random(BATCH) * (len(text) - TOKENS - 1)).astype(
        np.int64
    )
    pieces = torch.from_numpy(
        np.stack([text[s : s + TOKENS + 1] for s in starts[rows]]).astype(np.int64)
    )
    return pieces[:, :-1], pieces[:, 1:]


def loss_of(logits, labels):
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten())


def usual(model, optimizer):
    def step(inputs, labels):
        loss = loss_of(model(inputs).logits, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def single():
    model = make_model()
    return usual(model, adamw(model.parameters()))


def ddp():
    model = torch.nn.parallel.DistributedDataParallel(make_model())
    return usual(model, adamw(model.parameters()))


def fsdp2():
    from torch.distributed.fsdp import fully_shard

    model = make_model()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model, reshard_after_forward=False)
    return usual(model, adamw(model.parameters()))


def zero(stage):
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # leaves files in /dev/shm
    model = make_model()
    size = sum(p.numel() for p in model.parameters())
    bucket = size // 8
    stages = {
        "stage": stage,
        "reduce_bucket_size": bucket,
        "allgather_bucket_size": bucket + bucket % 2,
    }
    if stage == 3:
        live = (
            "stage3_prefetch_bucket_size",
            "stage3_max_live_parameters",
            "stage3_max_reuse_distance",
        )
        stages |= {
            **dict.fromkeys(live, bucket),
            "stage3_param_persistence_threshold": 1000,
        }
    config = {
        "train_batch_size": BATCH,
        "train_micro_batch_size_per_gpu": BATCH // world,
        "gradient_clipping": 0.0,
        "zero_optimization": stages,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31,
        "timers": {"throughput": {"enabled": False}},
    }
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=adamw(model.parameters()), config=config
    )

    def step(inputs, labels):
        engine.backward(loss_of(engine(inputs).logits, labels))
        engine.step()

    return step


def pipeline():
    """Puts half of the blocks on each rank; the schedule is 1F1B."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    class Half(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.llama, self.lm_head = model.model, model.lm_head
            self.llama.layers = self.llama.layers[:2] if rank == 0 else self.llama.layers[2:]
            if rank == 0:
                self.llama.norm = self.lm_head = None
            else:
                self.llama.embed_tokens = None

        def forward(self, hidden):
            if rank == 0:
                hidden = self.llama.embed_tokens(hidden)
            positions = torch.arange(TOKENS)[None]
            for layer in self.llama.layers:
                hidden = layer(hidden, position_embeddings=self.llama.rotary_emb(hidden, positions))
            return hidden if rank == 0 else self.lm_head(self.llama.norm(hidden))

    half = Half(make_model())
    stage = PipelineStage(half, rank, world, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=loss_of)
    optimizer = adamw(half.parameters())

    def step(inputs, labels):
        schedule.step(inputs) if rank == 0 else schedule.step(target=labels)
        optimizer.step()
        optimizer.zero_grad()

    return step


def tensor():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    model = make_model()
    columns = [
        f"model.layers.{i}.{n}"
        for i in range(4)
        for n in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    ]
    columns += [f"model.layers.{i}.mlp.{n}" for i in range(4) for n in ("gate_proj", "up_proj")]
    rows = [
        f"model.layers.{i}.{n}" for i in range(4) for n in ("self_attn.o_proj", "mlp.down_proj")
    ]
    plan = {name: ColwiseParallel() for name in columns} | {
        name: RowwiseParallel() for name in rows
    }
    parallelize_module(model, init_device_mesh("cpu", (world,)), plan)
    return usual(model, adamw(model.parameters()))


def horovod():
    import horovod.torch as hvd

    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        adamw(model.parameters()), named_parameters=model.named_parameters()
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    return usual(model, optimizer)


def accelerate():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.set_num_threads(1)  # Accelerate takes all cores
    model = make_model()
    model, optimizer = accelerator.prepare(model, adamw(model.parameters()))

    def step(inputs, labels):
        loss = loss_of(model(inputs).logits, labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    return step


def main():
    global rank, world
    os.environ["DS_ACCELERATOR"] = "cpu"
    local_rank = int(os.environ.get("LOCAL_RANK", os.environ.get("HOROVOD_LOCAL_RANK", "0")))
    # before the library starts its threads
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[local_rank]})
    os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if strategy == "horovod":
        import horovod.torch as hvd

        hvd.init()
        rank, world = hvd.rank(), hvd.size()
    elif strategy not in ("single", "accelerate"):
        dist.init_process_group("gloo")
    torch.set_num_threads(1)
    step = {"zero2": lambda: zero(2), "zero3": lambda: zero(3)}.get(strategy) or globals()[strategy]
    step = step()
    whole = strategy in ("pipeline", "tensor", "single")
    rows = slice(None) if whole else slice(rank * BATCH // world, (rank + 1) * BATCH // world)
    if (folder / "wait").exists():
        (folder / f"{rank}.pid").write_text(str(os.getpid()))
        while (folder / "wait").exists():
            time.sleep(0.01)
    times = []
    for index in range(WARM_UP + STEPS):
        begin = time.perf_counter()
        step(*batch(index, rows))
        times.append(time.perf_counter() - begin)
    (folder / f"{rank}.json").write_text(json.dumps(times))
    if dist.is_initialized():
        dist.barrier()
    os._exit(0)


main()
