"""Profiles that others measured: what their files say arrives, and what is wrong with them is said with its place."""

import json
from collections.abc import Callable
from math import log10
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from whale.cli.app import app
from whale.errors import InputFileError, UsageError
from whale.ir.cluster import Cluster
from whale.ir.profile import LinkCurve, ModelProfile
from whale.planner.catalog import device_types, device_types_with
from whale.planner.profile_import import import_metis, import_sailor

# Figures of the artifact of Sailor (SOSP 2025, MIT licence): OPT-350M on GH200, tensor degree 4, micro-batch 8.
TIMES = {0: [0.000922, 1e-06, 0.000479], 1: [0.003021, 0.006469, 0.000479], 25: [0.004014, 0.005944, 0.000479]}
INNER = [0.002683, 0.00647, 0.000479]
PARAMETERS = {0: 15073280, 25: 12978176}
BETWEEN = [[-0.65351182, 11.42553946, 45.25031399], 95e9]


def sailor_files() -> dict[str, Any]:
    layers = range(26)
    sizes = {
        "params_floats": 3153664,
        "act_output_floats": 2097152,
        "act_input_floats": 2097152,
        "act_mem_floats": 27398144,
    }
    return {
        "training.json": {"model": "OPT-350", "num_all_layers": 26, "sequence_length": 2048, "optimizer": "Adam"},
        "model.json": {
            "OPT-350": {"4": {str(i): sizes | {"params_floats": PARAMETERS.get(i, 3153664)} for i in layers}}
        },
        "nodes.json": {"GH-96": {"gpus_per_node": 4, "mem_per_gpu": 102625181696}, "zone": "here"},
        "intra_node_bandwidths.json": {"GH-96": {"2": [[-0.5, 14.0, 44.0], 125e9]}},
        "inter_node_bandwidths.json": {
            "here": {"GH-96": {"4": {"here": {"GH-96": {"4": BETWEEN, "2": BETWEEN}}, "there": {}}}},
            "there": {},
        },
        "profiles/OPT-350_GH-96.json": {
            "8": {"4": {str(i): TIMES.get(i, INNER) for i in layers}},
            "16": {"4": {str(i): [2 * time for time in TIMES.get(i, INNER)] for i in layers}},
        },
    }


def metis_files() -> dict[str, Any]:
    def file(forward_backward: float, memory: list[float]) -> dict[str, Any]:
        return {
            "model": {
                "model_name": "GPT3",
                "num_layers": 3,
                "parameters": {"total_parameters_bytes": 3200, "parameters_per_layer_bytes": [800, 1600, 800]},
            },
            "execution_time": {
                "total_time_ms": 9.0,
                "optimizer_time_ms": 4.0,
                "layer_compute_total_ms": [1.0, forward_backward, 1.0],
            },
            "execution_memory": {"total_memory": 100, "layer_memory_total_mb": memory},
        }

    return {
        "DeviceType.A100_tp1_bs1.json": file(3.0, [10, 20, 10]),
        "DeviceType.A100_tp1_bs4.json": file(12.0, [13, 32, 13]),
        "DeviceType.A100_tp2_bs1.json": file(2.0, [10, 10]),  # Metis's own samples have such short lists
        "DeviceType.V100_tp1_bs1.json": file(6.0, [10, 20, 10]),
        "README.txt": None,
    }


def write(folder: Path, files: dict[str, Any]) -> Path:
    for name, value in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value, indent=1), encoding="utf-8")
    return folder


@pytest.fixture
def sailor(tmp_path: Path) -> ModelProfile:
    return import_sailor(write(tmp_path, sailor_files()))


def gigabytes_per_second(curve: LinkCurve, size: float) -> float:
    value = 0.0
    for coefficient in curve.coefficients:
        value = value * log10(size) + coefficient
    return value


def test_equal_layers_share_a_kind(sailor: ModelProfile) -> None:
    assert sailor.layers == (0, 1, *[2] * 23, 3)
    assert [kind.name for kind in sailor.kinds] == ["0", "1", "2", "25"]
    assert sailor.row_tokens == 2048
    (times,) = sailor.kinds[2].measured
    assert (times.device_type, times.tensor_degree, times.rows) == ("GH-96", 4, (8, 16))
    assert times.forward == (0.002683, 2 * 0.002683)
    assert times.includes_communication


def test_update_of_the_model_is_shared_among_its_layers(sailor: ModelProfile) -> None:
    updates = [kind.measured[0].update[0] for kind in sailor.chain()]
    assert sum(updates) == pytest.approx(0.000479)
    assert updates[0] / updates[1] == pytest.approx(15073280 / 3153664)


def test_estimate_of_sailor_follows_from_the_profile(sailor: ModelProfile) -> None:
    """Its run of two stages of four GH200, 4 micro-batches of 8 rows, took 0.657 s; its own simulator says 0.6249."""
    chain = list(sailor.chain())
    computing = [sum(k.measured[0].forward[0] + k.measured[0].backward[0] for k in s) for s in (chain[:12], chain[12:])]
    curve = next(link for link in sailor.links if link.within == "nodes" and link.target_devices is None)
    size = chain[11].output.total(8, 4)
    send = size / 1e9 / gigabytes_per_second(curve, size)
    sending = [send, 2 * send]
    update = sum(kind.measured[0].update[0] for kind in chain)
    straggler = max(one + other for one, other in zip(computing, sending, strict=True))
    assert 3 * straggler + sum(computing) + sum(sending) + update == pytest.approx(0.62488238805901, rel=1e-12)


def test_curves_keep_their_values_in_another_base(sailor: ModelProfile) -> None:
    within, between, uneven = sailor.links
    assert (within.source, within.target, within.devices, within.maximum) == ("GH-96", "GH-96", 2, 125e9)
    assert gigabytes_per_second(within, 1e6) == pytest.approx(44.0)  # log2(1 MB) is 0
    assert gigabytes_per_second(within, 8e6) == pytest.approx(44.0 + 3 * 14.0 - 9 * 0.5)
    assert (uneven.devices, uneven.target_devices) == (4, 2) or (between.devices, between.target_devices) == (4, 2)


def test_a_cluster_file_names_device_types_of_the_profile(sailor: ModelProfile) -> None:
    text = """
    links = {intra_node = {bandwidth = "100 GB/s", latency = "5 us"}}
    nodes = [{devices = 4, device = "GH-96"}]
    """
    cluster = Cluster.parse(text, catalog=device_types_with(sailor))
    device = cluster.devices[0]
    assert (device.type.name, device.memory_bytes) == ("GH-96", 102625181696)
    assert device.speed("bfloat16") == device_types()["GH200-96GB"].speed("bfloat16")


def test_a_device_type_of_which_no_speed_is_known_is_left_to_the_cluster_file() -> None:
    profile = ModelProfile(name="m", layers=(), kinds=(), device_types={"card": {"memory_bytes": 1e9}})
    assert "card" not in device_types_with(profile)
    profile = profile.model_copy(
        update={"device_types": {"card": {"memory_bytes": 1e9, "memory_bandwidth": 1e10, "float32": 2e9}}}
    )
    assert device_types_with(profile)["card"].speed("float32") == 2e9


def test_metis_times_are_cut_into_forward_and_backward(tmp_path: Path) -> None:
    profile = import_metis(write(tmp_path, metis_files()), row_tokens=1024)
    assert profile.layers == (0, 1, 0)
    outer, inner = profile.kinds
    assert inner.parameters == 400
    assert inner.activations is not None and inner.activations.total(1, 4) == pytest.approx(4 * 2**20)
    assert [(t.device_type, t.tensor_degree, t.rows) for t in inner.measured] == [
        ("A100", 1, (1, 4)),
        ("A100", 2, (1,)),
        ("V100", 1, (1,)),
    ]
    first = inner.measured[0]
    assert first.forward == pytest.approx((0.001, 0.004)) and first.backward == pytest.approx((0.002, 0.008))
    assert first.update == pytest.approx((0.002, 0.002)) and outer.measured[0].update == pytest.approx((0.001, 0.001))
    assert profile.row_tokens == 1024


def test_metis_parameters_are_counted_by_the_precision(tmp_path: Path) -> None:
    profile = import_metis(write(tmp_path, metis_files()), precision="bfloat16")
    assert profile.kinds[1].parameters == 800
    with pytest.raises(UsageError, match="int8"):
        import_metis(tmp_path, precision="int8")


def _set(*path: Any) -> Callable[[dict[str, Any]], None]:
    *keys, last, value = path

    def change(files: dict[str, Any]) -> None:
        table: Any = files
        for key in keys:
            table = table[key]
        table[last] = value

    return change


def _drop(*path: str) -> Callable[[dict[str, Any]], None]:
    *keys, last = path

    def change(files: dict[str, Any]) -> None:
        table: Any = files
        for key in keys:
            table = table[key]
        del table[last]

    return change


@pytest.mark.parametrize(
    ("change", "file", "message"),
    [
        (_drop("training.json"), "training.json", "cannot be read"),
        (_drop("profiles/OPT-350_GH-96.json"), "profiles", "cannot be read"),
        (_set("training.json", "num_all_layers", 27), "model.json", "the key '26' is missing"),
        (_set("training.json", "num_all_layers", 10**9), "training.json", "must lie between"),
        (_set("training.json", "num_all_layers", True), "training.json", "must be a number"),
        (_set("training.json", "model", "../x"), "training.json", "must be a name"),
        (_set("training.json", "model", "GPT"), "model.json", "the key 'GPT' is missing"),
        (_set("nodes.json", "zone", "mars"), "inter_node", "the key 'mars' is missing"),
        (_set("nodes.json", "zone", 3), "inter_node", "zone"),
        (_set("nodes.json", "GH-96", "mem_per_gpu", 0), "", "memory_bytes"),
        (_set("nodes.json", "GH-96", "mem_per_gpu", 1.5), "nodes.json", "whole number"),
        (_set("intra_node_bandwidths.json", "GH-96", "2", [[1], 2, 3]), "intra_node", "a list of 2 values"),
        (_set("intra_node_bandwidths.json", "GH-96", "2", [["x"], 2]), "intra_node", "must be a number"),
        (_set("profiles/OPT-350_GH-96.json", "8", "4", "3", [1, 2]), "OPT-350_GH-96.json", "8.4.3: must be a list"),
        (_set("profiles/OPT-350_GH-96.json", "8", "4", "3", [1, -2, 3]), "OPT-350_GH-96.json", "not negative"),
        (_set("profiles/OPT-350_GH-96.json", {"8": {"2": {}}}), "profiles", "no times of a tensor degree"),
        (_set("profiles/OPT-350_GH-96.json", "0", {}), "OPT-350_GH-96.json", "whole number from 1"),
        (_set("profiles/OPT-350_GH-96.json", "8", []), "OPT-350_GH-96.json", "must be a table"),
        (_set("model.json", "OPT-350", "4", "3", None), "model.json", "must be a table"),
    ],
)
def test_what_is_wrong_with_files_of_sailor_is_said_with_its_place(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], file: str, message: str
) -> None:
    files = sailor_files()
    change(files)
    with pytest.raises(InputFileError) as refusal:
        import_sailor(write(tmp_path, files))
    assert message in refusal.value.message
    assert refusal.value.path is not None and file in refusal.value.path


def test_what_files_of_sailor_have_not_for_all_layers_is_left_out_and_said(
    tmp_path: Path, sailor: ModelProfile
) -> None:
    files = sailor_files()
    times = files["profiles/OPT-350_GH-96.json"]
    times["8"]["2"] = times["8"]["4"]  # model.json has no degree 2
    times["32"] = {"4": {"0": [1, 2, 3]}}
    files["profiles/OPT-350_A100-40.json"] = {"8": {"2": times["8"]["4"]}}
    files["model.json"]["OPT-350"]["8"] = {"0": files["model.json"]["OPT-350"]["4"]["0"]}
    said: list[str] = []
    folder = write(tmp_path / "more", files)
    assert import_sailor(folder, tell=said.append) == sailor
    unknown = [one for one in said if "tensor degree 2 of " in one]
    assert [one.partition(" of ")[2].partition(",")[0] for one in unknown] == ["A100-40", "GH-96"]
    assert all("model.json has no sizes (it has 4)" in one for one in unknown)
    assert sum("32.4: the key '1' is missing" in one for one in said) == 1
    assert sum("OPT-350.8: the key '1' is missing" in one for one in said) == 1 and len(said) == 4
    ran = CliRunner().invoke(app, ["profile", "import", "sailor", str(folder)])
    assert ran.exit_code == 0 and all(one in ran.stderr for one in said)


def test_what_files_of_metis_have_not_for_all_layers_is_said(tmp_path: Path) -> None:
    ran = CliRunner().invoke(app, ["profile", "import", "metis", str(write(tmp_path, metis_files()))])
    assert "left out: " in ran.stderr and "has 2 values for 3 layers" in ran.stderr
    assert "assumed: float32" in ran.stderr and "--row-tokens N changes it" in ran.stderr


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("execution_time", "layer_compute_total_ms"), [1.0], "a list of 3 values"),
        (("execution_time", "layer_compute_total_ms"), 5, "must be a list"),
        (("execution_time", "optimizer_time_ms"), None, "must be a number"),
        (("execution_memory", "layer_memory_total_mb"), {}, "must be a list"),
        (("model", "model_name"), "other", "is not 'GPT3'"),
    ],
)
def test_what_is_wrong_with_files_of_metis_is_said_with_its_place(
    tmp_path: Path, path: tuple[str, str], value: Any, message: str
) -> None:
    files = metis_files()
    _set("DeviceType.A100_tp1_bs4.json", *path, value)(files)
    with pytest.raises(InputFileError) as refusal:
        import_metis(write(tmp_path, files))
    assert message in refusal.value.message
    assert refusal.value.path is not None and refusal.value.path.endswith("DeviceType.A100_tp1_bs4.json")
    assert refusal.value.line is not None


def test_import_writes_a_profile_that_reads_back(tmp_path: Path) -> None:
    folder = write(tmp_path / "sailor", sailor_files())
    output = tmp_path / "profile.json"
    ran = CliRunner().invoke(app, ["profile", "import", "sailor", str(folder), "-o", str(output)])
    assert ran.exit_code == 0, ran.output
    assert ran.stdout == "" and "OPT-350" in ran.stderr
    assert ModelProfile.load(output) == import_sailor(folder)
    assert [path.name for path in tmp_path.iterdir()].count("profile.json") == 1 and len(list(tmp_path.iterdir())) == 2
    printed = CliRunner().invoke(app, ["profile", "import", "sailor", str(folder)])
    assert printed.stdout == output.read_text(encoding="utf-8")


def test_import_of_a_folder_that_is_not_there_is_a_bad_input(tmp_path: Path) -> None:
    ran = CliRunner().invoke(app, ["profile", "import", "metis", str(tmp_path / "none")])
    assert ran.exit_code == 3
    assert "none" in ran.stderr
