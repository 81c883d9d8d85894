"""Attention on a sequence that is cut over ranks, without processes: ways, refusals, balance, and a ring of threads."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import whale
from tests.distributed import spatial, zoo
from whale.compile.compilation import Compilation
from whale.compile.compile import compile_model
from whale.compile.options import Options
from whale.errors import AnnotationError, InfeasibleError
from whale.ir.cluster import Cluster
from whale.ir.placement import Cut, Segment, unit_ranges
from whale.ir.plan import Plan, PlanAxis, PlanStage
from whale.ir.strategy import Scope, Strategy, decode_scopes, encode_scopes, parse_strategy
from whale.runtime import collectives
from whale.runtime.attention import attend, attend_back
from whale.runtime.ring import RingAttention, Round, _Ahead, _Back
from whale.strategies.bridge_prices import Prices
from whale.strategies.dry_run import TaskCalls, stage_calls

# --- words ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["split(2, dim=1, attention='ring')", "split(dim=-2, attention='ulysses')"])
def test_a_way_survives_its_text_and_its_scope(text: str) -> None:
    strategy = parse_strategy(text)
    assert str(strategy) == text
    path = (Scope(strategy=strategy, region="a"),)
    assert decode_scopes(encode_scopes(path)) == path


def test_auto_is_said_by_nothing() -> None:
    assert str(whale.split(2, dim=1, attention="auto")) == "split(2, dim=1)"


def test_an_unknown_way_is_refused_with_those_that_are() -> None:
    with pytest.raises(AnnotationError, match=r"'flash'.*unknown way; use 'auto', 'gather', 'ring', 'ulysses'"):
        whale.split(2, dim=1, attention="flash")  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", [{"kind": "split"}, {"kind": "replicate"}])
def test_a_way_is_for_a_split_along_a_dim(strategy: Any) -> None:
    with pytest.raises(AnnotationError, match=r"only split\(n, dim=...\) has a way to compute attention"):
        Strategy(attention="ring", **strategy)


# --- what is chosen ---------------------------------------------------------------------------------------------------


def compiled(example: tuple[nn.Module, Any], attention: Any = "auto", size: int = 2, **options: Any) -> Compilation:
    model, batch = example
    whale.annotate(model, {"": whale.split(dim=1, attention=attention)})
    return compile_model(model, batch, Cluster.homogeneous(size), Options(**options), device="cpu", training=True)


def task_calls(compilation: Compilation) -> TaskCalls:
    """The collectives of rank 0 in the first micro-batch."""
    stage, rows = compilation.stages[0], compilation.rows
    every = stage_calls(compilation.captured, stage, rows, lambda s, rank: compilation.local_programs(s, rank, None), 0)
    return every[0][0]


def calls_of(compilation: Compilation) -> tuple[Counter[str], Counter[str]]:
    """The collectives of a step's forward and backward, by what they do."""
    found = task_calls(compilation)
    return Counter(call.op for call in found.forward), Counter(call.op for call in found.backward)


LAYERS = 2
CALLS = {
    "gather": ({"all_gather": 2 * LAYERS}, {"reduce_scatter": 2 * LAYERS}),
    "ring": ({"all_to_all": 2 * LAYERS}, {"all_to_all": 4 * LAYERS}),  # keys and values, and back their gradients too
    "ulysses": ({"all_to_all": 4 * LAYERS}, {"all_to_all": 4 * LAYERS}),
}


@pytest.mark.parametrize("way", CALLS)
def test_calls_of_three_ranks(way: str) -> None:
    assert calls_of(compiled(spatial.gpt(), way, size=3)) == CALLS[way]


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, groups: int) -> None:
        super().__init__()
        self.sizes = width, width * groups // heads
        self.heads, self.groups = heads, groups
        self.project, self.out = nn.Linear(width, width + 2 * self.sizes[1]), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.project(x).split([self.sizes[0], self.sizes[1], self.sizes[1]], -1)
        q, k, v = (part.unflatten(-1, (-1, self.sizes[0] // self.heads)).transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2)).square().mean()


def chosen(monkeypatch: pytest.MonkeyPatch, length: int, size: int, dtype: torch.dtype = torch.bfloat16) -> str:
    monkeypatch.setattr("whale.compile.compile.GLOO", Prices())
    with torch.device("meta"):
        model, x = Attention(4096, 32, 32).to(dtype), torch.empty(1, length, 4096, dtype=dtype)
    stage = compiled((model, {"x": x}), size=size).stages[0]
    (choice,) = (c[1] for node, c in stage.choices.items() if "scaled_dot" in str(node.target))
    return "ring" if choice.form == "ring" else "ulysses" if choice.outputs[0].dim == 1 else "gather"


def test_a_long_sequence_goes_round_behind_its_products_and_a_shorter_one_by_heads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert chosen(monkeypatch, 2**16, 4) == "ring"
    assert chosen(monkeypatch, 2**13, 16) == "ulysses"
    assert chosen(monkeypatch, 2**12, 64) == "gather"  # more ranks than heads, and nothing to hide behind
    assert chosen(monkeypatch, 2**18, 64) == "ring"
    assert chosen(monkeypatch, 2**16, 4, torch.float32) == "ulysses"  # a ring has no fused kernel there


def test_a_ring_passes_on_one_key_for_the_heads_of_a_group() -> None:
    model, batch = zoo.llama()
    config: Any = model.config
    compilation = compiled((model, batch), "ring")
    module = next(
        m
        for m in compilation.local_programs(compilation.stages[0], 0, None)[0].micro_batch.code.root.modules()
        if isinstance(m, RingAttention)
    )
    found = task_calls(compilation)
    rows, length = batch["input_ids"].shape
    per_rank = 2 * rows * config.num_key_value_heads * config.hidden_size // config.num_attention_heads
    assert found.forward[0].shapes[1] == tuple(per_rank * module.round.length(rank) for rank in range(2))
    assert module.round.length(0) + module.round.length(1) == length


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_more_ranks_than_heads_are_refused_for_ulysses() -> None:
    with pytest.raises(InfeasibleError, match=r"attention='ulysses'.*4 heads.*5 ranks; use attention='ring'"):
        compiled(spatial.gpt(), "ulysses", size=5)


def test_attention_in_steps_is_refused_as_a_ring_with_the_operator_that_would_do() -> None:
    with pytest.raises(InfeasibleError, match=r"transformer.h.0.attn at .*computed in steps.*scaled_dot_product"):
        compiled(zoo.gpt2_eager_one_layer(), "ring")


def test_dropped_weights_are_refused_in_a_ring() -> None:
    model, batch = zoo.gpt2_one_layer_with_dropout()
    with pytest.raises(InfeasibleError, match=r"drops some of its weights.*set its dropout to 0, or use"):
        compiled((model.train(), batch), "ring")


class Crossing(nn.Module):
    """A sequence that looks at itself, then at another."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 24), nn.Linear(8, 16)

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (2, 4)).transpose(1, 2) for y in self.inner(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v)
        k, v = (z.unflatten(-1, (2, 4)).transpose(1, 2) for z in self.outer(other).chunk(2, -1))
        return F.scaled_dot_product_attention(y, k, v).square().mean()


TWO_SEQUENCES = {"x": torch.randn(2, 6, 8), "other": torch.randn(2, 6, 8)}


def test_keys_of_another_sequence_are_gathered() -> None:
    stage = compiled((Crossing(), TWO_SEQUENCES), "ring").stages[0]
    assert [c[1].form for node, c in stage.choices.items() if "scaled_dot" in str(node.target)] == ["ring", ""]


# --- the plan ---------------------------------------------------------------------------------------------------------


def test_a_plan_has_the_way() -> None:
    axis = PlanAxis(name="split", size=2, role="split", shares=(3, 1))
    told = ("split(2, dim=1, attention='ring')",)
    plan = Plan(world_size=2, stages=(PlanStage(ranks=(0, 1), axes=(axis,)),), annotations={"": told})
    assert Plan.parse(plan.dumps()) == plan
    assert calls_of(compiled(spatial.gpt(), "ring", plan=plan)) == ({"all_to_all": LAYERS}, {"all_to_all": 2 * LAYERS})


# --- balance ----------------------------------------------------------------------------------------------------------

SIZES = st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any).map(tuple)


@given(SIZES, st.booleans())
def test_ranges_of_all_ranks_are_all_units(sizes: tuple[int, ...], mirrored: bool) -> None:
    ranges = unit_ranges(sizes, mirrored)
    assert [sum(stop - start for start, stop in own) for own in ranges] == list(sizes)
    assert sorted(i for own in ranges for start, stop in own for i in range(start, stop)) == list(range(sum(sizes)))


@given(SIZES, st.booleans(), st.integers(1, 2), st.integers(1, 2))
def test_parts_of_a_mirrored_cut_make_up_the_whole(sizes: Any, mirrored: bool, outer: int, inner: int) -> None:
    cut = Cut(0, (Segment(outer, sum(sizes), inner),), sizes, mirrored)
    whole = torch.arange(cut.extent * 2).view(cut.extent, 2)
    parts = [collectives.take(whole, cut, rank) for rank in range(len(sizes))]
    assert [len(part) for part in parts] == [cut.local_extent(rank) for rank in range(len(sizes))]
    for rank, part in enumerate(parts):
        expected = [whole[start:stop] for start, stop in cut.intervals(rank)]
        assert torch.equal(part, torch.cat([*expected, whole[:0]]))
    assert torch.equal(collectives.assemble(parts, cut), whole)
    assert torch.equal(torch.stack([collectives.embed(p, cut, rank) for rank, p in enumerate(parts)]).sum(0), whole)


@given(SIZES, st.booleans(), st.booleans())
def test_blocks_are_exactly_what_rows_see(sizes: tuple[int, ...], mirrored: bool, causal: bool) -> None:
    held, length = unit_ranges(sizes, mirrored), sum(sizes)
    seen = torch.zeros(length, length, dtype=torch.int)
    places = [torch.tensor([i for start, stop in own for i in range(start, stop)], dtype=torch.long) for own in held]
    for index in range(len(sizes)):
        for owner in range(len(sizes)):
            for rows, columns, square in Round(held=held, index=index, causal=causal).blocks(owner):
                block = torch.ones(rows[1] - rows[0], columns[1] - columns[0], dtype=torch.int)
                r, c = places[index][slice(*rows)], places[owner][slice(*columns)]
                seen[r[:, None], c[None]] += block.tril() if square else block
    expected = torch.ones(length, length, dtype=torch.int)
    assert torch.equal(seen, expected.tril() if causal else expected)


def test_each_rank_computes_its_share_of_a_causal_attention() -> None:
    sizes = (600, 200, 200)
    work = [sum(i + 1 for start, stop in own for i in range(start, stop)) for own in unit_ranges(sizes, True)]
    assert [own / sum(work) for own in work] == pytest.approx([0.6, 0.2, 0.2], rel=2e-3)
    stretches = [sum(i + 1 for start, stop in own for i in range(start, stop)) for own in unit_ranges(sizes, False)]
    assert stretches[2] / sum(stretches) > 0.35


def test_only_rows_of_causal_attention_are_cut_from_both_ends() -> None:
    assert compiled(spatial.gpt(), "ring").stages[0].layout.mirrored
    assert compiled(spatial.gpt(), "gather").stages[0].layout.mirrored
    assert not compiled(spatial.gpt(), "ulysses").stages[0].layout.mirrored
    assert not compiled((Crossing(), TWO_SEQUENCES), "ring").stages[0].layout.mirrored


# --- a ring of threads ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ring:
    """Rows of ranks, and operands that are whole."""

    held: tuple[tuple[tuple[int, int], ...], ...]
    causal: bool = False
    heads: int = 4
    groups: int = 4
    value: int = 8
    mask: Callable[[int], Tensor] | None = None
    learned: bool = False


ZIGZAG, STRETCHES = unit_ranges((4, 4, 3), True), unit_ranges((7, 2, 1), False)
RINGS = {
    "causal": Ring(ZIGZAG, causal=True),
    "causal, in stretches": Ring(STRETCHES, causal=True),
    "all": Ring(STRETCHES),
    "a rank without rows": Ring(unit_ranges((3, 4, 0), True), causal=True),
    "one key for all heads": Ring(ZIGZAG, causal=True, groups=1),
    "wide values": Ring(ZIGZAG, causal=True, value=6),
    "a boolean mask, rows without columns": Ring(ZIGZAG, mask=lambda n: torch.rand(n, n) > 0.8),
    "a bias": Ring(ZIGZAG, groups=2, mask=lambda n: torch.randn(1, 4, n, n)),
    "a bias with a gradient": Ring(ZIGZAG, mask=lambda n: torch.randn(1, 4, n, n), learned=True),
}


def go_round(ring: Ring, given: list[Tensor], mask: Tensor | None, grad: Tensor) -> list[tuple[Tensor, list[Tensor]]]:
    """Results and gradients of all ranks; each is a thread."""
    world = len(ring.held)
    wires: list[queue.Queue[Tensor]] = [queue.Queue() for _ in range(world)]
    found: list[Any] = [None] * world

    def run(index: int) -> None:
        module = RingAttention(Round(held=ring.held, index=index, causal=ring.causal), tuple(range(world)))

        def sent(part: Tensor, owner: int, of_row: int) -> Callable[[], Tensor]:
            wires[(index + 1) % world].put(part.clone())
            return lambda: wires[index].get(timeout=20)

        ahead, back = _Ahead(module), _Back(module, ring.learned)
        ahead.sent = back.sent = sent  # type: ignore[method-assign]
        places = [i for start, stop in ring.held[index] for i in range(start, stop)]
        own = [x[..., places, :] for x in (*given, *([] if mask is None else [mask]))]
        packed = ahead(*own)
        gradients = back.unpacked(back(grad[..., places, :], packed, *own), *own)
        found[index] = ahead.unpacked(packed, *own)[0], gradients

    threads = [threading.Thread(target=run, args=(index,)) for index in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def test_scores_of_many_rows_are_computed_in_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    query, key, value, grad = (torch.randn(2, 3, 7, 4).double() for _ in range(4))
    bias = torch.randn(7, 7).double()
    monkeypatch.setattr("whale.runtime.attention._on_processor", lambda query, value: False)
    for mask, causal in ((None, True), (bias, False), (bias[:1], False)):
        found = []
        for most in (10**6, 90):
            monkeypatch.setattr("whale.runtime.attention._MOST_SCORES", most)
            result, sums = attend(query, key, value, mask, causal, None)
            back = attend_back(grad, query, key, value, result, sums, mask, causal, None, mask is not None)
            found.append([result, sums, *(x for x in back if x is not None)])
        assert all(torch.allclose(one, other, atol=1e-13) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("ring", RINGS.values(), ids=RINGS.keys())
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-13), (torch.bfloat16, 0.1)])
def test_a_ring_is_attention(ring: Ring, dtype: torch.dtype, bound: float) -> None:
    torch.manual_seed(0)
    length = sum(stop - start for own in ring.held for start, stop in own)
    shapes = [(2, ring.heads, length, 8), (2, ring.groups, length, 8), (2, ring.groups, length, ring.value)]
    given = [torch.randn(shape).to(dtype) for shape in shapes]
    mask = None if ring.mask is None else ring.mask(length)
    mask = mask if mask is None or mask.dtype == torch.bool else mask.to(dtype)
    leaves = [x.double().clone().requires_grad_() for x in given]
    bias = mask if mask is None or mask.dtype == torch.bool else mask.double().clone().requires_grad_(ring.learned)
    query, key, value = leaves
    whole = F.scaled_dot_product_attention(query, key, value, bias, is_causal=ring.causal, enable_gqa=True)
    grad = torch.randn_like(whole).to(dtype)
    whole.backward(grad.double())
    wanted = [*leaves, *([bias] if ring.learned and bias is not None else [])]
    for index, (result, gradients) in enumerate(go_round(ring, given, mask, grad)):
        places = [i for start, stop in ring.held[index] for i in range(start, stop)]
        assert result.dtype == dtype
        assert torch.allclose(result.double(), whole[..., places, :], atol=bound, rtol=0)
        for found, x in zip(gradients, wanted, strict=True):
            assert x.grad is not None
            assert torch.allclose(found.double(), x.grad[..., places, :], atol=bound, rtol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("causal", [False, True])
def test_a_block_on_a_gpu_is_that_on_a_processor(dtype: torch.dtype, causal: bool) -> None:
    torch.manual_seed(0)
    query, key, value, grad = (torch.randn(2, heads, 48, 64).to(dtype) for heads in (4, 2, 2, 4))

    def block(device: str, dtype: torch.dtype) -> list[Tensor]:
        x = [each.to(device, dtype) for each in (query, key, value, grad)]
        result, sums = attend(x[0], x[1], x[2], None, causal, None)
        found = attend_back(x[3], x[0], x[1], x[2], result, sums, None, causal, None)
        return [result, sums, *found[:3]]

    for one, other in zip(block("cuda", dtype), block("cpu", torch.float64), strict=True):
        assert torch.allclose(one.cpu().double(), other, atol=0.1 if dtype == torch.bfloat16 else 1e-4)
