"""Parameter servers: ranks that own whole parameters sum and step them, in the step or some steps later."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import whale
from tests.distributed.parity import Worlds
from tests.distributed.parity import worlds as worlds_of_a_module
from tests.distributed.two_ranks import refusal
from tests.largest import largest
from tests.small_models import decoder, tokens
from whale.ir.plan import Plan, PlanAxis, PlanStage, PlanState
from whale.runtime.launch import World

BOUND = 1e-12
STEPS = 6
RATE = 3e-4


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    with worlds_of_a_module() as made:
        yield made


def curve(late: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses of the local model whose optimizer has gradients of *late* steps before, and its parameters after all
    of them."""
    model = decoder(layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    losses, made = [], []
    for step in range(STEPS + late):
        if step < STEPS:
            loss = model(**tokens())
            losses.append(loss.item())
            made.append(torch.autograd.grad(loss, list(model.parameters())))
        if step >= late:
            for parameter, gradient in zip(model.parameters(), made[step - late], strict=True):
                parameter.grad = gradient
            optimizer.step()
    return losses, model.state_dict()


def errors(world: World, plan: Plan | None, options: dict[str, Any]) -> tuple[float, float, int, int]:
    """Errors of losses and parameters of a run, the elements that this rank trains, and of its largest parameter."""
    made = whale.parallelize(decoder(layers=2), tokens(), device="cpu", plan=plan, **options)
    optimizer = torch.optim.AdamW(made.parameters(), lr=RATE) if list(made.parameters()) else None

    def step() -> None:
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()

    losses = []
    for _ in range(STEPS):
        losses.append(made.train_step(**tokens()).item())
        step()
    late = 0
    while made.drain():
        late += 1
        step()
    assert late == options.get("staleness", 0)
    expected, state = curve(late)
    whole = made.full_state_dict()
    loss = largest(*(abs(a - b) for a, b in zip(losses, expected, strict=True)))
    held = [p.numel() for p in made.parameters()]
    return (
        loss,
        largest(*((whole[n] - x).abs().max().item() for n, x in state.items())),
        sum(held),
        max(held, default=0),
    )


def workers_and_server() -> Plan:
    """A plan of a rank that serves all parameters and has no rows, and two that have the rows."""
    axis = PlanAxis(name="replicate", size=3, role="replicate", shares=(0, 4, 4))
    state = PlanState(level=1, shares=(1, 0, 0), align="parameter")
    stage = PlanStage(ranks=(0, 1, 2), axes=(axis,), state=state, reduce="server")
    return Plan(world_size=3, batch=8, stages=(stage,), annotations={"": ("replicate()",)})


CASES: dict[str, tuple[Plan | None, dict[str, Any]]] = {
    "equal": (None, {"reduce": "server"}),
    "one of the workers": (None, {"reduce": "server", "state_shares": [0, 1, 0]}),
    "uneven": (None, {"reduce": "server", "state_shares": [3, 1, 0], "micro_batches": 2}),
    "apart": (workers_and_server(), {}),
    "a step late": (None, {"reduce": "server", "staleness": 1}),
    "three steps late, apart": (workers_and_server(), {"staleness": 3}),
}


@pytest.mark.parametrize("name", CASES)
def test_servers_train_as_the_local_model(worlds: Worlds, name: str) -> None:
    found = worlds.run(3, errors, *CASES[name])
    for loss, parameters, _, _ in found:
        assert loss <= BOUND and parameters <= BOUND
    held = [own for _, _, own, _ in found]
    total = sum(p.numel() for p in decoder(layers=2).parameters())
    assert sum(held) == total  # each parameter has one server
    if name in ("one of the workers", "apart"):
        assert sorted(held) == [0, 0, total]
    if name == "uneven":
        largest = max(own for *_, own in found)
        assert held[2] == 0 and held[0] == pytest.approx(0.75 * total, abs=largest)


def refusals(world: World, folder: str) -> list[str]:
    def made(**options: Any) -> str:
        return refusal(lambda: whale.parallelize(decoder(layers=1), tokens(), device="cpu", **options))

    late = whale.parallelize(decoder(layers=1), tokens(), device="cpu", reduce="server", staleness=1)
    late.train_step(**tokens())
    return [
        made(staleness=1),
        made(staleness=1, reduce="server", zero=3),
        made(staleness=1, reduce="server", step_in_backward=True),
        made(staleness=-1, reduce="server"),
        refusal(lambda: whale.save_checkpoint(folder, late, step=1)),
    ]


def test_what_cannot_be_late_is_refused(worlds: Worlds, tmp_path: Any) -> None:
    mean, level, backward, number, saved = worlds.run(3, refusals, str(tmp_path))[0]
    assert "staleness=1: the sums of servers come late, but stage 0 has reduce='mean'" in mean
    assert "zero=3: leave zero out" in level
    assert "step_in_backward=True needs the gradients of a step in it" in backward
    assert "staleness=-1" in number
    assert "on their way to servers" in saved and "model.drain()" in saved
