"""Local batches: every rank brings the rows that it computes on, and the step is that of all of them together.

The ranks first tell each other how many rows they brought; that gives the global batch, for which the step is compiled
as if every rank had it. Its programs read rows of the global batch, which are found in the local one. What a loss
divides by, such as the number of labels that count, is summed over ranks from the terms of each. A leaf of which some
rank reads more than its rows is gathered. Knows rows and ranks; no graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import combinations
from math import prod
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor

from whale.errors import UsageError
from whale.ir.shares import shares_on_axis
from whale.runtime.launch import World
from whale.runtime.local_program import INPUTS, Intervals, ShapeAndDtype
from whale.runtime.loss import ROUNDING, check_replicas, look_at
from whale.runtime.outputs import put
from whale.runtime.refusals import Refusals
from whale.runtime.stage import LocalStage, part

__all__ = ["LocalBatches", "LocalRows", "RowShares", "RowTerms"]

Stretches = tuple[tuple[int, int], ...]
"""Half-open ranges of rows, in order, that do not touch."""

_OTHER_SAMPLES, _REFUSED, _NO_STEP = -2, -3, -4
"""In place of a number of rows: samples have other sizes than their parts, or the rank refuses the step, or calls
something else."""

Cuts = tuple[tuple[tuple[float, ...], int], ...]
"""How rows are divided, the outermost division first: the weights of the parts, and which part it is."""


@dataclass(frozen=True, kw_only=True)
class RowShares:
    """The rows that each rank brings of a global batch, for any number of rows.

    Attributes:
        rows: of the example batch.
        unit: rows that the model computes together in the example; other batches may have other ones.
        per_micro_batch: units in every micro-batch except the last; None for one micro-batch of any number of rows.
        cuts: by rank; each micro-batch is divided so. A rank without work is absent.
        first_stage: ranks that together bring every row once.
    """

    rows: int
    unit: int
    per_micro_batch: int | None
    cuts: Mapping[int, Cuts]
    first_stage: tuple[int, ...]

    def stretches(self, rank: int, rows: int) -> Stretches:
        """The rows of *rank* of a global batch."""
        if rank not in self.cuts:
            return ()
        unit = 1 if rows % self.unit else self.unit
        most = max(rows, 1) if self.per_micro_batch is None else self.per_micro_batch * self.unit
        return _stretches(rows, unit, most, self.cuts[rank])

    def count(self, rank: int, rows: int) -> int:
        """Number of rows of *rank*."""
        return sum(stop - first for first, stop in self.stretches(rank, rows))


@lru_cache(maxsize=4096)
def _stretches(rows: int, unit: int, per_micro_batch: int, cuts: Cuts) -> Stretches:
    found: list[tuple[int, int]] = []
    for begin in range(0, rows, per_micro_batch):
        first, units = begin, (min(begin + per_micro_batch, rows) - begin) // unit
        for weights, index in cuts:
            sizes = shares_on_axis(units, weights)
            first, units = first + sum(sizes[:index]) * unit, sizes[index]
        stop = first + units * unit
        if found and found[-1][1] == first:
            first = found.pop()[0]
        if first < stop:
            found.append((first, stop))
    return tuple(found)


def within(held: Stretches, wanted: Stretches) -> Stretches | None:
    """Positions of wanted rows among those that are held; None if some are not.

    >>> within(((0, 3), (8, 11)), ((1, 3), (8, 9)))
    ((1, 3), (3, 4))
    >>> within(((0, 3), (8, 11)), ((2, 4),)) is None
    True
    """
    found = []
    for first, stop in wanted:
        before = 0
        for a, b in held:
            if a <= first and stop <= b:
                found.append((before + first - a, before + stop - a))
                break
            before += b - a
        else:
            return None
    return tuple(found)


def box_within(held: Intervals, wanted: Intervals) -> Intervals | None:
    """The same for all dims of a tensor."""
    found = [within(own, dim) for own, dim in zip(held, wanted, strict=True)]
    return None if None in found else tuple(dim for dim in found if dim is not None)


@dataclass(eq=False)
class LocalRows:
    """Rows of a leaf of the global batch, or parts of rows: a tensor, and where it is in the whole."""

    tensor: Tensor
    held: Intervals

    def part(self, intervals: Intervals) -> Tensor:
        """The part of the whole leaf that lies in these stretches of each dim."""
        found = box_within(self.held, intervals)
        assert found is not None  # the leaf would have been gathered
        return part(self.tensor, found)

    def on_host(self, intervals: Intervals) -> Tensor:
        """The same, which is where the rank's device is."""
        return self.part(intervals)


@dataclass(frozen=True)
class RowTerms:
    """Terms of sums over the rows of all ranks.

    Attributes:
        likes: shapes and dtypes of the sums.
        of_stages: stages without tasks that return terms of this rank, with the numbers of their sums.
    """

    likes: tuple[ShapeAndDtype, ...] = ()
    of_stages: tuple[tuple[tuple[int, ...], LocalStage], ...] = ()

    @property
    def stages(self) -> tuple[LocalStage, ...]:
        """These stages."""
        return tuple(stage for _, stage in self.of_stages)


@dataclass(kw_only=True, eq=False)
class LocalBatches:
    """Makes global batches of local ones, with the other ranks.

    Attributes:
        world: all ranks.
        shares: the rows that each brings.
        refusals: of steps.
        leaves: names of the leaves whose first dim is the batch.
        known: names of all leaves of the example; the values of others are compared in every step.
        host_group: of all ranks, for tensors on the CPU.
        group: of all ranks, for tensors on the ranks' devices.
        compared_first, compared_each: steps in which ranks with the same rows compare their values.
        samples: whole sizes of the samples of leaves of which ranks bring parts.
        parts: for each rank, of these leaves the ranges of the dims after the first; None if samples are whole.
    """

    world: World
    shares: RowShares
    refusals: Refusals
    leaves: frozenset[str]
    known: frozenset[str]
    host_group: dist.ProcessGroup | None
    group: dist.ProcessGroup | None
    compared_first: int
    compared_each: int
    samples: dict[str, tuple[int, ...]] = field(default_factory=dict)
    parts: tuple[dict[str, Intervals], ...] | None = None
    _steps: int = field(default=0, init=False)

    def agree(
        self, batch: Mapping[str, Any], purpose: str, replicas: Callable[[], Tensor]
    ) -> tuple[Mapping[str, Any], dict[str, Any]]:
        """The local batch, and the global one without data, on the meta device; all ranks must call it.

        A rank without rows may bring nothing, or any batch without rows. *purpose* is the step in words, *replicas*
        gives a number for the values of parameters that every rank has.

        Raises:
            UsageError: on every rank, if one refuses the step, or brought other rows than its share, or leaves of other
                shapes.
            WorkerError: a rank did not come within the timeout.
        """
        own = self._of_rows(batch)
        lengths = {len(x) if x.dim() else -1 for x in own.values()}
        rows = 0 if not lengths else lengths.pop() if len(lengths) == 1 else -1
        rank = self.world.rank
        if rows > 0 and any(tuple(x.shape[1:]) != self._sizes(rank, n) for n, x in own.items() if n in self.samples):
            rows = _OTHER_SAMPLES
        looks = self._steps < self.compared_first or self._steps % self.compared_each == 0
        self._steps += 1
        own_words = f"{self._in_words(batch)} for {purpose}"
        told = self._all_told(self._told(batch, rows, own_words, looks, float(replicas()) if looks else 0.0))
        counts = [int(n) for n, *_ in told]
        self._refuse_unlike(counts, own_words)
        total = sum(counts[rank] for rank in self.shares.first_stage)
        self._check(counts, total, batch)
        first = counts.index(next(filter(None, counts)))
        if len({label for _, label, *_ in told}) > 1:
            kinds = self._objects((own_words, self._without_rows(batch)))
            for rank, (count, label, *_) in enumerate(told):
                if count and label != told[first][1]:
                    raise UsageError(
                        f"rank {rank} brought a batch of {kinds[rank][0]}, and rank {first} one of {kinds[first][0]}: "
                        "all ranks take the same steps, with the same attributes, and their rows have the same names, "
                        "dtypes and lengths: pad all to one length"
                    )
            if not rows:
                batch = kinds[first][1]
        if not rows:
            empty = {
                n: x.new_empty(0, *self._sizes(rank, n)) for n, x in self._of_rows(batch).items() if n in self.samples
            }
            batch = {**batch, **empty}
        self._check_values(told, total, first, batch)
        like = {
            name: torch.empty(
                (total, *self._whole(name, x)) if name in self.leaves else x.shape, dtype=x.dtype, device="meta"
            )
            if isinstance(x, Tensor)
            else x
            for name, x in batch.items()
        }
        return batch, like

    def read_whole(
        self, like: Mapping[str, Any], stages: Iterable[LocalStage], more: Iterable[tuple[str, Intervals]] = ()
    ) -> tuple[str, ...]:
        """Names of the leaves of which a rank reads other rows than its own, in stages or as *more* parts. All ranks
        must call it.

        Raises:
            WorkerError: a rank did not come within the timeout.
        """
        names = sorted(self._of_rows(like))
        held = {name: self._held(self.world.rank, name, like[name].shape) for name in names}
        lacking = {
            leaf for leaf, box in (*_reads(stages), *more) if leaf in held and box_within(held[leaf], box) is None
        }
        wanted = torch.tensor([name in lacking for name in names], dtype=torch.int64)
        if self.world.size > 1:
            work = dist.all_reduce(wanted, dist.ReduceOp.MAX, group=self.host_group, async_op=True)
            assert work is not None
            self.world.failures.wait(work, "the leaves that ranks read whole", range(self.world.size))
        return tuple(name for name, any_rank in zip(names, wanted.tolist(), strict=True) if any_rank)

    def placed(
        self, batch: Mapping[str, Any], like: Mapping[str, Any], gathered: Sequence[str]
    ) -> dict[str, Tensor | LocalRows]:
        """The leaves as stages read them: this rank's rows, or whole if they are *gathered*."""
        own = self._of_rows(batch)
        found = {**batch}
        for name, x in own.items():
            found[name] = LocalRows(x, self._held(self.world.rank, name, like[name].shape))
        if gathered:
            found |= self._gather({name: own[name] for name in gathered}, like)
        return found

    def sums(self, batch: Mapping[str, Any], terms: RowTerms) -> list[Tensor]:
        """The sums over the rows of all ranks, by one collective of a few numbers.

        Raises:
            WorkerError: a rank did not come within the timeout.
        """
        device = self.world.device
        sizes = [prod(shape) for shape, _ in terms.likes]
        total = torch.zeros(sum(sizes), dtype=torch.float64, device=device)
        parts = total.split(sizes)
        with torch.no_grad():
            for numbers, stage in terms.of_stages:
                stage.begin(batch)
                for number, term in zip(numbers, stage.forward(0, ()), strict=True):
                    parts[number].copy_(term.reshape(-1))
        if self.world.size > 1:
            work = dist.all_reduce(total, group=self.group, async_op=True)
            assert work is not None
            blocking = device.type == "cpu"
            self.world.failures.wait(
                work, "the sums over the rows of all ranks", range(self.world.size), blocking=blocking
            )
        return [part.view(shape).to(dtype) for part, (shape, dtype) in zip(parts, terms.likes, strict=True)]

    def _of_rows(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        return {name: x for name, x in batch.items() if name in self.leaves and isinstance(x, Tensor)}

    def _without_rows(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The batch for a rank without rows."""
        bare = {**batch, **{name: x[:0] for name, x in self._of_rows(batch).items()}}
        return {name: x.cpu() if isinstance(x, Tensor) else x for name, x in bare.items()}

    def _in_words(self, batch: Mapping[str, Any]) -> str:
        """A batch for errors, whatever its rows."""

        def shown(name: str, x: Any) -> str:
            if not isinstance(x, Tensor):
                return f"{name}={x!r}"
            shape = ("rows", *self._whole(name, x)) if name in self.leaves and x.dim() else x.shape
            return f"{name} ({', '.join(map(str, shape))}) {str(x.dtype).removeprefix('torch.')}"

        return ", ".join(shown(*item) for item in batch.items()) or "nothing"

    # What ranks tell each other

    def _told(self, batch: Mapping[str, Any], rows: int, given: str, looks: bool, replicas: float) -> Tensor:
        """The number of rows, a label of names and shapes, and samples of rows, other leaves and replicas."""
        zero = torch.zeros((), dtype=torch.float64)
        tensors = {name: x for name, x in batch.items() if isinstance(x, Tensor) and (looks or name not in self.known)}
        own = sum((look_at(x).cpu() for name, x in tensors.items() if name in self.leaves), zero)
        shared = sum((look_at(x).cpu() for name, x in tensors.items() if name not in self.leaves), zero)
        return torch.tensor([rows, crc32(given.encode()), float(own), float(shared), replicas], dtype=torch.float64)

    def _all_told(self, mine: Tensor) -> list[list[float]]:
        """The same of every rank, by rank."""
        if self.world.size == 1:
            return [mine.tolist()]
        gathered, work = self._tell(mine)
        self.world.failures.wait(work, "the rows that all ranks brought", range(self.world.size))
        return [x.tolist() for x in gathered]

    def _tell(self, mine: Tensor) -> tuple[list[Tensor], dist.Work]:
        gathered = [torch.empty_like(mine) for _ in range(self.world.size)]
        work = dist.all_gather(gathered, mine, group=self.host_group, async_op=True)
        assert work is not None
        self.refusals.joined += 1
        return gathered, work

    def sum(self, term: float, what: str) -> float:
        """A sum over ranks in a call that is no step; all ranks must make it.

        Raises:
            UsageError: another rank takes a step.
        """
        told = self._all_told(torch.tensor([_NO_STEP, crc32(what.encode()), term, 0, 0], dtype=torch.float64))
        self._refuse_unlike([int(n) for n, *_ in told], what)
        return float(sum(value for _, _, value, *_ in told))

    def _refuse_unlike(self, counts: Sequence[int], mine: str) -> None:
        """Refuse what only some ranks call."""
        if _REFUSED in counts:
            raise self.refusals.found()
        if _NO_STEP in counts and any(count != _NO_STEP for count in counts):
            words = self.refusals.told_by_all(mine)
            calling, other = counts.index(_NO_STEP), next(r for r, count in enumerate(counts) if count != _NO_STEP)
            raise UsageError(
                f"rank {calling} asks for {words[calling]}, and rank {other} for {words[other]}: all ranks take the "
                "same steps, and make the same calls between them"
            )

    def refuse(self) -> dist.Work:
        """Take part in the first collective of a step that this rank refuses."""
        _, work = self._tell(torch.tensor([_REFUSED, 0, 0, 0, 0], dtype=torch.float64))
        return work

    def _objects(self, mine: Any) -> list[Any]:
        found = [mine] * self.world.size
        if self.world.size > 1:
            dist.all_gather_object(found, mine, group=self.host_group)
        return found

    def _check(self, counts: Sequence[int], total: int, batch: Mapping[str, Any]) -> None:
        for rank, count in enumerate(counts):
            if count == _OTHER_SAMPLES:
                parts = ", ".join(
                    f"{name} (rows, {', '.join(map(str, self._sizes(rank, name)))})" for name in self.samples
                )
                raise UsageError(
                    f"rank {rank} brought samples of other sizes than its parts, which are {parts}: read the parts "
                    "that model.sample_share() names, as whale.shard_dataset(dataset, model, reader=...) asks for them"
                )
            if count < 0:
                raise UsageError(
                    f"rank {rank} brought a batch whose leaves {', '.join(sorted(self.leaves))} do not have the same "
                    "number of rows: their first dim is the batch"
                )
        if not any(counts):
            raise UsageError(
                f"no rank brought a row of {', '.join(sorted(self.leaves))}, the names of the example batch: this one "
                f"brought {', '.join(batch) or 'nothing'}; a global batch has at least one row, and ranks give theirs "
                "as the example was given (as keywords or one dict, or by position)"
            )
        for rank, count in enumerate(counts):
            share = self.shares.count(rank, total)
            if count != share:
                raise UsageError(
                    f"rank {rank} brought {_rows(count)}, but its share of this global batch of {_rows(total)} is "
                    f"{share}, as model.batch_share says; whale.shard_dataset(dataset, model) brings each rank its rows"
                )

    def _check_values(self, told: Sequence[Sequence[float]], rows: int, first: int, batch: Mapping[str, Any]) -> None:
        """Compare samples of the values of ranks that bring the same rows."""
        known: dict[Any, int] = {}
        num_leaves = len(batch)
        check_replicas([replicas for *_, replicas in told])
        if self._steps == 1:
            self._warn_of_copies(told, rows)
        for rank, (count, _, own, shared, _) in enumerate(told):
            parts = tuple(sorted(self.parts[rank].items())) if self.parts else ()
            same = known.setdefault((self.shares.stretches(rank, rows), parts), rank)
            if count and abs(own - told[same][2]) > num_leaves * ROUNDING:
                raise UsageError(
                    f"ranks {same} and {rank} compute on the same {_rows(int(count))} of the global batch, but brought "
                    "others; give both the same rows, as whale.shard_dataset(dataset, model) does"
                )
            if count and abs(shared - told[first][3]) > num_leaves * ROUNDING:
                others = [n for n, x in batch.items() if isinstance(x, Tensor) and n not in self.leaves]
                raise UsageError(
                    f"ranks {first} and {rank} brought other values in {', '.join(others)}, which must be the same on "
                    f"all ranks: in the example batch {', '.join(sorted(self.leaves))} have rows. Name what has rows "
                    "so, as the example was given (as keywords or by position), or give an example with all of it"
                )

    def _warn_of_copies(self, told: Sequence[Sequence[float]], rows: int) -> None:
        shares = {self.shares.stretches(rank, rows) for rank, (count, *_) in enumerate(told) if count}
        if len(shares) > 1 and told[0][2] and len({tuple(each) for each in told}) == 1:
            self.world.warn(
                f"every rank brought the same {_rows(int(told[0][0]))}, so that a step computes each row {len(shares)} "
                'times: with batch="local" a rank brings its own rows, as whale.shard_dataset(dataset, model) does'
            )

    def _gather(self, leaves: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole leaves, by one collective of bytes, as many for every rank."""
        ranks = range(self.world.size)
        held = {name: [self._held(rank, name, like[name].shape) for rank in ranks] for name in leaves}
        sizes = [[prod(_shape(held[name][rank])) * x.itemsize for name, x in leaves.items()] for rank in ranks]
        mine = torch.cat([x.contiguous().reshape(-1).view(torch.uint8) for x in leaves.values()])
        padded = mine.new_zeros(max(map(sum, sizes)))
        padded[: len(mine)] = mine
        gathered = [torch.empty_like(padded) for _ in ranks]
        work = dist.all_gather(gathered, padded, group=self.group, async_op=True)
        blocking = self.world.device.type == "cpu"
        self.world.failures.wait(work, f"the rows of {', '.join(leaves)}", ranks, blocking=blocking)
        found = {name: torch.empty(like[name].shape, dtype=x.dtype, device=x.device) for name, x in leaves.items()}
        pieces = [
            bytes_of.split([*each, len(padded) - sum(each)]) for bytes_of, each in zip(gathered, sizes, strict=True)
        ]
        for number, (name, whole) in enumerate(found.items()):
            for box, rank in {box: rank for rank, box in enumerate(held[name])}.items():
                put(whole, pieces[rank][number].clone().view(whole.dtype).view(_shape(box)), box)
        return found

    # Parts of samples

    def divide_samples(self, stages: Iterable[LocalStage], example: Mapping[str, Any]) -> None:
        """Let ranks bring the parts of samples that their stages read, of samples like those of *example*. All ranks
        must call it.

        A rank that reads several parts of a leaf brings the smallest, if the others contain it. A leaf whose parts
        overlap remains whole.
        """
        boxes: dict[str, set[Intervals]] = {}
        for leaf, box in _reads(stages):
            boxes.setdefault(leaf, set()).add(box[1:])
        smallest = {leaf: min(found, key=lambda box: prod(_shape(box))) for leaf, found in boxes.items()}
        nested = {n: box for n, box in smallest.items() if all(box_within(b, box) is not None for b in boxes[n])}
        told = self._objects(nested)
        self.parts = tuple({} for _ in told)
        for name, x in self._of_rows(example).items():
            whole = _all_of(x.shape[1:])
            distinct = {box for each in told if (box := each.get(name, whole)) != whole}
            if not distinct or not _tile(distinct, whole):
                continue
            self.samples[name] = tuple(x.shape[1:])
            for own, each in zip(self.parts, told, strict=True):
                own |= {name: each[name]} if each.get(name, whole) != whole else {}

    def _held(self, rank: int, name: str, shape: Sequence[int]) -> Intervals:
        """Position of the tensor that a rank brings in a leaf of the global batch."""
        parts = self.parts[rank] if self.parts else {}
        return (self.shares.stretches(rank, shape[0]), *parts.get(name, _all_of(shape[1:])))

    def _sizes(self, rank: int, name: str) -> tuple[int, ...]:
        """Sizes of a rank's parts of the samples of a divided leaf."""
        parts = self.parts[rank] if self.parts else {}
        return _shape(parts[name]) if name in parts else self.samples[name]

    def _whole(self, name: str, x: Tensor) -> tuple[int, ...]:
        """Sizes of the whole samples of a leaf."""
        return self.samples.get(name, tuple(x.shape[1:]))


def _reads(stages: Iterable[LocalStage]) -> Iterator[tuple[str, Intervals]]:
    """The parts of each leaf that this rank's programs read."""
    for stage in stages:
        for program in stage.programs:
            for graph in (program.constant, program.step, program.micro_batch) if program.nothing is None else ():
                for kind, what in graph.sources:
                    if kind in INPUTS and what[1]:
                        yield what


def _all_of(shape: Sequence[int]) -> Intervals:
    return tuple(((0, size),) if size else () for size in shape)


def _shape(box: Intervals) -> tuple[int, ...]:
    return tuple(sum(stop - first for first, stop in dim) for dim in box)


def _tile(parts: Iterable[Intervals], whole: Intervals) -> bool:
    """Whether parts cover the whole, each element once."""
    parts = list(parts)
    apart = all(
        any(all(b <= c or d <= a for a, b in one for c, d in other) for one, other in zip(*pair, strict=True))
        for pair in combinations(parts, 2)
    )
    return apart and sum(prod(_shape(part)) for part in parts) == prod(_shape(whole))


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"
