"""Imported once, in the fork server only: what every rank needs, so that a rank starts with it."""

from __future__ import annotations

import gc
import os

import torch
import torch.distributed.tensor.parallel  # noqa: F401
import transformers
from transformers import BertForSequenceClassification, GPT2LMHeadModel, LlamaForCausalLM, ResNetForImageClassification  # noqa: F401

import harness.worker

transformers.utils.logging.set_verbosity_error()
harness.worker.die_with_parent()
if os.getppid() != int(os.environ.pop(harness.worker.LAUNCHER)):  # it died while this was importing
    os._exit(1)
harness.worker.adopt_orphans()

# What the libraries made is not garbage: without this every collection in a rank walks, and copies, a million objects.
gc.collect()
gc.freeze()
