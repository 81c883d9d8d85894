"""Plans as files: what is read, what is refused and where, and that the same plan is the same bytes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from whale.errors import InputFileError, PlanMismatchError
from whale.ir.cluster import Cluster, DeviceType
from whale.ir.plan import ClusterIdentity, Plan, PlanAxis, PlanStage
from whale.ir.workload import DeviceMemory, LinkTime, Prediction, StageWork, Workload

TEXT = """\
{
  "version": 1,
  "world_size": 8,
  "batch": 16,
  "micro_batches": 2,
  "schedule": "1f1b",
  "annotations": {"h.[0-5]": "stage()", "h.6": ["stage(4)", "split()"]},
  "stages": [
    {"ranks": ["0-3"], "axes": [{"name": "replicate", "size": 4, "role": "replicate", "shares": [3, 3, 1, 1]}]},
    {"ranks": ["4-7"], "axes": [{"name": "split", "size": 4, "role": "split", "shares": [1.5, 1, 1, 1]}]}
  ]
}
"""


def test_a_plan_reads_back_as_the_same_bytes(tmp_path: Path) -> None:
    plan = Plan.parse(TEXT)
    assert plan.stages[0].ranks == (0, 1, 2, 3)
    assert plan.annotations == {"h.[0-5]": ("stage()",), "h.6": ("stage(4)", "split()")}
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan
    assert again.dumps() == plan.dumps() == (tmp_path / "plan.json").read_text()


def test_a_plan_of_the_first_form_is_still_read() -> None:
    plan = Plan.parse(
        '{"version": 1, "world_size": 2, "micro_batches": 4, "schedule": "gpipe", "stages": [{"ranks": [1]}]}'
    )
    assert plan == Plan(world_size=2, micro_batches=4, schedule="gpipe", stages=(PlanStage(ranks=(1,)),))
    assert not plan.decides_meshes


def test_a_plan_for_thousands_of_ranks_is_a_short_file() -> None:
    pipelines = 512
    axis = PlanAxis(name="data", size=pipelines, role="replicate")
    stages = tuple(PlanStage(ranks=tuple(range(s, 8 * pipelines, 8)), axes=(axis,)) for s in range(8))
    plan = Plan(world_size=8 * pipelines, stages=stages)
    assert len(plan.dumps()) < 1500
    assert Plan.parse(plan.dumps()) == plan


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ('"batch": 16', '"btch": 16', 4, "unknown key 'btch'; did you mean 'batch'?"),
        ('"role": "split"', '"rol": "split"', 10, "unknown key 'rol'; did you mean 'role'?"),
        ('"world_size": 8,', "", None, "the key 'world_size' is missing"),
        ('"version": 1', '"version": 2', 2, "version"),
        ('"size": 4', '"size": "4"', 9, "stages.0.axes.0.size: must be a whole number"),
        ("[3, 3, 1, 1]", "[3, 3, 1, 2]", 9, "shares: [3, 3, 1, 2] sum to 9, but a micro-batch has 8 rows"),
        ("[3, 3, 1, 1]", "[9, 3, 1, -5]", 9, "must lie between 0"),
        ("[3, 3, 1, 1]", "[4, 4]", 9, "there are 2 for an axis of size 4"),
        ("[3, 3, 1, 1]", "[0, 0, 0, 0]", 9, "without work"),
        ("[1.5, 1, 1, 1]", "[1.5, 1, 1, 0]", 10, "without work"),
        ("[1.5, 1, 1, 1]", "[1.5, 1, 1, 1e999]", 10, "not a finite number"),
        ('["0-3"]', '["0-2"]', 9, "stages.0.ranks: there are 3, but 4 need 4"),
        ('["0-3"]', "[0, 1, 2, 2]", 9, "rank 2 is listed twice"),
        ('["0-3"]', "[3, 1, 2, 0]", 9, "along the axis 'replicate' rank 1 comes after rank 3"),
        ('["0-3"]', '["3-0"]', 9, "must ascend"),
        ('["0-3"]', '["0-999999"]', 9, "end below"),
        ('["0-3"]', "[true]", 9, "is no rank"),
        ('["4-7"]', '["5-8"]', 10, "stages.1.ranks: rank 8 is not among the 8 of world_size"),
        (
            '"batch": 16',
            '"batch": 17',
            5,
            "micro_batches: 2 of 8 rows are not a batch of 17 rows, of which the last may",
        ),
        ('"stage()"', '"stge()"', 7, "'stge()' is no strategy"),
        ('["stage(4)", "split()"]', '["split()", "stage()"]', 7, "cannot be cut into stages"),
        ('"h.6"', '"h.["', 7, "unpaired bracket"),
        ('"1f1b"', '"os.system(1)"', 6, "schedule: unknown schedule 'os.system(1)'; use one of gpipe, 1f1b"),
        ('"1f1b"', '"zero_buble"', 6, "schedule: unknown schedule 'zero_buble'; did you mean 'zero_bubble'?"),
        ("}\n", "}\n}", 13, "after the end"),
    ],
)
def test_a_wrong_plan_is_refused_with_its_line(old: str, new: str, line: int | None, message: str) -> None:
    assert old in TEXT
    with pytest.raises(InputFileError) as refusal:
        Plan.parse(new.join(TEXT.rsplit(old, 1)) if old == "}\n" else TEXT.replace(old, new, 1), source="plan.json")
    assert message in refusal.value.message
    assert (refusal.value.path, refusal.value.line) == ("plan.json", line)


def test_the_published_schema_names_every_field() -> None:
    schema = Plan.published_schema()
    assert set(schema["properties"]) == set(Plan.model_fields)
    assert schema["additionalProperties"] is False
    assert {"PlanStage", "PlanAxis", "Prediction", "Workload"} <= set(schema["$defs"])
    json.dumps(schema)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"capacity": 8', '"capacity": 0', "memory.0.capacity: must be greater than 0"),
        ('"forward": [0.5]', '"forward": [1e308]', "forward.0: must be at most 1e+42"),
        ('"bandwidth": 2.0', '"bandwidth": 1e-300', "bandwidth: must be at least 0.000001"),
    ],
)
def test_figures_of_a_prediction_that_cannot_be_are_refused(old: str, new: str, message: str) -> None:
    work = StageWork(ranks=(0,), forward=(0.5,), backward=(1.0,), weights=(0.0,), kept_bytes=(0,))
    link = LinkTime(source=0, target=1, latency=0.0, bandwidth=2.0)
    workload = Workload(world_size=2, micro_batches=1, stages=(work,), links=(link,))
    memory = (DeviceMemory(rank=0, device="card:0", capacity=8),)
    prediction = Prediction(step_seconds=1.0, step_seconds_interval=(0.9, 1.1), memory=memory)
    text = Plan.parse(TEXT).with_prediction(prediction, workload).dumps()
    assert old in text
    with pytest.raises(InputFileError, match=re.escape(message)):
        Plan.parse(text.replace(old, new, 1))


def test_a_prediction_is_of_the_decisions_it_was_made_for() -> None:
    plan = Plan.parse(TEXT).with_prediction(Prediction(step_seconds=1.0, step_seconds_interval=(0.9, 1.1)), None)
    assert plan.prediction_is_current
    assert Plan.parse(plan.dumps()) == plan
    edited = plan.dumps().replace("[3, 3, 1, 1]", "[2, 2, 2, 2]")
    assert not Plan.parse(edited).prediction_is_current


def types(*names: str) -> Cluster:
    return Cluster.of(
        [
            ("node0", DeviceType.of(name, speed={"float32": 1e12}, memory_bytes=2**34, memory_bandwidth=1e12))
            for name in names
        ]
    )


def test_a_plan_says_its_precision_and_what_each_stage_computes_again() -> None:
    plain = Plan.parse(TEXT)
    text = TEXT.replace('"schedule": "1f1b",', '"schedule": "1f1b", "precision": "bf16",')
    text = text.replace('{"ranks": ["0-3"]', '{"recompute": "full", "ranks": ["0-3"]')
    plan = Plan.parse(text)
    assert (plan.precision, [stage.recompute for stage in plan.stages]) == ("bf16", ["full", None])
    assert Plan.parse(plan.dumps()) == plan
    assert plan.digest() != plain.digest()
    with pytest.raises(InputFileError, match=r"stages\.0\.recompute.*'selective'"):
        Plan.parse(text.replace('"full"', '"some"'))
    with pytest.raises(InputFileError, match=r"precision.*'bf16'"):
        Plan.parse(text.replace('"bf16"', '"int4"'))


def test_the_digest_of_a_plan_is_that_of_before_there_were_rules() -> None:
    assert Plan.parse(TEXT).digest() == "sha256:cd5d46cddfa2dc94"


def test_arguments_that_contradict_a_rule_or_the_precision_are_refused() -> None:
    text = TEXT.replace('"schedule": "1f1b",', '"schedule": "1f1b", "precision": "bf16",')
    plan = Plan.parse(text.replace('{"ranks": ["0-3"]', '{"recompute": "full", "ranks": ["0-3"]'))
    as_planned = {"micro_batches": None, "schedule": None}
    plan.check_options(**as_planned, precision="bf16", recompute="full")
    plan.check_options(**as_planned, recompute="auto")
    with pytest.raises(PlanMismatchError, match=r"stages\.0\.recompute is 'full', but recompute='none'"):
        plan.check_options(**as_planned, recompute="none")
    with pytest.raises(PlanMismatchError, match="precision is 'bf16', but precision='fp32'"):
        plan.check_options(**as_planned, precision="fp32")


def test_a_plan_says_how_each_stage_divides_its_state() -> None:
    text = TEXT.replace('{"ranks": ["0-3"]', '{"state": {"level": 3, "shares": [3, 1, 1, 1]}, "ranks": ["0-3"]')
    plan = Plan.parse(text)
    assert [None if stage.state is None else str(stage.state.sharding) for stage in plan.stages] == [
        "zero=3, state_shares=[3, 1, 1, 1]",
        None,
    ]
    assert Plan.parse(plan.dumps()) == plan
    assert plan.digest() != Plan.parse(TEXT).digest()
    as_planned = {"micro_batches": None, "schedule": None}
    plan.check_options(**as_planned, zero=3, state_align="row")
    plan.check_options(**as_planned, zero=3, state_shares=[3, 1, 1, 1])
    with pytest.raises(PlanMismatchError, match=r"stages\.0\.state\.level is 3, but zero=1"):
        plan.check_options(**as_planned, zero=1)
    with pytest.raises(PlanMismatchError, match=r"stages\.0\.state\.shares is \[3, 1, 1, 1\], but state_shares="):
        plan.check_options(**as_planned, state_shares=[1, 1, 1, 1])


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ('{"level": 4}', r"stages\.0\.state\.level"),
        ('{"level": 0, "shares": [1, 1, 1, 1]}', r"stages\.0\.state.*give zero=1, 2 or 3"),
        ('{"level": 1, "shares": [1, 1, 1]}', "there are 3, but the stage has 4 ranks and [0-9] replicas"),
        ('{"level": 1, "shares": [0, 0, 0, 0]}', "one of them more"),
        ('{"level": 1, "align": "element"}', r"stages\.0\.state\.align"),
    ],
)
def test_a_state_that_no_stage_can_have_is_refused(state: str, words: str) -> None:
    with pytest.raises(InputFileError, match=words):
        Plan.parse(TEXT.replace('{"ranks": ["0-3"]', f'{{"state": {state}, "ranks": ["0-3"]'))


def test_other_machines_than_the_plan_names_are_refused() -> None:
    plan = Plan(world_size=2, cluster=ClusterIdentity.of(types("fast", "slow")))
    plan.check_cluster(types("fast", "slow"))
    with pytest.raises(PlanMismatchError, match="has fast at rank 0, but this one has slow"):
        plan.check_cluster(types("slow", "fast"))
    faster = DeviceType.of("fast", speed={"float32": 2e12}, memory_bytes=2**34, memory_bandwidth=1e12)
    other = Cluster.of([("node0", faster), ("node0", types("slow").devices[0].type)])
    with pytest.raises(PlanMismatchError, match=r"cluster\.hash"):
        plan.check_cluster(other)


def test_a_plan_names_a_device_for_every_rank_or_for_none() -> None:
    with pytest.raises(InputFileError, match="every one of the 3 ranks"):
        Plan.parse('{"world_size": 3, "cluster": {"devices": {"fast": [0, 2]}}}')


def test_stages_that_share_devices_have_an_order_and_interleaved_ones_go_round() -> None:
    def plan(schedule: str, *ranks: int) -> str:
        return f'{{"world_size": 2, "schedule": "{schedule}",\n "stages": [{", ".join(_stage(one) for one in ranks)}]}}'

    for schedule, ranks in (("1f1b", (0, 0, 1)), ("greedy", (0, 1, 0)), ("interleaved", (0, 1, 0, 1))):
        assert len(Plan.parse(plan(schedule, *ranks)).stages) == len(ranks)
    with pytest.raises(InputFileError, match=r"^<text>:1: schedule: schedule 'interleaved' needs stages"):
        Plan.parse(plan("interleaved", 0, 0, 1))


def _stage(rank: int) -> str:
    return f'{{"ranks": [{rank}]}}'
