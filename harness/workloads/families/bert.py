from __future__ import annotations

from typing import TYPE_CHECKING

from harness.workloads.family import Family, ModelConfig, SplitByParts

if TYPE_CHECKING:
    from torch import Tensor, nn


class BertSplit(SplitByParts):
    blocks = "bert.encoder.layer"
    embedding = ("bert.embeddings",)
    head = ("bert.pooler", "classifier")

    def embed(self, model: nn.Module, inputs: Tensor) -> Tensor:
        hidden: Tensor = model.get_submodule("bert.embeddings")(inputs)
        return hidden

    def output(self, model: nn.Module, hidden: Tensor) -> Tensor:
        pooled = model.get_submodule("bert.pooler")(hidden)
        logits: Tensor = model.get_submodule("classifier")(pooled)
        return logits


def _without_key_bias(name: str, tensor: Tensor) -> Tensor:
    """Drops the key bias, whose gradient is zero: softmax ignores an equal shift of all scores."""
    return tensor[:0] if name.endswith("attention.self.key.bias") else tensor


def _size(
    layers: int, hidden: int, heads: int, vocabulary: int = 256, positions: int = 256
) -> ModelConfig:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden,
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
    }


FAMILY = Family(
    name="bert",
    kind="classification",
    config_class="BertConfig",
    model_class="BertForSequenceClassification",
    sizes={
        "micro": _size(4, 128, 4),
        "mini": _size(4, 256, 4),
        "slim": _size(8, 256, 8),
        "small": _size(4, 512, 8, 30522, 512),
        "base": _size(12, 768, 12, 30522, 512),
    },
    common={
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "classifier_dropout": 0.0,
        "num_labels": 10,
    },
    split=BertSplit(),
    without_zero_gradient=_without_key_bias,
)
