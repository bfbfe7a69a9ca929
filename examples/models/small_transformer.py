"""A small transformer in plain torch, as `opforge model` wants one: model() and inputs(), and loss(output) for --train."""

import torch
from torch import nn
from torch.nn import functional

WORDS, WIDTH, HEADS, LAYERS, LENGTH = 97, 32, 4, 2, 12


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.after = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, 4 * WIDTH)
        self.narrow = nn.Linear(4 * WIDTH, WIDTH)

    def attend(self, x):
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        scores = torch.softmax((q @ k.transpose(-2, -1)) * (WIDTH // HEADS) ** -0.5, -1)
        return self.out((scores @ v).transpose(1, 2).reshape(batch, length, WIDTH))

    def forward(self, x):
        x = x + self.attend(self.before(x))
        return x + self.narrow(functional.gelu(self.wide(self.after(x))))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.pooled = nn.Linear(WIDTH, WIDTH)

    def forward(self, words):
        x = self.words(words) + self.places
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return {"logits": self.head(x), "pooled": torch.tanh(self.pooled(x[:, 0]))}


def model():
    return Transformer()


def inputs():
    return (torch.randint(0, WORDS, (2, LENGTH)),)


def loss(output):
    targets = torch.arange(2 * LENGTH) % WORDS
    logits = output["logits"].flatten(0, 1)
    return functional.cross_entropy(logits, targets.to(logits.device)) + output["pooled"].square().mean()
