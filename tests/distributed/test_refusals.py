"""A step that one rank refuses is refused on all, at once and with its reason, and the next step runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import whale
from tests.distributed.parity import Worlds
from tests.distributed.two_ranks import LAYOUTS, Two, parallel, refusal
from tests.small_models import decoder, tokens
from whale.runtime.launch import World

AT_ONCE = 8.0
"""Seconds, of a timeout of 20."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[Two]:
    worlds = Worlds()
    yield Two(worlds)
    worlds.close()


class Coupled(torch.optim.SGD):
    """It divides gradients of matrices by the sum of all."""

    def step(self, closure: Any = None) -> Any:
        matrices = [p for group in self.param_groups for p in group["params"] if p.dim() > 1]
        total = sum(p.grad.abs().sum() for p in matrices)
        for p in matrices:
            p.grad = p.grad / total
        return super().step(closure)


def frozen(model: Any) -> Callable[[], None]:
    weight = dict(model.named_parameters()).get("layers.1.up.weight")
    if weight is None:
        return lambda: None
    weight.requires_grad_(False)

    def undo() -> None:
        weight.requires_grad_(True)

    return undo


def hooked(model: Any) -> Callable[[], None]:
    weight = dict(model.named_parameters()).get("layers.0.up.weight")
    return (lambda: None) if weight is None else weight.register_hook(lambda gradient: gradient).remove


def refuse_on_one(world: World, change: Callable[[Any], Callable[[], None]], bring: str) -> tuple[str, float, float]:
    """The refusal, the seconds that it took, and the loss of the next step."""
    model = parallel("stages", batch=bring)
    model.train_step(**tokens())
    undo = change(model)
    begin = time.monotonic()
    message = refusal(lambda: model.train_step(**tokens()))
    seconds = time.monotonic() - begin
    undo()
    return message, seconds, model.train_step(**tokens()).item()


@pytest.mark.parametrize("bring", ["global", "local"])
@pytest.mark.parametrize(
    ("change", "rank", "words"), [(frozen, 1, "was frozen after"), (hooked, 0, "a hook was added")]
)
def test_a_change_that_one_stage_sees_is_told_to_the_others(
    ranks: Two, change: Callable[[Any], Callable[[], None]], rank: int, words: str, bring: str
) -> None:
    found = ranks.run(refuse_on_one, change, bring)
    assert words in found[rank][0]
    assert f"rank {rank} refused the step: {found[rank][0]}" == found[1 - rank][0]
    assert max(seconds for _, seconds, _ in found) < AT_ONCE
    assert found[0][2] == found[1][2]


def refuse_arguments(world: World, kind: str) -> tuple[list[str], float]:
    """Refusals of calls that rank 1 makes wrongly, and the loss of a step after them."""
    model = parallel(kind)
    mine = world.rank == 1

    def without_gradients() -> None:
        with torch.set_grad_enabled(not mine):
            model.train_step(**tokens())

    def of_another_option() -> None:
        model.predict_step(**tokens(), to="rank7" if mine else "all")

    def in_autocast() -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=mine):
            model.eval_step(**tokens())

    messages = [refusal(call) for call in (without_gradients, of_another_option, in_autocast)]
    return messages, model.train_step(**tokens()).item()


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_call_that_one_rank_makes_wrongly_is_told_to_the_others(ranks: Two, kind: str) -> None:
    (told, loss), (own, same) = ranks.run(refuse_arguments, kind)
    assert all(told) and [f"rank 1 refused the step: {message}" for message in own] == told
    assert loss == same


def accumulate(world: World, refused: bool) -> tuple[str, float, list[Tensor]]:
    """The refusal of a step between two others, the loss of the last, and the gradients and statistics after it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
    whale.annotate(model, {"": whale.replicate()})
    x, message = torch.randn(8, 4), ""
    made: Any = whale.parallelize(model, x, loss_fn=lambda y, batch: y.square().mean(), device="cpu")
    made.train_step(x)
    if refused:
        message = refusal(lambda: made.train_step(x.roll(world.rank, 0)))
    loss = made.train_step(x.flip(0)).item()
    return message, loss, [*(p.grad for p in made.parameters()), *made.buffers()]


def test_a_refused_step_leaves_gradients_statistics_and_randomness(ranks: Two) -> None:
    for (message, *found), (_, *wanted) in zip(ranks.run(accumulate, True), ranks.run(accumulate, False), strict=True):
        assert "with other values" in message
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


class Halves(nn.Module):
    """A matrix in its first stage, and vectors in the second."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.b(self.a(x)).square().sum()
        return found


def refuse_an_optimizer(world: World) -> tuple[str, float]:
    torch.manual_seed(0)
    model = Halves()
    whale.annotate(model, {"a": whale.stage(), "b": whale.stage()})
    made: Any = whale.parallelize(model, torch.ones(4, 4), device="cpu", timeout_seconds=20)
    optimizer = Coupled(made.parameters(), lr=0.1)
    made.train_step(torch.ones(4, 4))
    begin = time.monotonic()

    def update() -> None:
        optimizer.step()
        made.train_step(torch.ones(4, 4))

    return refusal(update), time.monotonic() - begin


def test_an_optimizer_that_one_rank_refuses_is_told_to_the_others(ranks: Two) -> None:
    (own, _), (told, seconds) = ranks.run(refuse_an_optimizer)
    assert own.startswith("Coupled updates an element by others")
    assert told == f"rank 0 refused the step: {own}"
    assert seconds < AT_ONCE


def use_parameters_of_the_local_model(world: World, use: str) -> str:
    """The refusal where a script has parameters of a local model that ranks have in parts, and no module of it."""
    torch.manual_seed(0)
    local = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
    whale.annotate(local, {"": whale.split()})
    parameters, x = list(local.parameters()), torch.ones(2, 8)
    model: Any = whale.parallelize(local, x, device="cpu", loss_fn=lambda output, _: output.sum(), timeout_seconds=20)
    del local
    model.train_step(x)
    uses: dict[str, Callable[[], object]] = {
        "norm": lambda: torch.nn.utils.clip_grad_norm_(parameters, 1.0),
        "value": lambda: torch.nn.utils.clip_grad_value_(parameters, 1.0),
        "write": lambda: torch.nn.init.zeros_(parameters[0]),
        "freeze": lambda: parameters[0].requires_grad_(False),
        "hook": lambda: parameters[0].register_hook(torch.neg),
        "nothing": lambda: None,
    }

    def step() -> None:
        uses[use]()
        model.train_step(x)

    return refusal(step)


OF_PARAMETERS = {
    "norm": "clip_grad_norm_ was given 0.weight of the local model",
    "value": "clip_grad_value_ was given 0.weight of the local model",
    "write": "values were written into 0.weight of the local model after parallelize",
    "freeze": "0.weight of the local model was frozen after parallelize",
    "hook": "0.weight of the local model was given a hook after parallelize",
    "nothing": "",
}


@pytest.mark.parametrize("use", OF_PARAMETERS)
def test_parameters_of_the_local_model_are_not_taken_for_those_that_are_trained(ranks: Two, use: str) -> None:
    for message in ranks.run(use_parameters_of_the_local_model, use):
        assert message.startswith(OF_PARAMETERS[use]) and bool(message) == bool(OF_PARAMETERS[use])


def train_two_models_with_one_module(world: World, layout: str, updates: str) -> list[str]:
    """The refusals of a step by two models with a common module, after those of *updates* were updated."""
    torch.manual_seed(0)
    backbone = torch.nn.Linear(8, 8)
    models: list[Any] = []
    for _ in range(2):
        local = torch.nn.Sequential(backbone, torch.nn.Linear(8, 4))
        whale.annotate(local, {"": getattr(whale, layout)()})
        options: dict[str, Any] = {"device": "cpu", "loss_fn": lambda output, _: output.sum(), "timeout_seconds": 20}
        models.append(whale.parallelize(local, torch.ones(2, 8), **options))
    for model in models:
        model.train_step(torch.ones(2, 8))
    for model, name in zip(models, ("first", "second"), strict=True):
        if name in updates:
            torch.optim.SGD(model.parameters(), lr=0.1).step()
    return [refusal(partial(model.train_step, torch.ones(2, 8))) for model in models]


OF_TWO = "weight is of a module that another parallel model trains too, and that has updated its own copy"


@pytest.mark.parametrize(
    ("layout", "updates", "refuse"),
    [
        ("split", "", ()),
        ("split", "first", (1,)),
        ("split", "second", (0,)),
        ("split", "first, second", (0, 1)),
        ("replicate", "first, second", ()),
    ],
)
def test_two_models_that_train_copies_of_one_module_are_refused(
    ranks: Two, layout: str, updates: str, refuse: tuple[int, ...]
) -> None:
    for messages in ranks.run(train_two_models_with_one_module, layout, updates):
        for number, message in enumerate(messages):
            assert (f"0.{OF_TWO}" in message) == (number in refuse), message


def load_of_the_local_optimizer(world: World, shares: list[float] | None) -> tuple[str, str, float]:
    """Refusals of the state of the local model's optimizer, in the load or the step after it, and of one by names."""
    local = decoder(layers=1)
    local(**tokens()).backward()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    theirs = torch.optim.AdamW(local.parameters())
    theirs.step()
    by_number, by_name = theirs.state_dict(), get_optimizer_state_dict(local, theirs, options=options)
    model: Any = whale.parallelize(local, tokens(), device="cpu", timeout_seconds=20, zero=1, state_shares=shares)
    optimizer = torch.optim.AdamW(model.parameters())

    def load() -> None:
        optimizer.load_state_dict(by_number)
        model.train_step(**tokens())

    message = refusal(load)
    begin = time.monotonic()
    named = refusal(lambda: set_optimizer_state_dict(model, optimizer, by_name, options=options))
    model.train_step(**tokens())
    return message, named, time.monotonic() - begin


@pytest.mark.parametrize("shares", [[1, 1], [1, 0]])
def test_the_state_of_the_local_model_s_optimizer_is_refused_on_all(ranks: Two, shares: list[float]) -> None:
    found = ranks.run(load_of_the_local_optimizer, shares)
    for message, named, seconds in found:
        assert "it is of the local model or of another layout" in message
        assert "get_optimizer_state_dict" in message
        assert named == "" and seconds < AT_ONCE
    if shares == [1, 0]:
        assert found[0][0] == f"rank 1 refused the step: {found[1][0]}"


def load_groups_of_another_stage(world: World) -> str:
    model = parallel("stages")
    optimizer = torch.optim.AdamW(model.parameters())
    model.train_step(**tokens())
    optimizer.step()
    state: Any = get_optimizer_state_dict(model, optimizer)
    if world.rank == 0:
        del state["param_groups"][0]["amsgrad"]

    def load() -> None:
        set_optimizer_state_dict(model, optimizer, state)
        model.train_step(**tokens())

    return refusal(load)


def test_groups_of_an_optimizer_that_one_rank_refuses_are_told_to_the_others(ranks: Two) -> None:
    own, told = ranks.run(load_groups_of_another_stage)
    assert own.startswith("the optimizer's state has no 'amsgrad'")
    assert told == f"rank 0 refused the step: {own}"


def load_other_states(world: World, kind: str) -> tuple[list[str], float]:
    """Refusals of states that are not the same, or do not fit, on rank 1; and the loss of a step after them."""
    model = parallel(kind)
    state = {name: x.clone() for name, x in model.full_state_dict().items()}
    name, mine = next(iter(state)), world.rank == 1
    of_other_values = {**state, name: state[name] + 1} if mine else state
    of_another_shape = {**state, name: state[name][:1]} if mine else state
    of_fewer_names = {key: x for key, x in state.items() if key != name or not mine}
    found = [
        refusal(lambda given=given: model.load_full_state_dict(given))  # type: ignore[misc]
        for given in (of_other_values, of_another_shape, of_fewer_names, state)
    ]
    return found, model.train_step(**tokens()).item()


@pytest.mark.parametrize("kind", LAYOUTS)
def test_states_that_differ_between_ranks_are_refused_on_all(ranks: Two, kind: str) -> None:
    (told, loss), (own, same) = ranks.run(load_other_states, kind)
    assert (
        told[0] == own[0] == ("rank 1 was given another state to load than rank 0: load one checkpoint on every rank")
    )
    for place, part in ((1, "has shape"), (2, "the state does not fit the model: unknown [], missing")):
        assert part in own[place] and told[place] == f"rank 1 loads no state: {own[place]}"
    assert told[3] == own[3] == ""
    assert loss == same


def add_global_hooks(world: World) -> str:
    model = parallel("replicate")
    hook = nn.modules.module.register_module_forward_hook(lambda module, args, output: None)
    try:
        return refusal(lambda: model.train_step(**tokens()))
    finally:
        hook.remove()


def test_hooks_of_all_modules_that_steps_do_not_call_are_refused(ranks: Two) -> None:
    for message in ranks.run(add_global_hooks):
        assert "a hook was added to all modules after parallelize, but steps call no modules" in message


class Sparse(nn.Module):
    """An embedding with sparse gradients in the first stage."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(32, 4, sparse=True), nn.Linear(4, 32)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.embed(tokens)).flatten(0, 1), labels.flatten())


def train_sparsely(world: World) -> tuple[float, float]:
    local, model = Sparse(), Sparse()
    whale.annotate(model, {"embed": whale.stage(), "head": whale.stage()})
    made: Any = whale.parallelize(model, tokens(), device="cpu", micro_batches=2, timeout_seconds=20)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (local, made)]
    for _ in range(3):
        expected = local(**tokens())
        expected.backward()
        found = made.train_step(**tokens())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return expected.item(), found.item()


def test_sparse_gradients_of_a_stage_of_one_rank(ranks: Two) -> None:
    for expected, found in ranks.run(train_sparsely):
        assert found == pytest.approx(expected, rel=1e-6)
