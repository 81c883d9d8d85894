"""Seconds of kernels and layers: more work never takes less, and measured times win."""

from __future__ import annotations

from whale.ir.profile import Affine, Amount, Communication, Kernel, LayerKind, LayerVariant, MeasuredTimes
from whale.planner.catalog import device_types
from whale.planner.compute import layer_seconds, matmul_seconds

A100 = device_types()["A100-SXM4-80GB"]


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
    spent = [layer_seconds(kind, A100, rows=1, num_micro_batches=count).backward for count in (1, 4)]
    assert spent == [2.0, 2.3]
