"""Random planning problems: a model, a cluster and a batch, each drawn from a seed and a number alone.

The models are all of ``examples/models`` at random sizes and fourteen architectures of transformers; clusters have one
to four device types, 1 to 64 devices, and nodes and links that differ.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[1] / "examples" / "models"

DEVICES = (
    "K80 (per GK210 die)", "P100-SXM2-16GB", "V100-SXM2-16GB", "V100-SXM2-32GB", "T4", "RTX2080Ti", "A10G", "A30",
    "A40", "RTX3090", "RTX4090", "L4", "L40S", "A100-SXM4-40GB", "A100-SXM4-80GB", "H100-SXM5-80GB", "H20", "H200-SXM",
    "GH200-96GB", "MI250X (per GCD)", "MI300X",
)  # fmt: skip

NETWORKS = ("1 Gbit/s", "10 Gbit/s", "25 Gbit/s", "100 Gbit/s", "200 Gbit/s", "400 Gbit/s", "1600 Gbit/s")
SWITCHES = ("6 GB/s", "12 GB/s", "50 GB/s", "150 GB/s", "300 GB/s")
BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32, 48, 64, 96, 100, 128, 256, 512)

MOST_TYPES, MOST_NODES, MOST_DEVICES = 4, 16, 64


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A request to ``whale search``.

    Attributes:
        model: as ``--model`` takes it, with the *settings* of ``--set``.
        cluster: the text of a cluster file.
        batch: rows of the global batch.
        precision: as ``--precision`` takes it; None: the model's own.
    """

    seed: int
    number: int
    model: str
    settings: Mapping[str, Any]
    cluster: str
    batch: int
    precision: str | None

    @property
    def command(self) -> str:
        """The command line that asks for the same."""
        sets = " ".join(f"--set {key}={value}" for key, value in self.settings.items())
        precision = f" --precision {self.precision}" if self.precision else ""
        return f"whale search --model {self.model} {sets} --cluster c.toml --batch {self.batch}{precision}"


def drawn(seed: int, number: int, *, regions: bool = False) -> Problem:
    """The problem of a *number* under a *seed*, whatever the others are; with *regions* its nodes are in two, with slow
    links between these, if there are several."""
    numbers = random.Random(f"{seed}:{number}")
    model = numbers.choice([*BUILDERS, *HUGGING_FACE])
    name = model if model in HUGGING_FACE else f"{EXAMPLES / model}.py:{model}"
    draw = HUGGING_FACE.get(model) or BUILDERS[model]
    settings, cluster = draw(numbers), _cluster(numbers)
    return Problem(
        seed=seed,
        number=number,
        model=name,
        settings=settings,
        cluster=_in_regions(cluster, random.Random(f"{seed}:{number}:regions")) if regions else cluster,
        batch=numbers.choice(BATCHES),
        precision=numbers.choice([None, None, None, "fp16"]),
    )


# --- models -----------------------------------------------------------------------------------------------------------


def _widths(numbers: random.Random) -> tuple[int, int]:
    """A hidden size and a number of heads that divides it."""
    heads = numbers.choice((2, 4, 6, 8, 12, 16, 20, 32))
    return heads * numbers.choice((32, 64, 80, 128)), heads


def _transformer(numbers: random.Random, *, layers: int = 12) -> dict[str, Any]:
    hidden, heads = _widths(numbers)
    return {
        "layers": numbers.randint(1, layers),
        "hidden": hidden,
        "heads": heads,
        "seq": numbers.choice((16, 64, 128, 512, 1024)),
        "vocab": numbers.choice((1000, 30528, 50257)),
    }


def _gpt(numbers: random.Random) -> dict[str, Any]:
    return _transformer(numbers, layers=16) | {"dropout": numbers.choice((0, 0.1))}


def _llama(numbers: random.Random) -> dict[str, Any]:
    found = _transformer(numbers)
    return found | {"kv_heads": numbers.choice([n for n in range(1, found["heads"] + 1) if found["heads"] % n == 0])}


def _experts(numbers: random.Random) -> dict[str, Any]:
    experts = numbers.choice((2, 4, 6, 8, 16))
    found = _transformer(numbers, layers=6)
    return found | {"experts": experts, "top_k": numbers.randint(1, min(experts, 3)), "ffn": 2 * found["hidden"]}


def _resnet(numbers: random.Random) -> dict[str, Any]:
    return {
        "layers": numbers.choice((14, 26, 50)),
        "width": numbers.choice((1, 2, 4)),
        "classes": numbers.choice((10, 1000, 21841)),
        "size": numbers.choice((32, 64, 224)),
    }


BUILDERS = {
    "bert": _gpt,
    "gpt": _gpt,
    "gshard": _experts,
    "llama": _llama,
    "moe": _experts,
    "resnet": _resnet,
    "t5": lambda numbers: _transformer(numbers, layers=6),
}
"""Settings of each of the example models."""


def _tokens(numbers: random.Random, **names: str) -> dict[str, Any]:
    """Sizes of a language model under the names that its configuration has for them."""
    hidden, heads = _widths(numbers)
    sizes: dict[str, Any] = {
        "layers": numbers.randint(1, 10),
        "hidden": hidden,
        "heads": heads,
        "ffn": numbers.choice((2, 4)) * hidden,
        "vocab": numbers.choice((1000, 32000, 50257)),
    }
    usual = {
        "layers": "num_hidden_layers",
        "hidden": "hidden_size",
        "heads": "num_attention_heads",
        "ffn": "intermediate_size",
        "vocab": "vocab_size",
    } | names
    found = {usual[what]: value for what, value in sizes.items() if usual[what]}
    return found | {"sequence_length": numbers.choice((16, 64, 128, 512))}


def _grouped(numbers: random.Random) -> dict[str, Any]:
    found = _tokens(numbers)
    heads = found["num_attention_heads"]
    return found | {"num_key_value_heads": numbers.choice([n for n in range(1, heads + 1) if heads % n == 0])}


def _gemma(numbers: random.Random) -> dict[str, Any]:
    found = _grouped(numbers)
    return found | {"head_dim": found["hidden_size"] // found["num_attention_heads"]}


def _mixtral(numbers: random.Random) -> dict[str, Any]:
    found = _grouped(numbers) | {"num_hidden_layers": numbers.randint(1, 4)}
    return found | {"num_local_experts": numbers.choice((2, 4, 8))}


def _opt(numbers: random.Random) -> dict[str, Any]:
    found = _tokens(numbers, ffn="ffn_dim")
    return found | {"word_embed_proj_dim": found["hidden_size"]}


def _hugging_face_t5(numbers: random.Random) -> dict[str, Any]:
    names = {"layers": "num_layers", "hidden": "d_model", "heads": "num_heads", "ffn": "d_ff"}
    found = _tokens(numbers, **names)
    return found | {"num_layers": numbers.randint(1, 5), "d_kv": found["d_model"] // found["num_heads"]}


def _pictures(numbers: random.Random) -> dict[str, Any]:
    hidden, heads = _widths(numbers)
    return {
        "num_hidden_layers": numbers.randint(1, 10),
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden,
        "image_size": numbers.choice((64, 224)),
    }


HUGGING_FACE = {
    "hf:bert": _tokens,
    "hf:bloom": lambda numbers: _tokens(numbers, layers="n_layer", heads="n_head", ffn=""),
    "hf:gemma2": _gemma,
    "hf:gpt2": lambda numbers: _tokens(numbers, layers="n_layer", hidden="n_embd", heads="n_head", ffn="n_inner"),
    "hf:gpt_neox": _tokens,
    "hf:llama": _grouped,
    "hf:mistral": _grouped,
    "hf:mixtral": _mixtral,
    "hf:opt": _opt,
    "hf:qwen3": _gemma,
    "hf:resnet": lambda numbers: {"layer_type": numbers.choice(("basic", "bottleneck"))},
    "hf:roberta": _tokens,
    "hf:t5": _hugging_face_t5,
    "hf:vit": _pictures,
}
"""Settings of each of the architectures of transformers."""


# --- clusters ---------------------------------------------------------------------------------------------------------


def _cluster(numbers: random.Random) -> str:
    types = numbers.sample(DEVICES, numbers.choice((1, 1, 2, 2, 2, 3, 3, 4)))
    most = numbers.choice((1, 2, 4, 8, 8, 16, 32, MOST_DEVICES))
    per_node = numbers.choice((1, 2, 4, 8))
    unlike_nodes, unlike_links = numbers.random() < 0.3, numbers.random() < 0.3
    network, latency = numbers.choice(NETWORKS), numbers.choice((2, 5, 15, 50))
    lines = ["[links]", f'inter_node = {{bandwidth = "{network}", latency = "{latency} us"}}']
    left = max(most, len(types))
    for place, device in enumerate(types):
        size = numbers.choice((1, 2, 3, 4, 6, 8)) if unlike_nodes else per_node
        room = left - (len(types) - place - 1)  # a device is left for each type to come
        size = min(size, room)
        count = numbers.randint(1, max(1, min(MOST_NODES, room // size)))
        left -= count * size
        lines += ["[[nodes]]", f"count = {count}", f"devices = {size}", f'device = "{device}"']
        links = []
        if numbers.random() < 0.3:
            links.append(f'intra_node = {{bandwidth = "{numbers.choice(SWITCHES)}", latency = "3 us"}}')
        if unlike_links:
            adapters = numbers.choice((1, 1, 2, 4))
            own = f'bandwidth = "{numbers.choice(NETWORKS)}", latency = "{latency} us", adapters = {adapters}'
            links.append(f"inter_node = {{{own}}}")
        if links:
            lines.append(f"links = {{{', '.join(links)}}}")
    return "\n".join(lines) + "\n"


def _in_regions(cluster: str, numbers: random.Random) -> str:
    """A cluster file with its first nodes in one region and the others in another."""
    links, *nodes = cluster.split("[[nodes]]\n")
    if len(nodes) == 1:
        count, *rest = nodes[0].split("\n", 1)
        total = int(count.removeprefix("count = "))
        first = numbers.randint(1, max(1, total - 1))
        nodes = [f"count = {part}\n{rest[0]}" for part in (first, total - first) if part]
    if len(nodes) == 1:
        return cluster
    between = numbers.choice(("1 Gbit/s", "10 Gbit/s", "100 Gbit/s", "1600 Gbit/s")), numbers.choice((1, 5, 20, 60))
    links += f'inter_region = {{bandwidth = "{between[0]}", latency = "{between[1]} ms"}}\n'
    border = numbers.randint(1, len(nodes) - 1)
    placed = [f'{one}region = "{"north" if place < border else "south"}"\n' for place, one in enumerate(nodes)]
    return "[[nodes]]\n".join([links, *placed])
