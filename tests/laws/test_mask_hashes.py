"""Masks that are written out for a compiler: the same bits, computed again in the backward, of keys of their rows."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from tests.laws.test_derivatives import assert_same, graph_of, run
from whale.compile.kernels import Kernel
from whale.runtime.local_program import Derivative, LocalCode, LocalGraph
from whale.runtime.random import PositionMask, RNGPosition, SeededDropout, column_numbers, keep_mask, row_numbers
from whale.strategies.differentiation import differentiated
from whale.strategies.mask_hashes import masks_written_out
from whale.strategies.recompute import kept_once
from whale.strategies.segments import Segment, Segments
from whale.strategies.traced_call import fake_like

CPU = torch.device("cpu")


def numbers(rows: int, columns: int, first: int = 0) -> tuple[Tensor, Tensor]:
    """The numbers of rows and columns of a part of a tensor."""
    ranges = (((first, first + rows),), ((first, first + columns),))
    return row_numbers(ranges, (first + rows, first + columns), CPU), column_numbers(ranges, CPU)


def derivative_of_drops(tensors: tuple[Tensor, ...], keeps: list[float], clock: RNGPosition) -> Derivative:
    """The derivative of several dropouts, each after a sine."""
    root = nn.Module()
    for number, keep in enumerate(keeps):
        root.add_module(f"drop_{number}", SeededDropout(1 - keep, number + 3, clock, with_mask=False))

    def body(graph: fx.Graph, rows: fx.Node, columns: fx.Node, x: fx.Node) -> list[fx.Node]:
        for number in range(len(keeps)):
            sine = graph.call_function(torch.ops.aten.sin.default, (x,))
            x = graph.call_module(f"drop_{number}", (rows, columns, sine))
        return [x]

    graph = graph_of(tensors, body)
    graph.code.root = root
    blank = [fake_like(x.shape, x.dtype, CPU, requires_grad=x.requires_grad) for x in tensors]
    return differentiated(graph, blank, 1, [fake_like(tensors[2].shape, tensors[2].dtype, CPU)])


@settings(max_examples=40, deadline=None)
@given(
    st.tuples(st.integers(1, 5), st.integers(1, 9)),
    st.lists(st.sampled_from([0.0, 1e-9, 0.25, 0.9, 1 - 2**-33, 1.0]), min_size=1, max_size=3),
    st.integers(0, 2**40),
)
def test_masks_have_the_same_bits_and_are_not_kept(shape: tuple[int, int], keeps: list[float], seed: int) -> None:
    x = torch.linspace(-2, 2, shape[0] * shape[1], dtype=torch.float64).view(shape).requires_grad_()
    tensors = (*numbers(*shape, first=seed % 7), x)
    whole = derivative_of_drops(tensors, keeps, RNGPosition(seed))
    written = kept_once(masks_written_out(whole))
    seeds = [torch.ones(shape, dtype=torch.float64)]
    for one, other in zip(*(tree_leaves(run(each, tensors, seeds, False)) for each in (written, whole)), strict=True):
        assert_same(one, other)
    hashed = sum(0 < keep < 1 for keep in keeps)
    with torch.no_grad():
        kept = [derivative.forward(*tensors)[1:] for derivative in (whole, written)]
    masks = [sum(x.dtype == torch.bool for x in values) for values in kept]
    assert masks[0] - masks[1] == hashed
    assert sum(x.dtype == torch.int32 for x in kept[1]) == (hashed > 0)  # the keys of all masks


def test_compiled_hashes_have_the_same_bits() -> None:
    clock, cases = RNGPosition(2**62 + 5), [(1, 1, 0.5), (3, 17, 0.9), (5, 16, 0.1), (2, 33, 0.75)]
    root, graph, arguments = nn.Module(), fx.Graph(), list[Tensor]()
    ends = [numbers(rows, columns, first=number) for number, (rows, columns, _) in enumerate(cases)]
    places = [[graph.placeholder(f"{name}_{number}") for name in ("rows", "columns")] for number in range(len(cases))]
    masks = []
    for number, (rows, columns, keep) in enumerate(cases):
        root.add_module(f"mask_{number}", PositionMask(keep, number, clock))
        masks.append(graph.call_module(f"mask_{number}", tuple(places[number])))
        masks[-1].meta["val"] = fake_like((rows, columns), torch.bool, CPU)
        arguments += ends[number]
    graph.output(tuple(masks))
    empty = fx.Graph()
    empty.output(())
    given = Derivative(
        forward=LocalCode(root, graph),
        backward=LocalGraph(LocalCode(nn.Module(), empty), []),
        num_results=len(cases),
        strides={},
        received=(),
        seeds=(),
    )
    compiled = Segments(Kernel).of_derivative(masks_written_out(given)).forward
    found = compiled(*arguments)
    assert sum(isinstance(module, Segment) for module in compiled.root.children()) == 1
    for number, (_, _, keep) in enumerate(cases):
        assert torch.equal(found[number], keep_mask(clock.of_step(number), keep, *ends[number]))
