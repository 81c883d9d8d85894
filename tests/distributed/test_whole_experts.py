"""Experts of Hugging Face's mixtures on the ranks that have them: every family's step is that of plain PyTorch, for any
numbers of experts and ranks, equal devices and unlike ones."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import whale
from tests.distributed import zoo
from tests.distributed.parity import BOUND, Setup, Worlds, check, run_captured
from tests.distributed.parity import worlds as worlds_of_a_module
from tests.distributed.traces import captured_once
from whale import replicate, split, stage
from whale.compile import kernels
from whale.runtime.launch import World

WHOLE = split(experts="whole")
EXPERTS = "model.layers.*.mlp.experts"
BY_EXPERT = {"": replicate(), EXPERTS: WHOLE}


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    with worlds_of_a_module() as made:
        yield made


def moe(kind: str, experts: int = 4, rows: int = zoo.ROWS, **options: Any) -> zoo.Example:
    """A small mixture of a family, with the loss that balances experts where the family has one."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": zoo.VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 32}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    counts = dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), experts)
    hidden = dict.fromkeys(("moe_intermediate_size", "expert_ffn_hidden_size"), 24)
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_experts_per_tok": 2}
    given = {**sizes, **heads, **counts, **hidden, **special, "output_router_logits": True, **options}
    known = {*AutoConfig.for_model(kind).to_dict(), *options}
    config = AutoConfig.for_model(kind, **{name: value for name, value in given.items() if name in known})
    return AutoModelForCausalLM.from_config(config).double(), zoo.tokens(rows)


class Family:
    """A builder of one family's model, with a name for test ids. Those of equal models are equal."""

    def __init__(self, kind: str, **options: Any) -> None:
        self.kind, self.options = kind, options
        self.__name__ = kind if "num_hidden_layers" in options else "_".join([kind, *map(str, options.values())])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Family) and (self.kind, self.options) == (other.kind, other.options)

    def __hash__(self) -> int:
        return hash((self.kind, *self.options.items()))

    def __call__(self) -> zoo.Example:
        return moe(self.kind, **self.options)


FAMILIES = [
    Family("qwen2_moe"), Family("granitemoe"), Family("gpt_oss", num_hidden_layers=2),
    Family("ernie4_5_moe", num_hidden_layers=2, moe_k=2),
    Family("deepseek_v3", num_hidden_layers=2, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=8,
    v_head_dim=8, first_k_dense_replace=1, n_group=2, topk_group=2, num_key_value_heads=4),
]  # fmt: skip
"""Families that differ in their routers, biases, shared experts and norms; others have further tests. Those of two
layers have unlike ones: the first without experts, or attention of a window in every second."""

PLACES = {"granitemoe": "model.layers.*.block_sparse_moe"}


def layout_of(family: Family, ranks: Any = WHOLE) -> dict[str, Any]:
    return {"": replicate(), PLACES.get(family.kind, EXPERTS): ranks}


def named(value: Any) -> str | None:
    return getattr(value, "__name__", None)


def experts_held(held: dict[str, tuple[int, ...]]) -> set[int]:
    """Sizes of dim 0 of the stacks of experts that a rank has."""
    return {shape[0] for name, shape in held.items() if "experts" in name and "shared" not in name and len(shape) == 3}


@pytest.mark.parametrize("family", FAMILIES, ids=named)
def test_families(worlds: Worlds, family: Family) -> None:
    for found in check(worlds, 2, family, Setup(layout=layout_of(family), promote=True)):
        assert experts_held(found.held) == {2}


@pytest.mark.parametrize("experts", [8, 5])
def test_counts_that_do_not_divide(worlds: Worlds, experts: int) -> None:
    family = Family("mixtral", experts=experts, output_router_logits=False)
    results = check(worlds, 3, family, Setup(layout=BY_EXPERT, promote=True))
    assert sorted(n for found in results for n in experts_held(found.held)) == sorted(
        experts // 3 + (rank < experts % 3) for rank in range(3)
    )


@pytest.mark.parametrize("options", [{}, {"micro_batches": 2}], ids=str)
def test_ranks_without_rows_have_experts_for_those_of_others(worlds: Worlds, options: dict[str, Any]) -> None:
    rows = 2 * options.get("micro_batches", 1)
    family = Family("mixtral", rows=rows, output_router_logits=False)
    for found in check(worlds, 4, family, Setup(layout=BY_EXPERT, promote=True, **options)):
        assert experts_held(found.held) == {1}


def test_faster_devices_have_more_experts(worlds: Worlds) -> None:
    setup = Setup(layout=BY_EXPERT, promote=True, speeds=(3.0, 1.0))
    results = check(worlds, 2, Family("qwen3_moe", experts=8, output_router_logits=False), setup)
    assert [experts_held(found.held) for found in results] == [{6}, {2}]


STAGES = {
    "model.layers.0": [stage(2), replicate()], "model.layers.1": [stage(2), replicate()],
    "model.layers.[0-1].mlp.experts": WHOLE,
}  # fmt: skip
LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "two groups": (4, {"": [replicate(2), replicate()], EXPERTS: [replicate(2), WHOLE]}, {}),
    "a group without rows": (
        4,
        {"": [replicate(2), replicate()], EXPERTS: [replicate(2), WHOLE]},
        {"speeds": (1e4, 1e4, 1.0, 1.0)},
    ),
    "with rows on all ranks": (2, {"": WHOLE}, {}),
    "micro-batches": (2, BY_EXPERT, {"micro_batches": 2}),
    "stages": (4, STAGES, {"micro_batches": 2}),
    "zero bubble": (4, STAGES, {"micro_batches": 4, "schedule": "zero_bubble"}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_with_other_parallelism(worlds: Worlds, name: str) -> None:
    size, layout, more = LAYOUTS[name]
    aux = {} if more.get("micro_batches", 1) == 1 else {"output_router_logits": False}
    layers = {"num_hidden_layers": 2} if layout is STAGES else {}
    check(worlds, size, Family("mixtral", **aux, **layers), Setup(layout=layout, promote=True, **more))


def curves(world: World, options: dict[str, Any]) -> tuple[list[float], list[float], float]:
    """Losses of training in parallel and alone, and the largest difference of a trained weight. Kernels run operator by
    operator."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "Kernel", lambda graph: graph)
        return trained(options)


def trained(options: dict[str, Any]) -> tuple[list[float], list[float], float]:
    torch.manual_seed(0)
    model, batch = moe("olmoe", experts=5)
    local = copy.deepcopy(model)
    captured = captured_once(
        local, batch, promote=True
    )  # a norm and the logits are computed in float32 by the model itself
    whale.annotate(model, BY_EXPERT)
    parallel = whale.parallelize(model, batch, device="cpu", promote_casts=True, **options)
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-3) for one in (parallel, local)]
    found, alone = [], []
    for _ in range(5):
        found.append(float(parallel.train_step(**batch)))
        loss = run_captured(captured, local, batch)
        loss.backward()
        alone.append(float(loss))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state = parallel.full_state_dict()
    return found, alone, max(float((state[name] - x).abs().max()) for name, x in local.state_dict().items())


@pytest.mark.parametrize("options", [{}, {"zero": 1}, {"zero": 3}, {"recompute": "full"}, {"compile": True}], ids=str)
def test_training_is_that_of_plain_pytorch(worlds: Worlds, options: dict[str, Any]) -> None:
    for found, alone, apart in worlds.run(2, curves, options):
        assert found == pytest.approx(alone, rel=BOUND)
        assert apart < 1e-9  # Adam divides by roots of gradients


def moved(world: World, directory: str) -> bool:
    """Whether a checkpoint of whole experts, their state divided, is the same in a plan that cuts them."""
    torch.manual_seed(0)
    model, batch = moe("qwen3_moe", experts=5, output_router_logits=False)
    other = copy.deepcopy(model)
    for name, parameter in other.named_parameters():
        if "experts" in name:
            torch.nn.init.zeros_(parameter)
    layout = {"": [replicate(2), replicate()], EXPERTS: [replicate(2), WHOLE]}
    found: list[dict[str, torch.Tensor]] = []
    for one, ways in ((model, layout), (other, {"": replicate(), EXPERTS: split(experts="cut")})):
        whale.annotate(one, ways)
        parallel = whale.parallelize(one, batch, device="cpu", zero=3 if ways is layout else 0)
        optimizer = torch.optim.AdamW(parallel.parameters(), lr=1e-3)
        if found:
            whale.load_checkpoint(directory, parallel, optimizer=optimizer)
        else:
            parallel.train_step(**batch)
            optimizer.step()
            whale.save_checkpoint(directory, parallel, step=1, optimizer=optimizer)
            whale.wait_for_checkpoints()
        found.append(parallel.full_state_dict())
    before, after = found
    return all(torch.equal(before[name], after[name]) for name in before)


def test_a_checkpoint_has_whole_stacks(worlds: Worlds, tmp_path: Path) -> None:
    assert all(worlds.run(4, moved, str(tmp_path / "checkpoint")))
