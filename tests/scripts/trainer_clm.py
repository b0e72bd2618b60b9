"""Trains a small GPT-2 with transformers' Trainer, in the manner of its run_clm.py."""

import sys
import tempfile

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments


class Blocks(Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(0, 300, (4096, 32), generator=generator)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, at):
        return {"input_ids": self.ids[at], "labels": self.ids[at]}


def main():
    defaults = ["--output_dir", tempfile.mkdtemp(), "--report_to", "none", "--save_strategy", "no"]
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(
        [*defaults, *sys.argv[1:]]
    )
    config = GPT2Config(vocab_size=300, n_positions=32, n_embd=64, n_layer=2, n_head=4)
    trainer = Trainer(GPT2LMHeadModel(config), args, train_dataset=Blocks())
    trainer.train()


if __name__ == "__main__":
    main()
