"""Training under every level of ZeRO and every rule of recompute, in eight layouts, against the local model.

    PYTHONPATH=. python benchmarks/parity_matrix.py                      # 4 models x 8 layouts x 4 levels x 3 rules

In float64, casts to float32 inside of models promoted. Five steps of AdamW, the first of two accumulated batches. An
error is the largest difference of a loss, or of an element of a parameter at the end, from those of the local model in
one process. The collectives of the compiled steps are counted, too: under each rule there are as many.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from harness import report, table
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import whale
from tests.distributed.parity import cluster_of, worlds
from whale.cli.model_loader import load_model
from whale.graph.capture import capture
from whale.ir.state import LEVELS
from whale.ir.strategy import RECOMPUTES
from whale.runtime.launch import World
from whale.strategies.split_backward import communicates

BOUND = 1e-12
STEPS = 5


def words() -> dict[str, Tensor]:
    drawn = torch.randint(32, (8, 6), generator=torch.Generator().manual_seed(1))
    return {"input_ids": drawn, "labels": drawn}


def gpt2() -> tuple[nn.Module, Any]:
    sizes = {"vocab_size": 32, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 8}
    return GPT2LMHeadModel(GPT2Config(**sizes, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0)), words()


def llama() -> tuple[nn.Module, Any]:
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)), words()


def t5() -> tuple[nn.Module, Any]:
    sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 1, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0, dropout_rate=0.0)), words()


def mixture() -> tuple[nn.Module, Any]:
    sizes = {"layers": 2, "hidden": 16, "heads": 2, "ffn": 16, "seq": 6, "vocab": 32, "experts": 4, "batch_size": 8}
    found = load_model(f"{Path(__file__).parents[1] / 'examples' / 'models' / 'moe.py'}:moe", sizes)
    return found.model, found.batch


MODELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {"gpt2": gpt2, "llama": llama, "t5": t5, "mixture": mixture}
SECOND = {
    "gpt2": ("transformer.h.0", "transformer.h.1"),
    "llama": ("model.layers.0", "model.layers.1"),
    "t5": ("encoder", "decoder"),
    "mixture": ("blocks.0", "blocks.1"),
}
"""First modules of two stages."""


def two(name: str, first: Any, second: Any) -> dict[str, Any]:
    return dict(zip(SECOND[name], (first, second), strict=True))


def halves(name: str) -> dict[str, Any]:
    return two(name, *([whale.stage(2), whale.replicate()] for _ in range(2)))


Layout = tuple[int, Callable[[str], dict[str, Any]], dict[str, Any]]
PIPELINE = {"micro_batches": 4}
LAYOUTS: dict[str, Layout] = {
    "dp": (2, lambda name: {"": whale.replicate()}, {}),
    "dp, rows 3 : 1": (2, lambda name: {"": whale.replicate()}, {"cluster": (3.0, 1.0)}),
    "tp": (2, lambda name: {"": whale.split()}, {"micro_batches": 2}),
    "pp, 1F1B": (2, lambda name: two(name, whale.stage(), whale.stage()), PIPELINE),
    "pp, zero-bubble": (
        2,
        lambda name: two(name, whale.stage(), whale.stage()),
        PIPELINE | {"schedule": "zero_bubble"},
    ),
    "dp x tp": (4, lambda name: {"": [whale.replicate(2), whale.split()]}, {}),
    "pp x dp": (4, halves, {"micro_batches": 2}),
    "pp, 1 and 3 ranks": (
        4,
        lambda name: two(name, whale.stage(1), [whale.stage(3), whale.replicate()]),
        {"micro_batches": 2},
    ),
}
"""Ranks, annotations and options."""


def built(name: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    return model.double(), batch


def trained(model: Any, step: Callable[[], Tensor]) -> list[float]:
    optimizer = torch.optim.AdamW([{"params": list(model.parameters())}], lr=3e-4, weight_decay=0.1)
    losses = []
    for number in range(STEPS):
        optimizer.zero_grad()
        for _ in range(2 if number == 0 else 1):
            losses.append(step().item())
        optimizer.step()
    return losses


@cache
def local(name: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and parameters of the local model."""
    model, batch = built(name)
    captured = capture(model, batch, promote=True)
    tensors: dict[str, Any] = {**dict(model.named_parameters()), **dict(model.named_buffers()), **captured.constants}
    names = {**captured.parameters, **captured.buffers, **{n: n for n in captured.constants}}
    placeholders = [node.name for node in captured.graph.nodes if node.op == "placeholder"]
    read = [batch[captured.inputs[n]] if n in captured.inputs else tensors.get(names.get(n, "")) for n in placeholders]

    def step() -> Tensor:
        loss: Tensor = captured.module(*read)[0]
        loss.backward()
        return loss

    return trained(model, step), dict(model.named_parameters())


def collectives(made: Any) -> int:
    """The collectives of a rank's graphs."""
    found = 0
    for one in made._whale.engine.steps._steps.values():
        for stage in one.stages:
            derivative = stage.programs[0].derivative
            if derivative is not None:
                for code in (derivative.forward, derivative.backward.code):
                    found += sum(communicates(node, code.root) for node in code.graph.nodes)
    return found


def errors(world: World, name: str, kind: str, zero: int, recompute: str) -> tuple[float, float, int]:
    """Errors of losses and of parameters, and the collectives of this rank's graphs."""
    model, batch = built(name)
    _, annotation, options = LAYOUTS[kind]
    options = dict(options)
    whale.annotate(model, annotation(name))
    cluster = cluster_of(options.pop("cluster", ()))
    made: Any = whale.parallelize(
        model, batch, cluster=cluster, zero=zero, recompute=recompute, promote_casts=True, device="cpu", **options
    )
    losses = trained(made, lambda: made.train_step(**batch))
    wanted, parameters = local(name)
    whole = made.full_state_dict()
    loss = max(abs(a - b) for a, b in zip(losses, wanted, strict=True))
    return loss, max(float((whole[n] - x).abs().max()) for n, x in parameters.items()), collectives(made)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="models and layouts whose names contain this")
    parser.add_argument("--write", metavar="DATE", default="", help="write the results to benchmarks/results, dated so")
    options = parser.parse_args()
    options.repeats = 1
    rows, wrong, within, largest, unlike = [], list[str](), 0, 0.0, 0
    begin = time.monotonic()
    with worlds() as made:
        for kind, (ranks, _, _) in LAYOUTS.items():
            for name in MODELS:
                if options.only not in f"{name}, {kind}":
                    continue
                cells, counts = [], dict[int, set[tuple[int, ...]]]()
                for zero in LEVELS:
                    worst = 0.0
                    for rule in RECOMPUTES:
                        case = f"{name}, {kind}, zero={zero}, recompute={rule}"
                        try:
                            found = made.run(ranks, errors, name, kind, zero, rule, timeout=600.0)
                        except AssertionError as error:
                            wrong.append(f"{case}: {str(error).strip().splitlines()[-1]}")
                            print(case, error, flush=True)
                            worst = float("inf")
                            continue
                        error = max(max(loss, parameters) for loss, parameters, _ in found)
                        counts.setdefault(zero, set()).add(tuple(count for _, _, count in found))
                        worst = max(worst, error)
                        within += error <= BOUND
                        if not error <= BOUND:
                            wrong.append(f"{case}: {error:.1e}")
                    cells.append(f"{worst:.1e}")
                    largest = max(largest, worst)
                unlike += sum(len(each) > 1 for each in counts.values())
                rows.append((name, kind, *cells))
                print(rows[-1], f"{time.monotonic() - begin:.0f} s", flush=True)
    total = len(rows) * len(LEVELS) * len(RECOMPUTES)
    text = table(("model", "layout", *(f"zero={zero}" for zero in LEVELS)), rows)
    text += f"\n\nThe largest error of the three rules. {within} of {total} are within {BOUND:.0e}; the largest is "
    text += f"{largest:.1e}. Collectives differ between rules in {unlike} of {len(rows) * len(LEVELS)}."
    text += "".join(f"\n- {one}" for one in wrong)
    report("parity_matrix", options, text)


if __name__ == "__main__":
    main()
