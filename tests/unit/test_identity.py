"""The hash of a captured model: what it depends on, and what not."""

from __future__ import annotations

import subprocess
import sys

import torch
import transformers
from torch import nn

import whale
from tests.small_models import decoder, tokens
from whale.graph.capture import Batch, capture
from whale.graph.identity import model_hash
from whale.graph.ordering import settle_order


def hash_of(model: nn.Module, batch: Batch) -> str:
    captured = capture(model, batch)
    settle_order(captured)
    return model_hash(captured)


def llama(hidden: int = 32) -> nn.Module:
    config = transformers.LlamaConfig(
        num_hidden_layers=1, hidden_size=hidden, intermediate_size=64, num_attention_heads=4, vocab_size=64
    )
    with torch.device("meta"):
        return transformers.LlamaForCausalLM(config)


def test_the_hash_is_of_the_model_not_of_the_batch_or_the_annotations() -> None:
    plain = hash_of(decoder(), tokens())
    assert hash_of(decoder(), tokens(rows=3)) == plain
    assert hash_of(decoder(), tokens(length=5)) == plain
    annotated = decoder()
    whale.annotate(annotated, {"layers.[0-1]": whale.stage(), "layers.[2-3]": [whale.stage(), whale.split()]})
    assert hash_of(annotated, tokens()) == plain


def test_the_hash_is_not_of_the_number_type_even_where_a_model_casts() -> None:
    ids = torch.zeros(2, 8, dtype=torch.long, device="meta")
    batch = {"input_ids": ids, "labels": ids}
    assert hash_of(llama(), batch) == hash_of(llama().bfloat16(), batch)
    assert hash_of(llama(), batch) != hash_of(llama(hidden=48), batch)


class Masked(torch.nn.Linear):
    """Masks with the least number of its number type, as many attentions do."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        scores = super().forward(input)
        return (
            scores.masked_fill(scores > 1, torch.finfo(scores.dtype).min).clamp(min=torch.finfo(scores.dtype).eps).sum()
        )


def test_the_hash_is_not_of_the_limits_of_a_number_type() -> None:
    found = set()
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        with torch.device("meta"):
            found.add(hash_of(Masked(4, 4, dtype=dtype), (torch.zeros(2, 4, dtype=dtype),)))
    assert len(found) == 1


def test_other_sizes_operators_and_ties_are_other_models() -> None:
    found = {hash_of(decoder(**sizes), tokens()) for sizes in ({}, {"layers": 3}, {"width": 20}, {"heads": 2})}
    assert len(found) == 4
    tied = decoder()
    tied.head.weight = tied.embed.weight
    assert hash_of(tied, tokens()) not in found


def test_another_process_finds_the_same_hash() -> None:
    code = """
from tests.small_models import decoder, tokens
from whale.graph.capture import Batch, capture
from whale.graph.identity import model_hash
from whale.graph.ordering import settle_order
captured = capture(decoder(), tokens())
settle_order(captured)
print(model_hash(captured))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONHASHSEED": "7", "PYTHONPATH": "."}
    )
    assert done.stdout.split() == [hash_of(decoder(), tokens())], done.stderr
