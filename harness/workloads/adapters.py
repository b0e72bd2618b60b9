"""Adapters by peft for frozen models."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.workloads.quantisation import quiet

if TYPE_CHECKING:
    from peft import PeftConfig
    from torch import nn
    from transformers import PreTrainedModel

RANK = 8
VIRTUAL_TOKENS = 16
PROMPTS = ("prompt", "p_tuning", "p_tuning_lstm")
"""Adapters that prepend virtual tokens, which add positions to the logits."""


def adapt(model: PreTrainedModel, adapter: str) -> nn.Module:
    """Freezes all parameters; returns the model with a trainable adapter."""
    with quiet():
        import peft

        adapted: nn.Module = peft.get_peft_model(model, _config(model, adapter))
    return adapted


def _config(model: PreTrainedModel, adapter: str) -> PeftConfig:
    import peft
    from transformers.pytorch_utils import Conv1D

    task = "CAUSAL_LM"
    transposed = any(isinstance(module, Conv1D) for module in model.modules())
    if adapter == "lora":
        return peft.LoraConfig(
            task_type=task,
            r=RANK,
            lora_alpha=2 * RANK,
            lora_dropout=0.0,
            target_modules="all-linear",
            fan_in_fan_out=transposed,
        )
    if adapter == "ia3":
        return peft.IA3Config(task_type=task, fan_in_fan_out=transposed)
    if adapter == "prompt":
        return peft.PromptTuningConfig(task_type=task, num_virtual_tokens=VIRTUAL_TOKENS)
    if adapter == "prefix":
        return peft.PrefixTuningConfig(task_type=task, num_virtual_tokens=VIRTUAL_TOKENS)
    return peft.PromptEncoderConfig(
        task_type=task,
        num_virtual_tokens=VIRTUAL_TOKENS,
        encoder_reparameterization_type="LSTM" if adapter == "p_tuning_lstm" else "MLP",
        encoder_dropout=0.0,
    )
