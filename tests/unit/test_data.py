"""Loaders of each rank's rows: which rows are read, in which order, and where an epoch goes on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler, TensorDataset

import whale
from whale.data import ShardedLoader, read_parts, shard_dataset
from whale.errors import UsageError
from whale.ir.shares import shares_on_axis


class Noted(Dataset[dict[str, Tensor]]):
    """It notes which rows are read."""

    def __init__(self, length: int) -> None:
        self.length, self.read = length, list[int]()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        self.read.append(index)
        return {"x": torch.tensor([index])}


class Stream(IterableDataset[dict[str, Tensor]]):
    def __init__(self, length: int) -> None:
        self.length, self.epochs = length, list[int]()

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter([{"x": torch.tensor([index])} for index in range(self.length)])


class Counted(Stream):
    """A stream that says how long it is, as torch's loaders allow."""

    def __len__(self) -> int:
        return self.length


def loader_of(rank: int, dataset: Any, weights: Sequence[float] = (3, 1), **options: Any) -> ShardedLoader:
    def share(rows: int) -> list[tuple[int, int]]:
        sizes = shares_on_axis(rows, weights)
        first = sum(sizes[:rank])
        return [(first, first + sizes[rank])] if sizes[rank] else []

    given = {"batch_size": 8, "shuffle": False, "seed": 0, "drop_last": False}
    extra = {name: options.pop(name) for name in [*options] if name not in given}
    return ShardedLoader(dataset, share, **{**given, **options}, options=extra)


def rows_of(batches: Any) -> list[list[int]]:
    return [batch["x"].flatten().tolist() for batch in batches]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_ranks_read_their_shares_and_together_each_row_once(shuffle: bool, num_workers: int) -> None:
    datasets = [Noted(21), Noted(21)]
    loaders = [loader_of(r, d, shuffle=shuffle, num_workers=num_workers) for r, d in enumerate(datasets)]
    for _ in range(2):
        batches = [rows_of(loader) for loader in loaders]
        assert [list(map(len, each)) for each in batches] == [[6, 6, 4], [2, 2, 1]]
        assert sorted(row for each in batches for rows in each for row in rows) == list(range(21))
    if not num_workers:
        assert [len(dataset.read) for dataset in datasets] == [2 * 16, 2 * 5]


def test_every_epoch_has_its_own_order_of_one_seed() -> None:
    one, same, other = (loader_of(0, Noted(16), shuffle=True, seed=seed) for seed in (1, 1, 2))
    epochs = [rows_of(one), rows_of(one)]
    assert epochs[0] != epochs[1]
    same.set_epoch(1)
    assert rows_of(same) == epochs[1]
    assert rows_of(other) != epochs[0]


def test_a_rank_without_a_row_gets_a_batch_without_rows() -> None:
    dataset = Noted(9)
    *_, last = loader_of(1, dataset)
    assert last["x"].shape == (0, 1)
    *_, last = loader_of(1, Stream(9))
    assert last["x"].shape == (0, 1)
    assert [len(rows) for rows in rows_of(loader_of(1, dataset, drop_last=True))] == [2]


@pytest.mark.parametrize(
    ("dataset", "num_workers"), [(Noted(30), 0), (Noted(30), 2), (Stream(30), 0), (Counted(30), 1)]
)
def test_a_loader_goes_on_within_an_epoch(dataset: Any, num_workers: int) -> None:
    kind: dict[str, Any] = {"shuffle": isinstance(dataset, Noted), "num_workers": num_workers}
    loader = loader_of(0, dataset, **kind)
    rows_of(loader)
    states, batches = [], []
    for batch in loader:
        states.append(loader.state_dict())
        batches += rows_of([batch])
    again = loader_of(0, dataset, **kind)
    again.load_state_dict(states[1])
    assert again.state_dict() == states[1]
    assert rows_of(again) == batches[2:]
    assert again.state_dict() == loader.state_dict() == {"epoch": 2, "position": 0, "seed": 0, "batch_size": 8}


class Positioned(Stream):
    """It knows how far it was read."""

    at = 0
    num_read = 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while self.at < self.length:
            self.at, self.num_read = self.at + 1, self.num_read + 1
            yield {"x": torch.tensor([self.at - 1])}
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_a_stream_with_a_state_is_not_read_again() -> None:
    pytest.importorskip("torchdata")
    loader = loader_of(0, Positioned(30))
    states = [loader.state_dict() for _ in loader]
    again = Positioned(30)
    resumed = loader_of(0, again)
    resumed.load_state_dict(states[1])
    assert rows_of(resumed) == rows_of(loader)[2:]
    assert again.num_read == 30 - 16
    plain = loader_of(0, Stream(30))
    plain.load_state_dict(states[1])
    assert rows_of(plain) == rows_of(loader)[2:]
    assert len(rows_of(resumed)) == 4


def test_a_loop_that_ends_early_goes_on_with_the_next_epoch() -> None:
    dataset = Stream(16)
    loader = loader_of(0, dataset)
    for _ in loader:
        break
    assert len(rows_of(loader)) == 2
    assert dataset.epochs == [0, 1]


def test_a_state_of_another_order_is_refused() -> None:
    state = loader_of(0, Noted(16)).state_dict()
    with pytest.raises(whale.WhaleError, match="the loader's state is of seed=0, but this one has 1"):
        loader_of(0, Noted(16), seed=1).load_state_dict(state)


def test_streams_are_cut_like_datasets() -> None:
    for rank in range(2):
        assert rows_of(loader_of(rank, Stream(21))) == rows_of(loader_of(rank, Noted(21)))
        assert rows_of(loader_of(rank, Stream(21), drop_last=True)) == rows_of(loader_of(rank, Noted(16)))
    with pytest.raises(whale.WhaleError, match="Stream can only be iterated: shuffle it itself"):
        loader_of(0, Stream(21), shuffle=True)


class Draws(Dataset[Tensor]):
    """A random augmentation."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return torch.rand(2)


def test_workers_of_ranks_with_the_same_rows_draw_the_same() -> None:
    found = [list(loader_of(r, Draws(), w, batch_size=4, num_workers=1)) for w in ((1,), (1, 1)) for r in range(len(w))]
    again = list(loader_of(0, Draws(), (1,), batch_size=4, num_workers=1))
    assert torch.equal(found[0][0], again[0])
    assert not torch.equal(found[1][0], found[2][0])


# --- what shard_dataset takes -----------------------------------------------------------------------------------------

DATA = TensorDataset(torch.arange(10))


def test_without_a_model_every_rank_has_the_global_batch() -> None:
    loader = shard_dataset(DATA, batch_size=4)
    assert [batch.tolist() for (batch,) in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert len(loader) == 3
    assert loader.dataset is DATA
    shuffled = shard_dataset(DATA, batch_size=4, shuffle=True, seed=3)
    assert sorted(row for (batch,) in shuffled for row in batch.tolist()) == list(range(10))


def test_a_data_loader_decides_what_it_has() -> None:
    def collate(rows: list[Any]) -> list[int]:
        return [int(row) for (row,) in rows]

    made = DataLoader(DATA, batch_size=4, drop_last=True, collate_fn=collate)
    assert list(shard_dataset(made)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    shuffled = list(shard_dataset(DataLoader(DATA, batch_size=5, shuffle=True, collate_fn=collate), seed=1))
    assert sorted([*shuffled[0], *shuffled[1]]) == list(range(10)) != [*shuffled[0], *shuffled[1]]
    stream = DataLoader(Stream(5), batch_size=4)
    assert rows_of(shard_dataset(stream)) == [[0, 1, 2, 3], [4]]
    with pytest.raises(whale.WhaleError, match="the DataLoader decides batch_size"):
        shard_dataset(made, batch_size=4)


class Pairs:
    def __iter__(self) -> Iterator[list[int]]:
        yield [0, 1]

    def __len__(self) -> int:
        return 1


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"sampler": DistributedSampler(DATA, 2, 0)}, "DistributedSampler"),
        ({"sampler": RandomSampler(DATA, replacement=True)}, "RandomSampler"),
        ({"batch_sampler": Pairs()}, "Pairs"),
    ],
)
def test_orders_that_cannot_be_divided_are_refused(options: dict[str, Any], kind: str) -> None:
    with pytest.raises(whale.WhaleError, match=rf"its own order of batches \({kind}\)"):
        shard_dataset(DataLoader(DATA, **options))
    with pytest.raises(whale.WhaleError, match=f"shard_dataset has no {next(iter(options))}"):
        shard_dataset(DATA, batch_size=2, **options)


def test_other_wrong_arguments() -> None:
    with pytest.raises(whale.WhaleError, match="batch_size=None: it must be a whole number"):
        shard_dataset(DATA)
    with pytest.raises(whale.WhaleError, match="the model that whale.parallelize returned"):
        shard_dataset(DATA, torch.nn.Linear(1, 1), batch_size=2)  # type: ignore[arg-type]
    with pytest.raises(whale.WhaleError, match="dataset is a int"):
        shard_dataset(3, batch_size=2)
    with pytest.raises(TypeError, match="its batches cannot be counted"):
        len(shard_dataset(Stream(4), batch_size=2))


# --- parts of samples in files ----------------------------------------------------------------------------------------


def test_parts_are_read_as_slices_and_no_more() -> None:
    read: list[Any] = []

    class Stored:
        shape = (4, 3, 10, 6)

        def __getitem__(self, index: Any) -> np.ndarray[Any, Any]:
            read.append(index)
            return volumes[index]

    volumes = np.arange(4 * 3 * 10 * 6).reshape(Stored.shape)
    parts = (((0, 3),), ((0, 2), (7, 10)), ((4, 6),))
    found = read_parts(Stored(), parts, at=(2,))
    assert np.array_equal(found, np.concatenate([volumes[2, :, :2, 4:], volumes[2, :, 7:, 4:]], 1))
    assert read == [(2, slice(0, 3), slice(0, 2), slice(4, 6)), (2, slice(0, 3), slice(7, 10), slice(4, 6))]
    assert np.array_equal(read_parts(Stored(), (), at=(1,)), volumes[1])
    assert np.array_equal(read_parts(Stored(), (((0, 3),), ((2, 5),)), at=(0,), halo=3), volumes[0, :, :8])


@pytest.mark.parametrize(
    ("parts", "halo", "message"),
    [
        ((((0, 2),), ((0, 1),), ((0, 1),)), 0, "the array has 3 dims, of which at= takes 1, but the parts are of 3"),
        ((((0, 5),),), 0, "dim 0 of the sample has 4 elements in the file, but the parts go to 5"),
        ((((0, 1), (2, 3)),), 1, "read in 2 ranges, which have no halo"),
        ((((3, 1),),), 0, r"the range \(3, 1\) of dim 0 .* is none: write \(first, stop\), with 0 <= first <= stop"),
        ((((-1, 1),),), 0, r"the range \(-1, 1\) of dim 0 .* is none"),
        (((0, 2), (0, 6)), 0, r"dim 0 has 0 for a range: .* such as \(\(\(0, 2\),\), \(\(0, 6\),\)\)"),
        ({"volume": (((0, 2),),)}, 0, r"give those of one leaf, such as parts.get\('volume', \(\)\)"),
        ((), -1, "halo=-1: it must be a whole number of at least 0"),
    ],
)
def test_parts_that_a_file_does_not_have_are_refused(parts: Any, halo: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_parts(np.zeros((2, 4, 6)), parts, at=(0,), halo=halo)


def test_an_empty_part_has_no_halo() -> None:
    for ranges in ((), ((3, 3),)):
        assert read_parts(np.zeros((2, 6, 4)), ((), ranges), halo=2).shape[1] == 0


def test_the_place_of_a_sample_and_an_array_are_what_they_must_be() -> None:
    with pytest.raises(UsageError, match=r"at=3: give a tuple of indices, such as at=\(3,\)"):
        read_parts(np.zeros((4, 2)), at=3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="a dict has no shape: give an array, such as file\\[name\\] of h5py or zarr"):
        read_parts({"volume": np.zeros(3)})


def test_a_reader_needs_the_number_of_samples() -> None:
    with pytest.raises(UsageError, match=r"a Stream has no len\(\): give range\(n\)"):
        shard_dataset(Stream(4), batch_size=2, reader=lambda index, parts: index)
