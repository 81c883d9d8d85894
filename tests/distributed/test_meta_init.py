"""Models without data: each rank makes its own parameters only, with the values of the model built locally."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import whale
from tests.distributed.harness import Ranks
from whale.errors import PlanMismatchError, UsageError
from whale.runtime.launch import World

SIZE = 2


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(SIZE) as started:
        yield started


def tokens() -> dict[str, Tensor]:
    ids = torch.arange(32).view(4, 8) % 50
    return {"input_ids": ids, "labels": ids.clone()}


def gpt2() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=103, n_positions=32)
    )


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            num_hidden_layers=2,
            hidden_size=64,
            intermediate_size=128,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=103,
        )
    )


def bert() -> nn.Module:
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128, vocab_size=101
        )
    )


def t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config.from_dict(
            {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "vocab_size": 101}
            | {"decoder_start_token_id": 0}
        )
    )


class Net(nn.Module):
    """A convolution with batch statistics, and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())
        self.head = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.body(x)), y)


def images() -> dict[str, Tensor]:
    return {"x": torch.zeros(4, 3, 4, 4), "y": torch.arange(4)}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]], dict[str, Any]]] = {
    "gpt2": (gpt2, tokens, {"transformer.h.0": 1, "transformer.h.1": 1}),
    "llama": (llama, tokens, {"model.layers.0": 1, "model.layers.1": 1}),
    "bert": (bert, tokens, {"bert.encoder.layer.0": 1, "bert.encoder.layer.1": 1}),
    "t5": (t5, tokens, {"encoder": 1, "decoder": 1}),
    "net": (Net, images, {"body": 1, "head": 1}),
}


def annotate(model: nn.Module, name: str, kind: str) -> nn.Module:
    if kind == "pp":
        whale.annotate(model, {path: whale.stage() for path in MODELS[name][2]})
    else:
        whale.annotate(model, {"": whale.split() if kind == "tp" else whale.replicate()})
    return model


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.detach().clone() for name, x in model.state_dict().items()}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """The names that are missing, too many, or not bitwise equal."""
    names = sorted(set(found) ^ set(expected))
    return names + [n for n in expected if n in found and not torch.equal(found[n], expected[n])]


def initialised(world: World, name: str, kind: str, how: str) -> tuple[list[str], bool, list[str]]:
    build, batch, _ = MODELS[name]
    torch.manual_seed(5)
    expected = values(build().eval())
    state = torch.get_rng_state()
    torch.manual_seed(5)
    model: Any
    if how == "meta":
        with torch.device("meta"):
            model = annotate(build().eval(), name, kind)
    else:

        def model() -> nn.Module:
            return annotate(build().eval(), name, kind)

    parallel = whale.parallelize(model, batch(), device="cpu")
    whole = [n for n, x in parallel.named_parameters() if x.is_meta]
    return same(parallel.full_state_dict(), expected), torch.equal(torch.get_rng_state(), state), whole


WAYS = [("gpt2", "dp", "function"), ("gpt2", "tp", "meta"), ("gpt2", "pp", "function")]
WAYS += [(name, *way) for name in MODELS for way in (("tp", "function"), ("pp", "meta"))]


@pytest.mark.parametrize(("name", "kind", "how"), WAYS)
def test_a_model_without_data_gets_the_values_of_the_local_one(ranks: Ranks, name: str, kind: str, how: str) -> None:
    for wrong, generator, left in ranks.run(initialised, name, kind, how, timeout=110):
        assert wrong == [] and generator and left == []


def stepped(world: World) -> float:
    torch.manual_seed(5)
    local = gpt2().double().eval()
    loss = local(**tokens()).loss
    torch.manual_seed(5)
    parallel = whale.parallelize(lambda: annotate(gpt2().double().eval(), "gpt2", "tp"), tokens(), device="cpu")
    return abs(parallel.eval_step(**tokens()).item() - loss.item())


def test_a_converted_model_from_a_function_computes_the_local_loss(ranks: Ranks) -> None:
    assert max(ranks.run(stepped, timeout=110)) < 1e-6


def from_state(world: World, how: str) -> list[str]:
    torch.manual_seed(9)
    expected = values(gpt2().eval())
    torch.manual_seed(world.rank)  # no seed is needed where values are given
    build = lambda: annotate(gpt2().eval(), "gpt2", "tp")  # noqa: E731
    model: Any = build
    if how == "meta":
        with torch.device("meta"):
            model = build()
    parallel = whale.parallelize(model, tokens(), device="cpu", state_dict=expected)
    return same(parallel.full_state_dict(), expected)


@pytest.mark.parametrize("how", ["meta", "function"])
def test_given_values_take_the_place_of_random_ones(ranks: Ranks, how: str) -> None:
    assert ranks.run(from_state, how, timeout=110) == [[]] * SIZE


# Memory


class LiveBytes(TorchDispatchMode):
    """Follows the bytes of all storages that operators make."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(result):
            if type(x) is not Tensor or x.is_meta:
                continue
            storage = x.untyped_storage()
            key = storage._cdata
            if key not in self.seen:
                self.seen.add(key)
                self.live += storage.nbytes()
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._gone, key, storage.nbytes())
        return result

    def _gone(self, key: int, nbytes: int) -> None:
        self.seen.discard(key)
        self.live -= nbytes


def large() -> nn.Module:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_layer=4, n_embd=128, n_head=4, vocab_size=500, n_positions=32)
    )


def peak(world: World, kind: str, how: str) -> tuple[int, int, int, int]:
    """Peak of live bytes in parallelize, bytes of the rank's own parameters, of the largest module, of the model."""

    def build() -> nn.Module:
        model = large().eval()
        if kind == "pp":
            whale.annotate(model, {"transformer.h.[0-1]": whale.stage(), "transformer.h.[2-3]": whale.stage()})
        else:
            whale.annotate(model, {"": whale.split()})
        return model

    model: Any = build
    if how == "meta":
        with torch.device("meta"):
            model = build()
    with torch.device("meta"):
        shape = large()
    sizes = {n: p.numel() * 4 for n, p in shape.named_parameters()}
    modules: dict[str, int] = {}
    for name, size in sizes.items():
        modules[name.rpartition(".")[0]] = modules.get(name.rpartition(".")[0], 0) + size
    torch.manual_seed(2)
    with LiveBytes() as live:
        parallel = whale.parallelize(model, tokens(), device="cpu")
    own = sum(p.numel() * 4 for p in parallel.parameters())
    return live.peak, own, max(modules.values()), sum(sizes.values())


@pytest.mark.parametrize("how", ["meta", "function"])
@pytest.mark.parametrize("kind", ["tp", "pp"])
def test_no_rank_holds_more_than_its_parts_and_one_module(ranks: Ranks, kind: str, how: str) -> None:
    for found, own, largest, whole in ranks.run(peak, kind, how, timeout=110):
        assert own < 0.75 * whole
        assert own <= found <= own + largest


# What is refused


class Initialised(nn.Module):
    """A model whose constructor visits its modules, as in many models."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for p in self.parameters():
            nn.init.normal_(p)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).sum()


class Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return (self.body(x) * self.scale).sum()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).sum()


class Copied(nn.Module):
    """Layers that are copies of one, and drew nothing."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.Linear(8, 8)
        self.layers = nn.ModuleList([copy.deepcopy(layer) for _ in range(2)])


@pytest.mark.parametrize(
    ("kind", "name", "reason"),
    [
        (Initialised, "body.0.weight (a Linear)", "more than its module's reset_parameters"),
        (Bare, "scale (a Bare)", "how to initialise it is not known"),
        (Tied, "first.weight (a Linear)", "shared by several modules"),
        (Copied, "layers.0.weight (a Linear)", "reset_parameters"),
        (lambda: Initialised().double(), "body.0.weight", "cannot be seen"),
    ],
)
def test_a_meta_model_of_unknown_initialisation_is_refused_by_name(
    kind: Callable[[], nn.Module], name: str, reason: str
) -> None:
    with torch.device("meta"):
        model = kind()
    with pytest.raises(UsageError) as caught:
        whale.parallelize(model, torch.zeros(2, 4), device="cpu")
    message = str(caught.value)
    assert name in message and "function that builds the model" in message and "state_dict=" in message
    assert reason in message or "more than" in message


@pytest.mark.parametrize("kind", [Initialised, Bare, Tied])
def test_a_function_builds_what_a_meta_model_cannot_say(kind: Callable[[], nn.Module]) -> None:
    torch.manual_seed(1)
    expected = values(kind())
    torch.manual_seed(1)
    parallel = whale.parallelize(kind, torch.zeros(2, 4), device="cpu")
    assert same(parallel.full_state_dict(), expected) == []


def test_a_state_dict_must_fit() -> None:
    with torch.device("meta"):
        model = Bare()
    with pytest.raises(UsageError, match=r"unknown \['extra'\], missing \['body.bias'"):
        whale.parallelize(model, torch.zeros(2, 4), device="cpu", state_dict={"extra": torch.zeros(1)})
    with pytest.raises(UsageError, match="load_state_dict"):
        whale.parallelize(Bare(), torch.zeros(2, 4), device="cpu", state_dict=Bare().state_dict())


# Agreement


def different(world: World, what: str) -> str:
    torch.manual_seed(3)
    layers = 1 if what == "model" and world.rank else 2
    config = transformers.GPT2Config(n_layer=layers, n_embd=32, n_head=2, vocab_size=50)
    if what == "seed":
        torch.manual_seed(world.rank)
    model: Any = lambda: transformers.GPT2LMHeadModel(config).eval()  # noqa: E731
    if what == "values":
        torch.manual_seed(world.rank)
        model = model()
    batch = tokens()
    try:
        whale.parallelize(model, batch, device="cpu", micro_batches=2 if what == "options" and world.rank else 1)
    except PlanMismatchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "parts"),
    [
        ("model", ["rank 1 differs from rank 0 in the captured model"]),
        ("options", ["rank 1 differs from rank 0 in"]),
        ("seed", ["rank 1 differs from rank 0 in torch's random state"]),
        ("values", ["rank 1 has other values in transformer.wte.weight", "torch.manual_seed"]),
    ],
)
def test_ranks_that_compiled_something_else_are_named_on_every_rank(ranks: Ranks, what: str, parts: list[str]) -> None:
    for message in ranks.run(different, what, timeout=110):
        assert all(part in message for part in parts), message
