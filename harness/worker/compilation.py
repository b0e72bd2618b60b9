"""torch.compile in a rank: where compiled code is kept, and how long compiling takes."""

from __future__ import annotations

import os

from harness.host.cache import cache_folder
from harness.spec.cell import Cell


def prepare_to_compile(cell: Cell) -> None:
    """Imports what torch.compile needs, before memory is measured, and lets all ranks and later
    trials share what it writes, in a folder of the suite's cache.

    torch runs a block as it is where it has compiled it too often: a trial would then measure
    something else than it says, so here that is an error.
    """
    if cell.compile == "none":
        return
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache_folder() / "compiled")
    import torch._dynamo.config
    import torch._inductor.compile_fx

    torch._dynamo.config.fail_on_recompile_limit_hit = True


def compile_seconds() -> float:
    """Seconds that torch.compile has taken in this process so far, by torch's own count: forward
    and backward graphs, those that it found in its cache too."""
    from torch._dynamo.utils import calculate_time_spent

    return calculate_time_spent()["total_wall_time"]


def skipped_graphs() -> int:
    """Graphs that torch compiled in this process without making CUDA graphs of them, by its own
    count."""
    from torch._dynamo.utils import counters

    return int(counters["inductor"]["cudagraph_skips"])


def checked_compile_seconds(cell: Cell, before_timed_steps: float) -> float | None:
    """The same at a trial's end; None where the cell compiles nothing.

    Raises RuntimeError where nothing was compiled, something in the timed steps, or what should
    replay CUDA graphs launches kernels one by one.
    `before_timed_steps`: what `compile_seconds` gave before the first of these.
    """
    if cell.compile == "none":
        return None
    seconds = compile_seconds()
    if not seconds:
        raise RuntimeError(
            f"the cell asks for compile {cell.compile}, and torch.compile compiled nothing"
        )
    if seconds > before_timed_steps:
        raise RuntimeError(
            f"torch.compile compiled again for {seconds - before_timed_steps:.1f} s in the timed"
            f" steps; give more than {cell.warmup_steps} warmup_steps"
        )
    if cell.compile == "block_cudagraphs" and (skipped := skipped_graphs()):
        raise RuntimeError(
            f"the cell asks for CUDA graphs, and torch.compile made none of {skipped} that it"
            " compiled; TORCH_LOGS=cudagraphs says why"
        )
    return seconds
