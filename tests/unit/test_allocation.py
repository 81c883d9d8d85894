"""Jobs that share a cluster: the rule against all allocations of small cases, the timeline, the options, the file."""

import json
import random
from collections.abc import Sequence
from itertools import product
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from numpy.typing import NDArray

from tests.chains import chain, layer
from whale.cli.app import app
from whale.cli.clusters import load_cluster
from whale.errors import InputFileError, UsageError
from whale.ir.cluster import Cluster
from whale.ir.jobs import Jobs
from whale.ir.plan import Plan
from whale.ir.profile import ModelProfile
from whale.planner.allocation.options import options_of, place
from whale.planner.allocation.rules import LeastCompletion, Shares, equal_shares, first_come
from whale.planner.allocation.timeline import Change, Demand, simulate
from whale.planner.catalog import device_types

CLUSTER = """
[links]
inter_node = {bandwidth = "100 Gbit/s", latency = "15 us"}
[[nodes]]
devices = 2
device = "A100-SXM4-80GB"
[[nodes]]
count = 3
devices = 1
device = "V100-SXM2-32GB"
"""


# --- small cases, and all of their allocations ------------------------------------------------------------------------


def small_case(seed: int) -> tuple[list[Demand], NDArray[np.int64], tuple[int, ...], float]:
    """Two to four jobs, unlike in length, weight, least devices and how they speed up, on one or two kinds."""
    draw = random.Random(seed)
    kinds = draw.choice([1, 2, 2])
    capacity = tuple(draw.randint(1, 4 if kinds == 1 else 2) for _ in range(kinds))
    counts = np.array(sorted(product(*(range(number + 1) for number in capacity)), key=lambda one: (sum(one), one)))
    jobs = []
    for number in range(draw.randint(2, 4 if len(counts) <= 4 else 3)):
        rates = [draw.uniform(0.3, 1.0) for _ in capacity]
        power, mixed, least = draw.uniform(0.5, 1.0), draw.uniform(0.6, 1.0), draw.choice([1, 1, 1, 2])
        speeds = []
        for own in counts:
            speed = float(np.dot(rates, own)) ** power if own.sum() >= min(least, sum(capacity)) else 0.0
            speeds.append(speed * (mixed if (own > 0).sum() > 1 else 1.0))
        work = draw.uniform(10, 1000) if draw.random() < 0.7 else draw.uniform(1000, 3000)
        jobs.append(Demand(number=number, work=work, weight=draw.choice([1.0, 1.0, 2.0, 5.0]), speeds=np.array(speeds)))
    return jobs, counts, capacity, draw.choice([0.0, 0.0, 20.0])


def least_of_all(jobs: Sequence[Demand], counts: NDArray[np.int64], capacity: tuple[int, ...], restart: float) -> float:
    """The least weighted sum of completion times over all allocations, at the start and after every job."""
    if not jobs:
        return 0.0
    able = [[option for option, speed in enumerate(job.speeds) if speed > 0 or option == 0] for job in jobs]
    ways = [way for way in product(*able) if any(way) and (counts[list(way)].sum(axis=0) <= capacity).all()]
    if not restart:  # then no job is better off with less
        speeds = np.array([[job.speeds[option] for option, job in zip(way, jobs, strict=True)] for way in ways])
        ways = [
            way
            for way, own in zip(ways, speeds, strict=True)
            if not ((speeds >= own).all(axis=1) & (speeds > own).any(axis=1)).any()
        ]
    best = inf
    for way in ways:
        now = [job.given(option, restart) for job, option in zip(jobs, way, strict=True)]
        seconds = min(job.left_seconds for job in now)
        sum_ = seconds * sum(job.weight for job in jobs)
        if sum_ < best:
            rest = [job.after(seconds) for job in now if job.left_seconds > seconds]
            best = min(best, sum_ + least_of_all(rest, counts, capacity, restart))
    return best


@pytest.mark.slow
def test_sums_are_within_a_percent_of_the_best_of_all_allocations() -> None:
    errors = []
    for seed in range(100):
        jobs, counts, capacity, restart = small_case(seed)
        best = least_of_all(jobs, counts, capacity, restart)
        found = simulate(jobs, counts, capacity, LeastCompletion(counts, restart), restart_seconds=restart)
        errors.append(found.total_seconds / best - 1)
        for plain in (equal_shares(counts), first_come(counts)):
            other = simulate(jobs, counts, capacity, plain, restart_seconds=restart)
            assert found.total_seconds <= other.total_seconds * (1 + 1e-9)
    assert min(errors) > -1e-9
    assert max(errors) < 0.01


@pytest.mark.parametrize("seed", range(20))
def test_the_dynamic_program_is_exact(seed: int) -> None:
    jobs, counts, capacity, _ = small_case(seed)
    costs = np.stack([job.seconds(0.0) for job in jobs])
    costs[~np.isfinite(costs)] = 1e6
    given = Shares(counts).least(costs, capacity)
    ways = product(range(len(counts)), repeat=len(jobs))
    fitting = [way for way in ways if (counts[list(way)].sum(axis=0) <= capacity).all()]
    assert tuple(given) in fitting
    rows = range(len(jobs))
    assert costs[rows, given].sum() == pytest.approx(min(costs[rows, list(way)].sum() for way in fitting))


# --- the timeline -----------------------------------------------------------------------------------------------------

ONE_OR_TWO = np.array([[0], [1], [2]])


def job(number: int, work: float, **others: Any) -> Demand:
    return Demand(number=number, work=work, speeds=np.array([0.0, 1.0, 1.5]), **others)


@pytest.mark.parametrize("seed", range(6))
def test_three_jobs_share_devices_as_well_as_they_can(seed: int) -> None:
    rng = np.random.default_rng(seed)
    capacity = (int(rng.integers(1, 4)), int(rng.integers(0, 3)))
    counts = np.array([(a, b) for a in range(capacity[0] + 1) for b in range(capacity[1] + 1)])
    jobs = [
        Demand(
            number=number,
            work=float(10 ** rng.uniform(1, 4)),
            weight=float(10 ** rng.uniform(-1, 1)),
            speeds=(counts @ [1.0, rng.uniform(0.1, 0.8)]) ** rng.uniform(0.4, 1),
        )
        for number in range(3)
    ]
    found = simulate(jobs, counts, capacity, LeastCompletion(counts, 10.0), restart_seconds=10.0)
    assert found.total_seconds == pytest.approx(least_of_all(jobs, counts, capacity, 10.0), rel=1e-9)


def test_jobs_restart_when_their_devices_change() -> None:
    found = simulate([job(0, 10), job(1, 30)], ONE_OR_TWO, (2,), equal_shares(ONE_OR_TWO), restart_seconds=2.0)
    assert found.done_seconds == {0: 12.0, 1: pytest.approx(12 + 2 + 20 / 1.5)}
    assert found.total_seconds == pytest.approx(sum(found.done_seconds.values()))
    assert found.restarts == 1


def test_a_job_that_has_its_devices_goes_on_at_once() -> None:
    found = simulate([job(0, 10, held=2)], ONE_OR_TWO, (2,), first_come(ONE_OR_TWO), restart_seconds=2.0)
    assert found.done_seconds[0] == pytest.approx(10 / 1.5)


def test_a_job_keeps_what_it_has_if_a_restart_costs_more_than_it_gains() -> None:
    jobs = [job(0, 3, held=1)]
    assert LeastCompletion(ONE_OR_TWO, 60.0)(jobs, (2,)) == [1]
    assert LeastCompletion(ONE_OR_TWO, 0.1)(jobs, (2,)) == [2]


def test_times_are_from_arrivals() -> None:
    found = simulate([job(0, 3), job(1, 3, arrival_seconds=5.0)], ONE_OR_TWO, (1,), first_come(ONE_OR_TWO))
    assert found.done_seconds == {0: 3.0, 1: 8.0}
    assert found.total_seconds == 6.0


def test_the_job_on_a_device_that_fails_starts_again_with_what_it_saved() -> None:
    changes = [Change(seconds=4.0, capacity=(1,), kind=0, draw=0.9), Change(seconds=8.0, capacity=(2,))]
    jobs = [job(0, 20), job(1, 20)]
    rule = first_come(ONE_OR_TWO)
    found = simulate(
        jobs, ONE_OR_TWO, (2,), rule, restart_seconds=1.0, changes=changes, lost_seconds=2.0
    )  # the first has both at first
    #       1 s start, 3 s at 1.5, 2 s of it lost: 18.5 left; 1 s start, then on one device
    assert found.done_seconds[0] == pytest.approx(4 + 1 + 18.5)
    assert found.done_seconds[1] == pytest.approx(8 + 1 + 20)


def test_jobs_that_nothing_can_run_are_named() -> None:
    with pytest.raises(UsageError, match="1 job can run on none of the devices"):
        simulate([Demand(number=0, work=1.0, speeds=np.zeros(3))], ONE_OR_TWO, (2,), first_come(ONE_OR_TWO))


def test_short_jobs_go_first_and_heavy_ones_too() -> None:
    rule = LeastCompletion(np.array([[0], [1]]))

    def one(number: int, work: float, weight: float = 1.0) -> Demand:
        return Demand(number=number, work=work, weight=weight, speeds=np.array([0.0, 1.0]))

    assert rule([one(0, 9), one(1, 4)], (1,)) == [0, 1]
    assert rule([one(0, 9, weight=3), one(1, 4)], (1,)) == [1, 0]


def test_many_jobs_are_answered() -> None:
    draw = random.Random(0)
    jobs = [job(number, draw.uniform(1, 100)) for number in range(12)]
    found = simulate(jobs, ONE_OR_TWO, (4,), LeastCompletion(ONE_OR_TWO))
    plain = simulate(jobs, ONE_OR_TWO, (4,), equal_shares(ONE_OR_TWO))
    assert found.total_seconds < plain.total_seconds


# --- devices ----------------------------------------------------------------------------------------------------------


def test_options_are_parts_of_nodes_and_whole_nodes() -> None:
    cluster = Cluster.parse(
        CLUSTER.replace("devices = 2", "devices = 8").replace("count = 3", "count = 2"), catalog=device_types()
    )
    options = options_of(cluster)
    assert sorted({int(counts[0]) for counts in options.counts}) == [0, 1, 2, 4, 8]
    assert sorted({int(counts[1]) for counts in options.counts}) == [0, 1, 2]
    assert options.text(len(options.counts) - 1) == "8 A100-SXM4-80GB + 2 V100-SXM2-32GB"
    assert options.index({"A100-SXM4-80GB": 4}) is not None
    assert options.index({"A100-SXM4-80GB": 3}) is None
    with pytest.raises(UsageError, match="the cluster has no T4, but A100-SXM4-80GB, V100-SXM2-32GB"):
        options.index({"T4": 1})


def test_no_job_is_spread_over_the_rests_of_nodes() -> None:
    cluster = Cluster.homogeneous(8, num_devices_per_node=4)
    options = options_of(cluster)
    one, two, four = (options.index({"device": number}) for number in (1, 2, 4))
    assert one is not None and two is not None and four is not None
    placed = place(options, [one, two, four, one])
    assert placed == ((6,), (4, 5), (0, 1, 2, 3), (7,))


def test_nodes_of_other_sizes_are_kinds_of_their_own() -> None:
    text = CLUSTER.replace("V100-SXM2-32GB", "A100-SXM4-80GB")
    options = options_of(Cluster.parse(text, catalog=device_types()))
    assert [kind.name for kind in options.kinds] == ["A100-SXM4-80GB of 2", "A100-SXM4-80GB of 1"]


# --- the file ---------------------------------------------------------------------------------------------------------

JOBS = """
restart_seconds = 30
[[jobs]]
name = "long"
profile = "model.json"
batch = [8, 16]
rows = 400_000
noise_scale = 64

[[jobs]]
name = "short"
profile = "model.json"
batch = 8
rows = 20_000
weight = 2.0
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("rows = 20_000", "row = 20_000", "jobs.toml:14: unknown key 'row'; did you mean 'rows'?"),
        ("weight = 2.0", "weight = 0", "jobs.toml:15: jobs.1.weight: must be at least "),
        ('"short"', '"long"', "jobs.toml:11: jobs.1.name: two jobs are named 'long'; give each its own name"),
        ("[8, 16]", "[8, 8]", "batch: a number is there twice"),
        ('profile = "model.json"\nbatch = 8\n', "batch = 8\n", "job 'short' has neither profile nor model; give one"),
        ('"short"', '"../short"', "jobs.toml:11: jobs.1.name: "),
        ("batch = 8\n", "batch = 0\n", "jobs.toml:13: jobs.1.batch"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_its_line(old: str, new: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "jobs.toml"
    file.write_text(JOBS.replace(old, new))
    with pytest.raises(InputFileError) as caught:
        Jobs.load(file)
    assert message in str(caught.value)
    assert f"{file}:" in str(caught.value)


def test_the_only_job_that_is_wrong_is_no_list_without_jobs(tmp_path: Path) -> None:
    file = tmp_path / "jobs.toml"
    file.write_text(JOBS[: JOBS.index('[[jobs]]\nname = "short"')].replace("rows = 400_000", "rows = 0"))
    with pytest.raises(InputFileError, match=r"jobs.toml:7: jobs.0.rows: must be at least 1, not 0$"):
        Jobs.load(file)


def test_larger_batches_need_more_rows_by_the_noise_scale() -> None:
    long, short = Jobs.parse(JOBS).jobs
    assert (long.rows_for(8), long.rows_for(16)) == (400_000, 400_000 * 80 / 72)
    assert short.rows_for(64) == 20_000


# --- the command ------------------------------------------------------------------------------------------------------


MACHINES = """
[links]
intra_node = {bandwidth = "10 GB/s", latency = "10 us"}
inter_node = {bandwidth = "10 GB/s", latency = "10 us"}
[[nodes]]
devices = 2
device = "cpu-fast"
[[nodes]]
devices = 1
device = "cpu-slow"
[device_types.cpu-fast]
speed = {float32 = "1 TFLOP/s"}
memory = "64 GiB"
memory_bandwidth = "1 TB/s"
[device_types.cpu-slow]
speed = {float32 = "1 TFLOP/s"}
memory = "64 GiB"
memory_bandwidth = "1 TB/s"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("allocate")
    profile = chain([layer({"cpu-fast": 1e-3, "cpu-slow": 3e-3})], [0] * 4)
    paths = tuple(f"layers.{index}" for index in range(4))
    (folder / "model.json").write_text(profile.model_copy(update={"paths": paths}).dumps())
    (folder / "jobs.toml").write_text(JOBS)
    (folder / "cluster.toml").write_text(MACHINES)
    return folder


def run(folder: Path, *arguments: str) -> Any:
    files = [str(folder / "jobs.toml"), "--cluster", str(folder / "cluster.toml")]
    return CliRunner().invoke(app, ["allocate", *files, *arguments])


def test_the_command_shows_who_gets_what_and_what_plain_rules_would_take(folder: Path) -> None:
    result = run(folder)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["job", "gets", "batch", "rows/s", "done", "after", "devices"]
    assert any(line.startswith("long ") for line in lines) and any(line.startswith("short ") for line in lines)
    assert any(" short done: long gets 2 cpu-fast + 1 cpu-slow" in line for line in lines)
    assert "Weighted sum of completion times: " in lines[-1]
    assert "equal shares" in lines[-1] and "first come" in lines[-1]


def test_the_answer_as_json_gives_no_device_twice_and_plans_fit_it(folder: Path, tmp_path: Path) -> None:
    result = run(folder, "--json", "-o", str(tmp_path / "plans"))
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    given = [device for job in answer["jobs"] for device in job["devices"]]
    assert len(given) == len(set(given)) > 0
    assert all(answer["weighted_sum_seconds"] <= other * (1 + 1e-9) for other in answer["others"].values())
    for job in answer["jobs"]:
        if job["devices"]:
            plan = Plan.load(tmp_path / "plans" / f"{job['name']}.json")
            assert (plan.world_size, plan.batch) == (len(job["devices"]), job["batch"])
            plan.check_cluster(Cluster.load(tmp_path / "plans" / f"{job['name']}.cluster.json"))
            assert plan.prediction is not None
            noise = 72 / (64 + job["batch"]) if job["name"] == "long" else 1.0
            expected = job["batch"] / plan.prediction.step_seconds * noise
            assert job["rows_per_second"] == pytest.approx(expected)
    assert answer["phases"][-1]["seconds"] < max(job["done_seconds"] for job in answer["jobs"])


def test_models_are_found_from_the_folder_of_the_jobs_and_their_plans_are_compiled_and_can_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    examples = Path(__file__).resolve().parents[2] / "examples"
    monkeypatch.chdir(tmp_path)
    files = [str(examples / "jobs.toml"), "--cluster", str(examples / "mixed_gpus.toml")]
    result = CliRunner().invoke(app, ["allocate", *files, "-o", "plans"])
    assert result.exit_code == 0, result.output
    assert {line.split()[0] for line in result.stdout.splitlines()[1:4]} == {"pretrain", "finetune", "probe"}
    written = sorted(path.name for path in Path("plans").iterdir())
    assert written == ["finetune.cluster.json", "finetune.json", "probe.cluster.json", "probe.json"]
    for name, device in (("finetune", "V100-SXM2-32GB"), ("probe", "P100-PCIe-16GB")):
        plan, machines = Plan.load(f"plans/{name}.json"), load_cluster(f"plans/{name}.cluster.json", None)
        assert (plan.world_size, plan.batch, [one.type.name for one in machines.devices]) == (1, 32, [device])
        assert plan.model is not None and plan.prediction is not None and plan.workload is not None
        own = [f"plans/{name}.json", "--cluster", f"plans/{name}.cluster.json", "--on", "slurm", "--dry-run"]
        script = CliRunner().invoke(app, ["launch", *own, "--", "train.py"])
        assert script.exit_code == 0 and f"--constraint={device}" in script.stdout


def test_a_job_that_fits_nowhere_is_named(folder: Path, tmp_path: Path) -> None:
    profile = ModelProfile.load(folder / "model.json")
    kinds = [kind.model_copy(update={"parameters": 1e13}) for kind in profile.kinds]
    (tmp_path / "model.json").write_text(profile.model_copy(update={"kinds": tuple(kinds)}).dumps())
    (tmp_path / "jobs.toml").write_text(JOBS)
    (tmp_path / "cluster.toml").write_text(MACHINES)
    result = run(tmp_path)
    assert result.exit_code == 4
    assert "job 'long'" in result.stderr and "fits on no devices" in result.stderr


def with_jobs(folder: Path, tmp_path: Path, text: str) -> Path:
    (tmp_path / "model.json").write_text((folder / "model.json").read_text())
    (tmp_path / "jobs.toml").write_text(text)
    (tmp_path / "cluster.toml").write_text(MACHINES)
    return tmp_path


def test_a_job_that_may_have_fewer_devices_than_it_has_gets_these(folder: Path, tmp_path: Path) -> None:
    result = run(with_jobs(folder, tmp_path, JOBS + "max_devices = 1\ndevices = {cpu-fast = 2}\n"), "--json")
    assert result.exit_code == 0, result.output
    short = next(job for job in json.loads(result.stdout)["jobs"] if job["name"] == "short")
    assert len(short["devices"]) <= 1


def test_two_jobs_have_not_the_same_devices(folder: Path, tmp_path: Path) -> None:
    text = JOBS.replace("[[jobs]]", "[[jobs]]\ndevices = {cpu-slow = 1}")
    result = run(with_jobs(folder, tmp_path, text))
    assert result.exit_code == 3
    assert "jobs.toml:12: job 'short': devices: " in result.stderr
    assert "cpu-slow, but long has 1, short has 1; a device is of one job" in result.stderr


def test_no_job_is_named_as_the_cluster_file_of_another(folder: Path, tmp_path: Path) -> None:
    result = run(with_jobs(folder, tmp_path, JOBS.replace('"short"', '"long.cluster"')))
    assert result.exit_code == 3
    assert "'long.cluster' names the cluster file of 'long'; choose another" in result.stderr


@pytest.mark.parametrize(
    ("devices", "message"),
    [("T4 = 1", "the cluster has no T4"), ("cpu-fast = 500", "500 cpu-fast, but the cluster has ")],
)
def test_devices_that_the_cluster_lacks_are_named(devices: str, message: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text((folder / "model.json").read_text())
    (tmp_path / "jobs.toml").write_text(JOBS + f"devices = {{{devices}}}\n")
    (tmp_path / "cluster.toml").write_text(MACHINES)
    result = run(tmp_path)
    assert result.exit_code == 3
    assert f"jobs.toml:16: job 'short': devices: {message}" in result.stderr


def test_devices_may_have_other_names_for_their_types(folder: Path, tmp_path: Path) -> None:
    result = run(with_jobs(folder, tmp_path, JOBS + "devices = {CPU-Fast = 2}\n"))
    assert result.exit_code == 0, result.output
    result = run(with_jobs(folder, tmp_path, JOBS + "devices = {CPU-Fast = 2, cpu-fast = 1}\n"))
    assert result.exit_code == 3
    assert "devices: 3 cpu-fast, but the cluster has 2" in result.stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('precision = "fp7"', "job 'short': precision fp7"),
        ('model = "no.py:x"', "job 'short': model"),
        ('optimizer = "adamm"', "job 'short': unknown optimizer 'adamm'; use one of "),
    ],
)
def test_what_commands_take_as_options_is_named_as_a_key(line: str, message: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text((folder / "model.json").read_text())
    head, job, rest = JOBS.partition('name = "short"\n')
    rest = rest.replace('profile = "model.json"\n', "") if line.startswith("model") else rest
    (tmp_path / "jobs.toml").write_text(f"{head}{job}{line}\n{rest}")
    (tmp_path / "cluster.toml").write_text(MACHINES)
    result = run(tmp_path)
    assert result.exit_code == 3
    assert f"jobs.toml:12: {message}" in result.stderr
