"""Predicted against counted peaks of a rank's memory, with AdamW.

    PYTHONPATH=. python benchmarks/memory_predictions.py                       # GPT-2 and Llama in 40 settings
    PYTHONPATH=. python benchmarks/memory_predictions.py --draw 60 --seed 1    # other models and settings, drawn

Settings differ in layout, precision, recompute, division of state, what is on the host, schedule, micro-batches, and
whether the optimizer steps in the backward. A prediction is the dry run of the compiled step on shapes, as ``whale
plan`` makes it; counted are the live bytes of a real step that is not the first, operator by operator, without what
would be in the host's memory. The error is that of the rank where it is larger; a prediction must not be below.

Bytes do not depend on the load of the machine.
"""

from __future__ import annotations

import argparse
import random
import statistics
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from harness import report, table
from live_bytes import LiveBytes, hosted_left_out, living, peak_of
from models import batch, gpt2, llama
from torch import nn
from torch.optim import AdamW

import whale
from tests.distributed.parity import cluster_of, worlds
from whale.cli.model_loader import load_model
from whale.compile.compile import compile_model
from whale.compile.options import Options
from whale.errors import WhaleError
from whale.ir.cluster import Cluster
from whale.ir.state import StateSharding
from whale.predict.peak_memory import peak_memory
from whale.runtime.launch import World

MEAN, BELOW = 0.02, 0.0
"""The largest mean error, and the largest by which a prediction may be below."""

ROWS, LENGTH = 8, 32
DRAWN_ROWS = 12
BLOCKS = {"gpt2": "transformer.h", "llama": "model.layers"}
REPLICAS: list[dict[str, Any]] = [
    {},
    {"recompute": "selective"},
    {"recompute": "full", "micro_batches": 2},
    {"zero": 1},
    {"zero": 1, "micro_batches": 2, "recompute": "selective"},
    {"zero": 2, "micro_batches": 4},
    {"zero": 2, "state_shares": [3, 1], "recompute": "full"},
    {"zero": 3},
    {"zero": 3, "micro_batches": 2, "recompute": "full"},
    {"zero": 3, "state_shares": [1, 3], "recompute": "selective"},
    {"offload": "activations"},
    {"offload": "activations", "recompute": "full", "micro_batches": 2},
    {"offload": "state", "zero": 1},
    {"offload": "state", "zero": 3, "recompute": "full"},
    {"offload": "both", "zero": 2, "micro_batches": 2},
    {"step_in_backward": True},
    {"step_in_backward": True, "zero": 3, "recompute": "full"},
    {"gradient_dtype": "bf16", "recompute": "full"},
]
TENSORS: list[dict[str, Any]] = [
    {},
    {"micro_batches": 2, "recompute": "selective"},
    {"recompute": "full", "step_in_backward": True},
    {"offload": "activations"},
    {"offload": "state", "zero": 3, "recompute": "full"},
]
STAGES: list[dict[str, Any]] = [
    {"micro_batches": 4},
    {"micro_batches": 4, "schedule": "gpipe", "recompute": "full"},
    {"micro_batches": 4, "schedule": "zero_bubble"},
    {"micro_batches": 4, "schedule": "zero_bubble", "recompute": "selective", "step_in_backward": True},
    {"micro_batches": 4, "offload": "activations"},
    {"micro_batches": 2, "offload": "state", "zero": 3},
    {"micro_batches": 8, "recompute": "full"},
]
LOW: list[tuple[str, dict[str, Any]]] = [
    ("replicate", {}),
    ("replicate", {"zero": 3, "recompute": "full"}),
    ("replicate", {"zero": 1, "micro_batches": 2}),
    ("replicate", {"offload": "both", "zero": 1, "recompute": "selective"}),
    ("split", {"micro_batches": 2}),
    ("split", {"recompute": "full"}),
    ("stage", {"micro_batches": 4, "recompute": "selective"}),
    ("stage", {"micro_batches": 4, "schedule": "zero_bubble"}),
    ("stage", {"micro_batches": 4}),
    ("replicate", {"recompute": "full", "gradient_dtype": "bf16"}),
]
"""In bfloat16."""

Built = tuple[nn.Module, Any]
SMALL = {"hidden": 64, "heads": 4, "vocab": 512, "seq": 32}
HF = {"sequence_length": 32, "vocab_size": 512}


def _decoder(width: str, layers: str, heads: str, **more: Any) -> dict[str, Any]:
    return {**HF, width: 64, layers: 4, heads: 4, **more}


SHAPES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "gpt": ("gpt.py:gpt", {**SMALL, "layers": 4}, ("layers.{}",)),
    "bert": ("bert.py:bert", {**SMALL, "layers": 4}, ("layers.{}",)),
    "llama": ("llama.py:llama", {**SMALL, "layers": 4}, ("layers.{}",)),
    "t5": ("t5.py:t5", {**SMALL, "layers": 2}, ("encoder.{}", "decoder.{}")),
    "moe": ("moe.py:moe", {**SMALL, "layers": 3, "experts": 4, "ffn": 64}, ("blocks.{}", "layers.{}")),
    "gshard": ("gshard.py:gshard", {**SMALL, "layers": 3, "experts": 4, "ffn": 64}, ("layers.{}",)),
    "resnet": ("resnet.py:resnet", {"layers": 50, "width": 1, "classes": 100, "size": 32}, ("layers.{}",)),
    "cosmoflow": ("cosmoflow.py:cosmoflow", {"size": 32, "width": 4, "most": 8}, ("blocks.{}",)),
    "hf:gpt2": ("", _decoder("n_embd", "n_layer", "n_head", n_positions=32), ("transformer.h.{}",)),
    "hf:opt": ("", _decoder("hidden_size", "num_hidden_layers", "num_attention_heads", ffn_dim=128,
                            word_embed_proj_dim=64), ("model.decoder.layers.{}",)),
    "hf:gpt_neox": ("", _decoder("hidden_size", "num_hidden_layers", "num_attention_heads", intermediate_size=128),
                    ("gpt_neox.layers.{}",)),
    "hf:qwen2": ("", _decoder("hidden_size", "num_hidden_layers", "num_attention_heads", intermediate_size=128,
                              num_key_value_heads=2), ("model.layers.{}",)),
    "hf:bloom": ("", _decoder("hidden_size", "n_layer", "n_head"), ("transformer.h.{}",)),
    "hf:bert": ("", _decoder("hidden_size", "num_hidden_layers", "num_attention_heads", intermediate_size=128),
                ("bert.encoder.layer.{}",)),
    "hf:t5": ("", {**HF, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4},
              ("encoder.block.{}", "decoder.block.{}")),
    "hf:mixtral": ("", _decoder("hidden_size", "num_hidden_layers", "num_attention_heads", intermediate_size=64,
                                num_key_value_heads=2, num_local_experts=4), ("model.layers.{}",)),
    "hf:vit": ("", {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128,
                    "image_size": 32, "patch_size": 4}, ("vit.layers.{}", "vit.encoder.layer.{}")),
}  # fmt: skip
"""Models that are drawn: their builder in examples/models or their type in Hugging Face, sizes, and their layers."""


@dataclass(frozen=True)
class Case:
    """A model in a layout on some ranks; *speeds* of their devices are equal unless given."""

    model: str
    layout: str
    options: dict[str, Any] = field(default_factory=dict)
    ranks: int = 2
    speeds: tuple[float, ...] = ()

    def __str__(self) -> str:
        more = [f"{key}={value}" for key, value in self.options.items()]
        more += [f"{self.ranks} ranks"] * (self.ranks != 2) + [f"speeds {self.speeds}"] * bool(self.speeds)
        return ", ".join([self.model, self.layout, *more])

    def built(self) -> Built:
        """The annotated model and its batch."""
        if self.model in BLOCKS:
            model = gpt2(width=128, layers=4) if self.model == "gpt2" else llama(width=128, layers=4, words=1024)
            layers = [f"{BLOCKS[self.model]}.{n}" for n in range(4)]
            given: Any = batch(ROWS, LENGTH)
        else:
            file, sizes, paths = SHAPES[self.model]
            spec = f"{Path(__file__).parents[1] / 'examples' / 'models' / file}" if file else self.model
            loaded = load_model(spec, sizes, batch_size=DRAWN_ROWS)
            model, given = loaded.model, loaded.batch
            names = {name for name, _ in model.named_modules()}
            layers = [name for path in paths for n in range(20) if (name := path.format(n)) in names]
        whale.annotate(model, self._annotation(layers))
        return model, given

    def _annotation(self, layers: list[str]) -> dict[str, Any]:
        if self.layout in ("replicate", "split"):
            return {"": getattr(whale, self.layout)()}
        if self.layout == "cut rows":
            return {"": whale.split(dim=2 if self.model == "cosmoflow" else 1)}
        if self.layout == "stage":
            cuts = [layers[n * len(layers) // self.ranks] for n in range(self.ranks)]
            return {cut: whale.stage() for cut in cuts}
        inner = whale.replicate() if self.layout == "stages of 1 and 2" else whale.split()
        return {layers[0]: whale.stage(1), layers[len(layers) // 2]: [whale.stage(2), inner]}


def settings() -> list[Case]:
    """GPT-2 and Llama take turns."""
    chosen = [("replicate", options) for options in REPLICAS] + [("split", options) for options in TENSORS]
    chosen += [("stage", options) for options in STAGES]
    chosen += [(layout, options | {"precision": "bf16"}) for layout, options in LOW]
    return [Case(model, *one) for model, one in zip(cycle(BLOCKS), chosen, strict=False)]


def drawn(seed: int) -> Case:
    """A case by a seed; it may be refused."""
    draw = random.Random(seed)
    ranks = draw.choice((2, 2, 3))
    layout = draw.choice(
        ("replicate", "split", "stage", "cut rows") + ("stages of 1 and 2", "stages of 1 and split 2") * (ranks > 2)
    )
    options: dict[str, Any] = {}
    if (count := draw.choice((1, 1, 2, 4))) > 1 or "stage" in layout:
        options["micro_batches"] = max(2, count)
    if "stage" in layout:
        options["schedule"] = draw.choice(("1f1b", "1f1b", "gpipe", "zero_bubble"))
    rare: dict[str, tuple[Any, ...]] = {
        "recompute": (None, None, "selective", "full"),
        "precision": (None, None, "bf16", "fp16"),
        "zero": (None, None, 1, 2, 3),
        "offload": (None, None, None, "activations", "state", "both"),
        "gradient_dtype": (None, None, None, None, "bf16"),
        "step_in_backward": (None, None, None, True),
    }
    options |= {name: value for name, values in rare.items() if (value := draw.choice(values)) is not None}
    if options.get("offload") in ("state", "both"):
        options.pop("step_in_backward", None)  # its optimizer writes to what is left out of the count
    if options.get("zero"):
        if draw.random() < 0.4:
            options["state_shares"] = [draw.choice((1, 2, 3)) for _ in range(ranks)]
        if draw.random() < 0.25:
            options["state_align"] = "parameter"
    speeds = draw.choice(((), (), (3.0, 1.0, 2.0)[:ranks]))
    return Case(draw.choice(list(SHAPES)), layout, options, ranks, speeds)


def counted(case: Case) -> int:
    """The peak of this rank in a step that is not the first."""
    before, options = living(), case.options
    others = frozenset(before)  # which live on meanwhile, so that no other tensor gets their memory
    model, given = case.built()
    parallel = whale.parallelize(model, given, cluster=cluster_of(case.speeds), device="cpu", **options)
    del model
    hosts_state = options.get("offload") in ("state", "both")
    if hosts_state:
        others |= {parameter.untyped_storage()._cdata for parameter in parallel.parameters()}
    # the optimizer of the host writes to what is left out, which would be counted then
    update = AdamW([{"params": list(parallel.parameters())}]).step if not hosts_state else lambda: None

    def step() -> None:
        if isinstance(given, dict):
            parallel.train_step(**given)
        else:
            parallel.train_step(*given)
        update()
        parallel.zero_grad()

    if options.get("precision") == "fp16":
        parallel.loss_scaler.scale = 1.0  # no step overflows, and the optimizer has its states

    with LiveBytes(others) as live, hosted_left_out(live):
        return peak_of(step, live)


def predicted(case: Case, rank: int) -> int:
    """The same of the compiled step, of which nothing runs."""
    given = dict(case.options)
    level, shares = given.pop("zero", None), tuple(given.pop("state_shares", ()))
    state = StateSharding(level, shares, given.pop("state_align", "row")) if level else None
    chosen, cluster = Options(state=state, **given), cluster_of(case.speeds) or Cluster.homogeneous(case.ranks)
    found = compile_model(*case.built(), cluster, chosen, device="cpu", training=True)
    return peak_memory(found, rank, schedule=chosen.schedule).total


def both(world: World, case: Case) -> tuple[int, int] | str:
    """Counted and predicted bytes of this rank, or why the case is refused."""
    torch.manual_seed(0)
    try:
        return counted(case), predicted(case, world.rank)
    except WhaleError as error:
        return str(error).partition("\n")[0]


def main() -> None:
    parser = argparse.ArgumentParser(description="predicted against counted bytes of a step's peak")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--draw", type=int, default=0, metavar="N", help="as many other cases, by a seed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--write", metavar="DATE", default="", help="write the results to benchmarks/results, dated so")
    options = parser.parse_args()
    options.repeats = 5
    cases: list[Case] = [drawn(1000 * options.seed + n) for n in range(options.draw)] or settings()
    rows, errors, refused, least = [], [], 0, 0.0
    with worlds() as made:
        for case in sorted(cases, key=lambda case: case.ranks):
            if options.only not in str(case):
                continue
            try:
                found = made.run(case.ranks, both, case, timeout=600.0)
            except AssertionError as error:
                print(case, error, flush=True)
                rows.append([str(case), "failed", "", ""])
                errors.append(1.0)
                continue
            if isinstance(found[0], str):
                refused += 1
                print(case, found[0], flush=True)
                continue
            each = [said / size - 1 for size, said in found]
            errors.append(max(map(abs, each)))
            least = min(least, *each)
            peaks = [max(sizes) for sizes in zip(*found, strict=True)]
            worst = max(each, key=abs) if min(each) >= 0 else min(each)
            rows.append([str(case), *(f"{size / 2**20:.2f} MiB" for size in peaks), f"{worst:+.2%}"])
            print(rows[-1], flush=True)
    found_text = f"{len(rows)} settings: mean error {statistics.mean(errors):.2%} (asked {MEAN:.0%}), largest "
    found_text += f"{max(errors):.2%}; farthest below {least:.2%} (asked {BELOW:.0%})"
    found_text += f"; {refused} others are refused" * bool(refused)
    name = f"memory_predictions{f'_seed{options.seed}' if options.draw else ''}"
    command = "python benchmarks/memory_predictions.py" + f" --draw {options.draw} --seed {options.seed}" * bool(
        options.draw
    )
    text = table(["setting", "counted", "predicted", "error"], rows)
    report(name, options, f"{text}\n\n{found_text}", command)


if __name__ == "__main__":
    main()
