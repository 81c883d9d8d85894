"""Time of the first step with a new length of sequences, relative to later steps with it: models of Hugging Face.

Two lengths are compiled; for every further one the ratio is that of its first step and the median of three more, on the
slowest of two ranks. Lengths are drawn once for all models. The loss of every first step is compared with the local
model's, in float64; Llama and GPT-2 compute theirs in float32.
"""

from __future__ import annotations

import copy
import random
import statistics
import time
from collections.abc import Callable, Sequence
from unittest.mock import patch

import torch
import torch.distributed as dist
import transformers
from harness import arguments, on_two_ranks, over_ranks, report, table
from torch import Tensor, nn

import whale
from whale.compile import builder

ROWS, WORDS, LONGEST = 4, 1000, 512
SMALL = {
    "vocab_size": WORDS, "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
    "max_position_embeddings": LONGEST,
}  # fmt: skip
WITHOUT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def gpt2() -> nn.Module:
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = transformers.GPT2Config(n_layer=4, n_embd=128, n_head=4, vocab_size=WORDS, n_positions=LONGEST, **none)
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, num_key_value_heads=2))


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, **WITHOUT_DROPOUT))


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=WORDS, d_model=128, d_kv=32, d_ff=512, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "gpt2": (gpt2, "transformer.h.{}"),
    "llama": (llama, "model.layers.{}"),
    "bert": (bert, "bert.encoder.layer.{}"),
    "t5": (t5, ""),
}


def batch(kind: str, length: int, generator: torch.Generator) -> dict[str, Tensor]:
    ids = torch.randint(WORDS, (ROWS, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, length // 2 :] = 0
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids[:, : 2 * length // 3].clone() if kind == "t5" else ids.clone(),
    }


def measured(kind: str, layout: str, lengths: Sequence[int]) -> tuple[str, ...]:
    build, layers = MODELS[kind]
    torch.manual_seed(0)
    model = build().double()
    local = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    stages = {layers.format(0): whale.stage(), layers.format(2): whale.stage()}
    root = {"replicate": whale.replicate(), "split": whale.split()}
    whale.annotate(model, stages if layout == "stages" else {"": root[layout]})
    options = {"micro_batches": 2} if layout == "stages" else {}
    parallel = whale.parallelize(model, batch(kind, lengths[0], generator), device="cpu", **options)

    def step(given: dict[str, Tensor]) -> tuple[float, float]:
        parallel.zero_grad()
        dist.barrier()
        start = time.perf_counter()
        loss = parallel.train_step(**given)
        return over_ranks(time.perf_counter() - start, dist.ReduceOp.MAX), loss.item()

    second, _ = step(batch(kind, lengths[1], generator))
    ratios, differences = [], []
    with patch.object(builder, "compile_traced", wraps=builder.compile_traced) as compiling:
        for length in lengths[2:]:
            given = batch(kind, length, generator)
            first, loss = step(given)
            again = statistics.median(step(given)[0] for _ in range(3))
            ratios.append(first / again)
            with torch.no_grad():
                differences.append(abs(loss - local(**given).loss.item()))
    ordered = sorted(ratios)
    return (
        f"{kind}, {layout}",
        f"{again * 1e3:.0f} ms",
        f"{second / again:.0f}",
        f"{statistics.median(ratios):.2f}",
        f"{ordered[-1]:.2f}",
        str(compiling.call_count),
        f"{max(differences):.0e}",
    )


def main() -> None:
    options = arguments("the first step with a new length", repeats=12)
    on_two_ranks()
    draw = random.Random(0)
    lengths = [64, 80, *(draw.randrange(24, 400) for _ in range(options.repeats))]
    cases = [(kind, layout) for kind in MODELS for layout in ("replicate", "split", "stages")]
    rows = [
        measured(kind, layout, lengths)
        for kind, layout in cases
        if options.only in f"{kind}, {layout}" and (layout != "stages" or MODELS[kind][1])
    ]
    head = (
        "model and layout", "a step of the last length", "first step of the second length, in steps",
        "first step of a further length, in steps: median", "most", f"compiled of {options.repeats}", "worst loss",
    )  # fmt: skip
    report("new_lengths", options, table(head, rows))


if __name__ == "__main__":
    main()
