"""transformers' Trainer without one of the strategy's precautions, or with a failing callback."""

import types
from typing import Any, ClassVar, Literal

from harness.seam import Batch, Job, TrainStep, Workload
from harness.strategies.trainer import TransformersTrainer

ARGUMENTS = {
    "clipping": "max_grad_norm",
    "shuffling": "train_sampling_strategy",
    "falling_rate": "lr_scheduler_type",
    "unused_parameters": "ddp_find_unused_parameters",
    "no_cpu": "use_cpu",
}
FLAGS = (
    "find_unused_parameters",
    "static_graph",
    "broadcast_buffers",
    "gradient_as_bucket_view",
    "bucket_bytes_cap",
)
KEPT: list[Any] = []  # destroying a DDP in a rank may hang


class TrainerTraps(TransformersTrainer):
    """Trainer with one mistake."""

    trap: Literal[
        "none",
        "clipping",
        "shuffling",
        "falling_rate",
        "unused_parameters",
        "no_cpu",
        "deepspeed_clipping",
        "fsdp_on_cpu",
        "own_optimizer",
        "own_optimizer_without_exemption",
        "shifted_twice",
        "all_labels",
        "first_label_masked",
        "count_is_ignored",
        "balance_as_it_is",
        "raises",
        "ends",
    ] = "none"
    """The omitted precaution or planted mistake."""
    _former: ClassVar[dict[str, Any]] = {}

    def arguments(self, job: Job, *model_and_engine: Any) -> Any:
        arguments: Any = self._former["arguments"](job, *model_and_engine)
        if self.trap in ARGUMENTS:
            del arguments[ARGUMENTS[self.trap]]
        if self.trap == "deepspeed_clipping":
            del arguments["deepspeed"]["gradient_clipping"]
        if self.trap.startswith("own_optimizer"):
            _, given = job.optimizer_class()
            rate = {"learning_rate": given["lr"], "weight_decay": given["weight_decay"]}
            adam = {
                "adam_beta1": given["betas"][0],
                "adam_beta2": given["betas"][1],
                "adam_epsilon": given["eps"],
            }
            arguments |= {"optim": "adamw_torch", **rate, **adam}
        return arguments

    def make_trainer(self, stepped: Any, engine: Any) -> Any:
        from transformers import Trainer, TrainerCallback

        class Callback(TrainerCallback):
            def on_step_end(_, args: Any, state: Any, control: Any, **__: Any) -> None:
                if state.global_step == 3 and self.trap == "raises" and stepped.job.rank == 1:
                    raise ValueError("the planted mistake")
                if state.global_step == 3 and self.trap == "ends":
                    control.should_training_stop = True

        trainer = self._former["make_trainer"](stepped, engine)
        trainer.add_callback(Callback)
        if self.trap.startswith("own_optimizer"):
            trainer.create_optimizer = types.MethodType(Trainer.create_optimizer, trainer)
        if self.trap == "own_optimizer_without_exemption":
            trainer.get_decay_parameter_names = lambda model: [
                name for name, _ in model.named_parameters()
            ]
        return trainer

    def setup(self, job: Job) -> TrainStep:
        from torch.nn.parallel import DistributedDataParallel

        from harness.strategies import _trainer

        names = ("arguments", "make_trainer", "counts_labels", "named_inputs", "scale_balance")
        for name in names:
            self._former[name] = getattr(_trainer, name)
            setattr(_trainer, name, getattr(self, name))
        if self.trap == "fsdp_on_cpu":
            _trainer.pretend_gpus = lambda: None
        step = super().setup(job)
        wrapped: Any = job.train_state and job.train_state.model
        if isinstance(wrapped, DistributedDataParallel):
            KEPT.append(plain := DistributedDataParallel(job.model()))
            for flag in FLAGS:
                if getattr(wrapped, flag) != getattr(plain, flag):
                    raise RuntimeError(
                        f"DDP's {flag} is {getattr(wrapped, flag)}, the plain script's is"
                        f" {getattr(plain, flag)}"
                    )
        return step

    def scale_balance(self, job: Job, model: Any) -> None:
        if self.trap != "balance_as_it_is":
            self._former["scale_balance"](job, model)

    def counts_labels(self, workload: Workload) -> bool:
        return self.trap == "count_is_ignored" or self._former["counts_labels"](workload)

    def named_inputs(self, workload: Workload, model: Any, part: Batch) -> dict[str, Any]:
        import torch

        named = self._former["named_inputs"](workload, model, part)
        if self.trap == "shifted_twice":
            del named["shift_labels"]
        # One more token, so that the model's own shift keeps all labels.
        if self.trap in ("all_labels", "first_label_masked"):
            tokens = torch.cat([part.inputs, part.labels[:, -1:]], dim=1)
            labels = tokens.clone()
            if self.trap == "first_label_masked":
                labels[:, 0] = -100
            return {"input_ids": tokens, "labels": labels}
        return named
