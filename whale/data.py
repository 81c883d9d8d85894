"""Loaders for parallel models: batches that are the same on every rank, or of each rank its own rows.

The order of rows is that of one seed and the epoch on every rank, so a position in it means the same everywhere, for
any number of ranks. Shares are the model's; this knows rows and datasets.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    default_collate,
)

from whale.arguments import check_count, check_type
from whale.errors import UsageError
from whale.runtime.module import ParallelModule

__all__ = ["RowSampler", "ShardedLoader", "read_parts", "shard_dataset"]

Share = Callable[[int], Sequence[tuple[int, int]]]
"""This rank's rows of a global batch, as half-open ranges, by the number of all rows."""

Parts = Mapping[str, Sequence[Sequence[tuple[int, int]]]]
"""For leaves of a batch and each dim of a sample the half-open ranges that this rank reads."""


def shard_dataset(
    dataset: Any,
    model: ParallelModule | None = None,
    *,
    batch_size: int | None = None,
    shuffle: bool | None = None,
    seed: int = 0,
    drop_last: bool | None = None,
    reader: Callable[[int, Parts], Any] | None = None,
    **options: Any,
) -> ShardedLoader:
    """Return a loader of batches as ``model.train_step`` takes them.

    For a model with ``batch="local"`` this rank loads the rows that it computes on and no others, for one with
    ``batch="parts"`` the parts of them that it reads; else, and without a model, every rank loads the global batch.

    Args:
        dataset: with ``__getitem__`` and ``__len__``; or an iterable one, of which every rank reads all rows and keeps
            its own; or a DataLoader, whose dataset, batch size, order, ``collate_fn`` and workers are taken.
        model: the parallel model.
        batch_size: rows of the global batch; by default those of the DataLoader or of the model's example batch.
        shuffle: draw another order in every epoch, from *seed* and the epoch.
        seed: the same on every rank.
        drop_last: leave out the last rows if they are fewer than a batch.
        reader: ``reader(index, parts)`` reads a sample in place of ``dataset[index]``, of which only the length counts.
            *parts* is ``model.sample_share()``: the ranges to read, by leaf; empty for whole samples.
        options: of torch's DataLoader, such as ``num_workers`` and ``collate_fn``.

    Raises:
        UsageError: the order of a DataLoader or the kind of a dataset cannot be divided.
    """
    if model is not None:
        check_type("model", model, ParallelModule, "the model that whale.parallelize returned")
    if isinstance(dataset, DataLoader):
        dataset, taken = _taken(dataset)
        given = {"batch_size": batch_size, "shuffle": shuffle, "drop_last": drop_last, **options}
        twice = sorted(name for name, value in given.items() if value is not None and name in taken)
        if twice:
            raise UsageError(f"the DataLoader decides {', '.join(twice)}; give its dataset instead to choose them here")
        batch_size, shuffle, drop_last = (taken.pop(name) for name in ("batch_size", "shuffle", "drop_last"))
        options |= taken
    for name in {"sampler", "batch_sampler", "generator"} & set(options):
        raise UsageError(
            f"shard_dataset has no {name}: it draws the order of rows itself, which must be the same on every rank; "
            "use shuffle and seed, or order the dataset, as with torch.utils.data.Subset"
        )
    if batch_size is None and model is not None:
        batch_size = model._whale.engine.shares.rows
    check_count("batch_size", batch_size)
    assert batch_size is not None
    mode = "global" if model is None else model.batch_mode
    if reader is not None:
        if not hasattr(dataset, "__len__"):
            raise UsageError(
                f"with reader= the dataset says how many samples there are, but a {type(dataset).__name__} has no "
                "len(): give range(n) for n samples"
            )
        dataset = _PartReader(len(dataset), reader, {} if model is None else model.sample_share())
    elif mode == "parts":
        raise UsageError(
            'a model with batch="parts" takes parts of samples: give shard_dataset a reader=fn(index, parts) that '
            'reads them, or parallelize the model with batch="local"'
        )
    return ShardedLoader(
        dataset,
        model.batch_share if model is not None and mode != "global" else lambda rows: ((0, rows),),
        batch_size=batch_size,
        shuffle=bool(shuffle),
        seed=seed,
        drop_last=bool(drop_last),
        options=options,
    )


def read_parts(
    array: Any, parts: Sequence[Sequence[tuple[int, int]]] = (), *, at: Sequence[int] = (), halo: int = 0
) -> np.ndarray[Any, Any]:
    """Read a rank's parts of a sample from an array that is indexed by slices, and nothing else of it: a dataset of
    h5py, an array of zarr, or one of NumPy that is mapped from a file.

    Args:
        array: with a ``shape``.
        parts: of a leaf, as ``model.sample_share()`` has them: for each dim the ranges to read. Dims beyond them are
            read whole, as is a sample of which a rank brings no parts.
        at: indices in front of the dims of a sample, such as its place in the file.
        halo: elements to read beyond each end of a dim that is cut, as far as the sample goes. A step needs none; they
            are for what a reader does itself, such as smoothing, and it cuts them off. The part itself begins
            ``min(halo, first)`` elements after what was read. An empty part has none.

    Raises:
        UsageError: the array has fewer dims or elements than the parts, a dim with a halo has several ranges, or the
            parts are of another form, such as those of all leaves.

    >>> import numpy as np
    >>> volumes = np.arange(48).reshape(2, 4, 6)
    >>> read_parts(volumes, (((1, 3),), ((0, 2), (5, 6))), at=(1,)).tolist()
    [[30, 31, 35], [36, 37, 41]]
    >>> read_parts(volumes, (((1, 2),),), at=(0,), halo=1).shape
    (3, 6)
    """
    if not hasattr(array, "shape"):
        raise UsageError(f"a {type(array).__name__} has no shape: give an array, such as file[name] of h5py or zarr")
    check_count("halo", halo, least=0)
    if not isinstance(at, Sequence):
        raise UsageError(f"at={at!r}: give a tuple of indices, such as at=({at!r},)")
    if isinstance(parts, Mapping):
        leaf = next(iter(parts), "name")
        raise UsageError(f"the parts are of all leaves: give those of one leaf, such as parts.get({leaf!r}, ())")
    shape = tuple(array.shape)
    sizes = shape[len(at) :]
    if len(parts) > len(sizes):
        raise UsageError(
            f"the array has {len(shape)} dims, of which at= takes {len(at)}, but the parts are of {len(parts)}: index "
            "the sample with at=, or give the parts of the leaf that is stored there"
        )
    dims: list[list[slice]] = []
    for dim, size in enumerate(sizes):
        ranges = tuple(parts[dim]) if dim < len(parts) else ((0, size),)
        for one in ranges:
            if not isinstance(one, Sequence) or len(one) != 2:
                raise UsageError(
                    f"dim {dim} has {one!r} for a range: the parts are of dims, each of ranges, each of two numbers, "
                    "such as (((0, 2),), ((0, 6),))"
                )
            if not 0 <= one[0] <= one[1]:
                raise UsageError(
                    f"the range {tuple(one)} of dim {dim} of the sample is none: write (first, stop), with "
                    "0 <= first <= stop"
                )
            if one[1] > size:
                raise UsageError(
                    f"dim {dim} of the sample has {size} elements in the file, but the parts go to {one[1]}: samples "
                    "have the sizes of the example batch"
                )
        if halo and len(ranges) > 1:
            raise UsageError(f"dim {dim} of the sample is read in {len(ranges)} ranges, which have no halo; use halo=0")
        dims.append(
            [
                slice(max(0, first - halo), min(size, stop + halo)) if first < stop else slice(first, first)
                for first, stop in ranges or ((0, 0),)
            ]
        )

    def read(dim: int, chosen: tuple[slice, ...]) -> np.ndarray[Any, Any]:
        if dim == len(dims):
            return np.asarray(array[(*at, *chosen)])
        found = [read(dim + 1, (*chosen, one)) for one in dims[dim]]
        return found[0] if len(found) == 1 else np.concatenate(found, axis=dim)

    return read(0, ())


_OPTIONS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
)


def _taken(loader: DataLoader[Any]) -> tuple[Any, dict[str, Any]]:
    """The dataset of a DataLoader, and what it decides."""
    taken = {"batch_size": loader.batch_size, "drop_last": loader.drop_last, "shuffle": None}
    taken |= {name: getattr(loader, name) for name in _OPTIONS}
    if isinstance(loader.dataset, IterableDataset):
        known = loader.batch_size is not None
    else:
        sampler = loader.sampler
        shuffled = (
            type(sampler) is RandomSampler
            and not sampler.replacement
            and sampler.num_samples == len(sampler.data_source)
        )
        known = type(loader.batch_sampler) is BatchSampler and (shuffled or type(sampler) is SequentialSampler)
        taken["shuffle"] = shuffled
    if not known:
        kind = type(loader.batch_sampler if loader.batch_size is None else loader.sampler).__name__
        raise UsageError(
            f"the DataLoader has its own order of batches ({kind}), of which a rank cannot know its rows: give "
            "shard_dataset a DataLoader with a batch size, shuffled or not and without a sampler (a DistributedSampler "
            "is what shard_dataset replaces), or the dataset itself"
        )
    return loader.dataset, taken


class _PartReader(Dataset[Any]):
    """Samples, read in parts."""

    def __init__(self, length: int, reader: Callable[[int, Parts], Any], parts: Parts) -> None:
        self.length, self.reader, self.parts = length, reader, parts

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.reader(index, self.parts)


class RowSampler(Sampler[list[int]]):
    """The indices of this rank's rows in each global batch of an epoch.

    Args:
        length: of the dataset.
        share: this rank's rows of a batch.
        batch_size: rows of a global batch.
        shuffle: order rows by *seed* and the epoch, otherwise by index.
        seed: the same on every rank.
        drop_last: leave out a last batch with fewer rows.

    >>> sampler = RowSampler(7, lambda rows: [(rows // 2, rows)], batch_size=4, shuffle=False, seed=0, drop_last=False)
    >>> list(sampler)
    [[2, 3], [5, 6]]
    """

    def __init__(
        self, length: int, share: Share, *, batch_size: int, shuffle: bool, seed: int, drop_last: bool
    ) -> None:
        self.length, self.share, self.batch_size = length, share, batch_size
        self.shuffle, self.seed = shuffle, seed
        full, rest = divmod(length, batch_size)
        self._rows = (batch_size,) * full + ((rest,) if rest and not drop_last else ())
        self.epoch = self.position = 0

    def __len__(self) -> int:
        return len(self._rows)

    def begin(self, epoch: int, position: int) -> None:
        """Set the epoch, and the batch with which the next iteration starts."""
        self.epoch, self.position = epoch, position

    def order(self) -> Tensor:
        """The indices of all rows in the order of this epoch."""
        if not self.shuffle:
            return torch.arange(self.length)
        return torch.randperm(self.length, generator=torch.Generator().manual_seed(self.seed + self.epoch))

    def counts(self) -> list[int]:
        """Number of this rank's rows in each batch from the position on."""
        by_rows = {rows: sum(stop - first for first, stop in self.share(rows)) for rows in set(self._rows)}
        return [by_rows[rows] for rows in self._rows[self.position :]]

    def __iter__(self) -> Iterator[list[int]]:
        order = self.order()
        for batch in range(self.position, len(self._rows)):
            begin = batch * self.batch_size
            pieces = [order[begin + first : begin + stop] for first, stop in self.share(self._rows[batch])]
            if pieces:
                yield torch.cat(pieces).tolist()


class _RowStream(IterableDataset[Any]):
    """This rank's rows of each batch of a stream."""

    def __init__(
        self, rows: Iterable[Any], share: Share, batch_size: int, drop_last: bool, collate: Callable[[list[Any]], Any]
    ) -> None:
        self.rows, self.share, self.batch_size, self.drop_last, self.collate = (
            rows,
            share,
            batch_size,
            drop_last,
            collate,
        )

    def __iter__(self) -> Iterator[Any]:
        stream = iter(self.rows)
        while batch := list(islice(stream, self.batch_size)):
            if self.drop_last and len(batch) < self.batch_size:
                return
            own = [row for first, stop in self.share(len(batch)) for row in batch[first:stop]]
            yield self.collate(own) if own else without_rows(self.collate(batch[:1]))


class _StatefulRowStream(_RowStream):
    """The same of a stream that says how far it was read."""

    def state_dict(self) -> Any:
        return self.rows.state_dict()  # type: ignore[attr-defined]

    def load_state_dict(self, state: Any) -> None:
        self.rows.load_state_dict(state)  # type: ignore[attr-defined]


def _loader_of_stream(dataset: Any, options: dict[str, Any], *arguments: Any) -> DataLoader[Any]:
    """A loader whose state has that of the stream, if the stream has one and torchdata is installed."""
    if hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict"):
        with contextlib.suppress(ImportError), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torchdata calls what torch has deprecated
            from torchdata.stateful_dataloader import StatefulDataLoader

            made: DataLoader[Any] = StatefulDataLoader(
                _StatefulRowStream(dataset, *arguments), batch_size=None, **options
            )
            return made
    return DataLoader(_RowStream(dataset, *arguments), batch_size=None, **options)


def without_rows(batch: Any) -> Any:
    """A batch of the same form with no row."""
    return pytree.tree_map(lambda x: x[:0] if isinstance(x, Tensor) and x.dim() else x, batch)


class ShardedLoader:
    """Batches of a dataset, epoch after epoch; see :func:`shard_dataset`.

    Every iteration is an epoch of its own, with the next order of rows if they are shuffled. A rank whose share of a
    batch is empty gets a batch without rows.

    Attributes:
        dataset: as given.
        batch_size: rows of the global batch.
    """

    def __init__(
        self,
        dataset: Any,
        share: Share,
        *,
        batch_size: int,
        shuffle: bool,
        seed: int,
        drop_last: bool,
        options: Mapping[str, Any],
    ) -> None:
        self.dataset, self.batch_size, self.seed = dataset, batch_size, seed
        self._share = share
        self._random = torch.Generator()
        self._epoch = self._position = 0
        self._resumed = True
        self._skipped = 0
        options = {**options, "generator": self._random}
        is_stream = isinstance(dataset, IterableDataset)  # which has __getitem__ too, that raises
        if not is_stream and hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
            self._sampler: RowSampler | None = RowSampler(
                len(dataset), share, batch_size=batch_size, shuffle=shuffle, seed=seed, drop_last=drop_last
            )
            self._loader: DataLoader[Any] = DataLoader(dataset, batch_sampler=self._sampler, **options)
        elif hasattr(dataset, "__iter__"):
            if shuffle:
                raise UsageError(
                    f"shuffle=True, but {type(dataset).__name__} can only be iterated: shuffle it itself, by the same "
                    "seed on every rank"
                )
            self._sampler = None
            collate = options.pop("collate_fn", None) or default_collate
            self._loader = _loader_of_stream(dataset, options, share, batch_size, drop_last, collate)
        else:
            raise UsageError(
                f"dataset is a {type(dataset).__name__}; it must have __getitem__ and __len__, or __iter__, or be a "
                "DataLoader"
            )

    def __len__(self) -> int:
        if self._sampler is None:
            raise TypeError(f"{type(self.dataset).__name__} can only be iterated: its batches cannot be counted")
        return len(self._sampler)

    def set_epoch(self, epoch: int) -> None:
        """Let the next iteration be this epoch, from its start."""
        self._epoch, self._position, self._skipped, self._resumed = epoch, 0, 0, True

    def __iter__(self) -> Iterator[Any]:
        if not self._resumed:  # of the last iteration's epoch, which may have ended early
            self.set_epoch(self._epoch + 1)
        self._resumed = False
        epoch, start = self._epoch, self._position
        first = next((first for first, _ in self._share(self.batch_size)), 0)
        number = (self.seed * 1_000_003 + epoch) * 1_000_003 + first
        self._random.manual_seed(number % 2**63)  # of workers: ranks with the same rows draw the same
        for batch in self._of_stream(epoch) if self._sampler is None else self._of_sampler(epoch, start):
            self._position += 1
            yield batch
        self.set_epoch(epoch + 1)

    def _of_sampler(self, epoch: int, start: int) -> Iterator[Any]:
        sampler = self._sampler
        assert sampler is not None
        sampler.begin(epoch, start)
        loaded = iter(self._loader)
        for batch, count in enumerate(sampler.counts(), start):
            if count:
                yield next(loaded)
            else:
                some = int(sampler.order()[batch * self.batch_size])
                yield without_rows(self._loader.collate_fn([self.dataset[some]]))

    def _of_stream(self, epoch: int) -> Iterator[Any]:
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)
        return islice(self._loader, self._skipped, None)

    def state_dict(self) -> dict[str, Any]:
        """The position among all batches: the same on every rank, and for any number of ranks."""
        state = {"epoch": self._epoch, "position": self._position, "seed": self.seed, "batch_size": self.batch_size}
        return {**state, "stream": self._loader.state_dict()} if hasattr(self._loader, "state_dict") else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on where :meth:`state_dict` was called.

        Raises:
            UsageError: the state is of another order of rows.
        """
        for name, own in (("seed", self.seed), ("batch_size", self.batch_size)):
            if state[name] != own:
                raise UsageError(
                    f"the loader's state is of {name}={state[name]}, but this one has {own}: the same position would "
                    "be of other rows; make the loader with the state's, or begin an epoch with set_epoch"
                )
        self.set_epoch(state["epoch"])
        self._position = self._skipped = state["position"]
        if "stream" in state and hasattr(self._loader, "load_state_dict"):
            self._loader.load_state_dict(state["stream"])
            self._skipped = 0
