"""Prices of bridges between placements, for the solver to compare: the bytes that ring algorithms send, and start-ups.

Knows placements only: which operators need a bridge is the solver's question (`whale.strategies.sharding`).
"""

from __future__ import annotations

from dataclasses import dataclass

from whale.ir.placement import Placement

__all__ = ["GLOO", "IMPOSSIBLE", "Prices", "all_reduce_price", "conversion_cost", "exchange_price", "ring_price"]

IMPOSSIBLE = 1e18
"""Price of a bridge that does not exist: of rows at experts, to and from which only operators lead, and between two
ways to cut one dim."""


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Prices of communication and computation, in units of a byte sent over a link.

    ``latency``: a collective's start-up. ``byte_touched``: a byte read or written by a kernel. ``flop``: one floating
    point operation. ``reduce_scatter``: its price as a fraction of an all-reduce of the same tensor. ``score``: a score
    of attention in a ring where no kernel fuses them: in single precision, or with a mask. The defaults are 300 GB/s
    links of 10 us beside 2 TB/s memory and 300 TFLOP/s (an A100's data sheet, rounded).
    """

    latency: float = 3e6
    byte_touched: float = 0.15
    flop: float = 1e-3
    reduce_scatter: float = 0.5
    score: float = 6.0


GLOO = Prices(latency=5e4, byte_touched=0.1, flop=1e-2, reduce_scatter=1.0, score=0.0)
"""Loopback sockets and a CPU: assumed, not measured, as 1.5 GB/s and 30 us, with no gain from reduce-scatter. A kernel
for processors takes all that a ring needs."""


def conversion_cost(a: Placement, b: Placement, nbytes: float, size: int, grad: bool, prices: Prices) -> float:
    """Price of a bridge: bytes of the value's and the gradient's conversions (ring algorithms)."""
    if a == b:
        return 0.0
    if "E" in (a.kind, b.kind) or (a.kind == b.kind == "S" and a.dim == b.dim):
        return IMPOSSIBLE
    cost = _PRIMITIVE[a.value, b.value](nbytes, size, prices)
    if grad:
        cost += _PRIMITIVE[b.gradient, a.gradient](nbytes, size, prices)
    return cost


def _free(nbytes: float, size: int, prices: Prices) -> float:
    return 0.0


def _fill(nbytes: float, size: int, prices: Prices) -> float:
    """Nothing is sent, but all ranks except one write zeros."""
    return nbytes * prices.byte_touched


def all_reduce_price(nbytes: float, size: int, prices: Prices) -> float:
    """Price of an all-reduce of *nbytes* bytes."""
    return prices.latency + 2 * nbytes * (size - 1) / size


def _all_gather(nbytes: float, size: int, prices: Prices) -> float:
    return prices.latency + nbytes * (size - 1) / size


def ring_price(nbytes: float, work: float, size: int, prices: Prices) -> float:
    """Price of keys and values, *nbytes* bytes of all ranks together, that go round a ring, and round again with their
    gradients in the backward: what *work* in the forward, in the same unit, and two and a half as much in the backward
    leave exposed."""
    moved = nbytes * (size - 1) / size
    hidden = work * (size - 1) / size
    return 3 * (size - 1) * prices.latency + max(0.0, moved - hidden) + max(0.0, 2 * moved - 2.5 * hidden)


def _reduce_scatter(nbytes: float, size: int, prices: Prices) -> float:
    return prices.latency + 2 * prices.reduce_scatter * nbytes * (size - 1) / size


def exchange_price(nbytes: float, size: int, grad: bool, prices: Prices) -> float:
    """Price of an all-to-all of *nbytes* bytes of all ranks together, and of that of the gradient."""
    return (1 + grad) * _all_to_all(nbytes, size, prices)


def _all_to_all(nbytes: float, size: int, prices: Prices) -> float:
    return prices.latency + nbytes * (size - 1) / size / size


_PRIMITIVE = {
    ("R", "R"): _free, ("R", "S"): _free, ("P", "P"): _free, ("R", "P"): _fill, ("S", "P"): _fill,
    ("S", "R"): _all_gather, ("P", "R"): all_reduce_price, ("P", "S"): _reduce_scatter, ("S", "S"): _all_to_all,
}  # fmt: skip
