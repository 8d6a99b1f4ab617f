"""A transformer for texts: a record is a row of tokens, as whole numbers.

Vaswani and others, "Attention is all you need", NeurIPS 2017, section 3: an encoder, with learned
places, and with the norm before each step as in Xiong and others, "On layer normalization in the
transformer architecture", ICML 2020. Its features are the mean over the tokens of a text.

Token 0 fills up texts that are shorter than others: no token attends to it, and it is in no mean.
Layers are called one by one, so that each can have an adapter (lora.py), and ``vmap`` can run them.
"""

from collections import OrderedDict
from math import sqrt
from typing import Annotated

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from ....files.documents import Strict
from .residual import Few, Share, Width, dropped


class TextTransformerOptions(Strict):
    """Further arguments of ``text_transformer``."""

    # Records are float32, in which whole numbers up to 2^24 are exact.
    tokens: Annotated[int, Field(strict=True, ge=2, le=2**24)] = 256
    """Size of the vocabulary: tokens are 0 to tokens - 1, and 0 is no token."""
    width: Width = 64
    heads: Few = 4
    blocks: Few = 2
    hidden: Width = 128
    dropout: Share = 0.0

    @model_validator(mode="after")
    def _divides(self) -> "TextTransformerOptions":
        if self.width % self.heads:
            raise ValueError(
                f"width = {self.width} does not divide by heads = {self.heads}; choose a multiple"
            )
        return self


def text_transformer(
    shape: tuple[int],
    classes: int,
    _: str,
    *,
    tokens: int = 256,
    width: int = 64,
    heads: int = 4,
    blocks: int = 2,
    hidden: int = 128,
    dropout: float = 0.0,
) -> dict[str, nn.Module]:
    """An encoder of texts [B, length], with ``width`` features, and a linear classifier."""
    extractor = TextEncoder(tokens, shape[0], width, dropout)
    for number in range(1, blocks + 1):
        extractor.blocks.add_module(f"{number}", TextBlock(width, heads, hidden, dropout))
    return {"extractor": extractor, "classifier": nn.Linear(width, classes)}


class TextEncoder(nn.Module):
    """Tokens [B, length], kept as float32, to features [B, width]."""

    def __init__(self, tokens: int, length: int, width: int, dropout: float) -> None:
        super().__init__()
        self.tokens = tokens
        self.token, self.place = _table(tokens, width), _table(length, width)
        self.drop = dropped(dropout)
        self.blocks = nn.Sequential(OrderedDict())
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Features of texts; a number that is no token counts as the nearest one."""
        # A record that could not be read is NaN (data/dataset.py).
        tokens = x.nan_to_num().clamp(0, self.tokens - 1).long()
        there = tokens > 0  # [B, length]
        states = self.drop(self.token(tokens) + self.place.weight)
        for block in self.blocks:
            states = block(states, there)
        own = self.norm(states) * there[..., None]
        # A text of no tokens has the features 0.
        return own.sum(-2) / there.sum(-1, keepdim=True).clamp(min=1)  # type: ignore[no-any-return]


def _table(rows: int, width: int) -> nn.Embedding:
    # Its constructor would draw values, for which torch imports its compiler on device "meta": two
    # seconds in each process. They come from ``initialise`` (build.py).
    return nn.Embedding(rows, width, _weight=torch.empty(rows, width))


class TextBlock(nn.Module):
    """Attention between the tokens of a text, and a step of each token on its own."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.drop1, self.drop2 = dropped(dropout), dropped(dropout)
        self.relu = nn.ReLU()

    def forward(self, states: Tensor, there: Tensor) -> Tensor:
        """States [B, length, width]; ``there`` [B, length] says where tokens are."""
        states = states + self.drop1(self._attended(self.norm1(states), there))
        stepped: Tensor = self.fc2(self.relu(self.fc1(self.norm2(states))))
        return states + self.drop2(stepped)  # type: ignore[no-any-return]

    def _attended(self, states: Tensor, there: Tensor) -> Tensor:
        query, key, value = (
            layer(states).unflatten(-1, (self.heads, -1)).transpose(-2, -3)
            for layer in (self.query, self.key, self.value)
        )  # [B, heads, length, width / heads]
        scores = query @ key.mT / sqrt(query.shape[-1])
        # Not -inf: a text of no tokens would become NaN.
        scores = scores.masked_fill(~there[..., None, None, :], torch.finfo(scores.dtype).min)
        mixed = scores.softmax(-1) @ value
        return self.out(mixed.transpose(-2, -3).flatten(-2))  # type: ignore[no-any-return]
