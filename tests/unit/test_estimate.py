"""Estimates of given degrees: units, monotonicity, and contradictory options."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from whale.errors import UsageError
from whale.ir.cluster import Cluster, DeviceType, Link
from whale.ir.profile import (
    Affine,
    Amount,
    Communication,
    Kernel,
    LayerKind,
    LayerVariant,
    MeasuredTimes,
    ModelProfile,
    Saved,
)
from whale.planner.catalog import device_types
from whale.planner.cost.configuration import Configuration, Layout, blocks_of, even_cuts, require_parts
from whale.planner.cost.estimate import Estimate, estimate
from whale.planner.cost.layers import layer_seconds
from whale.planner.cost.memory import kept_bytes, state_bytes
from whale.planner.cost.precision import PRECISIONS, precision_named

A100 = device_types()["A100-SXM4-80GB"]
V100 = device_types()["V100-SXM2-16GB"]
SEQ, HIDDEN, VOCAB = 1024, 2048, 32000
GOLDEN = Path(__file__).parents[1] / "golden" / "gpt_22b_profile.json"


def linear(m: float, n: float, k: float, *, of_weights: bool = False) -> Kernel:
    dims = (Affine(1, 0), Affine(0, m), Affine(n, 0), Affine(k, 0))
    if of_weights:
        dims = (Affine(1, 0), Affine(n, 0), Affine(k, 0), Affine(0, m))
    return Kernel(
        name="aten.mm",
        kind="matmul",
        dims=dims,
        flops=Affine(0, 2 * m * n * k),
        read=Amount(elements=Affine(n * k, m * k)),
        written=Amount(elements=Affine(0, m * n)),
        split=True,
    )


def norm() -> Kernel:
    moved = Amount(elements=Affine(0, SEQ * HIDDEN))
    return Kernel(name="aten.native_layer_norm", kind="memory", read=moved, written=moved)


def saved(origin: str, elements: float, **how: bool) -> Saved:
    return Saved(origin=origin, size=Amount(elements=Affine(0, elements)), **how)


def block(degree: int) -> LayerVariant:
    """Attention (fused) with 16 heads of 128, and one product four times as wide."""
    heads, wide = 16 // degree, 4 * HIDDEN // degree
    attention = Kernel(
        name="aten.scaled_dot_product_attention",
        kind="attention",
        dims=(Affine(0, heads), Affine(SEQ, 0), Affine(SEQ, 0), Affine(128, 0)),
        flops=Affine(0, 4 * heads * SEQ * SEQ * 128),
        read=Amount(elements=Affine(0, 3 * SEQ * HIDDEN / degree)),
        written=Amount(elements=Affine(0, SEQ * HIDDEN / degree)),
        split=True,
    )
    backward = attention.model_copy(update={"flops": Affine(0, 10 * heads * SEQ * SEQ * 128)})
    reduce = Communication(kind="all_reduce", size=Amount(elements=Affine(0, SEQ * HIDDEN)), count=2)
    reduces = (reduce,) if degree > 1 else ()
    return LayerVariant(
        tensor_degree=degree,
        forward=(norm(), linear(SEQ, wide, HIDDEN), attention, linear(SEQ, HIDDEN, wide)),
        backward=(
            linear(SEQ, wide, HIDDEN),
            linear(SEQ, HIDDEN, wide, of_weights=True),
            backward,
            linear(SEQ, HIDDEN, wide),
            linear(SEQ, wide, HIDDEN, of_weights=True),
            norm(),
        ),
        forward_communications=reduces,
        backward_communications=reduces,
        saved=(
            saved("input", SEQ * HIDDEN, input=True),
            saved("layer_norm", SEQ * HIDDEN),
            saved("linear", SEQ * wide, split=True),
            saved("gelu", SEQ * wide, split=True),
            saved("statistic", SEQ * heads, split=True, attention=True),
        ),
        parameters=8 * HIDDEN * HIDDEN / degree,
    )


def ends(degree: int, *, head: bool) -> LayerVariant:
    forward = (linear(SEQ, VOCAB // degree, HIDDEN),) if head else (norm(),)
    return LayerVariant(
        tensor_degree=degree,
        forward=forward,
        backward=forward,
        saved=(saved("input", SEQ * HIDDEN, input=True),),
        parameters=VOCAB * HIDDEN / degree,
    )


def model(num_layers: int = 8) -> ModelProfile:
    output = Amount(elements=Affine(0, SEQ * HIDDEN))
    degrees = (1, 2, 4)
    kinds = (
        LayerKind(name="tokens", variants=tuple(ends(t, head=False) for t in degrees), output=output),
        LayerKind(name="layers.0", variants=tuple(block(t) for t in degrees), output=output),
        LayerKind(name="head", variants=tuple(ends(t, head=True) for t in degrees)),
    )
    paths = ("tokens", *(f"layers.{index}" for index in range(num_layers)), "head")
    return ModelProfile(name="small", layers=(0, *(1,) * num_layers, 2), paths=paths, kinds=kinds, row_tokens=SEQ)


def machines(
    num: int, type_: DeviceType = A100, *, per_node: int = 8, inter: float = 100e9, intra: float | None = None
) -> Cluster:
    return Cluster.homogeneous(
        num,
        type_,
        num_devices_per_node=min(num, per_node),
        intra=Link(bandwidth=intra, latency=4e-6) if intra else type_.intra_node,
        inter=Link(bandwidth=inter, latency=5e-6, adapters=4),
    )


def predicted(cluster: Cluster, profile: ModelProfile | None = None, **how: Any) -> Estimate:
    return estimate(profile or model(), cluster, Configuration(**{"batch": 64, "micro_batch": 2, **how}))


def seconds(cluster: Cluster, **how: Any) -> float:
    return predicted(cluster, **how).prediction.step_seconds


def fullest(cluster: Cluster, **how: Any) -> int:
    return max(device.total for device in predicted(cluster, **how).prediction.memory)


def test_a_step_on_one_device_is_the_sum_of_its_layers() -> None:
    profile = model()
    found = predicted(machines(1), profile)
    spent = [layer_seconds(kind, A100, rows=2, eager=False) for kind in profile.chain()]
    expected = 32 * sum(one.forward + one.backward for one in spent) + sum(one.update for one in spent)
    assert found.prediction.step_seconds == pytest.approx(expected + found.workload.overhead)
    assert sum(found.prediction.breakdown.values()) == pytest.approx(found.prediction.step_seconds)


def test_the_interval_holds_the_prediction_and_is_wider_on_mixed_devices() -> None:
    alike = predicted(machines(2)).prediction
    mixed = Cluster.of([("a", A100), ("b", V100)], inter=Link(bandwidth=10e9, latency=5e-6))
    unlike = predicted(mixed).prediction
    widths = [(one.step_seconds_interval[1] / one.step_seconds - 1) for one in (alike, unlike)]
    assert alike.step_seconds_interval[0] < alike.step_seconds < alike.step_seconds_interval[1]
    assert widths[1] > widths[0]


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        (name, precision)
        for name, kind in device_types().items()
        for precision in PRECISIONS
        if precision != "fp64" and (precision != "fp8" or "float8" in dict(kind.rates))
    ],
)
def test_every_known_device_gets_a_sane_prediction(name: str, precision: str) -> None:
    found = predicted(machines(1, device_types()[name]), precision=precision).prediction
    assert 0 < found.mfu < 1
    assert found.step_seconds > 0


def test_a_slower_network_never_makes_a_step_shorter() -> None:
    ways: tuple[dict[str, Any], ...] = ({"zero": 0}, {"zero": 1}, {"zero": 3}, {"pipeline": 2})
    for how in ways:
        times = [seconds(machines(16, inter=rate), **how) for rate in (100e9, 10e9, 1e9)]
        assert times == sorted(times)


def test_a_faster_device_makes_a_step_shorter_and_one_with_less_memory_does_not_change_it() -> None:
    rates = {name: 2 * rate for name, rate in A100.rates}
    faster = DeviceType.of(A100.name, speed=rates, memory_bytes=2**36, memory_bandwidth=2 * A100.memory_bandwidth)
    assert seconds(machines(1, faster)) < seconds(machines(1))
    assert seconds(machines(1, replace(A100, memory_bytes=2**30))) == seconds(machines(1))


def test_zero_never_takes_more_memory_and_gains_with_replicas() -> None:
    sizes = [fullest(machines(8), zero=zero) for zero in (0, 1, 2, 3)]
    assert sizes == sorted(sizes, reverse=True)
    assert fullest(machines(8), zero=3) < fullest(machines(4), zero=3)


def test_more_devices_never_need_more_memory_each() -> None:
    ways: tuple[dict[str, Any], ...] = ({"tensor": 2}, {"pipeline": 2}, {"tensor": 2, "pipeline": 2})
    for how in ways:
        assert fullest(machines(8), **how) <= fullest(machines(8))


def test_recomputation_trades_time_for_memory() -> None:
    found = {how: predicted(machines(1), recompute=how).prediction for how in ("none", "selective", "full")}
    times = [found[how].step_seconds for how in found]
    sizes = [found[how].memory[0].total for how in found]
    assert times == sorted(times)
    assert sizes == sorted(sizes, reverse=True)


def test_sequence_parallelism_divides_what_tensor_parallelism_does_not() -> None:
    with_it, without = (fullest(machines(4), tensor=4, sequence_parallel=way) for way in (True, False))
    assert with_it < without


def test_sequence_parallelism_that_is_not_said_follows_fused_attention() -> None:
    for precision, on in (("bf16", True), ("fp16", False)):
        how: dict[str, Any] = {"tensor": 4, "precision": precision}
        found = predicted(machines(4), sequence_parallel=None, **how)
        assert found.prediction == predicted(machines(4), sequence_parallel=on, **how).prediction
        assert bool(found.assumptions) is on


def test_stages_of_a_pipeline_keep_weights_and_gradients_whole_whatever_is_divided() -> None:
    whole, divided = (predicted(machines(4), pipeline=2, zero=zero).prediction.memory[0] for zero in (1, 3))
    assert divided.parameters == whole.parameters
    assert divided.gradients == 2 * whole.gradients  # in the float32 in which they are summed, not in bfloat16


def test_losses_are_kept_in_float32() -> None:
    head = LayerKind(
        name="head", variants=(LayerVariant(tensor_degree=1, saved=(saved("cross_entropy_loss", VOCAB),)),)
    )
    for eager in (True, False):
        precision = precision_named("bf16")
        assert kept_bytes(head, precision=precision, fused_attention=True, eager=eager)(1) == 4 * VOCAB


def test_eager_selective_recomputation_keeps_every_second_product() -> None:
    origins = ("linear", "linear", "scaled_dot_product_attention", "linear", "silu")
    variant = LayerVariant(tensor_degree=1, saved=tuple(saved(origin, 10) for origin in origins))
    kind, how = (
        LayerKind(name="h", variants=(variant,)),
        {"precision": precision_named("bf16"), "fused_attention": True},
    )
    kept = [kept_bytes(kind, recompute="selective", eager=way, **how)(1) for way in (False, True)]  # type: ignore[arg-type]
    assert kept == [80, 60]


def test_earlier_stages_keep_more_micro_batches() -> None:
    found = predicted(machines(4), pipeline=4, data=1, batch=32)
    kept = [device.activations for device in found.prediction.memory]
    assert kept[1] > kept[2] > kept[3]


def test_interleaving_shortens_the_bubble() -> None:
    plain, interleaved = (
        predicted(machines(4), pipeline=4, data=1, virtual_stages=virtual).prediction for virtual in (1, 2)
    )
    assert interleaved.step_seconds < plain.step_seconds
    assert interleaved.bubble < plain.bubble


def test_spelt_out_attention_takes_longer_and_keeps_its_scores() -> None:
    how: dict[str, Any] = {"precision": "fp16", "micro_batch": 8}
    fused, spelt = (predicted(machines(1), attention=way, **how).prediction for way in ("fused", "unfused"))
    assert spelt.step_seconds > fused.step_seconds
    block_ = model().kinds[1]
    kept = [kept_bytes(block_, precision=precision_named("fp16"), fused_attention=way)(1) for way in (False, True)]
    assert kept[0] - kept[1] == 5 * 16 * SEQ * SEQ  # probabilities before and after dropout, and a byte of mask


def test_attention_is_fused_by_precision_and_device() -> None:
    for type_, precision, same in ((A100, "bf16", "fused"), (A100, "fp16", "unfused"), (V100, "fp16", "unfused")):
        how: dict[str, Any] = {"precision": precision, "micro_batch": 8}
        assert seconds(machines(1, type_), **how) == seconds(machines(1, type_), attention=same, **how)


def test_fits_says_whether_every_device_has_the_room() -> None:
    need = fullest(machines(1))
    for room, fits in ((need, True), (need - 1, False)):
        assert predicted(machines(1, replace(A100, memory_bytes=room))).prediction.fits is fits


def test_states_take_eighteen_bytes_a_parameter_as_in_megatron() -> None:
    mixed, full = precision_named("bf16"), precision_named("fp32")
    assert state_bytes(1e9, precision=mixed).total == 18e9
    assert state_bytes(1e9, precision=full).total == 16e9
    assert state_bytes(1e9, precision=mixed, zero=1, shards=4).total == 7e9


def test_unlike_replicas_wait_for_the_slowest_and_balance_relieves_them() -> None:
    mixed = Cluster.of(
        [("a", A100)] * 2 + [("b", V100)] * 2,
        intra=Link(bandwidth=100e9, latency=5e-6),
        inter=Link(bandwidth=10e9, latency=5e-6),
    )
    how: dict[str, Any] = {"batch": 64, "micro_batch": 4, "precision": "fp16"}
    even, speed = (predicted(mixed, balance=way, **how) for way in ("even", "speed"))
    assert even.prediction.step_seconds >= seconds(machines(4, V100), **how) * 0.95
    assert speed.prediction.step_seconds < even.prediction.step_seconds
    assert speed.rows[0] > speed.rows[2]
    assert sum(speed.rows) == pytest.approx(sum(even.rows))


def test_the_device_order_decides_who_forms_a_stage() -> None:
    mixed = Cluster.of([("a", A100), ("b", V100), ("c", A100), ("d", V100)], inter=Link(bandwidth=10e9, latency=5e-6))
    how: dict[str, Any] = {"pipeline": 2, "precision": "fp16", "batch": 32}
    found = predicted(mixed, device_order=(0, 2, 1, 3), **how)
    assert [device.device.split(":")[0] for device in found.prediction.memory] == [A100.name, V100.name]


def test_blocks_are_cut_evenly_with_embedding_and_head_at_the_ends() -> None:
    profile = model(10)
    layout = Layout.of(Configuration(batch=16, pipeline=4), machines(4))
    assert list(blocks_of(profile)) == list(range(1, 11))
    assert [len(part) for part in even_cuts(profile, layout)] == [3, 3, 3, 3]
    given = Configuration(batch=16, pipeline=2, layers_per_stage=(4, 6))
    assert [len(part) for part in even_cuts(profile, Layout.of(given, machines(2)))] == [5, 7]
    given = replace(given, layers_per_stage=(4, 8))
    assert [len(part) for part in even_cuts(profile, Layout.of(given, machines(2)))] == [4, 8]


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"tensor": 3}, ["--tp 3", "8 devices"]),
        ({"data": 2, "tensor": 2}, ["--dp 2", "4 devices", "has 8"]),
        ({"expert": 3}, ["--ep 3", "8"]),
        ({"batch": 4}, ["--batch 4", "--dp 8"]),
        ({"micro_batch": 16}, ["--micro-batch 16", "128", "--batch 64"]),
        ({"virtual_stages": 2}, ["--virtual-stages 2", "--pp is 1"]),
        ({"sequence_parallel": True}, ["--sequence-parallel", "--tp is 1"]),
        ({"precision": "fp7"}, ["fp7", "bf16"]),
        ({"precision": "fp8"}, ["fp8", "A100", "no float8", "bf16"]),
        ({"batch": 20}, ["--batch 20", "no multiple", "--batch 16 or 32"]),
        ({"pipeline": 8, "layers_per_stage": (1,) * 8, "balance": "speed"}, ["--balance speed", "one replica"]),
        ({"pipeline": 2, "layers_per_stage": (1, 2, 5)}, ["--layers-per-stage", "3 stages"]),
        ({"pipeline": 2, "layers_per_stage": (1, 2)}, ["1,2", "sums to 3", "8 layers"]),
        ({"pipeline": 8, "virtual_stages": 4}, ["32 stages", "8 layers"]),
        ({"device_order": (0, 1)}, ["--device-order", "7"]),
        ({"tensor": 8}, ["tensor degree 8", "1, 2, 4"]),
    ],
)
def test_what_contradicts_itself_is_refused_by_name(how: dict[str, Any], says: list[str]) -> None:
    with pytest.raises(UsageError) as error:
        predicted(machines(8), **how)
    for part in says:
        assert part in str(error.value)


def test_degrees_over_what_the_model_has_not_are_refused() -> None:
    """Blocks have attention and no experts; embeddings and head have neither."""
    require_parts(model(), Configuration(batch=8, context=2))
    with pytest.raises(UsageError, match="has none; leave --ep out"):
        require_parts(model(), Configuration(batch=8, expert=2))
    with pytest.raises(UsageError, match="no attention; use --dp"):
        require_parts(
            model().model_copy(update={"layers": (0, 1), "kinds": model().kinds[::2]}),
            Configuration(batch=8, context=2),
        )


def test_layers_without_times_or_kernels_for_a_device_are_an_error_and_not_free() -> None:
    times = MeasuredTimes(device_type="other", tensor_degree=1, rows=(1,), forward=(1.0,), backward=(2.0,), update=(0,))
    imported = LayerKind(name="h.0", variants=(LayerVariant(tensor_degree=1, parameters=10),), measured=(times,))
    with pytest.raises(
        UsageError, match=r"layer 'h\.0' on other, but neither times nor kernels for A100.*whale profile"
    ):
        layer_seconds(imported, A100, rows=1)


# --- published runs, from the captured GPT of 22 billion parameters ---------------------------------------------------


@pytest.fixture(scope="module")
def gpt_22b() -> ModelProfile:
    return ModelProfile.load(GOLDEN)


@pytest.mark.parametrize(
    ("recompute", "sequence_parallel", "measured"), [("full", False, 1.42), ("selective", True, 1.10)]
)
def test_steps_of_megatron_22b_are_met_within_eight_percent(
    gpt_22b: ModelProfile, recompute: Any, sequence_parallel: bool, measured: float
) -> None:
    """Korthikanti et al. 2022 (arXiv 2205.05198), table 5: eight A100."""
    found = predicted(
        machines(8),
        gpt_22b,
        batch=4,
        micro_batch=4,
        tensor=8,
        precision="fp16",
        recompute=recompute,
        sequence_parallel=sequence_parallel,
    )
    assert found.prediction.step_seconds == pytest.approx(measured, rel=0.08)


@pytest.mark.parametrize(
    ("recompute", "sequence_parallel", "gib"),
    [("none", False, 59.25), ("selective", True, 9.56), ("full", False, 4.53)],
)
def test_activations_of_megatron_22b_are_met_within_three_percent(
    gpt_22b: ModelProfile, recompute: Any, sequence_parallel: bool, gib: float
) -> None:
    """The same, figures 1 and 7, for the 48 blocks."""
    kept = kept_bytes(
        gpt_22b.kinds[1],
        tensor_degree=8,
        precision=precision_named("fp16"),
        fused_attention=False,
        recompute=recompute,
        sequence_parallel=sequence_parallel,
    )
    assert 48 * kept(4) / 2**30 == pytest.approx(gib, rel=0.03)
