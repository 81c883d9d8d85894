"""Masks that attention knows by a word are recognised, and only those."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, fx, nn

import whale
from tests.solved import solve, tokens
from tests.unit.test_placements import gpt2, llama

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


def attentions(model: nn.Module, batch: Any, annotations: dict[str, Any], **options: Any) -> list[tuple[bool, bool]]:
    """For each attention of rank 0's program: whether it reads a mask, and whether it is causal."""
    compilation = solve(model, batch, annotations, **options).compilation
    program = compilation.local_programs(compilation.stages[0], 0, None)[0]
    calls = [node for node in program.micro_batch.code.module.graph.nodes if node.target is ATTENTION]
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    bound = [dict(zip(names, node.args, strict=False)) | dict(node.kwargs) for node in calls]
    return [(isinstance(b.get("attn_mask"), fx.Node), bool(b.get("is_causal"))) for b in bound]


@pytest.mark.parametrize("strategy", [whale.split(), whale.replicate()])
@pytest.mark.parametrize("build", [gpt2, llama])
def test_a_causal_mask_that_a_model_spells_out_is_not_computed(build: Any, strategy: Any) -> None:
    assert attentions(build(), tokens(4, 8), {"": strategy}) == [(False, True)] * 2


def test_a_mask_of_the_batch_stays() -> None:
    batch = tokens(4, 8) | {"attention_mask": torch.ones(4, 8, dtype=torch.long, device="meta")}
    assert attentions(gpt2(), batch, {"": whale.replicate()}) == [(True, False)] * 2


@pytest.mark.parametrize(("window", "found"), [(4, (True, False)), (8, (False, True))])
def test_a_window_is_causal_only_if_it_is_as_long_as_the_sequence(window: int, found: tuple[bool, bool]) -> None:
    config = transformers.MistralConfig(
        num_hidden_layers=1, hidden_size=64, intermediate_size=64, num_attention_heads=4, num_key_value_heads=4,
        vocab_size=64, sliding_window=window,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.MistralForCausalLM(config)
    assert attentions(model, tokens(4, 8), {"": whale.split()}) == [found]


class Masked(nn.Module):
    """One head's attention of a sequence to itself, with a mask made of nothing but its length."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.project = nn.Linear(8, 8)

    def mask(self, length: int) -> Tensor:
        rows, columns = torch.arange(length)[:, None], torch.arange(length)[None, :]
        if self.kind == "all":
            return rows >= 0
        if self.kind == "biased":
            return -(rows - columns).abs().to(torch.float32)
        if self.kind == "strict":
            return columns < rows.clamp(min=1)
        return torch.zeros(length, length).masked_fill(columns > rows, torch.finfo(torch.float32).min)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.project(x).unsqueeze(1)
        mask = self.mask(x.shape[1]).expand(x.shape[1], x.shape[1])
        return nn.functional.scaled_dot_product_attention(heads, heads, heads, attn_mask=mask).sum()


@pytest.mark.parametrize(
    ("kind", "found"),
    [("all", (False, False)), ("added", (False, True)), ("biased", (True, False)), ("strict", (True, False))],
)
def test_masks_are_compared_element_by_element(kind: str, found: tuple[bool, bool]) -> None:
    assert attentions(Masked(kind), (torch.zeros(4, 6, 8),), {"": whale.replicate()}) == [found]
