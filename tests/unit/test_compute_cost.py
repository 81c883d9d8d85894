"""Seconds of kernels and layers: more work never takes less, and measured times win."""

from __future__ import annotations

from collections import Counter
from math import ceil
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import Parameter

from whale.ir.cluster import DeviceType
from whale.ir.profile import Affine, Amount, Communication, Kernel, LayerKind, LayerVariant, MeasuredTimes
from whale.planner.catalog import device_types
from whale.planner.cost.buckets import REPEATS, packed
from whale.planner.cost.kernels import matmul_seconds
from whale.planner.cost.layers import layer_seconds, layer_seconds_by_rows
from whale.planner.cost.precision import precision_named
from whale.runtime.reduce import bucketize

A100 = device_types()["A100-SXM4-80GB"]
H100 = device_types()["H100-SXM5-80GB"]


def linear(m: float, n: float, k: float) -> Kernel:
    return Kernel(
        name="aten.mm",
        kind="matmul",
        dims=(Affine(1, 0), Affine(0, m), Affine(n, 0), Affine(k, 0)),
        flops=Affine(0, 2 * m * n * k),
        read=Amount(elements=Affine(n * k, m * k)),
        written=Amount(elements=Affine(0, m * n)),
        split=True,
    )


def test_a_large_product_runs_near_the_sustained_rate_and_a_thin_one_far_below() -> None:
    large = 2 * 8192**3 / matmul_seconds(1, 8192, 8192, 8192, 1e14, 108)
    thin = 2 * 8192 * 8192 * 64 / matmul_seconds(1, 8192, 8192, 64, 1e14, 108)
    assert 0.85e14 < large < 1e14
    assert thin < 0.5 * large


def test_one_tile_more_than_a_wave_costs_another_wave() -> None:
    full = matmul_seconds(1, 256 * 108, 128, 4096, 1e14, 108)
    more = matmul_seconds(1, 256 * 109, 128, 4096, 1e14, 108)
    assert more > 1.2 * full


def test_measured_times_win_and_are_interpolated_between_rows() -> None:
    times = MeasuredTimes(
        device_type=A100.name, tensor_degree=1, rows=(1, 4), forward=(1.0, 4.0), backward=(2.0, 8.0), update=(0.5, 0.5)
    )
    kind = LayerKind(name="h", variants=(LayerVariant(tensor_degree=1, forward=(linear(8, 8, 8),)),), measured=(times,))
    spent = layer_seconds(kind, A100, rows=2, precision="fp32")
    assert (spent.forward, spent.backward, spent.update) == (2.0, 4.0, 0.5)
    assert spent.measured


def test_a_degree_that_was_not_measured_takes_its_share_of_the_nearest() -> None:
    times = MeasuredTimes(
        device_type=A100.name, tensor_degree=2, rows=(1,), forward=(1.0,), backward=(2.0,), update=(0.5,)
    )
    kind = LayerKind(name="h", measured=(times,))
    assert layer_seconds(kind, A100, rows=1, tensor_degree=4).forward == 0.5


def test_full_recomputation_adds_a_forward_to_the_backward() -> None:
    kind = LayerKind(
        name="h",
        variants=(LayerVariant(tensor_degree=1, forward=(linear(2048, 4096, 4096),), backward=(linear(1, 1, 1),)),),
    )
    plain, full = (layer_seconds(kind, A100, rows=4, recompute=how) for how in ("none", "full"))
    assert abs(full.backward - plain.backward - plain.forward) < 1e-4


def test_times_measured_without_collectives_leave_them_to_be_priced() -> None:
    sum_of_rows = Communication(kind="all_reduce", size=Amount(elements=Affine(0, 10)))
    variant = LayerVariant(tensor_degree=2, forward_communications=(sum_of_rows,))
    alone, together = (
        MeasuredTimes(
            device_type=A100.name,
            tensor_degree=2,
            rows=(1,),
            forward=(1.0,),
            backward=(2.0,),
            update=(0.0,),
            includes_communication=includes,
        )
        for includes in (False, True)
    )
    for times, num_collectives in ((alone, 1), (together, 0)):
        kind = LayerKind(name="h", variants=(variant,), measured=(times,))
        spent = layer_seconds(kind, A100, tensor_degree=2, rows=1, precision="fp32")
        assert (spent.forward, len(spent.forward_collectives)) == (1.0, num_collectives)


def test_gradients_are_added_up_by_all_micro_batches_but_the_first() -> None:
    times = MeasuredTimes(
        device_type=A100.name,
        tensor_degree=1,
        rows=(1,),
        forward=(1.0,),
        backward=(2.0,),
        update=(0.0,),
        accumulation=(0.4,),
    )
    kind = LayerKind(name="h", measured=(times,))
    spent = [layer_seconds(kind, A100, rows=1).averaged(count).backward for count in (1, 4)]
    assert spent == [2.0, 2.3]


def moving(name: str, elements: float) -> Kernel:
    moved = Amount(elements=Affine(0, elements))
    return Kernel(name=name, kind="memory", read=moved, written=moved)


def forward_seconds(*kernels: Kernel, device: DeviceType = A100, **how: Any) -> float:
    kind = LayerKind(name="h", variants=(LayerVariant(tensor_degree=how.get("tensor_degree", 1), forward=kernels),))
    return layer_seconds(kind, device, **{"rows": 1, **how}).forward


def test_eager_stacks_run_pointwise_operators_one_by_one() -> None:
    kernels = (moving("aten.gelu", 2e8), moving("aten.mul", 2e8))
    assert forward_seconds(*kernels, eager=True) > 1.5 * forward_seconds(*kernels, eager=False)


def test_attention_is_slower_on_hopper_in_fsdps_runs_and_not_on_ampere() -> None:
    attention = Kernel(
        name="aten.scaled_dot_product_attention",
        kind="attention",
        dims=(Affine(0, 32), Affine(8192, 0), Affine(8192, 0), Affine(128, 0)),
        flops=Affine(0, 4 * 32 * 8192 * 8192 * 128),
    )
    for device, least, most in ((A100, 0.99, 1.01), (H100, 1.5, 3)):
        ways: tuple[dict[str, bool], ...] = ({"eager": True, "fsdp": True}, {"eager": True}, {"eager": False})
        fsdp, eager, vendors = (forward_seconds(attention, device=device, **way) for way in ways)
        assert least < fsdp / vendors < most
        assert eager == pytest.approx(vendors, rel=0.01)


def test_the_larger_the_product_the_more_float8_gains() -> None:
    def gain(size: int) -> float:
        half, eighth = (
            forward_seconds(linear(8192, size, size), device=H100, precision=precision) for precision in ("bf16", "fp8")
        )
        return half / eighth

    assert 1 < gain(4096) < gain(16384) < 2


def test_what_the_host_limits_takes_longer_in_a_group_that_spans_its_sockets() -> None:
    small = linear(128, 128, 128)
    assert forward_seconds(small, tensor_degree=4) == forward_seconds(small, tensor_degree=1)
    assert forward_seconds(small, tensor_degree=8) > 1.2 * forward_seconds(small, tensor_degree=4)


def test_a_batch_norm_reads_its_input_twice() -> None:
    norm, other = (forward_seconds(moving(name, 1e9)) for name in ("aten.native_batch_norm", "aten.native_layer_norm"))
    assert 1.3 < norm / other < 1.6


def test_float32_uses_tensor_cores_for_convolutions_alone_and_tf32_for_products_too() -> None:
    product = linear(8192, 8192, 8192)
    volta = device_types()["V100-SXM2-32GB"]
    whole, tensor = (forward_seconds(product, precision=name) for name in ("fp32", "tf32"))
    assert 4 < whole / tensor < 8  # 19.5 and 156 TFLOP/s at their peaks
    assert forward_seconds(product, device=volta, precision="fp32") == forward_seconds(
        product, device=volta, precision="tf32"
    )
    assert precision_named("fp32").rate(A100, "convolutions") == (A100.speed("tfloat32"), "tfloat32")


def test_convolutions_in_float32_pay_for_their_layout_on_tensor_cores() -> None:
    convolution = Kernel(
        name="aten.convolution",
        kind="convolution",
        dims=(Affine(1, 0), Affine(0, 56 * 56), Affine(64, 0), Affine(576, 0)),
        flops=Affine(0, 2 * 56 * 56 * 64 * 576),
        read=Amount(elements=Affine(576 * 64, 56 * 56 * 64)),
        written=Amount(elements=Affine(0, 56 * 56 * 64)),
    )
    whole, half = (forward_seconds(convolution, rows=256, precision=precision) for precision in ("fp32", "fp16"))
    assert whole > 2.5 * half


def test_many_numbers_of_rows_take_what_each_takes_by_itself() -> None:
    kernels = (
        linear(512, 4096, 1000),
        linear(512, 4096, 1000).model_copy(update={"kind": "grouped_matmul", "expert": True}),
        moving("aten.native_batch_norm", 1e6),
        moving("aten.gelu", 1e6).model_copy(update={"count": 3}),
    )
    variant = LayerVariant(tensor_degree=2, forward=kernels, backward=kernels[::-1], parameters=1e7)
    kind, rows = LayerKind(name="h", variants=(variant,)), (1, 3, 64, 0.5)
    how: dict[str, Any] = {"tensor_degree": 2, "expert_degree": 2, "sequence_parallel": True, "precision": "fp8"}
    alone = [layer_seconds(kind, H100, rows=count, **how) for count in rows]
    assert layer_seconds_by_rows(kind, H100, rows, **how) == alone
    assert alone[0].forward < alone[2].forward


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_buckets_of_layers_are_those_of_the_runtime(sizes: list[int]) -> None:
    layers = sizes * (repeats := REPEATS * ceil(max(1, 8 / sum(sizes))))
    made = bucketize([Parameter(torch.empty(size, device="meta")) for size in layers], capacity_bytes=4 * 8)
    counts = Counter(sum(parameter.numel() for parameter in bucket) for bucket in made)
    assert packed(sizes, capacity=8) == {size: num / repeats for size, num in counts.items()}
