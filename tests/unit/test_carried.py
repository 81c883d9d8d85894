"""State that forwards leave in Python for each other: steps for several lengths are the local ones, or refused."""

from __future__ import annotations

import copy
import functools
import io
from array import array
from collections import UserList, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import whale
from whale.errors import CaptureError

LONGEST = 0
SEEN: dict[int, int] = {}


def positions(length: int) -> Tensor:
    return torch.arange(length, dtype=torch.float64)


def of_the_longest(model: Any, length: int) -> Tensor:
    model.longest = max(getattr(model, "longest", 0), length)
    return positions(length) / model.longest


def of_the_first(model: Any, length: int) -> Tensor:
    if model.kept is None:
        model.kept = 1 / length
    return positions(length) * model.kept


def of_the_last(model: Any, length: int) -> Tensor:
    last, model.kept = model.kept, length
    return positions(length) * (1.0 if last in (None, length) else 2.0)


def of_an_array(model: Any, length: int) -> Tensor:
    if model.kept is None or len(model.kept) < length:
        model.kept = np.arange(length) / length
    return torch.as_tensor(model.kept[:length])


def of_a_list(model: Any, length: int) -> Tensor:
    while len(model.rows) < length:
        model.rows.append(length / 10)
    return torch.tensor(model.rows[:length], dtype=torch.float64)


def of_numbers_in_turn(model: Any, length: int) -> Tensor:
    return positions(length) + model.numbers.setdefault(length, len(model.numbers))


def of_an_object(model: Any, length: int) -> Tensor:
    model.config.longest = max(model.config.longest, length)
    return positions(length) / model.config.longest


def of_an_inner_module(model: Any, length: int) -> Tensor:
    model.head.longest = max(getattr(model.head, "longest", 0), length)
    return positions(length) / model.head.longest


def of_a_global(model: Any, length: int) -> Tensor:
    global LONGEST
    LONGEST = max(LONGEST, length)
    return positions(length) / LONGEST


def of_a_table(model: Any, length: int) -> Tensor:
    return positions(length) + SEEN.setdefault(length, len(SEEN))


def of_a_class(model: Any, length: int) -> Tensor:
    Model.longest_of_all = max(Model.longest_of_all, length)
    return positions(length) / Model.longest_of_all


def of_an_early_training(model: Any, length: int) -> Tensor:
    if model.training or model.kept is None:
        model.kept = torch.arange(8, dtype=torch.float64) / length
    return model.kept[:length]


def of_a_long_one(model: Any, length: int) -> Tensor:
    """Each length is compiled, because its code loops over the words; the fourth one is the first that is long."""
    model.longest = max(getattr(model, "longest", 0), length)
    return torch.tensor([float(place) for place in range(length)]).double() * (2.0 if model.longest > 9 else 1.0)


REFUSED: list[Callable[[Any, int], Tensor]] = [
    of_the_longest,
    of_the_first,
    of_the_last,
    of_an_array,
    of_a_list,
    of_numbers_in_turn,
    of_an_object,
    of_an_inner_module,
]

EXACT: list[Callable[[Any, int], Tensor]] = [of_a_global, of_a_table, of_a_class]


def of_each(model: Any, length: int) -> Tensor:
    model.length = length
    return positions(model.length) / model.length


def by_length(model: Any, length: int) -> Tensor:
    if length not in model.numbers:
        model.numbers[length] = 1 / length
    return positions(length) * model.numbers[length]


def of_arrays_by_length(model: Any, length: int) -> Tensor:
    if length not in model.numbers:
        model.numbers[length] = np.arange(length) / length
    return torch.from_numpy(model.numbers[length])


def noted(model: Any, length: int) -> Tensor:
    found = positions(length) / length
    model.last = found.sum()
    model.config.seen = length, "for a log"
    return found


def grown(model: Any, length: int) -> Tensor:
    if model.kept is None or len(model.kept) < length:
        model.kept = positions(length) / 10
    model.length = length
    return model.kept[: model.length]


ACCEPTED: list[Callable[[Any, int], Tensor]] = [of_each, by_length, of_arrays_by_length, noted, grown]


class Model(nn.Module):
    longest_of_all: ClassVar[int] = 0

    def __init__(self, added: Callable[[Any, int], Tensor]) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(9, 4), nn.Linear(4, 9)
        self.added = added
        self.kept: Any = None
        self.rows: list[float] = []
        self.numbers: dict[int, Any] = {}
        self.config = SimpleNamespace(longest=0, seen=None)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x) + self.added(self, x.shape[1])[:, None]
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), x.flatten())


class Longest:
    """The greatest of the lengths that it was given."""

    def __init__(self) -> None:
        self.length = 0

    def of(self, length: int) -> int:
        self.length = max(self.length, length)
        return self.length


def longest_in(kept: Any, length: int) -> int:
    kept[0] = max(kept[0], length)
    return int(kept[0])


class In:
    """The greatest length in some container."""

    def __init__(self, kept: Any) -> None:
        self.kept = kept

    def __call__(self, length: int) -> int:
        return longest_in(self.kept, length)


def text_of_longest(text: io.StringIO, length: int) -> int:
    found = max(int(text.getvalue() or 0), length)
    text.seek(0)
    text.write(f"{found:04}")
    return found


CONTAINERS: dict[str, Callable[[], Any]] = {
    "method": lambda: Longest().of,
    "partial": lambda: functools.partial(longest_in, [0]),
    "array": lambda: In(array("d", [0])),
    "bytes": lambda: In(bytearray(1)),
    "masked array": lambda: In(np.ma.array([0])),
    "text": lambda: functools.partial(text_of_longest, io.StringIO()),
    "deque": lambda: In(deque([0])),
    "user list": lambda: In(UserList([0])),
}


def batch(length: int) -> Tensor:
    return torch.randint(0, 9, (4, length), generator=torch.Generator().manual_seed(length))


def prepared(added: Callable[[Any, int], Tensor]) -> tuple[Model, Any]:
    torch.manual_seed(0)
    model = Model(added).double()
    return copy.deepcopy(model), whale.parallelize(model, batch(4), device="cpu")


STEPS: dict[str, list[tuple[str, int]]] = {
    "longer": [("train", 4), ("train", 8), ("train", 4)],
    "shorter": [("train", 4), ("train", 2), ("train", 3)],
    "evaluation": [("train", 4), ("train", 4), ("eval", 8), ("train", 4), ("eval", 4)],
}
EVALUATION_FIRST = [("eval", 4), ("eval", 6), ("train", 4), ("train", 6), ("eval", 4)]


def errors(added: Callable[[Any, int], Tensor], steps: list[tuple[str, int]]) -> float:
    """The largest difference from the losses of the local model."""
    global LONGEST
    LONGEST, Model.longest_of_all = 0, 0
    SEEN.clear()
    local, parallel = prepared(added)
    worst = 0.0
    found = []
    for mode, length in steps:
        step = parallel.train_step if mode == "train" else parallel.eval_step
        found.append(float(step(batch(length)).detach()))
    LONGEST, Model.longest_of_all = 0, 0
    SEEN.clear()
    for (mode, length), loss in zip(steps, found, strict=True):
        worst = max(worst, abs(float(local.train(mode == "train")(batch(length)).detach()) - loss))
    return worst


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("added", ACCEPTED)
def test_what_decides_nothing_is_kept(added: Callable[[Any, int], Tensor], steps: str) -> None:
    assert errors(added, STEPS[steps]) < 1e-12


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("added", EXACT)
def test_what_is_no_attribute_is_that_of_the_step_before(added: Callable[[Any, int], Tensor], steps: str) -> None:
    assert errors(added, STEPS[steps]) < 1e-12


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("added", REFUSED)
def test_what_decides_a_later_step_is_refused(added: Callable[[Any, int], Tensor], steps: str) -> None:
    with pytest.raises(CaptureError, match=r"the forward keeps .* later calls: .* \(4, \d\) computes something else"):
        errors(added, STEPS[steps])


@pytest.mark.parametrize("kind", CONTAINERS)
def test_numbers_in_other_containers_are_compared(kind: str) -> None:
    keeps: Any = CONTAINERS[kind]()

    def of_a_container(model: Any, length: int) -> Tensor:
        return positions(length) / model.longest_of(length)

    def errors_of() -> float:
        torch.manual_seed(0)
        model = Model(of_a_container).double()
        model.longest_of = keeps
        local, parallel = copy.deepcopy(model), whale.parallelize(model, batch(4), device="cpu")
        losses = [float((parallel.train_step(batch(n)) - local(batch(n))).detach()) for n in (4, 8, 4)]
        return max(map(abs, losses))

    with pytest.raises(CaptureError, match="the forward keeps longest_of"):
        errors_of()


def test_a_shape_that_comes_late_is_compared_with_the_one_before() -> None:
    parallel = prepared(of_a_long_one)[1]
    for length in (5, 6):
        parallel.train_step(batch(length))
    with pytest.raises(CaptureError, match=r"step with .* \(4, 6\) computes something else after .* \(4, 12\)"):
        parallel.train_step(batch(12))


def test_a_module_that_the_forward_makes_is_named() -> None:
    class Lazy(Model):
        def forward(self, x: Tensor) -> Tensor:
            if self.kept is None:
                self.kept = nn.Linear(4, 4)
            return super().forward(x)

    with pytest.raises(CaptureError, match="the forward makes the module kept, a Linear: make it in __init__"):
        whale.parallelize(Lazy(of_each), batch(4), device="cpu")


def test_training_alone_makes_a_table_anew_in_each_step() -> None:
    assert errors(of_an_early_training, STEPS["longer"]) < 1e-12


@pytest.mark.parametrize("steps", [STEPS["evaluation"], EVALUATION_FIRST])
def test_a_table_of_training_is_not_that_of_evaluation(steps: list[tuple[str, int]]) -> None:
    with pytest.raises(CaptureError, match="an evaluation step with .* computes something else after a training step"):
        errors(of_an_early_training, steps)
