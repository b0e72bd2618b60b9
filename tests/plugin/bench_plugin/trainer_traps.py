"""transformers' Trainer with one of the strategy's precautions taken out, or with a callback that
goes wrong."""

import types
from typing import Any, Literal

import harness.strategies.trainer
from harness.spec.training import Batch, TrainStep
from harness.strategies.trainer import TransformersTrainer
from harness.strategy.job import Job
from harness.workloads import Workload

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
KEPT: list[Any] = []  # a DDP that is destroyed in a rank may hang


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
        "raises",
        "ends",
    ] = "none"
    """What is left out, or done in its place."""

    def arguments(self, job: Job, model: Any) -> dict[str, Any]:
        arguments = super().arguments(job, model)
        if self.trap in ARGUMENTS:
            del arguments[ARGUMENTS[self.trap]]
        if self.trap == "deepspeed_clipping":
            del arguments["deepspeed"]["gradient_clipping"]
        if self.trap.startswith("own_optimizer"):
            _, said = job.optimizer_class()
            rate = {"learning_rate": said["lr"], "weight_decay": said["weight_decay"]}
            adam = {
                "adam_beta1": said["betas"][0],
                "adam_beta2": said["betas"][1],
                "adam_epsilon": said["eps"],
            }
            arguments |= {"optim": "adamw_torch", **rate, **adam}
        return arguments

    def trainer(self, stepped: Any) -> Any:
        from transformers import Trainer, TrainerCallback

        class Callback(TrainerCallback):
            def on_step_end(_, args: Any, state: Any, control: Any, **__: Any) -> None:
                if state.global_step == 3 and self.trap == "raises" and stepped.job.rank == 1:
                    raise ValueError("the planted mistake")
                if state.global_step == 3 and self.trap == "ends":
                    control.should_training_stop = True

        if self.trap == "fsdp_on_cpu":
            harness.strategies.trainer.pretend_gpus = lambda: None
        trainer = super().trainer(stepped)
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

    def counts_labels(self, workload: Workload) -> bool:
        return self.trap == "count_is_ignored" or super().counts_labels(workload)

    def named(self, workload: Workload, model: Any, part: Batch) -> dict[str, Any]:
        import torch

        named = super().named(workload, model, part)
        if self.trap == "shifted_twice":
            del named["shift_labels"]
        if self.trap in (
            "all_labels",
            "first_label_masked",
        ):  # a token more, so that the model's own shift leaves all labels
            tokens = torch.cat([part.inputs, part.labels[:, -1:]], dim=1)
            labels = tokens.clone()
            if self.trap == "first_label_masked":
                labels[:, 0] = -100
            return {"input_ids": tokens, "labels": labels}
        return named
