"""A candidate of the search as a plan: its annotations make the stages that were chosen, in as few keys as it takes."""

from __future__ import annotations

from typing import Any

import pytest

import whale
from tests.chains import card, chain, layer, machines
from tests.small_models import decoder, tokens
from whale.annotations import Annotation, module_scopes
from whale.commands.candidates import CandidateCompiler, scopes_by
from whale.compile.compile import compile_model
from whale.compile.options import Options
from whale.errors import UsageError
from whale.graph.capture import capture
from whale.graph.partition import partition
from whale.graph.scoping import module_paths, recorded_scopes, scopes_by_module
from whale.ir.cluster import Cluster
from whale.ir.plan import Plan, PlanAxis
from whale.ir.strategy import parse_strategy
from whale.ir.workload import Prediction, Workload
from whale.planner.cost.stage import CostModel
from whale.planner.search import Candidate, StageChoice
from whale.planner.search.to_plan import annotations_of, plan_of, split_shares

PATHS = ["embed", "layers.0", "layers.1", "layers.2", "layers.3", "head"]


def stages_of(*given: tuple[int, int, int]) -> list[StageChoice]:
    """Stages by number of layers, data and tensor degree, on ranks in order."""
    found: list[StageChoice] = []
    layer = rank = 0
    for layers, data, tensor in given:
        ranks = tuple(range(rank, rank + data * tensor))
        rows = tuple(8 // data for _ in range(data))
        found.append(StageChoice(first=layer, last=layer + layers, ranks=ranks, data=data, tensor=tensor, rows=rows))
        layer, rank = layer + layers, rank + data * tensor
    return found


def plan_for(stages: list[StageChoice], annotations: dict[str, tuple[str, ...]], cluster: Cluster) -> Plan:
    prediction = Prediction(step_seconds=1.0, step_seconds_interval=(1.0, 1.0))
    workload = Workload(world_size=len(cluster.devices), micro_batches=1, stages=())
    candidate = Candidate(
        stages=tuple(stages), micro_batches=1, schedule="1f1b", prediction=prediction, workload=workload
    )
    return plan_of(candidate, cluster, batch=8, annotations=annotations)


@pytest.fixture(scope="module")
def trial() -> CandidateCompiler:
    return CandidateCompiler(decoder().to("meta"), tokens(), name="decoder")


CHOSEN: dict[str, tuple[tuple[int, int, int], ...]] = {
    "replicas": ((6, 4, 1),),
    "parts": ((6, 1, 4),),
    "parts in replicas": ((6, 2, 2),),
    "a pipeline": ((3, 1, 1), (3, 1, 1)),
    "replicas of stages": ((2, 2, 1), (4, 2, 1)),
    "stages that are split alike": ((3, 1, 2), (3, 1, 2)),
    "only the first stage is split": ((3, 1, 4), (3, 4, 1)),
    "only the last stage is split": ((3, 4, 1), (3, 1, 4)),
    "stages of other sizes": ((2, 1, 1), (2, 2, 2), (2, 1, 2)),
    "a split stage between others": ((2, 2, 1), (2, 1, 2), (2, 2, 1)),
}


@pytest.mark.parametrize("given", CHOSEN.values(), ids=CHOSEN.keys())
def test_the_annotations_of_a_plan_make_its_stages(trial: CandidateCompiler, given: Any) -> None:
    stages = stages_of(*given)
    anchors = [PATHS[stage.first] for stage in stages]
    annotations = annotations_of(stages, anchors, trial.places(anchors) if len(stages) > 1 else [])
    cluster = Cluster.homogeneous(sum(len(stage.ranks) for stage in stages))
    model = decoder().to("meta")
    whale.annotate(
        model, {key: [Annotation(strategy=parse_strategy(t)) for t in texts] for key, texts in annotations.items()}
    )
    plan = plan_for(stages, annotations, cluster)
    compilation = compile_model(model, tokens(), cluster, Options(plan=plan), device="cpu", training=True)
    for stage, placed in zip(stages, compilation.stages, strict=True):
        assert placed.mesh.ranks == stage.ranks
        held = {
            path
            for path, layer in zip(PATHS, range(6), strict=True)
            if any(name.startswith(f"{path}.") for name in names_of(compilation, placed))
            if stage.first <= layer < stage.last
        }
        assert held == set(PATHS[stage.first : stage.last])
        whole = [
            name
            for name, shard in compilation.shards().items()
            if name in names_of(compilation, placed)
            and len(shard.shape) == 2
            and any(part == tuple(((0, size),) for size in shard.shape) for part in shard.parts.values())
        ]
        assert bool(whole) == (stage.tensor == 1), whole


def names_of(compilation: Any, stage: Any) -> set[str]:
    """The parameters that a stage holds."""
    return {compilation.parameter_name(v) for v in stage.stored if v[0].name in compilation.captured.parameters}


def test_stages_that_are_split_alike_share_one_key() -> None:
    stages = stages_of((3, 1, 2), (3, 1, 2))
    places = [(path, layer // 3) for layer, path in enumerate(PATHS)]
    assert annotations_of(stages, ["embed", "layers.2"], places) == {
        "embed": ("stage(2)", "split(2)"),
        "layers.2": ("stage(2)", "split(2)"),
        "": ("split(2)",),
    }


def test_a_stage_without_a_module_of_its_own_is_refused() -> None:
    stages = stages_of((3, 1, 1), (3, 1, 1))
    with pytest.raises(UsageError, match="layer 3, with which stage 1 would begin, has no module"):
        annotations_of(stages, ["embed", ""], [])


def test_equal_rows_need_no_shares_and_others_are_written() -> None:
    cluster = Cluster.homogeneous(2)
    (stage,) = stages_of((6, 2, 1))
    (axis,) = plan_for([stage], {"": ("replicate(2)",)}, cluster).stages[0].axes or ()
    assert axis == PlanAxis(name="replicate", size=2, role="replicate")
    uneven = StageChoice(first=0, last=6, ranks=(0, 1), data=2, tensor=1, rows=(5, 3))
    (axis,) = plan_for([uneven], {"": ("replicate(2)",)}, cluster).stages[0].axes or ()
    assert axis.shares == (5, 3)


def test_parts_follow_the_slowest_device_of_each_part() -> None:
    """By the times of layers, whatever the peak speeds, which are equal here."""
    fast, slow = card("fast"), card("slow")
    cluster = machines([fast, slow, fast, fast])
    prices = CostModel.of(chain([layer({"cpu-fast": 1.0, "cpu-slow": 3.0}, degrees=(1, 2))], [0] * 6), cluster)
    pair, both = stages_of((3, 1, 2), (3, 1, 2))
    assert split_shares(pair, prices) == (3.0, 1.0)
    assert split_shares(both, prices) == ()
    (square,) = stages_of((6, 2, 2))
    assert split_shares(square, prices) == (3.0, 1.0)


@pytest.mark.parametrize(
    "annotations",
    [
        {"": ("split(2)",)},
        {"embed": ("stage(1)",), "layers.[1-2]": ("stage(2)", "split(2)"), "head": ("replicate()",)},
        {"layers": ("replicate(2)",), "layers.1.up": ("split(2)",)},
    ],
)
def test_scopes_put_on_a_graph_are_those_of_a_capture(annotations: dict[str, tuple[str, ...]]) -> None:
    model = decoder().to("meta")
    bare = capture(model, tokens())
    put = scopes_by_module(module_paths(bare, model), scopes_by(model, annotations))
    assert not module_scopes(model)
    whale.annotate(
        model, {key: [Annotation(strategy=parse_strategy(t)) for t in texts] for key, texts in annotations.items()}
    )
    annotated = capture(model, tokens())
    found, expected = (
        [scopes.of.get(n, ()) for n in c.graph.nodes if n.op == "call_function"]
        for c, scopes in ((bare, put), (annotated, recorded_scopes(annotated)))
    )
    assert found == expected and any(found)
    assert put.stage_regions == annotated.stage_regions
    assert [s.name for s in partition(bare, put).stages] == [s.name for s in partition(annotated).stages]
