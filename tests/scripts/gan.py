"""Trains a generator and a discriminator in turn, in the manner of PyTorch's DCGAN example."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=2000)
parser.add_argument("--fail-at", type=int, default=-1)
args = parser.parse_args()

dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
generator = DistributedDataParallel(
    nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2)), broadcast_buffers=False
)
discriminator = DistributedDataParallel(
    nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(), nn.Linear(64, 1)), broadcast_buffers=False
)
of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
of_generator = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
criterion = nn.BCEWithLogitsLoss()
real, fake = torch.ones(32, 1), torch.zeros(32, 1)

for step in range(args.steps):
    if step == args.fail_at:
        raise ValueError("the data has ended\nwhich nobody expected")
    of_discriminator.zero_grad()
    criterion(discriminator(torch.randn(32, 2) + 3), real).backward()
    made = generator(torch.randn(32, 8))
    criterion(discriminator(made.detach()), fake).backward()
    of_discriminator.step()

    of_generator.zero_grad()
    criterion(discriminator(made), real).backward()
    of_generator.step()
