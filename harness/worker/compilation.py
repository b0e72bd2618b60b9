from __future__ import annotations

import os

from harness.cell.cell import Cell
from harness.host.folders import cache_folder


def prepare_to_compile(cell: Cell) -> None:
    """Imports what torch.compile needs before memory is measured, and sets its cache folder. Makes
    exceeding the recompilation limit an error: torch would run the block uncompiled and the trial
    be mislabelled."""
    if cell.compile == "none":
        return
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache_folder() / "compiled")
    import torch._dynamo.config
    import torch._inductor.compile_fx

    torch._dynamo.config.fail_on_recompile_limit_hit = True


def compile_seconds() -> float:
    from torch._dynamo.utils import calculate_time_spent

    return calculate_time_spent()["total_wall_time"]


def skipped_graphs() -> int:
    """Returns the number of compiled graphs that have no CUDA graph."""
    from torch._dynamo.utils import counters

    return int(counters["inductor"]["cudagraph_skips"])


def checked_compile_seconds(cell: Cell, before_timed_steps: float) -> float | None:
    """Returns `compile_seconds`; None if the cell does not compile. Raises RuntimeError if nothing
    was compiled, a timed step compiled, or CUDA graphs are missing."""
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
