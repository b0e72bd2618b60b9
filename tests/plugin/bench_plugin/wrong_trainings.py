"""Right strategies whose gradients, optimizer or model get one planted mistake.

torch's global optimizer hooks plant most of them, also in optimizers that libraries build.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness.seam import Job, Strategy, TrainStep
from harness.strategies.amp import Amp
from harness.strategies.ddp import Ddp
from harness.strategies.deepspeed import Deepspeed
from harness.strategies.fsdp2 import Fsdp2
from harness.strategies.sync_batch_norm import SyncBatchNorm

Change = Callable[[Any], None]


class Mistaken(Strategy):
    """Mixin that plants a mistake before a strategy is set up."""

    mistake: str = "none"
    """The planted mistake."""
    from_step: int = 0
    """First step with the mistake, if it is made around an optimizer's step."""

    def setup(self, job: Job) -> TrainStep:
        from torch.optim import optimizer as hooks

        if before := BEFORE.get(self.mistake):
            hooks.register_optimizer_step_pre_hook(_only_inner(before, self.from_step))
        if after := AFTER.get(self.mistake):
            hooks.register_optimizer_step_post_hook(_only_inner(after, self.from_step))
        if self.mistake == "each_shard_alone":
            orthogonalise_shards(job.cell.devices)
        if change := MODELS.get(self.mistake):
            build = job.model

            def model(*arguments: Any, **named: Any) -> Any:
                built = build(*arguments, **named)
                for name, module in built.named_modules():
                    change(name, module)
                return built

            job.model = model  # type: ignore[method-assign]
        if clip := CLIPS.get(self.mistake):
            job.recipe.clip = clip(job)
        return super().setup(job)


class MistakenDdp(Mistaken, Ddp):
    """DDP with a planted mistake."""


class MistakenFsdp2(Mistaken, Fsdp2):
    """FSDP2 with a planted mistake."""


class MistakenDeepspeed(Mistaken, Deepspeed):
    """DeepSpeed with a planted mistake."""


class MistakenAmp(Mistaken, Amp):
    """AMP with a planted mistake."""


class MistakenSyncBatchNorm(Mistaken, SyncBatchNorm):
    """Synchronised BatchNorm with a planted mistake."""


INNER = ("AdamW", "SGD", "Muon", "MuonWithAuxAdam", "AdamW8bit", "DeepSpeedCPUAdam")
"""Optimizers that update parameters themselves, if only partly."""


def orthogonalise_shards(ranks: int) -> None:
    """Makes Muon orthogonalise each rank's rows of a matrix by themselves."""
    import torch
    from deepspeed.runtime.zero.muon import original_muon
    from torch.optim import _muon

    of_whole, of_zero = _muon._zeropower_via_newtonschulz, original_muon.muon_update

    def of_shard(update: Any, *settings: Any) -> Any:
        found = of_whole(_local(update), *settings)
        return type(update).from_local(found, update.device_mesh, update.placements)

    def of_rows(gradient: Any, momentum: Any, *settings: Any, **named: Any) -> Any:
        parts = list(zip(gradient.chunk(ranks), momentum.chunk(ranks), strict=True))
        return torch.cat([of_zero(part.clone(), m, *settings, **named) for part, m in parts])

    _muon._zeropower_via_newtonschulz = of_shard
    original_muon.muon_update = of_rows


def _only_inner(change: Change, from_step: int) -> Callable[..., None]:
    """Returns a hook that skips optimizers that only call others, as for Muon with AdamW."""

    def hook(optimizer: Any, *_: Any) -> None:
        if type(optimizer).__name__ in INNER:
            taken = optimizer.__dict__.get("steps taken", 0)
            optimizer.__dict__["steps taken"] = taken + 1
            if taken >= from_step:
                change(optimizer)

    return hook


def _parameters(optimizer: Any) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def _local(tensor: Any) -> Any:
    """Returns a tensor without gradient tracking; of a DTensor, this rank's shard."""
    return tensor.detach().to_local() if hasattr(tensor, "to_local") else tensor.detach()


def setting(key: str, change: Callable[[Any], Any], only: str = "") -> Change:
    """Changes a setting of parameter groups by its right value, in one kind of optimizer or all."""

    def before(optimizer: Any) -> None:
        for group in optimizer.param_groups:
            if key in group and only in ("", type(optimizer).__name__):
                right = group.setdefault(f"right {key}", group[key])
                group[key] = change(right)

    return before


def rate(factor: float) -> Change:
    """Scales the learning rate, also if a schedule sets it before each step."""

    def before(optimizer: Any) -> None:
        for group in optimizer.param_groups:
            if group.get("set rate") != group["lr"]:
                group["lr"] = group["set rate"] = group["lr"] * factor

    return before


def gradients(change: Callable[[Any], Any], chosen: Callable[[Any], bool] = bool) -> Change:
    """Changes the gradients of chosen parameters, which may be shards."""

    def before(optimizer: Any) -> None:
        for parameter in _parameters(optimizer):
            if chosen is bool or chosen(parameter):
                gradient = _local(parameter.grad)
                gradient.copy_(change(gradient))

    return before


def delayed(optimizer: Any) -> None:
    """Steps with the previous step's gradients."""
    kept = optimizer.__dict__.setdefault("kept gradients", {})
    for parameter in _parameters(optimizer):
        gradient = _local(parameter.grad)
        newest = gradient.clone()
        gradient.copy_(kept.get(parameter, newest))
        kept[parameter] = newest


def clipped(optimizer: Any) -> None:
    import torch

    torch.nn.utils.clip_grad_norm_(_parameters(optimizer), 1.0)


def without_smallest(gradient: Any) -> Any:
    """Drops the smallest tenth of a gradient's elements, like top-k compression."""
    least = gradient.abs().flatten().float().kthvalue(max(1, gradient.numel() // 10)).values
    return gradient * (gradient.abs() > least)


def states(change: Callable[[Any], Any], *names: str) -> Change:
    """Changes optimizer states after each step."""

    def after(optimizer: Any) -> None:
        for state in optimizer.state.values():
            for name in names or ("exp_avg", "exp_avg_sq", "momentum_buffer"):
                if name in state:
                    tensor = _local(state[name])
                    tensor.copy_(change(tensor))

    return after


def in_eight_bits(tensor: Any) -> Any:
    """Rounds each block of 256 numbers to 8 bits, linear up to its largest root."""
    import torch

    flat = torch.nn.functional.pad(tensor.flatten(), (0, -tensor.numel() % 256)).view(-1, 256)
    scale = flat.abs().amax(1, keepdim=True).clamp_min(1e-30)
    roots = (flat / scale).abs().sqrt().mul(127).round().div(127)
    return (roots**2 * flat.sign() * scale).flatten()[: tensor.numel()].view_as(tensor)


def one_step_ahead(optimizer: Any) -> None:
    """Counts one step too many in bias corrections."""
    for state in optimizer.state.values():
        if "step" in state and int(state["step"]) == 1:
            state["step"] += 1


def rounded_weights(optimizer: Any) -> None:
    """Loses the fp32 master weights."""
    for parameter in _parameters(optimizer):
        weights = _local(parameter)
        weights.copy_(weights.bfloat16())


def _vector(parameter: Any) -> bool:
    return parameter.ndim == 1


def _expert(parameter: Any) -> bool:
    return parameter.ndim == 3


def _smallest_matrix(parameter: Any) -> bool:
    """Whether it is a router: a matrix with one row for each of at most 16 experts."""
    return parameter.ndim == 2 and len(parameter) <= 16


BEFORE: dict[str, Change] = {
    "no_decay": setting("weight_decay", lambda right: 0.0),
    "half_decay": setting("weight_decay", lambda right: right / 2),
    "double_decay": setting("weight_decay", lambda right: right * 2),
    "other_beta1": setting("betas", lambda right: (0.88, right[1])),
    "other_beta2": setting("betas", lambda right: (right[0], 0.97)),
    "default_betas": setting("betas", lambda right: (0.9, 0.999)),
    "other_epsilon": setting("eps", lambda right: 1e-8),
    "rate_3_percent_off": rate(1.03),
    "rate_1_percent_off": rate(1.01),
    "no_nesterov": setting("nesterov", lambda right: False, "Muon"),
    "other_momentum": setting("momentum", lambda right: 0.9),
    "momentum_1_percent_off": setting("momentum", lambda right: 0.94, "Muon"),
    "no_decay_by_muon": setting("weight_decay", lambda right: 0.0, "Muon"),
    "fewer_iterations": setting("ns_steps", lambda right: 4, "Muon"),
    "unadjusted_rate": setting("adjust_lr_fn", lambda right: "original", "Muon"),
    "gradients_4_percent_large": gradients(lambda g: 1.04 * g),
    "gradients_summed": gradients(lambda g: 2.0 * g),
    "gradients_in_bf16": gradients(lambda g: g.bfloat16()),
    "smallest_dropped": gradients(without_smallest),
    "vectors_frozen": gradients(lambda g: 0.0 * g, _vector),
    "expert_gradients_halved": gradients(lambda g: 0.5 * g, _expert),
    "router_frozen": gradients(lambda g: 0.0 * g, _smallest_matrix),
    "router_gradients_doubled": gradients(lambda g: 2.0 * g, _smallest_matrix),
    "delayed": delayed,
    "clipped": clipped,
}
AFTER: dict[str, Change] = {
    "moments_in_bf16": states(lambda state: state.bfloat16()),
    "first_moment_in_fp16": states(lambda state: state.half(), "exp_avg", "momentum_buffer"),
    "moments_in_8_bits": states(in_eight_bits),
    "one_step_ahead": one_step_ahead,
    "rounded_weights": rounded_weights,
}


def _batch_norm(**settings: Any) -> Callable[[str, Any], None]:
    def change(name: str, module: Any) -> None:
        if hasattr(module, "running_mean"):
            for key, value in settings.items():
                setattr(module, key, value)

    return change


def _attribute(key: str, factor: float) -> Callable[[str, Any], None]:
    def change(name: str, module: Any) -> None:
        if isinstance(value := getattr(module, key, None), float):
            setattr(module, key, factor * value)

    return change


MODELS: dict[str, Callable[[str, Any], None]] = {
    "statistics_twice_as_fast": _batch_norm(momentum=0.2),
    "statistics_frozen": _batch_norm(momentum=0.0),
    "batch_norm_epsilon": _batch_norm(eps=1e-3),
    "norm_epsilon": _attribute("variance_epsilon", 100.0),
    "attention_scale": _attribute("scaling", 1.05),
}


def _of_tied_twice(job: Job) -> Callable[[float], Any]:
    """Clips by a norm that counts the embedding twice, as if it were tied."""

    def clip(most: float) -> Any:
        import torch

        assert job.train_state is not None
        parameters = [p for p in job.train_state.model.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in (*parameters, parameters[0])])
        torch.nn.utils.clip_grads_with_norm_(parameters, most, norm)
        return norm

    return clip


def _too_large(job: Job) -> Callable[[float], Any]:
    """Clips by a norm that is 1.5% too large, and reports it."""

    def clip(most: float) -> Any:
        import torch

        assert job.train_state is not None
        parameters = [p for p in job.train_state.model.parameters() if p.grad is not None]
        norm = 1.015 * torch.nn.utils.get_total_norm([p.grad for p in parameters])
        torch.nn.utils.clip_grads_with_norm_(parameters, most, norm)
        return norm

    return clip


CLIPS = {"embedding_counted_twice": _of_tied_twice, "norm_1_5_percent_large": _too_large}


class AdamwInDouble(Ddp):
    """DDP with a right AdamW that computes each step in double precision."""

    def setup(self, job: Job) -> TrainStep:
        import torch

        inner_class = torch.optim.AdamW

        class Double(inner_class):  # type: ignore[misc, valid-type]
            def step(self, closure: Any = None) -> Any:
                for group in self.param_groups:
                    doubles = {p: p.detach().double() for p in group["params"]}
                    inner = inner_class([{**group, "params": [*doubles.values()]}])
                    for parameter, double in doubles.items():
                        double.grad = parameter.grad.double()
                        state = self.state[parameter]
                        inner.state[double] = {
                            name: value if name == "step" else value.double()
                            for name, value in state.items()
                        }
                    inner.step()
                    for parameter, double in doubles.items():
                        parameter.detach().copy_(double)
                        self.state[parameter] = {
                            name: value if name == "step" else value.float()
                            for name, value in inner.state[double].items()
                        }

        torch.optim.AdamW = Double  # type: ignore[misc]
        return super().setup(job)
