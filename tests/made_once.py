"""Models whose forward makes a table in its first call and keeps it, in the ways in which people write that."""

from __future__ import annotations

import random
import types
from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["KEEPING", "REFUSED", "batch_of"]

ROWS, VOCABULARY, WIDTH = 4, 16, 8


def batch_of(length: int, seed: int) -> dict[str, Tensor]:
    """Four rows of tokens of a length, with their labels."""
    generator = torch.Generator().manual_seed(seed)
    made = torch.randint(0, VOCABULARY, (2, ROWS, length), generator=generator)
    return {"tokens": made[0], "labels": made[1]}


def _table(n: int) -> Tensor:
    """Values that depend on the length with which they are made, so that a table of another one is seen."""
    return torch.arange(n * n).view(n, n).float() / n


class Attention(nn.Module):
    """One attention, to which what :meth:`added` gives is added."""

    table: Any
    all: Any
    inverse: Any
    count: Any
    mean: Any
    last: Any
    cos: Any
    sin: Any

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.prepare()

    def prepare(self) -> None:
        """Set the attributes of its first call."""
        self.table = None

    def added(self, n: int, x: Tensor) -> Any:
        """A table of n rows and columns."""
        raise NotImplementedError

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        scores = self.inner(x) @ x.transpose(1, 2) + self.added(tokens.shape[1], x)
        return functional.cross_entropy(self.head(scores.softmax(-1) @ x).flatten(0, 1), labels.flatten())


class Grown(Attention):
    def added(self, n: int, x: Tensor) -> Any:
        if self.table is None or self.table.size(0) < n:
            self.table = _table(n)
        return self.table[:n, :n]


class OfOneLength(Attention):
    def added(self, n: int, x: Tensor) -> Any:
        if self.table is None or self.table.size(0) != n:
            self.table = torch.triu(x.new_full((n, n), -1e9), 1)
        return self.table


class Absent(Attention):
    def prepare(self) -> None:
        pass

    def added(self, n: int, x: Tensor) -> Any:
        if not hasattr(self, "kept"):
            self.kept = _table(16)
        return self.kept[:n, :n]


class Buffer(Attention):
    def prepare(self) -> None:
        self.register_buffer("table", None, persistent=False)

    def added(self, n: int, x: Tensor) -> Any:
        if self.table is None or self.table.size(0) < n:
            self.table = _table(n)
        return self.table[:n, :n]


class RegisteredBuffer(Attention):
    def prepare(self) -> None:
        pass

    def added(self, n: int, x: Tensor) -> Any:
        if not hasattr(self, "table") or self.table.size(0) < n:
            self.register_buffer("table", _table(n), persistent=False)
        return self.table[:n, :n]


class ByLength(Attention):
    def prepare(self) -> None:
        self.tables: dict[Any, Any] = {}

    def added(self, n: int, x: Tensor) -> Any:
        key = n, x.dtype, x.device
        if key not in self.tables:
            with torch.no_grad():
                made = torch.zeros(n, n, device=x.device)
                made[:, 0] = 1
                made.masked_fill_(torch.ones(n, n).triu(1).bool(), -1e9)
            self.tables[key] = made, n
        return self.tables[key][0] * self.tables[key][1]


class Ordered(Attention):
    def prepare(self) -> None:
        self.tables: OrderedDict[int, Tensor] = OrderedDict()

    def added(self, n: int, x: Tensor) -> Any:
        if n not in self.tables:
            self.tables[n] = _table(n)
        return self.tables[n]


class Listed(Attention):
    def prepare(self) -> None:
        self.tables: list[Tensor] = []

    def added(self, n: int, x: Tensor) -> Any:
        if not self.tables:
            self.tables.append(_table(16))
        return self.tables[0][:n, :n]


class Rotary(Attention):
    def prepare(self) -> None:
        self.register_buffer("inverse", 100.0 ** -(torch.arange(0, WIDTH, 2) / WIDTH), persistent=False)
        self.longest, self.cos, self.sin = 0, None, None

    def added(self, n: int, x: Tensor) -> Any:
        if n > self.longest:
            angles = torch.outer(torch.arange(n, device=self.inverse.device, dtype=self.inverse.dtype), self.inverse)
            self.longest, self.cos, self.sin = n, angles.cos(), angles.sin()
        return self.cos[:n] @ self.sin[:n].T


class Flagged(Attention):
    def prepare(self) -> None:
        self.is_made = False

    def added(self, n: int, x: Tensor) -> Any:
        if not self.is_made:
            self.is_made, self.table, self.factor = True, torch.eye(16), 3
        return self.table[:n, :n] * self.factor


class Moved(Attention):
    """The mask of fairseq's decoder."""

    def prepare(self) -> None:
        self.table = torch.empty(0)

    def added(self, n: int, x: Tensor) -> Any:
        if self.table.size(0) == 0 or self.table.device != x.device or self.table.size(0) < n:
            self.table = torch.triu(torch.zeros(n, n).fill_(-1e9), 1)
        self.table = self.table.to(x)
        return self.table[:n, :n]


class LikeInput(Attention):
    def added(self, n: int, x: Tensor) -> Any:
        if self.table is None or self.table.size(0) != n:
            self.table = torch.ones_like(x[0, :, :1]).expand(n, n).tril().log().clamp(min=-1e9)
        return self.table


class FromNumpy(Attention):
    def added(self, n: int, x: Tensor) -> Any:
        if self.table is None:
            self.table = torch.from_numpy(np.tril(np.ones((16, 16), dtype=np.float32)))
        return self.table[:n, :n]


class View(Attention):
    """Two tensors of one memory, of which one is written."""

    def added(self, n: int, x: Tensor) -> Any:
        if self.table is None:
            self.table = torch.zeros(16, 16)
            self.rows = self.table[:4]
            self.rows.fill_(2)
        return self.table[:n, :n] + self.rows.sum()


class Inside(Attention):
    """A module in the module has it, as tables of positions are."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table: Tensor | None = None

        def forward(self, n: int) -> Tensor:
            if self.table is None or n > self.table.size(0):
                self.table = _table(n).sin()
            return self.table[:n, :n].detach()

    def prepare(self) -> None:
        self.positions = self.Positions()

    def added(self, n: int, x: Tensor) -> Any:
        return self.positions(n)


class WithLast(Attention):
    """Beside the table it keeps what it computed last, for the script."""

    def prepare(self) -> None:
        self.table = self.last = None
        self.register_buffer("mean", None)

    def added(self, n: int, x: Tensor) -> Any:
        if self.table is None:
            self.table = _table(16)
        self.last, self.mean = x.detach().sum(), x.detach().mean()
        return self.table[:n, :n]


class InObject(Attention):
    def prepare(self) -> None:
        self.kept = types.SimpleNamespace(table=None)

    def added(self, n: int, x: Tensor) -> Any:
        if self.kept.table is None or self.kept.table.size(0) < n:
            self.kept.table = _table(n)
        return self.kept.table[:n, :n]


class Shared(Attention):
    """An object and a dict that several modules have, of which one fills them, and says the length of each batch."""

    class Reader(nn.Module):
        def __init__(self, kept: Any, tables: dict[Any, Any], *, fills: bool) -> None:
            super().__init__()
            self.kept, self.tables, self.fills = kept, tables, fills

        def forward(self, n: int) -> Tensor:
            if self.fills:
                self.kept.length = self.tables["length"] = n
                if self.kept.table is None or self.kept.table.size(0) < n:
                    self.kept.table = _table(n)
                if n not in self.tables:
                    self.tables[n] = _table(n).cos()
            return self.kept.table[:n, :n] * self.kept.length + self.tables[n] / self.tables["length"]

    def prepare(self) -> None:
        kept, tables = types.SimpleNamespace(table=None, length=0), dict[Any, Any]()
        self.first, self.second = (self.Reader(kept, tables, fills=fills) for fills in (True, False))

    def added(self, n: int, x: Tensor) -> Any:
        return self.first(n) - self.second(n).square()


class HandedDown(Attention):
    """The module makes a table for those in it, again for each length."""

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table: Any = None

        def forward(self) -> Any:
            return self.table

    def prepare(self) -> None:
        self.readers = nn.ModuleList(self.Reader() for _ in range(2))

    def added(self, n: int, x: Tensor) -> Any:
        first: Any = self.readers[0]
        if first.table is None or first.table.size(0) != n:
            made = _table(n)
            for reader in self.readers:
                reader.table = made
        return self.readers[0]() + self.readers[1]().square()


KEEPING = (
    Grown, OfOneLength, Absent, Buffer, RegisteredBuffer, ByLength, Ordered, Listed, Rotary, Flagged, Moved, LikeInput,
    FromNumpy, View, Inside, WithLast, InObject, Shared,
    HandedDown,
)  # fmt: skip
"""Models that are captured as they are in later calls."""


class OfBatch(Attention):
    def added(self, n: int, x: Tensor) -> Any:
        if self.table is None:
            self.table = x.detach().std() * torch.ones(16, 16)
        return self.table[:n, :n]


class BufferOfBatch(Attention):
    """A normalization that takes its scale from the first batch."""

    def prepare(self) -> None:
        self.register_buffer("table", None)

    def added(self, n: int, x: Tensor) -> Any:
        if self.table is None:
            self.table = x.detach().std()
        return self.table * torch.ones(n, n)


class OfParameter(Attention):
    def added(self, n: int, x: Tensor) -> Any:
        if self.table is None:
            self.table = self.inner.weight.detach().repeat(2, 2).clone()
        return self.table[:n, :n]


class Drawn(Attention):
    def added(self, n: int, x: Tensor) -> Any:
        if self.table is None:
            self.table = torch.rand(16, 16)
        return self.table[:n, :n]


class OfCounter(Attention):
    """Made from a buffer that each step writes."""

    def prepare(self) -> None:
        self.register_buffer("count", torch.ones(()))
        self.table = None

    def added(self, n: int, x: Tensor) -> Any:
        self.count.add_(1)
        if self.table is None:
            self.table = torch.eye(16) * self.count
        return self.table[:n, :n]


class ViewOfBuffer(Attention):
    def prepare(self) -> None:
        self.register_buffer("all", torch.ones(16, 16))
        self.table = None

    def added(self, n: int, x: Tensor) -> Any:
        if self.table is None:
            self.table = self.all[:8, :8]
        return self.table[:n, :n]


class WithFirst(Attention):
    """Beside the table its first call does what later ones do not."""

    def prepare(self) -> None:
        self.table, self.is_first = None, True
        self.register_buffer("mean", torch.zeros(()))
        self.scale = nn.Parameter(torch.ones(()))

    def begin(self, x: Tensor) -> Any:
        """The factor of a first call."""
        return 0.1

    def added(self, n: int, x: Tensor) -> Any:
        if self.table is None:
            self.table = torch.tril(torch.ones(16, 16))
        factor: Any = 1.0
        if self.is_first:
            factor = self.begin(x)
            self.is_first = False
        return self.table[:n, :n] * factor * self.scale - self.mean


class WithBuffer(WithFirst):
    def begin(self, x: Tensor) -> Any:
        self.mean.copy_(x.detach().mean())
        return 1.0


class WithParameter(WithFirst):
    """Its scale is that of the first batch, in Glow's way."""

    def begin(self, x: Tensor) -> Any:
        self.scale.data.copy_(x.detach().std())
        return 1.0


class WithValue(WithFirst):
    def begin(self, x: Tensor) -> Any:
        self.of_first = x.detach().std()
        return 1.0


class WithDraw(WithFirst):
    def begin(self, x: Tensor) -> Any:
        self.drawn = random.random()
        return self.drawn


REFUSED = (
    OfBatch, BufferOfBatch, OfParameter, Drawn, OfCounter, ViewOfBuffer, WithFirst, WithBuffer, WithParameter,
    WithValue, WithDraw,
)  # fmt: skip
"""Models whose first call makes what no capture knows."""
