"""Collectives that scripts call: values, gradients, ragged parts, objects, mesh axes, and calls that do not match."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import whale
from tests.distributed.harness import Ranks
from tests.distributed.parity import Worlds
from tests.distributed.parity import worlds as worlds_of_a_module
from tests.distributed.two_ranks import refusal
from whale.runtime.launch import World

LENGTHS = (2, 0, 3)


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    with worlds_of_a_module() as made:
        yield made


def drawn(rank: int, *shape: int, of: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * of + rank)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def values(world: World) -> None:
    own, everyone = drawn(world.rank, 3, 2), [drawn(rank, 3, 2) for rank in range(world.size)]
    stacked = torch.stack(everyone)
    expected = {
        "sum": stacked.sum(0),
        "mean": stacked.mean(0),
        "max": stacked.amax(0),
        "min": stacked.amin(0),
        "product": stacked.prod(0),
    }
    before = own.clone()
    for op, value in expected.items():
        torch.testing.assert_close(whale.all_reduce(own, op), value, rtol=1e-15, atol=1e-15)
    assert torch.equal(own, before)
    assert torch.equal(whale.broadcast(own, root=1), everyone[1])
    for dim in (0, 1, -1):
        assert torch.equal(whale.all_gather(own, dim), torch.cat(everyone, dim))
    rows = [drawn(rank, length, 2) for rank, length in enumerate(LENGTHS)]
    assert torch.equal(whale.all_gather(rows[world.rank]), torch.cat(rows))
    assert torch.equal(whale.all_gather(rows[world.rank].T, 1), torch.cat(rows).T)
    assert whale.all_gather(torch.empty(0, 4)).shape == (0, 4)
    # Rank i sends i + j rows to rank j.
    sent = [[drawn(10 * i + j, i + j, 2) for j in range(world.size)] for i in range(world.size)]
    received = whale.all_to_all(sent[world.rank])
    assert all(torch.equal(x, sent[i][world.rank]) for i, x in enumerate(received))
    assert whale.all_gather_object({"rank": world.rank}) == [{"rank": rank} for rank in range(world.size)]
    assert whale.broadcast_object(("from", world.rank), root=2) == ("from", 2)
    found = whale.all_to_all_object([f"{world.rank} to {other}" * other for other in range(world.size)])
    assert found == [f"{other} to {world.rank}" * world.rank for other in range(world.size)]
    assert (whale.rank(), whale.size(), whale.local_rank()) == (world.rank, 3, world.rank)
    assert whale.all_reduce(torch.tensor(world.rank)).item() == 3


def test_values_are_those_of_all_ranks(worlds: Worlds) -> None:
    worlds.run(3, values)


CALLS: dict[str, Callable[[list[Tensor], int], list[Tensor]]] = {
    "sum": lambda x, rank: [whale.all_reduce(x[0])],
    "mean": lambda x, rank: [whale.all_reduce(x[0], "mean")],
    "gather": lambda x, rank: [whale.all_gather(x[0])],
    "gather columns": lambda x, rank: [whale.all_gather(x[0], dim=1)],
    "ragged gather": lambda x, rank: [whale.all_gather(x[0][: LENGTHS[rank]])],
    "broadcast": lambda x, rank: [whale.broadcast(x[0], root=1)],
    "all to all": lambda x, rank: whale.all_to_all([piece[: rank + n] for n, piece in enumerate(x)]),
}


def products(world: World) -> dict[str, tuple[float, float]]:
    """This rank's part of <A x, y> and of <x, A' y>, where A' is what the backward computes."""
    found = {}
    for name, call in CALLS.items():
        inputs = [drawn(world.rank, 6, 2, of=n).requires_grad_() for n in range(world.size)]
        outputs = call(inputs, world.rank)
        seeds = [drawn(world.rank, *x.shape, of=7 + n) for n, x in enumerate(outputs)]
        gradients = torch.autograd.grad(outputs, inputs, seeds, allow_unused=True)
        forward = sum(float((x.detach() * y).sum()) for x, y in zip(outputs, seeds, strict=True))
        backward = sum(float((x.detach() * g).sum()) for x, g in zip(inputs, gradients, strict=True) if g is not None)
        found[name] = forward, backward
    return found


def test_gradients_are_adjoint_to_the_collectives_over_all_ranks(worlds: Worlds) -> None:
    told = worlds.run(3, products)
    for name in CALLS:
        forward, backward = (sum(of_rank[name][side] for of_rank in told) for side in (0, 1))
        assert forward == pytest.approx(backward, rel=1e-13), name
        assert abs(forward) > 0.01, name


def loss_of_rows(world: World) -> tuple[float, float]:
    """A loss of gathered features, as of contrastive learning, against the same on one process."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 3).double()
    rows = drawn(0, sum(LENGTHS), 4)
    own = rows.split(LENGTHS)[world.rank]
    everything = whale.all_gather(layer(own))
    (everything.T @ everything).square().sum().div(world.size).backward()  # the same loss on every rank
    assert layer.weight.grad is not None
    found = whale.all_reduce(layer.weight.grad)
    alone = layer(rows)
    expected = torch.autograd.grad((alone.T @ alone).square().sum(), layer.weight)[0]
    return float((found - expected).abs().max()), float(expected.abs().max())


def test_a_loss_that_all_ranks_compute_is_divided_by_their_number(worlds: Worlds) -> None:
    for error, largest in worlds.run(3, loss_of_rows):
        assert error <= 1e-13 * largest


def mismatches(world: World) -> list[str]:
    odd = world.rank == 1
    calls: list[Callable[[], Any]] = [
        lambda: whale.all_reduce(torch.ones(3, 5 if odd else 4)),
        lambda: whale.all_reduce(torch.ones(3, dtype=torch.float64 if odd else torch.float32)),
        lambda: whale.all_reduce(torch.ones(3), "mean" if odd else "sum"),
        lambda: whale.all_gather(torch.ones(2, 3 if odd else 4)),
        lambda: whale.broadcast(torch.ones(2)) if odd else whale.all_reduce(torch.ones(2)),
        lambda: whale.broadcast(torch.ones(2), root=int(odd)),
        lambda: whale.all_to_all([torch.ones(1, 2 if odd else 3)] * world.size),
        lambda: whale.broadcast_object("x") if odd else whale.all_gather_object("x"),
        lambda: whale.broadcast_object("x") if odd else whale.all_to_all_object([1, 2, 3]),
    ]
    told = [refusal(call) for call in calls]
    whale.all_reduce(torch.ones(1))  # the ranks go on
    return told


def test_ranks_whose_calls_differ_are_named_on_all_ranks(worlds: Worlds) -> None:
    told = worlds.run(3, mismatches)
    assert told[0] == told[1] == told[2]
    parts = [
        "rank 1 gives all_reduce of float32 (3, 5), but rank 0 all_reduce of float32 (3, 4): ranks [0, 1, 2] must",
        "rank 1 gives all_reduce of float64 (3,), but rank 0 all_reduce of float32 (3,)",
        "rank 1 calls all_reduce with op='mean', but rank 0 with op='sum'",
        "rank 1 gives all_gather of float32 (2, 3), but rank 0 all_gather of float32 (2, 4)",
        "rank 1 gives broadcast of float32 (2,), but rank 0 all_reduce of float32 (2,)",
        "rank 1 calls broadcast with root=1, but rank 0 with root=0",
        "rank 1 gives all_to_all of float32 (3, 2), but rank 0 all_to_all of float32 (3, 3)",
        "rank 1 gives broadcast_object of uint8",
        "but rank 0 all_to_all_object of uint8",
    ]
    for message, part in zip(told[0], parts, strict=True):
        assert part in message
    assert "the sizes of dim 0 may differ" in told[0][3]


def wrong_arguments(world: World) -> dict[str, str]:
    calls: dict[str, Callable[[], Any]] = {
        "gradient": lambda: whale.all_reduce(torch.ones(2, requires_grad=True), "max"),
        "integers": lambda: whale.all_reduce(torch.ones(2, dtype=torch.int64), "mean"),
        "op": lambda: whale.all_reduce(torch.ones(2), "average"),
        "scalar": lambda: whale.all_gather(torch.ones(())),
        "root": lambda: whale.broadcast(torch.ones(2), root=3),
        "pieces": lambda: whale.all_to_all([torch.ones(2)]),
        "unlike": lambda: whale.all_to_all([torch.ones(2), torch.ones(2, 2), torch.ones(2)]),
        "parameters": lambda: whale.broadcast_parameters(nn.Linear(2, 2).parameters()),  # type: ignore[arg-type]
        "parameter": lambda: whale.broadcast_parameters(nn.Parameter(torch.ones(2))),
        "group": lambda: whale.all_reduce(torch.ones(2), group="tp"),  # type: ignore[arg-type]
    }
    return {name: refusal(call) for name, call in calls.items()}


def test_wrong_arguments_are_refused_with_what_to_write(worlds: Worlds) -> None:
    told = worlds.run(3, wrong_arguments)[0]
    assert "has no gradient for op='max': give x.detach()" in told["gradient"]
    assert "give x.double()" in told["integers"]
    assert "op='average' is unknown" in told["op"]
    assert "give x[None]" in told["scalar"]
    assert "root=3 is none of the ranks [0, 1, 2]" in told["root"]
    assert "1 pieces for 3 ranks" in told["pieces"]
    assert "pieces[1] is float32 (2, 2)" in told["unlike"]
    assert "give names too: model, model.state_dict() or model.named_parameters()" in told["parameters"]
    assert told["parameter"] == told["parameters"]
    assert "a mesh axis, a process group, or a DeviceMesh" in told["group"]


def groups(world: World) -> str:
    pair = dist.new_group([0, 2])
    own = torch.tensor([float(world.rank)])
    told = ""
    if world.rank == 1:
        told = refusal(lambda: whale.all_reduce(own, group=pair))
    else:
        assert whale.all_reduce(own, group=pair).item() == 2
        assert (whale.rank(pair), whale.size(pair)) == (world.rank // 2, 2)
        assert whale.broadcast(own, root=2, group=pair).item() == 2
        assert whale.all_gather_object(world.rank, pair) == [0, 2]
        assert whale.broadcast_object(world.rank, 2, pair) == 2
    mesh = DeviceMesh("cpu", [0, 1, 2], mesh_dim_names=("dp",))
    assert whale.all_reduce(own, group=mesh).item() == 3
    dist.destroy_process_group(pair)
    return told


def test_groups_are_those_of_torch(worlds: Worlds) -> None:
    told = worlds.run(3, groups)
    assert "rank 1 is not in the group" in told[1]


def axes(world: World) -> list[tuple[str, tuple[int, ...], int, float]]:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    annotations = {"0": [whale.stage(1)], "1": [whale.stage(2), whale.split(2)]}
    if world.size == 4:
        annotations = {"": [whale.replicate(2), whale.split(2)]}
    whale.annotate(model, annotations)
    made = whale.parallelize(model, torch.ones(8, 8), loss_fn=lambda y, batch: y.square().mean(), device="cpu")
    names = ["split"] if world.size == 3 else ["replicate", "split"]
    assert f"there are {', '.join(map(repr, names))}" in refusal(lambda: whale.mesh_axis(made, "model"))
    found = []
    for name in names:
        axis = whale.mesh_axis(made, name)
        assert (whale.rank(axis), whale.size(axis)) == (axis.index, axis.size)
        total = whale.all_reduce(torch.tensor([float(world.rank)]), group=axis).item()
        found.append((axis.name, axis.ranks, axis.index, total))
    assert whale.mesh_axis(made, names[-1]) == axis
    return found


def test_collectives_run_over_any_axis_of_a_nest(worlds: Worlds) -> None:
    told = worlds.run(4, axes)
    assert [row[0] for row in told] == [
        ("replicate", (rank % 2, rank % 2 + 2), rank // 2, 2 * (rank % 2) + 2.0) for rank in range(4)
    ]
    assert [row[1] for row in told] == [
        ("split", (rank // 2 * 2, rank // 2 * 2 + 1), rank % 2, 4 * (rank // 2) + 1.0) for rank in range(4)
    ]


def test_a_rank_whose_stage_has_no_such_axis_is_alone_on_it(worlds: Worlds) -> None:
    told = worlds.run(3, axes)
    assert [row[0] for row in told] == [
        ("split", (0,), 0, 0.0),
        ("split", (1, 2), 0, 3.0),
        ("split", (1, 2), 1, 3.0),
    ]


def starts(world: World) -> tuple[list[float], str, str]:
    torch.manual_seed(world.rank)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    groups: list[dict[str, Any]] = [
        {"params": model[0].parameters(), "lr": 0.1 + world.rank},
        {"params": model[1].parameters()},
    ]
    optimizer = torch.optim.Adam(groups)
    if world.rank == 1:  # as after a checkpoint was loaded
        model(torch.randn(8, 3)).square().sum().backward()
        optimizer.step()
    whale.broadcast_parameters(model, root=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        whale.broadcast_optimizer_state(optimizer, root=1)
    states = [float(x.double().sum()) for state in optimizer.state.values() for x in state.values()]
    found = [float(x.double().sum()) for x in model.state_dict().values()]
    whale.broadcast_parameters(model.state_dict())
    whale.broadcast_parameters(model.named_parameters())
    bad = refusal(lambda: whale.broadcast_parameters({"w": torch.ones(2 + world.rank)}))
    split = nn.Linear(4, 4)
    whale.annotate(split, {"": whale.split()})
    made = whale.parallelize(
        split, torch.ones(4, 4), loss_fn=lambda y, batch: y.sum(), device="cpu", sync_module_states=True
    )
    return [*found, *states, optimizer.param_groups[0]["lr"]], bad, refusal(lambda: whale.broadcast_parameters(made))


def test_parameters_and_optimizer_states_become_those_of_one_rank(worlds: Worlds) -> None:
    told = worlds.run(2, starts)
    assert told[0][0] == told[1][0]
    assert told[0][0][-1] == 1.1
    for _, unlike, parts in told:
        assert "in the names, shapes or dtypes of the tensors to broadcast" in unlike
        assert "parallelize(..., sync_module_states=True)" in parts


def one_stays_away(world: World) -> None:
    whale.init(timeout_seconds=2, device="cpu")
    if world.rank == 0:
        whale.all_reduce(torch.ones(3))
    else:
        time.sleep(5)


def test_a_rank_that_does_not_come_is_named() -> None:
    with Ranks(2) as ranks:
        outcomes = ranks.outcomes(one_stays_away)
    assert (
        "WorkerError: rank 0 waited for all_reduce, which ranks [0, 1] must call, and rank 1 did not"
        in outcomes[0].error
    )


def unlike_backwards(world: World) -> None:
    whale.init(timeout_seconds=2, device="cpu")
    x = torch.ones(3, requires_grad=True)
    y = whale.all_gather(x)
    if world.rank == 0:
        y.sum().backward()
    else:
        time.sleep(5)


def test_a_rank_whose_loss_leaves_the_result_out_is_named() -> None:
    with Ranks(2) as ranks:
        outcomes = ranks.outcomes(unlike_backwards)
    assert (
        "rank 0 waited for the gradient of all_gather, which ranks [0, 1] must call, and rank 1 did"
        in outcomes[0].error
    )
