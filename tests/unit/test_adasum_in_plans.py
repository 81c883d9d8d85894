"""Adasum in plans: the tree of pairs, the messages of a compiled step, and their price in search and prediction."""

from __future__ import annotations

from pathlib import Path

import pytest

import whale
from tests.small_models import decoder, tokens
from tests.unit.test_precision_in_plans import GIVEN, run
from tests.unit.test_search_memory import CLUSTER, MICRO_BATCHES, SIZES, stages
from tests.unit.test_traffic import compiled
from whale.cli.model_loader import load_model
from whale.commands.candidates import CandidateCompiler
from whale.commands.plan_writer import PlanWriter
from whale.compile.options import Options
from whale.errors import AnnotationError, PlanMismatchError, UsageError
from whale.ir.adasum import levels
from whale.ir.plan import Plan, PlanStage
from whale.ir.strategy import Scope, decode_scopes, encode_scopes, parse_strategy
from whale.planner.search.constraints import fixed_by
from whale.planner.search.evaluate import evaluate
from whale.predict.traffic import traffic
from whale.strategies.profile import profile_model


@pytest.mark.parametrize("num", range(1, 20))
def test_every_gradient_is_combined_once_into_the_first(num: int) -> None:
    left = list(range(num))
    for level in levels(num):
        assert len({place for pair in level for place in pair}) == 2 * len(level)  # at the same time
        for first, second in level:
            assert first in left
            left.remove(second)
    assert left == [0]
    assert len(levels(num)) == (num - 1).bit_length()


def test_a_step_exchanges_terms_sums_products_and_gathers() -> None:
    model = decoder(layers=2)
    num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    products = 3 * 8 * len(list(model.parameters()))
    found = traffic(compiled(model, tokens(), {"": whale.replicate(reduce="adasum")}, 4), 3)
    assert all(m.purpose == "gradients" and m.ranks == (0, 1, 2, 3) for m in found)
    sizes = {op: [m.tensor_bytes for m in found if m.op == op for _ in range(m.count)] for op in {m.op for m in found}}
    assert sum(sizes["all_to_all"]) == sum(sizes["all_gather"]) == num_bytes
    assert sizes["all_reduce"] == [2 * products, products]
    owned = traffic(compiled(decoder(layers=2), tokens(), {"": whale.replicate(reduce="adasum", zero=1)}, 4), 3)
    assert {(m.purpose, m.op) for m in owned} == {
        ("gradients", "all_to_all"),
        ("gradients", "all_reduce"),
        ("parameters", "all_gather"),
    }


def test_the_search_prices_what_the_compiled_plan_takes() -> None:
    loaded = load_model("examples/models/gpt.py:gpt", SIZES | {"vocab": 2048}, device="meta")
    trial = CandidateCompiler(loaded.model, loaded.batch, name="gpt", options=Options(reduce="adasum"))
    profile = profile_model(loaded.model, loaded.batch, tensor_degrees=(1, 2), captured=trial.captured)
    layout = stages("data", profile)
    found = {
        reduce: evaluate(profile, CLUSTER, layout, micro_batches=MICRO_BATCHES, precision="fp32", reduce=reduce)
        for reduce in ("mean", "adasum")
    }
    sums = {reduce: [one.seconds for one in found[reduce].workload.reductions] for reduce in found}
    assert len(sums["adasum"]) == 2 and sum(sums["adasum"]) > sum(sums["mean"])
    writer = PlanWriter(profile, CLUSTER, 8 * MICRO_BATCHES, trial, reduce="adasum")
    choice = writer.compiled(found["adasum"], trial)
    assert choice.compiled and [stage.reduce for stage in choice.plan.stages] == ["adasum"]
    assert Plan.parse(choice.plan.dumps()) == choice.plan
    workload = choice.plan.workload
    assert workload is not None
    assert sum(one.seconds for one in workload.reductions) == pytest.approx(sum(sums["adasum"]), rel=0.1)
    assert found["adasum"].prediction.step_seconds == pytest.approx(choice.prediction.step_seconds, rel=0.06)


def test_plans_keep_their_digest_and_refuse_another_way() -> None:
    plain = Plan(world_size=2, stages=(PlanStage(ranks=(0, 1)),))
    told = plain.model_copy(update={"stages": (PlanStage(ranks=(0, 1), reduce="adasum"),)})
    assert told.digest() != plain.digest()
    with pytest.raises(PlanMismatchError, match=r"stages.0.reduce is 'adasum', but reduce='mean' was given"):
        told.check_options(micro_batches=None, schedule=None, reduce="mean")
    plain.check_options(micro_batches=None, schedule=None, reduce="adasum")


def test_annotations_say_it() -> None:
    strategy = whale.replicate(2, reduce="adasum").strategy
    assert parse_strategy(str(strategy)) == strategy
    path = (Scope(strategy=strategy, region="a"),)
    assert decode_scopes(encode_scopes(path)) == path
    with pytest.raises(AnnotationError, match="unknown; use 'mean', 'adasum', 'server'"):
        whale.replicate(reduce="sum")  # type: ignore[arg-type]
    with pytest.raises(AnnotationError, match="replicas have gradients of their own rows"):
        parse_strategy("split(2, reduce='adasum')")


def test_a_search_takes_it_for_all_stages() -> None:
    path = (Scope(strategy=whale.replicate(reduce="adasum").strategy, region="a"),)
    with pytest.raises(UsageError, match="all stages of a search make gradients as --reduce says"):
        fixed_by({"a": path}, ["a"], ())


def test_commands_write_it(tmp_path: Path) -> None:
    made = run(tmp_path, "plan", *GIVEN, "--batch", "8", "--stages", "1", "--reduce", "adasum", "--json")
    assert made.exit_code == 0, made.output
    assert [stage.reduce for stage in Plan.parse(made.stdout).stages] == ["adasum"]
    file = tmp_path / "plan.json"
    searched = run(
        tmp_path, "search", *GIVEN, "--batch", "8", "--max-stages", "1", "--reduce", "adasum", "-o", str(file)
    )
    assert searched.exit_code == 0, searched.output
    assert {stage.reduce for stage in Plan.load(file).stages} == {"adasum"}
