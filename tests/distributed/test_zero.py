"""State in stretches: steps and optimizers train as the local model, and each rank has its share of the state."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import whale
from tests.distributed import trained
from tests.distributed.parity import Worlds, cluster_of
from tests.distributed.parity import worlds as worlds_of_a_module
from tests.distributed.trained import BOUND, MODELS
from tests.distributed.two_ranks import refusal
from tests.largest import largest
from tests.small_models import decoder, tokens
from whale.errors import UsageError
from whale.ir.cluster import Cluster, DeviceType, Link
from whale.ir.plan import Plan
from whale.runtime.launch import World


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    with worlds_of_a_module() as made:
        yield made


def errors(world: World, annotation: dict[str, Any], name: str, options: dict[str, Any]) -> tuple[float, float, int]:
    """Errors of losses and of parameters, and how many elements this rank trains."""
    loss, parameters, made = trained.training_errors(name, annotation, options)
    return loss, parameters, sum(p.numel() for p in made.parameters())


def check(worlds: Worlds, name: str, kind: str, **options: Any) -> list[int]:
    """Train as the local model; return how many elements each of four ranks trains."""
    found = worlds.run(4, errors, LAYOUTS[kind](MODELS[name].stages), name, options)
    assert max(max(loss, parameters) for loss, parameters, _ in found) <= BOUND
    return [held for _, _, held in found]


Stages = tuple[str, str]
LAYOUTS: dict[str, Callable[[Stages], dict[str, Any]]] = {
    **{kind: trained.LAYOUTS[kind].annotate for kind in ("dp", "dp x tp", "pp x dp")},
    "dp x pp": lambda stages: {path: whale.stage(1) for path in stages},
    "each stage its own": lambda stages: {
        stages[0]: [whale.stage(2, zero=3, state_shares=[3, 1]), whale.replicate()],
        stages[1]: [whale.stage(2), whale.replicate(zero=1)],
    },
}
"""Annotations for four ranks."""


CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("decoder", "dp", {"zero": 3, "state_shares": [3, 1, 2, 1], "micro_batches": 2}),
    ("decoder", "dp x tp", {"zero": 1, "micro_batches": 2}),
    ("decoder", "dp x tp", {"zero": 3, "recompute": "selective"}),
    ("decoder", "pp x dp", {"zero": 2, "micro_batches": 4, "recompute": "full"}),
    ("decoder", "pp x dp", {"zero": 3, "micro_batches": 4, "schedule": "zero_bubble", "recompute": "selective"}),
    ("decoder", "dp x pp", {"zero": 1, "micro_batches": 2, "state_align": "parameter"}),
    ("decoder", "each stage its own", {"micro_batches": 4}),
    ("gpt2", "each stage its own", {"micro_batches": 2, "recompute": "full"}),
    ("gpt2", "dp", {"zero": 2, "micro_batches": 2, "recompute": "full"}),
    ("gpt2", "pp x dp", {"zero": 3, "micro_batches": 2, "state_shares": [3, 1, 3, 1]}),
    ("llama", "dp x tp", {"zero": 2, "micro_batches": 2, "recompute": "full", "state_shares": [1, 1, 3, 3]}),
    ("t5", "pp x dp", {"zero": 3, "micro_batches": 2, "recompute": "full", "schedule": "zero_bubble"}),
    ("mixture", "dp", {"zero": 3, "micro_batches": 2}),
    ("mixture", "dp x tp", {"zero": 1}),
    ("gpt2", "pp x dp", {"offload": "state", "micro_batches": 2, "recompute": "full"}),
    ("decoder", "dp x pp", {"zero": 3, "offload": "state", "micro_batches": 2, "schedule": "zero_bubble"}),
]


@pytest.mark.parametrize(("name", "kind", "options"), CASES, ids=lambda x: str(x))
def test_training_equals_the_local_model(worlds: Worlds, name: str, kind: str, options: dict[str, Any]) -> None:
    check(worlds, name, kind, **options)


def test_ranks_own_their_shares(worlds: Worlds) -> None:
    total = sum(p.numel() for p in decoder(layers=2).parameters())
    held = check(worlds, "decoder", "dp", zero=1, state_shares=[3, 1, 0, 1])
    assert sum(held) == total
    for share, own in zip((3, 1, 0, 1), held, strict=True):
        assert own == pytest.approx(share / 5 * total, abs=48)  # a row
    assert sum(check(worlds, "decoder", "dp", zero=3, state_align="parameter")) == total


PLANNED = """{"world_size": 4, "batch": 8, "micro_batches": 2, "annotations": {"layers.0": ["stage(2)", "replicate(2)"],
    "layers.1": ["stage(2)", "replicate(2)"]}, "stages": [
    {"ranks": ["0-1"], "axes": [{"name": "replicate", "size": 2, "role": "replicate"}],
     "state": {"level": 3, "shares": [3, 1]}},
    {"ranks": ["2-3"], "axes": [{"name": "replicate", "size": 2, "role": "replicate"}]}]}"""


def test_a_plan_says_how_its_stages_divide_their_state(worlds: Worlds) -> None:
    found = worlds.run(4, errors, {}, "decoder", {"plan": Plan.parse(PLANNED)})
    assert all(max(loss, parameters) <= BOUND for loss, parameters, _ in found)
    held = [held for _, _, held in found]
    assert held[2] == held[3]  # all of the second stage
    assert held[0] == pytest.approx(3 * held[1], rel=0.05)


def test_a_rank_without_rows_owns_a_part_of_the_states(worlds: Worlds) -> None:
    last = '"role": "replicate", "shares": [4, 0]}], "state": {"level": 1}}]'
    text = PLANNED.replace('"role": "replicate"}]}]', last)
    found = worlds.run(4, errors, {}, "decoder", {"plan": Plan.parse(text)})
    assert all(max(loss, parameters) <= BOUND for loss, parameters, _ in found)
    assert found[2][2] == pytest.approx(found[3][2], rel=0.05)
    assert found[2][2] < sum(p.numel() for p in decoder(layers=2).parameters()) / 3


def by_memory(world: World, memories: tuple[int, ...], options: dict[str, Any]) -> tuple[str, int, float]:
    """How this rank's stage divides its state on devices of these bytes, how many elements it owns, and the error."""
    cards = [
        (
            "node0",
            DeviceType.of(f"cpu-{size}", speed={"float64": 1e10}, memory_bytes=size, memory_bandwidth=1e9),
        )
        for size in memories
    ]
    cluster = Cluster.of(cards, intra=Link(bandwidth=1e9, latency=1e-5))
    model = decoder(layers=8)
    whale.annotate(model, {"": whale.replicate()})
    plan = '{"world_size": 2, "stages": [{"ranks": ["0-1"], "axes": [%s]}]}'
    equal = plan % '{"name": "replicate", "size": 2, "role": "replicate"}'
    made = whale.parallelize(model, tokens(), device="cpu", cluster=cluster, plan=Plan.parse(equal), **options)
    loss = made.train_step(**tokens())
    builder: Any = made._whale.engine.source
    state = builder.__self__.first.stages[0].state
    held = sum(p.numel() for p in made.parameters())
    return str(state), held, (loss - decoder(layers=8)(**tokens())).abs().item()


def test_ranks_own_what_their_memory_leaves(worlds: Worlds) -> None:
    roomy = worlds.run(2, by_memory, (2**30, 2**30), {"zero": "auto"})
    assert {state for state, _, _ in roomy} == {"None"}
    size = sum(p.numel() * 8 for p in decoder(layers=8).parameters())
    tight = worlds.run(2, by_memory, (2 * size, 5 * size), {"zero": "auto", "state_shares": "auto"})
    assert len({state for state, _, _ in tight}) == 1
    assert "state_shares" in tight[0][0]
    assert tight[1][1] > 1.5 * tight[0][1]
    assert max(error for *_, error in (*roomy, *tight)) <= BOUND


# --- what scripts do with it ------------------------------------------------------------------------------------------


def parallel(zero: int, model: nn.Module | None = None, **options: Any) -> Any:
    return whale.parallelize(
        decoder(layers=2) if model is None else model, tokens(), device="cpu", timeout_seconds=30, zero=zero, **options
    )


def apart(made: Any, reference: nn.Module) -> float:
    whole = made.full_state_dict()
    return largest(*((whole[name] - x).abs().max().item() for name, x in reference.state_dict().items()))


def habits(world: World | None, zero: int, **options: Any) -> dict[str, float]:
    """By how much a parallel and a local model differ after what scripts do."""
    made, reference, batch = parallel(zero, **options), decoder(layers=2), tokens()
    average: Any
    average, other = torch.optim.swa_utils.AveragedModel(made), torch.optim.swa_utils.AveragedModel(reference)
    own, plain = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (made, reference))
    found = {}
    for _ in range(3):
        own.zero_grad(set_to_none=False)
        plain.zero_grad(set_to_none=False)
        made.train_step(**batch)
        reference(**batch).backward()
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.3) for m in (made, reference)]
        own.step()
        plain.step()
        average.update_parameters(made)
        other.update_parameters(reference)
    found["clipped norms"] = (norms[0] - norms[1]).abs().item()
    gradients = made.full_gradients()
    found["gradients"] = largest(*((gradients[n] - p.grad).abs().max().item() for n, p in reference.named_parameters()))
    found["trained"] = apart(made, reference)
    found["average"] = (average.module.eval_step(**batch) - other.module(**batch)).abs().item()
    state, optimizer_state = copy.deepcopy(made.state_dict()), copy.deepcopy(own.state_dict())
    own.zero_grad()
    made.train_step(**batch)
    own.step()
    resumed = parallel(zero, **options)
    resumed.load_state_dict(state)
    again = torch.optim.SGD(resumed.parameters(), lr=0.1, momentum=0.9)
    again.load_state_dict(optimizer_state)
    resumed.train_step(**batch)
    again.step()
    found["resumed"] = (made.eval_step(**batch) - resumed.eval_step(**batch)).abs().item()
    resumed.load_full_state_dict(reference.state_dict())
    found["loaded"] = apart(resumed, reference)
    with torch.no_grad():
        for m in (resumed, reference):
            for parameter in m.parameters():
                parameter.mul_(0.5)
    found["scaled in place"] = (resumed.eval_step(**batch) - reference(**batch)).abs().item()
    for m in (resumed, reference):
        for parameter in m.parameters():
            parameter.data = parameter.data * 0.5
    found["given other memory"] = (resumed.eval_step(**batch) - reference(**batch)).abs().item()
    for m in (resumed, reference):
        before = [parameter.data for parameter in m.parameters()]
        for parameter in m.parameters():
            parameter.data = torch.zeros_like(parameter)
        if m is resumed:
            m.eval_step(**batch)
        for parameter, data in zip(m.parameters(), before, strict=True):
            parameter.data = data
    found["taken back"] = (resumed.eval_step(**batch) - reference(**batch)).abs().item()
    flat = torch.cat([parameter.detach().flatten() for parameter in resumed.parameters()])
    nn.utils.vector_to_parameters(flat, resumed.parameters())
    resumed.eval_step(**batch)
    flat.mul_(0.5)  # of which parameters are views
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.mul_(0.5)
    copied, local_copy = copy.deepcopy(resumed), copy.deepcopy(reference)
    for m in (copied, local_copy):
        handles = [parameter.data for parameter in m.parameters()]
        if m is copied:
            m.eval_step(**batch)
        for handle in handles:
            handle.mul_(0.5)
    found["memory of a copy"] = (copied.eval_step(**batch) - local_copy(**batch)).abs().item()
    found["in memory of the script"] = (resumed.eval_step(**batch) - reference(**batch)).abs().item()
    return found


def exchanged(world: World, zero: int) -> float:
    """The error after two parameters of one rank have exchanged their memory."""
    made = parallel(zero, state_shares=[1, 0])
    reference = decoder(layers=2)
    made.train_step(**tokens())
    for m in (made, reference):
        own = dict(m.named_parameters())
        pairs = [n for n in own if n.startswith("layers.0.")]
        for name in pairs:
            one, other = own[name], own.get(name.replace("layers.0.", "layers.1."))
            if other is not None:
                one.data, other.data = other.data, one.data
    made.eval_step(**tokens())
    return apart(made, reference)


@pytest.mark.parametrize("zero", [1, 3])
def test_parameters_exchange_their_memory(worlds: Worlds, zero: int) -> None:
    assert max(worlds.run(2, exchanged, zero)) == 0


def adafactor(world: World) -> list[float]:
    """Losses with an optimizer whose states have other shapes than parameters, with a reload in the middle, without
    that, and of the local model."""
    losses = []
    for kind in ("reloaded", "plain", "local"):
        local = decoder(layers=2)
        model: Any = local if kind == "local" else parallel(1, local, state_align="parameter")
        optimizer = torch.optim.Adafactor(model.parameters(), lr=0.01)
        for number in range(4):
            optimizer.zero_grad()
            if model is local:
                loss = model(**tokens())
                loss.backward()
            else:
                loss = model.train_step(**tokens())
            optimizer.step()
            if kind == "reloaded" and number == 1:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        losses.append(loss.item())
    return losses


def test_states_of_whole_parameters_are_loaded(worlds: Worlds) -> None:
    for reloaded, plain, expected in worlds.run(2, adafactor):
        assert reloaded == plain
        assert plain == pytest.approx(expected, abs=1e-8)


def one_gradient(world: World) -> str:
    made = parallel(0)
    one, other = [p for p in made.parameters() if p.shape == (16,)][:2]
    one.grad = other.grad = torch.zeros_like(one)
    with pytest.raises(UsageError) as refused:
        made.train_step(**tokens())
    return str(refused.value)


def test_one_tensor_as_the_gradient_of_two_parameters_is_refused(worlds: Worlds) -> None:
    for refused in worlds.run(2, one_gradient):
        assert "have one tensor as .grad" in refused


@pytest.mark.parametrize("zero", [1, 3])
def test_scripts_do_what_they_do_with_the_local_model(worlds: Worlds, zero: int) -> None:
    for found in worlds.run(2, habits, zero):
        assert found == pytest.approx(dict.fromkeys(found, 0.0), abs=BOUND)


@pytest.mark.parametrize("zero", [0, 3])
def test_scripts_of_one_process_with_the_state_on_the_host(zero: int) -> None:
    found = habits(None, zero, offload="state")
    assert found == pytest.approx(dict.fromkeys(found, 0.0), abs=BOUND)


def test_scripts_of_two_ranks_with_the_state_on_the_host(worlds: Worlds) -> None:
    for found in worlds.run(2, partial(habits, offload="state"), 2):
        assert found == pytest.approx(dict.fromkeys(found, 0.0), abs=BOUND)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_state_of_a_gpu_is_on_the_host() -> None:
    torch.manual_seed(0)
    model = decoder(layers=2)
    reference = copy.deepcopy(model).cuda()
    made = whale.parallelize(model, tokens(), zero=3, offload="state", timeout_seconds=30)
    pairs = [(m, torch.optim.AdamW(m.parameters(), lr=0.01)) for m in (made, reference)]
    for _ in range(3):
        for m, optimizer in pairs:
            optimizer.zero_grad()
            m.train_step(**tokens()) if m is made else m(**{n: x.cuda() for n, x in tokens().items()}).backward()
            nn.utils.clip_grad_norm_(m.parameters(), 1.0)
            optimizer.step()
    states = [x for state in pairs[0][1].state.values() for x in state.values()]
    held = [*made.parameters(), *(p.grad for p in made.parameters() if p.grad is not None), *states]
    whole = made.full_state_dict()
    assert {x.device.type for x in held} == {"cpu"}
    assert max((whole[n].cpu() - x.cpu()).abs().max().item() for n, x in reference.state_dict().items()) <= 1e-9


def lengths(world: World, zero: int, speeds: tuple[float, ...], rows: tuple[int, ...]) -> float:
    """The largest error of losses and parameters over batches of several sizes."""
    made = whale.parallelize(
        decoder(layers=2), tokens(rows[0]), device="cpu", zero=zero, micro_batches=2, cluster=cluster_of(speeds)
    )
    reference = decoder(layers=2)
    own, plain = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (made, reference))
    worst = 0.0
    for number, count in enumerate(rows):
        batch = tokens(count, 6 if number % 2 else 5)
        own.zero_grad()
        plain.zero_grad()
        loss = reference(**batch)
        worst = largest(worst, (made.train_step(**batch) - loss).abs().item())
        loss.backward()
        own.step()
        plain.step()
    return largest(worst, apart(made, reference))


@pytest.mark.parametrize("zero", [2, 3])
@pytest.mark.parametrize("speeds", [(), (5.0, 1.0)], ids=["equal", "unequal"])
def test_batches_of_which_ranks_have_no_rows(worlds: Worlds, zero: int, speeds: tuple[float, ...]) -> None:
    for error in worlds.run(2, lengths, zero, speeds, (8, 3, 1, 2, 8)):
        assert error <= BOUND


def resharded(world: World, directory: str) -> float:
    """A checkpoint of stretches, loaded where every rank has all."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    def step(model: Any, optimizer: Any) -> None:
        optimizer.zero_grad()
        model.train_step(**tokens())
        optimizer.step()

    pairs = []
    for model in (parallel(3, state_shares=[3, 1]), parallel(0)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        step(model, optimizer)
        pairs.append((model, optimizer))
    one, other = pairs
    step(*one)
    parts: dict[str, Any] = dict(zip(("model", "optimizer"), get_state_dict(*one), strict=True))
    dcp.save(parts, checkpoint_id=directory)
    parts = dict(zip(("model", "optimizer"), get_state_dict(*other), strict=True))
    dcp.load(parts, checkpoint_id=directory)
    set_state_dict(*other, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"])
    step(*one)
    step(*other)
    states = [model.full_state_dict() for model, _ in pairs]
    return max((states[0][name] - x).abs().max().item() for name, x in states[1].items())


def test_checkpoints_are_resharded(worlds: Worlds, tmp_path: Any) -> None:
    assert max(worlds.run(2, resharded, str(tmp_path))) <= BOUND


def low_precision(world: World, precision: str) -> float:
    """The difference from every replica having all."""
    models = []
    for zero in (0, 1, 3):
        torch.manual_seed(0)
        made = parallel(zero, decoder(layers=2).float(), precision=precision, micro_batches=2)
        optimizer = torch.optim.AdamW(made.parameters(), lr=0.01)
        if made.loss_scaler is not None:
            made.loss_scaler.scale = 2.0**40  # the first steps overflow, and are skipped by all
        for _ in range(4):
            optimizer.zero_grad()
            made.train_step(**tokens())
            optimizer.step()
        models.append(made.full_state_dict())
    plain, *others = models
    return max((plain[name] - x).abs().max().item() for other in others for name, x in other.items())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_low_precision_trains_as_without(worlds: Worlds, precision: str) -> None:
    assert worlds.run(2, low_precision, precision) == [0.0, 0.0]


def muon(world: World) -> tuple[list[str], float]:
    """The refusals by rows, of Muon and of LBFGS, and the error by parameters."""

    def matrices(model: nn.Module) -> list[nn.Parameter]:
        return [p for p in model.parameters() if p.dim() == 2]

    made = parallel(1)
    made.train_step(**tokens())
    refused = [
        refusal(lambda: torch.optim.Muon(matrices(made)).step()),
        refusal(lambda: torch.optim.LBFGS(made.parameters()).step(lambda: made.train_step(**tokens()))),
    ]
    made, reference = parallel(3, state_align="parameter"), decoder(layers=2)
    own, plain = (torch.optim.Muon(matrices(m)) for m in (made, reference))
    for _ in range(3):
        own.zero_grad()
        plain.zero_grad()
        made.train_step(**tokens())
        reference(**tokens()).backward()
        own.step()
        plain.step()
    return refused, apart(made, reference)


def test_optimizers_of_matrices_need_whole_parameters(worlds: Worlds) -> None:
    for refused, error in worlds.run(2, muon):
        assert "Muon updates an element by others" in refused[0] and 'state_align="parameter"' in refused[0]
        assert refused[1].endswith("use an elementwise optimizer, such as AdamW, or leave zero and offload out")
        assert error <= BOUND


def refusals(world: World) -> list[str]:
    found = []
    for options in (
        {"zero": 4},
        {"zero": 0, "state_shares": [1, 1]},
        {"zero": 1, "state_shares": [1, -1]},
        {"zero": 1, "state_shares": [1, 1, 1]},
        {"zero": 1, "state_align": "element"},
    ):
        try:
            parallel(**options)
        except UsageError as error:
            found.append(str(error))
    made = parallel(1)
    for parameter in made.parameters():
        parameter.requires_grad_(False)
    try:
        made.train_step(**tokens())
    except UsageError as error:
        found.append(str(error))
    return found


def test_refusals(worlds: Worlds) -> None:
    expected = [
        "zero is 4; it can be 0, 1, 2 or 3",
        "state_shares and state_align say how zero= divides the state",
        "they must be numbers of at least 0",
        "state_shares has 3 numbers, but gradients are summed over 2 ranks",
        "it can be 'row' or 'parameter'",
        "was frozen after parallelize",
    ]
    for found in worlds.run(2, refusals):
        assert len(found) == len(expected)
        for text, words in zip(found, expected, strict=True):
            assert words in text
