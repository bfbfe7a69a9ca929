"""A small training loop of plain torch, to be recorded: `opforge trace examples/traces/train.py`."""

import torch
from torch import nn

WORDS, SIZE, BATCH, LENGTH = 500, 64, 8, 32


def main() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(SIZE, nhead=4, dim_feedforward=4 * SIZE, batch_first=True)
    model = nn.Sequential(nn.Embedding(WORDS, SIZE), layer, nn.Linear(SIZE, WORDS))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        tokens = torch.randint(WORDS, (BATCH, LENGTH + 1))
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


if __name__ == "__main__":
    main()
