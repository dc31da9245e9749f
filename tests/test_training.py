"""A small model with KDA layers learns to recall; without them it can't."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flashkda.nn import KimiDeltaAttention

NUM_KEYS = NUM_VALUES = 16
NUM_PAIRS = 8
WIDTH = 64


def recall_batch(batch: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Multi-query associative recall.

    Tokens [B, 3 * NUM_PAIRS] are key value key value ... and then every key again, in another
    order. Targets [B, NUM_PAIRS] are the values that belong to the keys of that last part.
    """

    def distinct(count: int) -> Tensor:
        return torch.rand(batch, count, generator=generator).argsort(dim=1)[:, :NUM_PAIRS]

    keys = distinct(NUM_KEYS)
    values = torch.randint(NUM_VALUES, (batch, NUM_PAIRS), generator=generator)
    order = distinct(NUM_PAIRS)
    pairs = torch.stack([keys, NUM_KEYS + values], dim=2).flatten(1)
    return torch.cat([pairs, keys.gather(1, order)], dim=1), values.gather(1, order)


class Block(nn.Module):
    def __init__(self, kda_weight: float) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.kda = KimiDeltaAttention(WIDTH, head_dim=32, num_heads=2)
        self.kda_weight = kda_weight

    def forward(self, x: Tensor) -> Tensor:
        return x + self.kda_weight * self.kda(self.norm(x))[0]


class Model(nn.Module):
    """Embedding, two blocks, head. With `kda_weight=0` the tokens don't see each other."""

    def __init__(self, kda_weight: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_KEYS + NUM_VALUES, WIDTH)
        self.blocks = nn.Sequential(Block(kda_weight), Block(kda_weight))
        self.head = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, NUM_VALUES))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(tokens)))[:, 2 * NUM_PAIRS :]


def train_and_score(kda_weight: float, steps: int) -> float:
    """Share of queries answered correctly, on sequences not seen in training."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = Model(kda_weight)
    optimiser = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, max_lr=4e-3, total_steps=steps)
    for _ in range(steps):
        tokens, targets = recall_batch(32, generator)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
    tokens, targets = recall_batch(512, torch.Generator().manual_seed(2))
    with torch.no_grad():
        return float((model(tokens).argmax(-1) == targets).double().mean())


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """The work of a step is too small to share; beside other processes sharing it is ruinous."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.timeout(180)
def test_a_two_layer_model_learns_associative_recall() -> None:
    assert train_and_score(kda_weight=1.0, steps=160) >= 0.95


@pytest.mark.timeout(180)
def test_the_same_model_without_kda_does_not() -> None:
    assert train_and_score(kda_weight=0.0, steps=160) < 0.3
