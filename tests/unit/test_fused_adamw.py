"""AdamW in one pass: torch's updates to 2 units in the last place, its states, its habits, and its refusals."""

from __future__ import annotations

import copy
import ctypes
import importlib.util
import io
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale
from whale import optim
from whale.runtime import adamw
from whale.runtime.adamw_runs import Kind, Run
from whale.runtime.adamw_table import BLOCK, Rows, Table

SHAPES = ((100, 33), (1,), (), (7,), (4096,), (0, 3))
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
UNITS = 4 if INTERPRETED else 2
"""Triton's interpreter fuses no product with a sum, and cuts bfloat16 off where devices round."""

SLACK = 1e-6
"""Added to a whole number of units: devices round the power of two that `units` divides by."""

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])]


def parameters(dtype: torch.dtype = torch.float32, device: str = "cpu", shapes: Any = SHAPES) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape, dtype=torch.float64).to(device, dtype)) for shape in shapes]


def draw_gradients(*several: Sequence[nn.Parameter]) -> None:
    for alike in zip(*several, strict=True):
        gradient = torch.randn(alike[0].shape, dtype=torch.float64).to(alike[0].device, alike[0].dtype)
        for p in alike:
            p.grad = gradient.clone()


def units(found: Tensor, expected: Tensor, *operands: Tensor) -> float:
    """The largest difference, in units in the last place of the largest number that an element was computed from."""
    if not found.numel():
        return 0.0
    size = torch.stack([x.detach().abs().double() for x in (found, expected, *operands)]).amax(0)
    place = torch.finfo(found.dtype).eps * 2.0 ** size.clamp(min=1e-300).log2().floor()
    return float(((found.double() - expected.double()).abs() / place).max())


def worst_of_steps(device: str = "cpu", dtype: torch.dtype = torch.float32, steps: int = 4, **options: Any) -> float:
    """The largest difference from torch's of parameters and moments after a step from equal ones."""
    ours, theirs = (parameters(dtype, device) for _ in range(2))
    own, other = optim.FusedAdamW(ours, **options), torch.optim.AdamW(theirs, foreach=False, **options)
    worst = 0.0
    for _ in range(steps):
        draw_gradients(ours, theirs)
        before = copy.deepcopy([other.state[p] for p in theirs])
        starts = [p.detach().clone() for p in theirs]
        for one in (own, other):
            one.step()
        for x, y, start, state in zip(ours, theirs, starts, before, strict=True):
            assert y.grad is not None
            rate = torch.full_like(start, float(other.param_groups[0]["lr"]))  # the size of an update
            worst = max(worst, units(x.detach(), y.detach(), start, rate))
            for name, value in other.state[y].items():
                found = own.state[x][name]
                if name == "step":
                    assert torch.equal(found, value)
                    continue
                operand = y.grad if name == "exp_avg" else y.grad.square()
                worst = max(worst, units(found, value, operand, *([state[name]] if state else [])))
                found.copy_(value)
            with torch.no_grad():
                x.copy_(y)
    return worst


OPTIONS: list[dict[str, Any]] = [
    {},
    {"lr": 0.1, "weight_decay": 0.0, "eps": 1e-4},
    {"betas": (0.4, 0.5)},
    {"lr": torch.tensor(0.01)},
    {"amsgrad": True},
    {"maximize": True},
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_step_is_that_of_torch_to_two_units_in_the_last_place(device: str, options: dict[str, Any]) -> None:
    assert worst_of_steps(device, **options) <= UNITS + SLACK


def test_a_step_in_float64_is_that_of_torch() -> None:
    assert worst_of_steps(dtype=torch.float64) <= 2 + SLACK


@NO_GPU
@pytest.mark.gpu
def test_a_captured_step_is_that_of_torch_to_two_units_in_the_last_place() -> None:
    ours, theirs = (parameters(device="cuda") for _ in range(2))
    own, other = optim.FusedAdamW(ours, capturable=True), torch.optim.AdamW(theirs)
    draw_gradients(ours, theirs)
    own.step()  # to make its states
    other.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        own.step()
    for _ in range(3):
        graph.replay()
        other.step()
    for x, y in zip(ours, theirs, strict=True):
        assert torch.allclose(x, y, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("device", DEVICES)
def test_many_steps_keep_with_those_of_torch(device: str) -> None:
    ours, theirs = parameters(device=device), parameters(device=device)
    own, other = optim.FusedAdamW(ours, lr=0.01), torch.optim.AdamW(theirs, lr=0.01)
    for _ in range(50):
        draw_gradients(ours, theirs)
        own.step()
        other.step()
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


def test_groups_have_their_options_and_parameters_without_gradients_stay() -> None:
    def groups(own: list[nn.Parameter]) -> list[dict[str, Any]]:
        return [{"params": own[:2], "lr": 0.5}, {"params": own[2:], "weight_decay": 0.3}]

    ours, theirs = parameters(), parameters()
    made = optim.FusedAdamW(groups(ours)), torch.optim.AdamW(groups(theirs))
    for step in range(4):
        draw_gradients(ours, theirs)
        for p in (ours[0], theirs[0]):
            p.grad = None
        if step % 2:  # steps are counted for each
            for p in (ours[3], theirs[3]):
                p.grad = None
        for one in made:
            one.step()
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-7)
    assert [len(one.state) for one in made] == [5, 5]


@pytest.mark.parametrize("first", [optim.FusedAdamW, torch.optim.AdamW])
def test_either_loads_the_states_of_the_other(first: Any) -> None:
    second = torch.optim.AdamW if first is optim.FusedAdamW else optim.FusedAdamW
    before, after, alone = parameters(), parameters(), parameters()
    one, reference = first(before, lr=0.02), torch.optim.AdamW(alone, lr=0.02)
    for _ in range(2):
        draw_gradients(before, alone)
        one.step()
        reference.step()
    file = io.BytesIO()
    torch.save(one.state_dict(), file)
    file.seek(0)
    other = second(after)
    other.load_state_dict(torch.load(file, weights_only=True))
    with torch.no_grad():
        for x, y in zip(after, before, strict=True):
            x.copy_(y)
    draw_gradients(after, alone)
    other.step()
    reference.step()
    for x, y in zip(after, alone, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-7)
    assert other.param_groups[0]["lr"] == 0.02


def test_copies_and_schedulers_go_on() -> None:
    ours, theirs = parameters(), parameters()
    own, other = optim.FusedAdamW(ours), torch.optim.AdamW(theirs)
    schedulers = [torch.optim.lr_scheduler.StepLR(one, 1, 0.5) for one in (own, other)]
    for _ in range(3):
        draw_gradients(ours, theirs)
        own.step()
        other.step()
        for scheduler in schedulers:
            scheduler.step()
    twin = copy.deepcopy(own)
    copied = [p for group in twin.param_groups for p in group["params"]]
    draw_gradients(copied, theirs)
    twin.step()
    other.step()
    for x, y in zip(copied, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-7)


def test_parameters_that_follow_each_other_are_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    step = adamw.step_runs

    def counted(runs: Sequence[Run], *arguments: Any) -> None:
        seen.append(len(runs))
        step(runs, *arguments)

    monkeypatch.setattr(optim, "step_runs", counted)
    flat, gradient = torch.randn(300), torch.randn(300)
    sizes = (100, 70, 130)
    own = [nn.Parameter(x) for x in flat.split(sizes)]
    for p, g in zip(own, gradient.split(sizes), strict=True):
        p.grad = g
    other = nn.Parameter(flat.clone())
    other.grad = gradient.clone()
    made, expected = optim.FusedAdamW(reversed(own)), torch.optim.AdamW([other])
    for _ in range(2):
        made.step()
        expected.step()
    assert seen == ([] if INTERPRETED else [1, 1])  # the kernel has a row for each parameter
    torch.testing.assert_close(flat, other.detach(), rtol=1e-6, atol=1e-7)


def vector(address: int, length: int, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer((ctypes.c_byte * (length * dtype.itemsize)).from_address(address), dtype=dtype)


def step_by_address(rows: Rows, scalars: Tensor, kind: Kind, found_inf: Tensor | None = None) -> None:
    """The step of the kernel, which finds memory by the table alone."""
    table = [(*fixed, *moving) for fixed, moving in zip(rows.fixed.tolist(), rows.moving.tolist(), strict=True)]
    assert rows.aligned == all(address % 16 == 0 for row in table for address in (*row[:5], row[6]))
    for number, (parameter, mean, square, largest, low, length, gradient, place) in enumerate(table):
        blocks = [block for of, block in rows.blocks.tolist() if of == number]
        assert blocks == list(range(-(-length // BLOCK)))
        if length:
            addresses = (parameter, gradient, mean, square, largest, low)
            memory: list[Any] = [
                None if dtype is None else vector(address, length, dtype)
                for address, dtype in zip(addresses, rows.types, strict=True)
            ]
            own = scalars[place].clone()
            own[5] = 1 / own[5]
            adamw._update(*memory, own, kind)  # type: ignore[call-arg]


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each table that steps send, which are by table as on a GPU."""
    seen: list[int] = []
    send = Table._send

    def counted(self: Table, numbers: Sequence[Sequence[int]]) -> Tensor:
        seen.append(len(numbers))
        return send(self, numbers)

    monkeypatch.setattr(Table, "_send", counted)
    monkeypatch.setattr(optim, "is_triton", lambda device: True)
    if not INTERPRETED:
        monkeypatch.setattr(optim, "step_rows", step_by_address)
    return seen


class Pair:
    """The same parameters under `FusedAdamW` and torch's."""

    def __init__(self, **options: Any) -> None:
        self.ours, self.theirs = parameters(), parameters()
        self.own, self.other = optim.FusedAdamW(self.ours, **options), torch.optim.AdamW(self.theirs, **options)

    def step(self, draws: bool = True) -> None:
        if draws:
            draw_gradients(self.ours, self.theirs)
        self.own.step()
        self.other.step()
        for x, y in zip(self.ours, self.theirs, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
            if y in self.other.state:
                assert torch.equal(self.own.state[x]["step"], self.other.state[y]["step"])


def test_a_table_is_sent_if_something_moved(sent: list[int]) -> None:
    pair, several = Pair(), len(SHAPES)
    pair.step()
    assert len(sent) == 3
    assert sent.count(several) == 2
    sent.clear()
    pair.step(draws=False)
    for p in pair.ours:
        assert p.grad is not None
        p.grad.mul_(2)  # in place
    for p in pair.theirs:
        assert p.grad is not None
        p.grad.mul_(2)
    pair.step(draws=False)
    assert sent == []
    kept = [p.grad for p in pair.ours]  # whose memory is not free for new ones
    pair.step()
    assert sent == [several]
    sent.clear()
    pair.own.state[pair.ours[0]]["exp_avg"] = pair.own.state[pair.ours[0]]["exp_avg"].clone()
    pair.step(draws=False)
    assert len(sent) == 3
    assert len(kept) == several


def replace_storage(own: list[nn.Parameter], optimizer: Any) -> None:
    own[0].data = own[0].data.clone()


def load_states(own: list[nn.Parameter], optimizer: Any) -> None:
    state = copy.deepcopy(optimizer.state_dict())
    for held in state["state"].values():
        held["exp_avg"] *= 0.5
        held["step"] += 3
    optimizer.load_state_dict(state)


def change_counts(own: list[nn.Parameter], optimizer: Any) -> None:
    optimizer.state[own[1]]["step"] += 3
    optimizer.state[own[2]]["step"] = torch.tensor(7.0)
    optimizer.state[own[3]]["step"].data = torch.tensor(9.0)
    optimizer.state[own[4]]["step"].fill_(20)


def change_moments(own: list[nn.Parameter], optimizer: Any) -> None:
    optimizer.state[own[3]]["exp_avg"].mul_(0.5)
    optimizer.state[own[4]]["exp_avg"] = optimizer.state[own[4]]["exp_avg"] * 0.5


def forget_states(own: list[nn.Parameter], optimizer: Any) -> None:
    del optimizer.state[own[0]]


def add_group(own: list[nn.Parameter], optimizer: Any) -> None:
    own.append(nn.Parameter(torch.ones(5, 3)))
    optimizer.add_param_group({"params": own[-1:], "lr": 0.1})


def change_options(own: list[nn.Parameter], optimizer: Any) -> None:
    optimizer.param_groups[0].update(lr=0.5, weight_decay=0.3, betas=(0.8, 0.9), maximize=True)


def transpose(own: list[nn.Parameter], optimizer: Any) -> None:
    own[0].data = own[0].data.T.contiguous().T


CHANGES = [
    replace_storage,
    load_states,
    change_counts,
    change_moments,
    forget_states,
    add_group,
    change_options,
    transpose,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_what_changes_between_steps_is_seen(sent: list[int], change: Callable[[list[nn.Parameter], Any], None]) -> None:
    pair = Pair()
    for _ in range(2):
        pair.step()
    change(pair.ours, pair.own)
    change(pair.theirs, pair.other)
    for _ in range(2):
        pair.step()


def test_parameters_that_are_stepped_in_turns_have_a_table_each(sent: list[int]) -> None:
    pair = Pair()
    for turn in range(3):
        draw_gradients(pair.ours, pair.theirs)
        gradients = [(x.grad, y.grad) for x, y in zip(pair.ours, pair.theirs, strict=True)]
        for part in (slice(0, 3), slice(3, 6)):
            for n, (x, y) in enumerate(zip(pair.ours, pair.theirs, strict=True)):
                x.grad, y.grad = gradients[n] if n in range(6)[part] else (None, None)
            sent.clear()
            pair.step(draws=False)
            assert len(sent) == 3 if turn == 0 else len(sent) <= 1


def test_a_gradient_that_is_not_there_for_a_step_is_not_counted(sent: list[int]) -> None:
    pair = Pair()
    for missing in (None, 4, None, 0, 0, None):
        draw_gradients(pair.ours, pair.theirs)
        if missing is not None:
            pair.ours[missing].grad = pair.theirs[missing].grad = None
        pair.step(draws=False)


def test_a_gradient_in_another_layout_is_copied(sent: list[int]) -> None:
    pair = Pair()
    for _ in range(3):
        draw_gradients(pair.ours, pair.theirs)
        assert pair.ours[0].grad is not None
        pair.ours[0].grad = pair.ours[0].grad.T.contiguous().T
        pair.step(draws=False)


def test_a_copy_has_a_table_of_its_own(sent: list[int]) -> None:
    pair = Pair()
    pair.step()
    twin = copy.deepcopy(pair.own)
    copied = twin.param_groups[0]["params"]
    before = [p.detach().clone() for p in pair.ours]
    draw_gradients(copied, pair.theirs)
    twin.step()
    pair.other.step()
    for x, y, own, old in zip(copied, pair.theirs, pair.ours, before, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)
        assert torch.equal(own, old)
        assert pair.own.state[own]["step"] == 1


def test_steps_that_were_counted_elsewhere_go_on(sent: list[int]) -> None:
    first, second = Pair(), Pair()
    first.step()
    state = first.other.state_dict()  # whose tensors torch's optimizers share with those that load it
    second.own.load_state_dict(state)
    before = {number: float(held["step"]) for number, held in state["state"].items()}
    draw_gradients(second.ours)
    second.own.step()
    assert {number: float(held["step"]) for number, held in state["state"].items()} == before
    assert {float(held["step"]) for held in second.own.state.values()} == {2.0}
    assert all(held["step"].dim() == 0 for held in second.own.state.values())


def test_states_lie_where_wide_loads_find_them(sent: list[int]) -> None:
    pair = Pair(amsgrad=True)
    pair.step()
    for p in pair.ours:
        for name in ("exp_avg", "exp_avg_sq"):
            assert pair.own.state[p][name].data_ptr() % 16 == 0


def test_gradients_that_are_negated_when_read_are_read_so() -> None:
    ours, theirs = parameters(shapes=[(100,)]), parameters(shapes=[(100,)])
    own, other = optim.FusedAdamW(ours), torch.optim.AdamW(theirs)
    draw_gradients(ours, theirs)
    assert ours[0].grad is not None
    ours[0].grad = torch._neg_view(-ours[0].grad)
    own.step()
    other.step()
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-6, atol=1e-7)


def test_any_dense_layout_is_updated_in_place() -> None:
    def made() -> list[nn.Parameter]:
        torch.manual_seed(0)
        image = torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
        return [
            nn.Parameter(image),
            nn.Parameter(torch.randn(6, 4).T),
            nn.Parameter(torch.randn(5, dtype=torch.cfloat)),
        ]

    ours, theirs = made(), made()
    own, other = optim.FusedAdamW(ours), torch.optim.AdamW(theirs)
    for _ in range(2):
        for x, y in zip(ours, theirs, strict=True):
            x.grad = torch.randn(x.shape, dtype=x.dtype)  # contiguous
            y.grad = x.grad.clone()
        own.step()
        other.step()
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-7)
        assert own.state[x]["exp_avg"].stride() == other.state[y]["exp_avg"].stride()


@pytest.mark.parametrize("device", DEVICES)
def test_low_precision_parameters_are_rounded_as_by_the_fused_one_of_torch(device: str) -> None:
    ours, theirs = (parameters(torch.bfloat16, device) for _ in range(2))
    own, other = optim.FusedAdamW(ours, lr=0.1), torch.optim.AdamW(theirs, lr=0.1, fused=True)
    for _ in range(2):
        draw_gradients(ours, theirs)
        own.step()
        other.step()
        for x, y in zip(ours, theirs, strict=True):
            assert units(x.detach(), y.detach()) <= 1 + SLACK
            assert own.state[x]["exp_avg"].dtype == torch.bfloat16


@pytest.mark.parametrize("device", DEVICES)
def test_masters_are_updated_and_rounded_in_the_same_pass(device: str) -> None:
    low = parameters(torch.bfloat16, device)
    wide = [nn.Parameter(p.detach().float()) for p in low]
    own, other = optim.FusedAdamW(low, masters=True), torch.optim.AdamW(wide)
    for _ in range(3):
        draw_gradients(low)
        for x, y in zip(low, wide, strict=True):
            assert x.grad is not None
            y.grad = x.grad.float()
        own.step()
        other.step()
    for x, y in zip(low, wide, strict=True):
        assert own.state[x]["exp_avg_sq"].dtype == torch.float32
        torch.testing.assert_close(own.state[x]["master"], y.detach(), rtol=1e-6, atol=1e-7)
        assert units(x.detach(), own.state[x]["master"].bfloat16()) <= INTERPRETED
    again = optim.FusedAdamW(parameters(torch.bfloat16, device), masters=True)
    again.load_state_dict(own.state_dict())
    for x, y in zip(again.param_groups[0]["params"], low, strict=True):
        for name in ("master", "exp_avg", "exp_avg_sq"):
            assert torch.equal(again.state[x][name], own.state[y][name]), name
    plain = torch.optim.AdamW(parameters(torch.bfloat16, device))
    plain.load_state_dict(own.state_dict())  # which has no use for them
    draw_gradients(plain.param_groups[0]["params"])
    plain.step()


def test_a_scaler_divides_and_skips() -> None:
    ours, theirs = parameters(), parameters()
    pairs = [(optim.FusedAdamW(ours), ours), (torch.optim.AdamW(theirs), theirs)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10) for _ in pairs]
    for step in range(4):
        draw_gradients(ours, theirs)
        for scaler, (optimizer, own) in zip(scalers, pairs, strict=True):
            scaler.scale(torch.zeros(()))
            for p in own:
                assert p.grad is not None
                p.grad.mul_(scaler.get_scale())
            if step == 2:
                own[0].grad[0, 0] = torch.inf  # type: ignore[index]
            scaler.step(optimizer)
            scaler.update()
    assert scalers[0].get_scale() == scalers[1].get_scale() == 2.0**9
    for x, y in zip(ours, theirs, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-7)
        assert pairs[0][0].state[x]["step"] == 3
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-6, atol=1e-7)


def test_the_pass_is_one_loop() -> None:
    from torch._functorch import config as autograd_config
    from torch._inductor import config, metrics

    metrics.reset()
    adamw._compiled.cache_clear()
    try:
        with config.patch(fx_graph_cache=False), autograd_config.patch(enable_autograd_cache=False):
            own = parameters(torch.bfloat16, shapes=[(1000,)])
            draw_gradients(own)
            optim.FusedAdamW(own, masters=True).step()
    finally:
        adamw._compiled.cache_clear()
    assert metrics.generated_kernel_count == 1


def refusal(what: Callable[[], Any]) -> str:
    with pytest.raises(whale.WhaleError) as caught:
        what()
    return str(caught.value)


def test_what_one_pass_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    own = parameters(shapes=[(100,)])
    assert "has no gradient" in refusal(lambda: optim.FusedAdamW(own, differentiable=True))
    assert "leave one out" in refusal(lambda: optim.FusedAdamW(own, foreach=True, fused=True))
    draw_gradients(own)
    assert "is for CUDA graphs" in refusal(optim.FusedAdamW(own, capturable=True).step)
    gaps = nn.Parameter(torch.randn(4, 4)[:, :2])
    gaps.grad = torch.ones(4, 2)
    assert "with gaps or overlaps in memory" in refusal(optim.FusedAdamW([gaps]).step)
    sparse = nn.Parameter(torch.randn(4, 2))
    sparse.grad = torch.ones(4, 2).to_sparse()
    assert "torch.optim.SparseAdam" in refusal(optim.FusedAdamW([sparse]).step)

    def broken(*arguments: Any, **options: Any) -> Any:
        def call(*arguments: Any) -> None:
            raise RuntimeError("No working C++ compiler found")

        return call

    adamw._compiled.cache_clear()
    monkeypatch.setattr(torch, "compile", broken)
    try:
        told = refusal(optim.FusedAdamW(own).step)
    finally:
        adamw._compiled.cache_clear()
    assert "needs a C++ compiler, and this failed: No working C++ compiler found; use torch.optim.AdamW" in told


def test_the_module_is_there_after_import_whale() -> None:
    code = "import whale; print(whale.optim.FusedAdamW.__name__)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "FusedAdamW\n"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed: its kernel is not run")
@pytest.mark.skipif(INTERPRETED, reason="this is the run in the interpreter")
def test_the_kernel_in_triton_passes_these_tests_in_its_interpreter() -> None:
    chosen = "not cuda and not one_loop and not cannot_do and not by_the_fused_one and not after_import"
    arguments = ["-q", "-p", "no:cacheprovider", "-n", "0", "-k", chosen, str(Path(__file__))]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
