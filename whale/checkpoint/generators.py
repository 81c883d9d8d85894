"""Generators of random numbers as objects with ``state_dict`` and ``load_state_dict``: those that a script has made,
and those of a process, from which loaders and augmentations draw. It knows generators; no files and no models."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

__all__ = ["GeneratorState", "of_process", "state_of_generator"]


@dataclass(frozen=True)
class GeneratorState:
    """The state of generators, by name.

    Attributes:
        read: returns the state.
        write: sets one.
    """

    read: Callable[[], dict[str, Any]]
    write: Callable[[Mapping[str, Any]], None]

    def state_dict(self) -> dict[str, Any]:
        """The state, of numbers, texts, lists, dicts and tensors."""
        return self.read()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set a state; whatever the generator raises of one that is none."""
        self.write(state)


def state_of_generator(value: object) -> GeneratorState | None:
    """The state of a generator of torch, of ``random`` or of numpy; None if it is none of these.

    >>> own = random.Random(0)
    >>> state = state_of_generator(own)
    >>> before, first = state.state_dict(), own.random()
    >>> state.load_state_dict(before)
    >>> own.random() == first
    True
    """
    if isinstance(value, torch.Generator):
        return GeneratorState(
            lambda: {"torch": value.get_state()}, lambda state: _none(value.set_state(state["torch"]))
        )
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return GeneratorState(lambda: {"python": value.getstate()}, lambda state: value.setstate(state["python"]))
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return GeneratorState(
            lambda: {"numpy": _listed(bits.state)},
            lambda state: setattr(bits, "state", _with_arrays(state["numpy"], bits.state)),
        )
    if isinstance(value, np.random.RandomState):
        return _numpys(value)
    return None


def of_process(device: torch.device) -> dict[str, GeneratorState]:
    """The generators of this process: torch's of the host and of the device, and those of the modules ``random`` and
    ``numpy.random``."""
    found = {
        "torch": GeneratorState(
            lambda: {"torch": torch.get_rng_state()}, lambda state: torch.set_rng_state(state["torch"])
        ),
        "python": GeneratorState(lambda: {"python": random.getstate()}, lambda state: random.setstate(state["python"])),
        "numpy": _numpys(np.random),
    }
    if device.type == "cuda":
        found["cuda"] = GeneratorState(
            lambda: {"cuda": torch.cuda.get_rng_state(device)},
            lambda state: torch.cuda.set_rng_state(state["cuda"], device),
        )
    return found


def _numpys(generator: Any) -> GeneratorState:
    """The state of a ``RandomState``, or of the module, which is one."""
    return GeneratorState(
        lambda: {"numpy": _listed(generator.get_state(legacy=False))},
        lambda state: generator.set_state(_with_arrays(state["numpy"], generator.get_state(legacy=False))),
    )


def _listed(value: Any) -> Any:
    """A state of numpy with lists in place of arrays."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    return {key: _listed(inner) for key, inner in value.items()} if isinstance(value, dict) else value


def _with_arrays(value: Any, like: Any) -> Any:
    """The same with arrays where the present state has some."""
    if isinstance(like, np.ndarray):
        return np.array(value, dtype=like.dtype).reshape(like.shape)
    return {key: _with_arrays(value[key], inner) for key, inner in like.items()} if isinstance(like, dict) else value


def _none(_: object) -> None:
    """Nothing, whatever a setter returns."""
