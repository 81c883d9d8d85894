"""The reducer, on a process group of this process alone: what is summed, when it starts, and in which order."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from whale.errors import ScheduleError, UsageError
from whale.runtime.failure import Failures
from whale.runtime.reduce import Bucket, Reducer, bucketize


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world = dist.group.WORLD
    assert world is not None
    yield world
    dist.destroy_process_group()


@pytest.fixture
def summed(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Double every tensor, as two equal ranks would, and note it."""
    noted: list[Tensor] = []
    original = dist.all_reduce

    def all_reduce(tensor: Tensor, **options: Any) -> Any:
        noted.append(tensor)
        tensor.mul_(2)
        return original(tensor, **options)

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    return noted


def weights(*sizes: int) -> list[Parameter]:
    return [Parameter(torch.arange(1.0, size + 1)) for size in sizes]


def bucket(
    index: int, group: dist.ProcessGroup | None, parameters: list[Parameter], stages: set[int] | None = None
) -> Bucket:
    return Bucket(
        index=index,
        parameters=tuple(parameters),
        ranks=(0, 1),
        stages=frozenset(stages or {0}),
        group=group,
    )


def step(reducer: Reducer, *losses: Tensor) -> None:
    """Run a step of one stage whose last loss is its last micro-batch."""
    every = [p for bucket in reducer.buckets for p in bucket.parameters if isinstance(p, Parameter)]
    hooks = [parameter.register_post_accumulate_grad_hook(reducer.gradient_ready) for parameter in every]
    reducer.begin()
    for loss in losses[:-1]:
        loss.backward()
    reducer.arm(0)
    losses[-1].backward()
    for hook in hooks:
        hook.remove()
    reducer.finished(0)
    for each in reducer.buckets:
        reducer.launch(each.index)
    reducer.finish()


def test_one_parameter_is_summed_in_place_and_several_as_one_tensor(
    group: dist.ProcessGroup, summed: list[Tensor]
) -> None:
    a, b, c = weights(2, 3, 4)
    reducer = Reducer([bucket(0, group, [a]), bucket(1, group, [b, c])], Failures(0))
    step(reducer, (a.sum() + (b * b).sum() + c.sum() * 3))
    assert [tensor.numel() for tensor in summed] == [2, 7]
    assert a.grad is not None
    assert summed[0].data_ptr() == a.grad.data_ptr()
    torch.testing.assert_close(a.grad, torch.full((2,), 2.0))
    torch.testing.assert_close(b.grad, 4 * b.detach())
    torch.testing.assert_close(c.grad, torch.full((4,), 6.0))


def test_all_micro_batches_are_in_the_sum_and_only_the_last_starts_it(
    group: dist.ProcessGroup, summed: list[Tensor]
) -> None:
    (a,) = weights(2)
    step(Reducer([bucket(0, group, [a])], Failures(0)), a.sum(), a.sum(), a.sum())
    assert len(summed) == 1
    torch.testing.assert_close(a.grad, torch.full((2,), 6.0))


def test_a_bucket_starts_during_the_last_backward_as_soon_as_it_is_ready(
    group: dist.ProcessGroup, summed: list[Tensor]
) -> None:
    a, b = weights(3, 3)
    started: list[int] = []
    reducer = Reducer([bucket(0, group, [b]), bucket(1, group, [a])], Failures(0))
    hidden = a * 1
    hidden.register_hook(lambda gradient: started.append(len(summed)))
    step(reducer, (hidden * 2 * b).sum())
    assert started == [1]


def test_buckets_start_in_their_order_whatever_is_ready_first(group: dist.ProcessGroup, summed: list[Tensor]) -> None:
    a, b = weights(3, 5)
    step(Reducer([bucket(4, group, [a]), bucket(2, group, [b])], Failures(0)), ((a * 1).sum() * b).sum())
    assert [tensor.numel() for tensor in summed] == [3, 5]


def test_a_bucket_of_several_stages_starts_where_the_program_says_so(
    group: dist.ProcessGroup, summed: list[Tensor]
) -> None:
    a, b = weights(2, 3)
    shared = replace(bucket(0, group, [a]), early=False)
    reducer = Reducer([shared, bucket(1, group, [b])], Failures(0))
    reducer.begin()
    reducer.arm(0)
    (a.sum() + b.sum()).backward()
    reducer.finished(0)
    assert not summed, "the gradient is there, but a send may come before it in the order of all ranks"
    reducer.launch(0)
    assert [tensor.numel() for tensor in summed] == [2, 3]
    reducer.launch(1)
    reducer.finish()


def test_a_parameter_without_a_gradient_here_contributes_zeros(group: dist.ProcessGroup, summed: list[Tensor]) -> None:
    a, b, alone = weights(2, 3, 2)
    step(Reducer([bucket(0, group, [a, b]), bucket(1, group, [alone])], Failures(0)), a.sum())
    torch.testing.assert_close(b.grad, torch.zeros(3))
    torch.testing.assert_close(alone.grad, torch.zeros(2))


def test_a_weight_of_two_stages_waits_for_both(group: dist.ProcessGroup, summed: list[Tensor]) -> None:
    (a,) = weights(2)
    reducer = Reducer([bucket(0, group, [a], {0, 3})], Failures(0))
    reducer.begin()
    reducer.arm(3)
    a.sum().backward()
    reducer.finished(3)
    assert not summed
    with pytest.raises(ScheduleError, match=r"bucket 0 cannot be reduced yet"):
        reducer.launch(0)
    reducer.arm(0)
    a.sum().backward()
    reducer.gradient_ready(a)
    assert len(summed) == 1
    reducer.finished(0)
    reducer.finish()
    torch.testing.assert_close(a.grad, torch.full((2,), 4.0))


@pytest.mark.parametrize(("rank", "term"), [(0, 10.0 + 1.0), (1, 1.0)])
def test_gradients_from_before_the_step_are_a_term_of_one_rank(
    group: dist.ProcessGroup, summed: list[Tensor], rank: int, term: float
) -> None:
    a, b = weights(2, 3)
    a.grad = before = torch.full((2,), 10.0)
    step(Reducer([bucket(0, group, [a, b])], Failures(rank)), a.sum() + b.sum())
    assert a.grad is before
    torch.testing.assert_close(a.grad, torch.full((2,), 2 * term))


def test_new_gradients_are_where_they_were_summed(group: dist.ProcessGroup, summed: list[Tensor]) -> None:
    a, b = Parameter(torch.ones(2, 3)), Parameter(torch.ones(4))
    step(Reducer([bucket(0, group, [b, a])], Failures(0)), a.sum() + b.sum())
    assert a.grad is not None and b.grad is not None
    assert b.grad.data_ptr() == summed[0].data_ptr()
    assert a.grad.data_ptr() == summed[0][4:].data_ptr()
    assert (a.grad.shape, b.grad.shape) == (a.shape, b.shape)
    a.grad.mul_(2)  # as of clipping: a gradient is no special tensor
    torch.testing.assert_close(b.grad, torch.full((4,), 2.0))


@pytest.mark.parametrize(("rank", "total"), [(0, 2 * (2.0 + 1.0)), (1, 2 * 1.0)])
def test_accumulated_gradients_of_a_bucket_are_summed_in_place(
    group: dist.ProcessGroup, summed: list[Tensor], rank: int, total: float
) -> None:
    a, b = weights(2, 3)
    reducer = Reducer([bucket(0, group, [a, b])], Failures(rank))
    step(reducer, a.sum() + b.sum())
    before = (a.grad, b.grad)
    step(reducer, a.sum() + b.sum())
    assert a.grad is before[0] and b.grad is before[1]
    assert len({tensor.data_ptr() for tensor in summed}) == 1
    torch.testing.assert_close(a.grad, torch.full((2,), total))
    torch.testing.assert_close(b.grad, torch.full((3,), total))


@pytest.mark.parametrize(("rank", "kept"), [(0, 2 * (2.0 + 1.0)), (1, 2 * 1.0)])
def test_gradients_of_a_bucket_that_were_dropped_in_part(
    group: dist.ProcessGroup, summed: list[Tensor], rank: int, kept: float
) -> None:
    a, b = weights(2, 3)
    reducer = Reducer([bucket(0, group, [a, b])], Failures(rank))
    step(reducer, a.sum() + b.sum())
    before, a.grad = b.grad, None
    step(reducer, a.sum() + b.sum())
    assert b.grad is before
    torch.testing.assert_close(a.grad, torch.full((2,), 2.0))
    torch.testing.assert_close(b.grad, torch.full((3,), kept))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_gradient_that_was_replaced_beside_one_that_was_not(
    group: dist.ProcessGroup, summed: list[Tensor], rank: int
) -> None:
    a, b = weights(2, 3)
    reducer = Reducer([bucket(0, group, [a, b])], Failures(rank))
    step(reducer, a.sum() + b.sum())
    before = a.grad
    reducer.begin()
    a.grad, b.grad = torch.full((2,), 5.0), b.grad if rank == 0 else torch.zeros(3)
    reducer.finished(0)
    reducer.launch(0)
    reducer.finish()
    assert a.grad is before
    torch.testing.assert_close(a.grad, torch.full((2,), 10.0))
    torch.testing.assert_close(b.grad, torch.full((3,), 4.0 if rank == 0 else 0.0))


def test_a_gradient_in_another_layout_is_summed_in_the_common_one(
    group: dist.ProcessGroup, summed: list[Tensor]
) -> None:
    a = Parameter(torch.ones(2, 3))
    reducer = Reducer([bucket(0, group, [a])], Failures(0))
    reducer.begin()
    a.grad = torch.arange(6.0).view(3, 2).t()
    expected = a.grad * 2
    reducer.finished(0)
    reducer.finish()
    assert summed[0].is_contiguous()
    torch.testing.assert_close(a.grad, expected)


def test_without_a_group_nothing_is_sent_and_nothing_changes(summed: list[Tensor]) -> None:
    a, b = weights(2, 3)
    a.grad = torch.ones(2)
    step(Reducer([bucket(0, None, [a, b])], Failures(0)), a.sum())
    assert not summed
    assert b.grad is None
    torch.testing.assert_close(a.grad, torch.full((2,), 2.0))


def test_a_step_that_ends_early_is_an_error(group: dist.ProcessGroup) -> None:
    reducer = Reducer([bucket(0, group, weights(2))], Failures(0))
    reducer.begin()
    with pytest.raises(ScheduleError, match=r"before buckets \[0\] were reduced"):
        reducer.finish()


def test_buckets_of_mixed_or_repeated_parameters_are_refused(group: dist.ProcessGroup) -> None:
    a = Parameter(torch.ones(2))
    with pytest.raises(UsageError, match="bucket 0 .*one dtype"):
        Reducer([bucket(0, group, [a, Parameter(torch.ones(2, dtype=torch.float64))])], Failures(0))
    with pytest.raises(UsageError, match="bucket 1 .*each in one bucket"):
        Reducer([bucket(0, group, [a]), bucket(1, group, [a])], Failures(0))


def test_buckets_are_cut_by_size_from_the_last_parameter_and_leave_frozen_ones_out() -> None:
    a, b, c, d, e = weights(4, 2, 1, 100, 1)
    b.requires_grad_(False)
    expected = [(e,), (d,), (c, a)]
    buckets = bucketize([a, b, c, d, e], capacity_bytes=20)
    assert [[id(p) for p in one] for one in buckets] == [[id(p) for p in one] for one in expected]
    assert bucketize([], capacity_bytes=20) == []
    half = Parameter(torch.ones(1, dtype=torch.float16))
    assert [len(one) for one in bucketize([a, half, c], capacity_bytes=20)] == [1, 1, 1]
