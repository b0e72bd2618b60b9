"""Trains a small GPT on characters with DistributedDataParallel, in the manner of minGPT-ddp."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

TEXT = "To be, or not to be, that is the question. " * 200


class Characters(Dataset):
    def __init__(self, block_size):
        letters = sorted(set(TEXT))
        self.vocab_size, self.block_size = len(letters), block_size
        self.data = torch.tensor([letters.index(letter) for letter in TEXT])

    def __len__(self):
        return len(self.data) - self.block_size

    def __getitem__(self, at):
        piece = self.data[at : at + self.block_size + 1]
        return piece[:-1], piece[1:]


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        q, k, v = (
            part.unflatten(2, (4, -1)).transpose(1, 2) for part in self.qkv(self.ln1(x)).chunk(3, 2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, vocab_size, block_size, width, layers):
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Parameter(torch.zeros(1, block_size, width))
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.head = nn.Linear(width, vocab_size)

    def forward(self, ids, targets):
        logits = self.head(self.blocks(self.tokens(ids) + self.positions[:, : ids.shape[1]]))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    args = parser.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device(
        f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
    )
    torch.manual_seed(1337)
    dataset = Characters(block_size=32)
    model = GPT(dataset.vocab_size, 32, 64, args.layers).to(device)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, args.batch_size, sampler=sampler, num_workers=0)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for step, (ids, targets) in enumerate(loader):
            _, loss = model(ids.to(device), targets.to(device))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if step % 100 == 0 and dist.get_rank() == 0:
                print(f"epoch {epoch} step {step}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
