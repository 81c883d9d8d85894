"""Experts' rows leave their sorted order where that changes nothing, and only there."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

import whale
from tests.solved import solve, tokens
from whale.graph.capture import capture
from whale.runtime import experts
from whale.runtime.experts import group, grouped_product, product_of_groups
from whale.strategies.ungroup import ungroup

SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 4001}
FEW = {"num_key_value_heads": 2, "num_experts_per_tok": 2}


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(**SMALL, **FEW, intermediate_size=96, num_local_experts=4)
    with torch.device("meta"):
        return transformers.MixtralForCausalLM(config)


def gpt_oss() -> nn.Module:
    config = transformers.GptOssConfig(**SMALL, **FEW, intermediate_size=96, num_local_experts=4, head_dim=16)
    with torch.device("meta"):
        return transformers.GptOssForCausalLM(config)


def deepseek() -> nn.Module:
    config = transformers.DeepseekV3Config(
        **SMALL, num_key_value_heads=4, num_experts_per_tok=2, intermediate_size=96, moe_intermediate_size=32,
        n_routed_experts=4, n_group=2, topk_group=1, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=16,
        qk_rope_head_dim=8, v_head_dim=16, first_k_dense_replace=1,
    )  # fmt: skip
    with torch.device("meta"):
        return transformers.DeepseekV3ForCausalLM(config)


def program(compilation: Any) -> fx.GraphModule:
    return compilation.local_programs(compilation.stages[0], 0, None)[0].micro_batch.code.module


@pytest.mark.parametrize("build", [mixtral, gpt_oss, deepseek])
def test_experts_are_data_parallel_without_communication(build: Any) -> None:
    solved = solve(build(), tokens(4, 8), {"": whale.replicate()})
    assert not solved.forward and not solved.backward and not solved.compilation.report.whole
    found = Counter(node.target for node in program(solved.compilation).graph.nodes)
    layers = 1 if build is deepseek else 2
    assert (found[group], found[product_of_groups]) == (layers, 2 * layers)  # rows are sorted once a layer


@pytest.mark.parametrize("build", [mixtral, gpt_oss])
def test_experts_are_cut_along_their_hidden_units(build: Any) -> None:
    solved = solve(build(), tokens(8, 256), {"": whale.split()})
    assert not solved.compilation.report.whole
    assert not [name for name in solved.whole_matrices if "experts" in name and "bias" not in name]
    graph = program(solved.compilation)
    for node in graph.graph.nodes:
        if node.target is product_of_groups:
            source: Any = node.args[1]
            while source.op == "call_function":  # transposed
                source = source.args[0]
            assert source.op == "placeholder", "a weight of experts is gathered"


def looped(x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """A kernel that reads where groups end, as that of older versions of transformers in its backward."""
    parts = torch.tensor_split(x, ends.long()[:-1])
    return torch.cat([part @ matrix for part, matrix in zip(parts, matrices, strict=True)])


def test_a_kernel_whose_backward_reads_values_has_one_that_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    x, matrices = (torch.randn(*shape, generator=generator).double() for shape in ((9, 4), (5, 4, 3)))
    choice = torch.tensor([3, 0, 3, 1, 0, 4, 4, 4, 1])

    def gradients() -> list[Tensor]:
        leaves = [one.clone().requires_grad_() for one in (x, matrices)]
        grouped_product(leaves[0], leaves[1], choice, looped).square().sum().backward()
        return [one.grad for one in leaves if one.grad is not None]

    expected = gradients()
    monkeypatch.setattr(experts, "_reads_values", lambda kernel: True)
    for own, other in zip(gradients(), expected, strict=True):
        assert (own - other).abs().max() <= 1e-14
    ends = torch.empty(5, dtype=torch.int32, device="meta")
    made = torch.ops.whale_experts.outer_products(x.to("meta"), torch.empty(9, 3, device="meta"), ends)
    assert made.shape == (5, 4, 3)


@pytest.mark.parametrize("build", [mixtral, deepseek])
def test_experts_take_micro_batches(build: Any) -> None:
    layout = {"model.layers.0": whale.stage(), "model.layers.1": whale.stage()}
    assert len(solve(build(), tokens(4, 8), layout, micro_batches=2).compilation.rows) == 2


class Sorted(nn.Module):
    """Rows in the order of their experts, and something that is done with them there."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.router = nn.Linear(8, 4)
        self.experts = nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        choice = self.router(x).argmax(-1)
        ordered, order = torch.sort(choice)
        y = x[order]
        counts = torch.histc(ordered.float(), bins=4, min=0, max=3)
        ends = torch.cumsum(counts, 0, dtype=torch.int32)
        y = torch.ops.aten._grouped_mm(y.bfloat16(), self.experts.bfloat16(), ends).float()
        if self.kind == "couples rows":
            y = torch.cumsum(y, 0)
        if self.kind == "mixes orders":
            y = y + x
        if self.kind == "sums rows":
            return (y * self.router.weight.sum()).sum()
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order))
        return y[inverse].square().sum()


@pytest.mark.parametrize(
    ("kind", "possible"), [("plain", True), ("sums rows", True), ("couples rows", False), ("mixes orders", False)]
)
def test_only_what_is_done_row_by_row_leaves_the_order(kind: str, possible: bool) -> None:
    graph = capture(Sorted(kind), (torch.zeros(6, 8),)).graph
    before = [str(node.target) for node in graph.nodes]
    assert ungroup(graph) == possible
    found = {node.target for node in graph.nodes}
    assert (grouped_product in found) == possible
    assert (torch.ops.aten.sort.default in found) != possible
    if not possible:
        assert [str(node.target) for node in graph.nodes] == before


def loop(x: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """The plainest kernel."""
    starts = [0, *ends.tolist()]
    return torch.cat([x[a:b] @ m for a, b, m in zip(starts, starts[1:], matrices, strict=False)])


@settings(deadline=None, max_examples=50)
@given(choice=st.lists(st.integers(0, 3), max_size=12))
def test_a_grouped_product_multiplies_each_row_with_its_matrix(choice: list[int]) -> None:
    torch.manual_seed(0)
    x = torch.randn(len(choice), 3, dtype=torch.float64, requires_grad=True)
    matrices = torch.randn(4, 3, 2, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(len(choice), 2, dtype=torch.float64)
    found = grouped_product(x, matrices, torch.tensor(choice, dtype=torch.long), loop)
    expected = torch.einsum("ni,nio->no", x, matrices[choice])
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad((y * weights).sum(), (x, matrices)) for y in (found, expected)]
    torch.testing.assert_close(*gradients)
