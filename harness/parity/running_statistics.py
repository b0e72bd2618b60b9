from __future__ import annotations

from typing import TYPE_CHECKING

from harness.strategy.whole_state import trained_buffers

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.nn.modules.batchnorm import _BatchNorm

STATISTICS = ("running_mean", "running_var")


class RunningStatistics:
    """Derives from a reference run the BatchNorm statistics of the first of N replicas, which sees
    the first 1/N of the batch's parts. DDP broadcasts its statistics."""

    def __init__(self, model: nn.Module, parts: int) -> None:
        """`parts`: number of forwards per step."""
        from torch.nn.modules.batchnorm import _BatchNorm

        self.model, self.parts = model, parts
        self.replicas = [n for n in range(2, parts + 1) if parts % n == 0]
        self.kept: dict[str, Tensor] = {}
        for name, module in model.named_modules():
            if isinstance(module, _BatchNorm) and module.track_running_stats and self.replicas:
                self._follow(name, module)

    def by_replicas(self) -> dict[str, Tensor]:
        """Returns floating-point buffers by `REPLICAS/NAME`."""
        everything = {f"1/{name}": buffer for name, buffer in trained_buffers(self.model)}
        return everything | self.kept

    def _follow(self, name: str, module: _BatchNorm) -> None:
        calls = 0
        before: dict[str, Tensor] = {}
        for replicas in self.replicas:
            for statistic in STATISTICS:
                key = f"{replicas}/{name}.{statistic}"
                self.kept[key] = getattr(module, statistic).clone()

        def remember(*_: object) -> None:
            for statistic in STATISTICS:
                before[statistic] = getattr(module, statistic).clone()

        def update(*_: object) -> None:
            nonlocal calls
            part, calls = calls % self.parts, calls + 1
            for replicas in self.replicas:
                if part < self.parts // replicas:
                    for statistic, old in before.items():
                        statistics = self.kept[f"{replicas}/{name}.{statistic}"]
                        moved = getattr(module, statistic) - old
                        statistics += moved + (module.momentum or 0.0) * (old - statistics)

        module.register_forward_pre_hook(remember)
        module.register_forward_hook(update)
