"""Suffixes that turn a workload into a variant: `llama-mini+nf4+lora`."""

from __future__ import annotations

STORAGES = {
    "bf16": "weights, gradients and optimizer state in bf16",
    "fp16": "weights, gradients and optimizer state in fp16",
    "float8": "products of attention and MLP matrices in float8, weights in fp32",
    "int8": "frozen 8-bit matrices, with an adapter",
    "nf4": "frozen 4-bit matrices, with an adapter",
}
"""Storage of the weights, or arithmetic with them."""
ADAPTERS = {
    "lora": "rank 8 on every attention and MLP matrix",
    "prompt": "prompt tuning, 16 virtual tokens",
    "p_tuning": "16 virtual tokens from an MLP",
    "p_tuning_lstm": "16 virtual tokens from an LSTM",
    "prefix": "prefix tuning, 16 virtual tokens before each block's keys and values",
    "ia3": "scales of keys, values and MLP activations",
}
"""Parameters trained instead of the model's own weights."""
SUFFIXES = {**STORAGES, **ADAPTERS}
FLOAT8 = "float8"
QUANTISED = ("int8", "nf4")
HALF = ("bf16", "fp16")
