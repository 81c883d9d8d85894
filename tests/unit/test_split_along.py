"""``split(n, dim=...)`` without processes: what it stores and declares, and how what cannot be done is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import whale
from tests.distributed import spatial
from whale.compile.compilation import Compilation
from whale.compile.compile import compile_model
from whale.compile.options import Options
from whale.errors import AnnotationError, InfeasibleError, UsageError
from whale.ir.cluster import Cluster
from whale.ir.plan import Plan, PlanAxis, PlanStage
from whale.ir.strategy import Scope, Strategy, decode_scopes, encode_scopes, parse_strategy
from whale.planner.search.constraints import fixed_by
from whale.predict.peak_memory import peak_memory
from whale.strategies.dry_run import stage_calls

SLABS = whale.split(dim=2)


def compiled(example: tuple[nn.Module, Any], layout: Any, size: int = 2, **options: Any) -> Compilation:
    model, batch = example
    whale.annotate(model, layout if isinstance(layout, dict) else {"": layout})
    return compile_model(model, batch, Cluster.homogeneous(size), Options(**options), device="cpu", training=True)


@pytest.mark.parametrize("text", ["split(2, dim=1)", "split(dim=0)", "split(16, dim=-1)"])
def test_a_dim_survives_its_text_and_its_scope(text: str) -> None:
    strategy = parse_strategy(text)
    assert str(strategy) == text
    path = (Scope(strategy=strategy, region="a"),)
    assert decode_scopes(encode_scopes(path)) == path


@pytest.mark.parametrize(
    "text", ["split(2,dim=1)", "split(, dim=1)", "split(2, dim=)", "split(2, dim=1.5)", "split(2, 1)"]
)
def test_other_texts_are_refused_with_one_that_would_do(text: str) -> None:
    with pytest.raises(AnnotationError, match=r"is no strategy.*split\(2, dim=1\)"):
        parse_strategy(text)


@pytest.mark.parametrize("dim", [True, 1.0, "1", 65])
def test_a_dim_is_a_whole_number(dim: Any) -> None:
    with pytest.raises(AnnotationError, match="the dim is a whole number"):
        whale.split(2, dim=dim)


def test_only_split_has_a_dim() -> None:
    with pytest.raises(AnnotationError, match=r"only split\(n, dim=...\)"):
        Strategy(kind="replicate", dim=1)


def test_a_dim_that_nothing_has_is_refused_with_the_shapes() -> None:
    with pytest.raises(
        AnnotationError, match=r"split\(2, dim=7\) of the model: .* \[1, 1, 12, 8, 8\], \[1, 12, 8, 8\]"
    ):
        compiled(spatial.unet3d(), whale.split(dim=7))


def test_more_parts_than_a_pooled_dim_has_are_refused_with_its_parts() -> None:
    with pytest.raises(InfeasibleError, match=r"12 positions.* at most 3 parts, for its operators take 4 positions"):
        compiled(spatial.unet3d(), SLABS, size=4)


def test_the_batch_is_for_replicate() -> None:
    with pytest.raises(AnnotationError, match=r"dim 0 is the batch; write replicate\(2\)"):
        compiled(spatial.gpt(), whale.split(dim=0))


def test_one_dim_is_not_cut_by_two_annotations() -> None:
    with pytest.raises(AnnotationError, match=r"split\(dim=-2\) of the model cuts a dim that another annotation"):
        compiled(spatial.unet3d(), [whale.split(2, dim=3), whale.split(2, dim=-2)], size=4)


class Valid(nn.Module):
    """A convolution without padding, maybe after one with it."""

    def __init__(self, padded: bool) -> None:
        super().__init__()
        self.first = nn.Conv1d(3, 3, 3, padding=1) if padded else nn.Identity()
        self.second = nn.Conv1d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)).square().mean()


def test_a_dim_along_which_nothing_can_be_cut_is_refused() -> None:
    with pytest.raises(
        InfeasibleError, match=r"none of its operators can be cut along dim 2 of x of shape \[2, 3, 9\]"
    ):
        compiled((Valid(padded=False), {"x": torch.zeros(2, 3, 9)}), SLABS)


class Padded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv1d(3, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).square().mean()


def test_why_a_length_of_one_cannot_be_cut_is_said() -> None:
    with pytest.raises(InfeasibleError, match="which has one position; give an example with the lengths of training"):
        compiled((Padded(), {"x": torch.zeros(2, 3, 1)}), SLABS)


def test_an_operator_that_needs_all_of_the_dim_is_named() -> None:
    (said,) = compiled((Valid(padded=True), {"x": torch.zeros(2, 3, 9)}), SLABS).warnings
    assert re.search(r"split along a dim: aten.conv1d.default at .* computed whole", said)


def test_parameters_are_whole_and_slabs_meet_in_two_exchanges_a_convolution() -> None:
    compilation = compiled(spatial.unet3d(), SLABS)
    assert all(len(set(shard.parts.values())) == 1 for shard in compilation.shards().values())
    stage = compilation.stages[0]
    calls = stage_calls(
        compilation.captured, stage, compilation.rows, lambda s, r: compilation.local_programs(s, r, None), 0
    )[0][0]
    exchanges = [[call for call in half if call.op == "all_to_all"] for half in (calls.forward, calls.backward)]
    assert [len(half) for half in exchanges] == [5, 4]  # five of 3 x 3 x 3; the batch has no gradient
    high = exchanges[0][0]
    assert high.shapes == ((1, 1, 2, 8, 8), (8, 4), (9, 5))  # a row each way; rows held, and read
    assert not any(call.op == "all_gather" for call in (*calls.forward, *calls.backward))


def test_a_plan_gives_slabs_their_shares() -> None:
    axis = PlanAxis(name="split", size=2, role="split", shares=(1, 2))
    plan = Plan(world_size=2, stages=(PlanStage(ranks=(0, 1), axes=(axis,)),), annotations={"": ("split(2, dim=2)",)})
    assert Plan.parse(plan.dumps()) == plan
    compilation = compiled(spatial.unet3d(), whale.split(2, dim=2), plan=plan)
    stage = compilation.stages[0]
    value = next(n for n in stage.nodes if "conv3d" in str(n.target))
    placed = tuple(choice.outputs[0] for choice in stage.choices[value])
    assert [stage.layout.local_shape((value, 0), placed, (0, rank))[2] for rank in (0, 1)] == [4, 8]


def test_the_search_takes_no_dims() -> None:
    scopes = {"layers.0": (Scope(strategy=Strategy(kind="split", degree=2, dim=1), region="layers.0"),)}
    with pytest.raises(UsageError, match=r"split\(2, dim=1\): the search knows no split along a dim"):
        fixed_by(scopes, ["layers.0"])


class Chain(nn.Module):
    """Convolutions one after the other, each with batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*(spatial.convolution(inside, 4) for inside in (1, 4, 4, 4)))
        self.head = nn.Conv3d(4, 3, 1)

    def forward(self, volume: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.body(volume)), labels)


def test_half_of_a_volume_takes_little_more_than_half_of_the_activations() -> None:
    batch = {"volume": torch.zeros(1, 1, 32, 8, 8), "labels": torch.zeros(1, 32, 8, 8, dtype=torch.long)}
    alone, half = (
        peak_memory(
            compiled((Chain(), batch), SLABS, size=size),
            0,
            schedule="1f1b",
            optimizer="sgd",
            device="cpu",
        )
        .tasks[0]
        .kept
        for size in (1, 2)
    )
    copied = sum(x.nbytes for x in batch.values()) / 2  # its parts of the batch, which have gaps
    assert half - copied < 0.55 * alone  # a convolution keeps the rows of its neighbours, and no copy of its own
