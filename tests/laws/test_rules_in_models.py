"""Axis rules in the graphs of real models, where dims are refined and cut by inner axis factors: heads, fused parts,
groups.

Every operator, with the values that it has in the model, is computed whole and in parts, for every choice that the
analysis offers. Then: the parts that tensor parallelism lives on are among the choices.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, fx, nn

from tests.sharded_call import Call, check
from whale.graph.capture import batch_leaves, capture
from whale.graph.captured import Captured, mark_gradients
from whale.graph.partition import is_random
from whale.graph.values import Value, is_call, value_tensor
from whale.ir.placement import Placement
from whale.strategies.analysis import Analysis, analyse
from whale.strategies.placing import batch_placeholders
from whale.strategies.routes import ROUTED
from whale.strategies.ungroup import ungroup

Built = tuple[nn.Module, dict[str, Any] | tuple[Any, ...]]
SMALL: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 37}
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}


def words(**more: Any) -> dict[str, Any]:
    ids = torch.randint(1, 37, (4, 8), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids.clone(), **more}


def gpt2() -> Built:
    config = transformers.GPT2Config(n_layer=1, n_embd=32, n_head=4, vocab_size=37, n_positions=8)
    return transformers.GPT2LMHeadModel(config), words()


def llama(attention: str = "sdpa") -> Built:
    more: dict[str, Any] = {"num_key_value_heads": 2, "attn_implementation": attention}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, **more, intermediate_size=48)), words()


def phi3() -> Built:
    config = transformers.Phi3Config(**SMALL, intermediate_size=48, num_key_value_heads=2, pad_token_id=0)
    return transformers.Phi3ForCausalLM(config), words()


def t5() -> Built:
    config: dict[str, Any] = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4, "vocab_size": 37}
    config["decoder_start_token_id"] = 0
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**config))
    return model, words()


def bert() -> Built:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, intermediate_size=48)), words()


def mixtral() -> Built:
    config = transformers.MixtralConfig(**SMALL, intermediate_size=48, num_key_value_heads=2, **EXPERTS)
    return transformers.MixtralForCausalLM(config), words()


def vit() -> Built:
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48, image_size=16, patch_size=4
    )
    images = torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    return transformers.ViTForImageClassification(config), {
        "pixel_values": images,
        "labels": torch.tensor([0, 1, 1, 0]),
    }


class Convolutions(nn.Module):
    """A small U-Net: strided, grouped and transposed convolutions, batch and group norm, pooling, a skip."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.deep, self.groups = nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.GroupNorm(4, 8)
        self.up, self.head = nn.ConvTranspose2d(8, 8, 2, 2), nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        high = F.relu(self.norm(self.stem(x)))
        low = F.silu(self.groups(self.deep(F.max_pool2d(high, 2))))
        joined = torch.cat([high, self.up(low)], 1)
        return F.interpolate(self.head(joined), scale_factor=2, mode="bilinear").square().mean()


def convolutions() -> Built:
    return Convolutions(), (torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0)),)


class Recommender(nn.Module):
    """Several embedding tables and the products of their rows, as DLRM has."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(n, 8, padding_idx=0) for n in (7, 9, 11))
        self.dense, self.top = nn.Linear(5, 8), nn.Linear(6 + 8, 1)

    def forward(self, ids: Tensor, x: Tensor) -> Tensor:
        dense = self.dense(x)
        rows = torch.stack([dense, *(table(ids[:, i]) for i, table in enumerate(self.tables))], 1)
        products = torch.bmm(rows, rows.transpose(1, 2))
        i, j = torch.tril_indices(4, 4, -1)
        return F.softplus(self.top(torch.cat([dense, products[:, i, j]], 1))).mean()


def recommender() -> Built:
    generator = torch.Generator().manual_seed(0)
    return Recommender(), (torch.randint(7, (8, 3), generator=generator), torch.rand(8, 5, generator=generator))


class Recurrent(nn.Module):
    """An LSTM, its cell unrolled, and an encoder layer of PyTorch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.cell = nn.LSTM(5, 8, batch_first=True), nn.LSTMCell(8, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.lstm(x)
        h = c = y.new_zeros(x.shape[0], 8)
        for step in range(2):
            h, c = self.cell(y[:, step], (h, c))
        return (self.encoder(y).mean(1) * h).sum(1).square().mean()


def recurrent() -> Built:
    return Recurrent(), (torch.rand(4, 3, 5, generator=torch.Generator().manual_seed(0)),)


MODELS: dict[str, tuple[Callable[[], Built], str]] = {
    "gpt2": (gpt2, "train"),
    "llama": (llama, "eval"),
    "llama eager": (lambda: llama("eager"), "eval"),
    "phi3": (phi3, "eval"),
    "bert": (bert, "eval"),
    "t5": (t5, "eval"),
    "mixtral": (mixtral, "eval"),
    "vit": (vit, "train"),
    "convolutions in training": (convolutions, "train"),
    "convolutions": (convolutions, "eval"),
    "recommender": (recommender, "train"),
    "recurrent": (recurrent, "train"),
}
WHOLE = {"recommender": {"aten.tril_indices.default"}}
"""Operators without a rule: a constant."""

_cache: dict[str, tuple[Captured, Analysis, dict[Value, Tensor]]] = {}


def analysed(name: str) -> tuple[Captured, Analysis, dict[Value, Tensor]]:
    """A captured model in float64 with the value of every tensor in it."""
    if name not in _cache:
        build, mode = MODELS[name]
        torch.manual_seed(0)
        model, batch = build()
        model = model.double().train(mode == "train")
        leaves = {k: v.double() if v.is_floating_point() else v for k, v in batch_leaves(batch).items()}
        given = tuple(leaves.values()) if isinstance(batch, tuple) else leaves
        captured = capture(model, given, promote=True)
        if ungroup(captured.graph):
            mark_gradients(captured, model)
        tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        placed = {k: tensors[v] for k, v in (captured.parameters | captured.buffers).items()}
        placed |= captured.constants | {k: leaves[v] for k, v in captured.inputs.items()}
        _cache[name] = captured, analyse(captured.graph, batch_placeholders(captured)), values_of(captured, placed)
    return _cache[name]


def values_of(captured: Captured, placed: dict[str, Tensor]) -> dict[Value, Tensor]:
    """Every tensor of the graph, each a factor of autograd with a gradient where the graph has one."""
    env: dict[fx.Node, Any] = {}
    found: dict[Value, Tensor] = {}

    def factor(x: Any, node: fx.Node) -> Any:
        if isinstance(x, (tuple, list)):
            return [factor(item, node) for item in x]
        if isinstance(x, Tensor):
            return x.detach().clone().requires_grad_(bool(node.meta["grad"]) and x.is_floating_point())
        return x

    for node in captured.graph.nodes:
        if node.op == "placeholder":
            env[node] = factor(placed.get(node.name), node)
        elif node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
            env[node] = node.target(*args, **kwargs)
            env[node] = env[node] if node.target is operator.getitem else factor(env[node], node)
        else:
            continue
        results = env[node] if isinstance(env[node], list) else [env[node]]
        found |= {(node, i): x for i, x in enumerate(results) if isinstance(x, Tensor)}
    return found


_first: dict[str, fx.Node] = {}
"""The first call of all models with these shapes, arguments and cuts: those that follow are computed as it is."""


def distinct_calls(name: str) -> Iterator[Call]:
    """Each operator once for the shapes, the arguments and the cuts that it has, in this model and those before."""
    captured, analysis, tensors = analysed(name)
    for node in captured.graph.nodes:
        if is_call(node) and not analysis.rules[node].opaque and _first.setdefault(key(analysis, node), node) is node:
            yield Call(captured, analysis, node, tensors)


def key(analysis: Analysis, node: fx.Node) -> str:
    """Key of everything that decides the sharded computation of a call, except its values."""

    def shape(operand: fx.Node) -> Any:
        value = operand.meta.get("val")
        return (value.dtype, tuple(value.shape), operand.meta.get("grad")) if isinstance(value, Tensor) else 0

    def cut(value: Value, placed: Placement) -> object:
        through = analysis.dims[value][placed.dim] if placed.kind == "S" else []
        return placed.kind, placed.dim, analysis.factors.segments(through, placed.factor, {}) if through else ()

    operands = analysis.ops[node].operands
    choices = [
        (
            choice.form,
            [cut(value, placed) for value, placed in zip(operands, choice.inputs, strict=True)],
            [cut((node, index), placed) for index, placed in enumerate(choice.outputs)],
        )
        for choice in analysis.choices[node]
    ]
    same = [operands.index(value) for value in operands]  # a product with itself is another operator
    return str((node.target, fx.map_arg((node.args, node.kwargs), shape), same, choices))


def undefined(node: fx.Node) -> bool:
    """Whether the values of a call may differ from time to time."""
    return is_random(node) or "empty" in str(node.target)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", MODELS)
def test_every_operator_of_a_model_computes_in_parts_what_the_whole_does(name: str) -> None:
    for call in distinct_calls(name):
        operands = call.analysis.ops[call.node].operands
        for choice in call.choices[1:]:
            if len(set(zip(operands, choice.inputs, strict=True))) > len(set(operands)):
                continue  # one tensor given twice, and wanted in two placements: the lowering bridges it
            if choice.form == ROUTED:
                continue  # no operator has rows at experts alone: tests/distributed/test_whole_experts.py
            try:
                check(call, [choice], [(3.0, 1.0)], compare_values=not undefined(call.node))
            except Exception as error:
                raise AssertionError(f"{call.node.format_node()}: {choice} {choice.form}: {error}") from error
    _, analysis, _ = analysed(name)
    assert sum(len(choices) - 1 for choices in analysis.choices.values()) > 30


@pytest.mark.parametrize("name", MODELS)
def test_no_operator_is_opaque_that_need_not_be(name: str) -> None:
    _, analysis, _ = analysed(name)
    opaque = {str(node.target) for node, rule in analysis.rules.items() if rule.opaque}
    assert opaque <= WHOLE.get(name, set())


@pytest.mark.parametrize("name", MODELS)
def test_every_operator_that_has_rows_of_the_batch_can_be_cut_along_them(name: str) -> None:
    _, analysis, _ = analysed(name)
    for node, choices in analysis.choices.items():
        operands = analysis.ops[node].operands
        rows = any(
            analysis.factors.count(dim, analysis.batch_factor) == 1 for v in operands for dim in analysis.dims[v]
        )
        if rows and not analysis.rules[node].opaque:
            assert any(choice.factor == analysis.batch_factor for choice in choices), node.format_node()


def leaves(name: str, parameter: str, dim: int) -> list[int]:
    """Sizes of the axis factors by which a dim of a parameter can be cut where it is read, major to minor."""
    captured, analysis, _ = analysed(name)
    node = next(n for n in captured.graph.nodes if captured.parameters.get(n.name, "").endswith(parameter))
    reader = next(n for n in node.users if is_call(n))
    position = analysis.ops[reader].operands.index((node, 0))
    offered = {(c.inputs[position].dim, c.inputs[position].factor) for c in analysis.choices[reader]}
    assert value_tensor((node, 0)).dim() > dim
    factors = analysis.factors
    return [
        factors.size(factor) for factor in factors.cuttable(analysis.dims[(node, 0)][dim]) if (dim, factor) in offered
    ]


@pytest.mark.parametrize(
    ("name", "parameter", "dim", "sizes"),
    [
        ("gpt2", "attn.c_attn.weight", 1, [3, 4]),
        ("gpt2", "attn.c_attn.bias", 0, [3, 4]),
        ("gpt2", "attn.c_proj.weight", 0, [4, 8]),
        ("gpt2", "mlp.c_fc.weight", 1, [128]),
        ("gpt2", "mlp.c_proj.weight", 0, [128]),
        ("gpt2", "wte.weight", 0, [37]),
        ("llama", "q_proj.weight", 0, [2, 2]),
        ("llama", "k_proj.weight", 0, [2]),
        ("llama", "v_proj.weight", 0, [2]),
        ("llama", "o_proj.weight", 1, [2, 2]),
        ("llama", "gate_proj.weight", 0, [48]),
        ("llama", "down_proj.weight", 1, [48]),
        ("llama", "lm_head.weight", 0, [37]),
        ("phi3", "qkv_proj.weight", 0, [2]),
        ("phi3", "gate_up_proj.weight", 0, [2, 48]),
        ("phi3", "down_proj.weight", 1, [48]),
        ("bert", "word_embeddings.weight", 0, [37]),
        ("t5", "SelfAttention.q.weight", 0, [4]),
        ("vit", "patch_embeddings.projection.weight", 0, [32]),
        ("vit", "q_proj.weight", 0, [4]),
        ("convolutions", "deep.weight", 0, [2]),
    ],
)
def test_weights_can_be_cut_by_what_they_consist_of(name: str, parameter: str, dim: int, sizes: list[int]) -> None:
    assert leaves(name, parameter, dim)[: len(sizes)] == sizes
