"""Fine-tunes a small BERT to compare sentences, in the manner of Accelerate's nlp_example.py."""

import argparse

import torch
from accelerate import Accelerator
from torch.optim import AdamW
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup


def get_dataloader(batch_size):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 200, (4096, 32), generator=generator)
    return DataLoader(TensorDataset(ids, ids[:, 0] % 2), batch_size, shuffle=True)


def training_function(args):
    accelerator = Accelerator(gradient_accumulation_steps=args.gradient_accumulation_steps)
    torch.manual_seed(42)
    loader = get_dataloader(args.batch_size)
    config = BertConfig(
        vocab_size=200,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=32,
    )
    model = BertForSequenceClassification(config)
    optimizer = AdamW(params=model.parameters(), lr=2e-5)
    scheduler = get_linear_schedule_with_warmup(optimizer, 100, len(loader) * args.epochs)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for epoch in range(args.epochs):
        model.train()
        for ids, labels in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=ids, labels=labels).loss
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: loss {loss.item():.4f}")


def main():
    parser = argparse.ArgumentParser(description="Simple example of training script.")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=20)
    training_function(parser.parse_args())


if __name__ == "__main__":
    main()
