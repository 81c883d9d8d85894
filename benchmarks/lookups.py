"""Look-ups per second of a recommendation model on two ranks: tables with sparse gradients, trained with row-wise
Adagrad, against torch's EmbeddingBag under DDP.

    python benchmarks/lookups.py

A step is the forward, the backward, the exchange and the optimizers' updates, of one global batch; the steps of all
sides alternate in the same processes. Sides: DDP with dense gradients (Adagrad of torch) and with sparse ones, which
gloo sums; Whale with replicas of all tables, with every table cut over both ranks (``split``), and with tables placed
by ``whale.place_tables``. Where gradients are sparse, ``whale.optim.RowWiseAdagrad`` updates the rows of all sides. The
parameters of all sparse sides are compared after the last step.

Where torchrec is installed (``pip install --no-deps torchrec==1.8.0 fbgemm-gpu-cpu==1.8.0 tensordict torchmetrics``
for torch 2.13, with what these import), it is one more side: tables cut as its planner says, updated inside of its
kernels, ``EXACT_ROWWISE_ADAGRAD`` of FBGEMM.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from harness import in_turns, on_two_ranks, report, table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

import torch
import torch.distributed as dist
from dlrm import Dense
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import whale

ROWS, DIM, BATCH, SEVERAL = (400_000, 150_000, 60_000, 60_000, 20_000, 2_000, 500, 40), 32, 512, 8


class Clicks(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(rows, DIM, mode="sum", sparse=sparse) for rows in ROWS)
        self.dense = Dense(len(ROWS), DIM, 13)
        for each in self.tables:
            nn.init.normal_(each.weight, std=0.1)

    def forward(self, numbers: torch.Tensor, ids: torch.Tensor, clicked: torch.Tensor) -> torch.Tensor:
        return self.dense(numbers, [each(ids[:, i]) for i, each in enumerate(self.tables)], clicked)


def batch(seed: int) -> dict[str, torch.Tensor]:
    """Indices by a power law, as those of clicks are."""
    draw = torch.Generator().manual_seed(seed)
    ids = [(torch.rand(BATCH, SEVERAL, generator=draw) ** 3 * size).long() for size in ROWS]
    clicked = (torch.rand(BATCH, generator=draw) < 0.3).float()
    return {"numbers": torch.randn(BATCH, 13, generator=draw), "ids": torch.stack(ids, 1), "clicked": clicked}


def main() -> None:
    parser = argparse.ArgumentParser(description="look-ups per second of embedding tables with sparse gradients")
    parser.add_argument("--repeats", type=int, default=20, help="timed steps of each side")
    parser.add_argument("--write", metavar="DATE", default="", help="write the results to benchmarks/results, dated so")
    options = parser.parse_args()
    on_two_ranks()
    models: dict[str, Any] = {}
    steps = {
        "EmbeddingBag, dense gradients, under DDP": ddp(models, sparse=False),
        "EmbeddingBag, sparse gradients, under DDP": ddp(models, sparse=True),
        "whale, replicate": of_whale(models, "replicate", lambda model: {"": whale.replicate()}),
        "whale, split": of_whale(
            models, "split", lambda model: {"tables.*": whale.split(), "dense": whale.replicate()}
        ),
        "whale, place_tables": of_whale(models, "placed", lambda model: whale.place_tables(model, batch(0), 2)),
    }
    if find_spec("torchrec") is not None:
        steps["torchrec, its sharder and planner"] = of_torchrec(models)
    seconds = in_turns(steps, options.repeats)
    states = {name: state(model) for name, model in models.items() if name != "dense"}
    errors = {name: max(float((own[k] - states["sparse"][k]).abs().max()) for k in own) for name, own in states.items()}
    rows = []
    base = seconds["EmbeddingBag, sparse gradients, under DDP"]
    for name, own in seconds.items():
        middle = statistics.median(own)
        rate = BATCH * SEVERAL * len(ROWS) / middle
        ratio = statistics.median(a / b for a, b in zip(base, own, strict=True))
        rows.append((name, f"{middle * 1e3:.1f} ms", f"{rate / 1e6:.2f} million", f"{ratio:.2f}"))
    text = table(("side", "step", "look-ups per second", "times DDP with sparse gradients"), rows)
    said = f"{len(ROWS)} tables of {', '.join(map(str, ROWS))} rows of {DIM}, batch {BATCH}, {SEVERAL} look-ups each"
    told = ", ".join(f"{name} {error:.1e}" for name, error in errors.items() if name != "sparse")
    report("lookups", options, f"{said}\n\n{text}\n\nlargest differences of parameters from DDP's, float32: {told}")
    dist.barrier()
    dist.destroy_process_group()


def made(sparse: bool) -> Clicks:
    torch.manual_seed(0)
    return Clicks(sparse)


def trained(model: Any, sparse: bool, step: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[], None]:
    tables = [p for name, p in model.named_parameters() if "tables" in name]
    rest = [p for name, p in model.named_parameters() if "tables" not in name]
    of_tables = whale.optim.RowWiseAdagrad(tables, lr=0.05) if sparse else torch.optim.Adagrad(tables, lr=0.05)
    of_rest, count = torch.optim.SGD(rest, lr=0.05), 0

    def run() -> None:
        nonlocal count
        step(batch(count))
        count += 1
        for optimizer in (of_tables, of_rest):
            optimizer.step()
            optimizer.zero_grad()

    return run


def ddp(models: dict[str, Any], *, sparse: bool) -> Callable[[], None]:
    model = DistributedDataParallel(made(sparse))
    models["sparse" if sparse else "dense"] = model.module
    half, rank = BATCH // 2, dist.get_rank()
    return trained(
        model, sparse, lambda given: model(**{k: v[half * rank :][:half] for k, v in given.items()}).backward()
    )


def of_whale(models: dict[str, Any], name: str, annotations: Callable[[nn.Module], Any]) -> Callable[[], None]:
    model = made(True)
    whale.annotate(model, annotations(copy.deepcopy(model)))
    parallel: Any = whale.parallelize(model, batch(0), device="cpu")
    models[name] = parallel
    return trained(parallel, True, lambda given: parallel.train_step(**given))


class Recorded(nn.Module):
    """The same model of torchrec's modules."""

    def __init__(self) -> None:
        super().__init__()
        from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

        tables = [
            EmbeddingBagConfig(name=f"t{i}", embedding_dim=DIM, num_embeddings=rows, feature_names=[f"f{i}"])
            for i, rows in enumerate(ROWS)
        ]
        self.tables, self.dense = EmbeddingBagCollection(tables, device=torch.device("meta")), made(True).dense

    def forward(self, numbers: torch.Tensor, ids: Any, clicked: torch.Tensor) -> torch.Tensor:
        found = self.tables(ids)
        return self.dense(numbers, [found[f"f{i}"] for i in range(len(ROWS))], clicked)


def of_torchrec(models: dict[str, Any]) -> Callable[[], None]:
    from torch.distributed.optim import _apply_optimizer_in_backward
    from torchrec import KeyedJaggedTensor
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    model, half, rank = Recorded(), BATCH // 2, dist.get_rank()
    _apply_optimizer_in_backward(RowWiseAdagrad, model.tables.parameters(), {"lr": 0.05, "eps": 1e-10})
    planner = EmbeddingShardingPlanner(topology=Topology(world_size=2, compute_device="cpu"), batch_size=half)
    sharders: Any = [EmbeddingBagCollectionSharder()]
    plan = planner.collective_plan(model, sharders, dist.group.WORLD)
    parallel = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=sharders)
    start = made(True).state_dict()
    for i in range(len(ROWS)):
        for part, (first, column) in parts_of(parallel, i):
            whole = start[f"tables.{i}.weight"]
            part.copy_(whole[first : first + part.shape[0], column : column + part.shape[1]])
    models["torchrec"] = Gathered(parallel)
    dense, count = torch.optim.SGD(parallel.module.dense.parameters(), lr=0.05), 0
    keys, lengths = [f"f{i}" for i in range(len(ROWS))], torch.full((len(ROWS) * half,), SEVERAL)

    def run() -> None:
        nonlocal count
        given = {k: v[half * rank :][:half] for k, v in batch(count).items()}
        ids = KeyedJaggedTensor(keys, given["ids"].transpose(0, 1).reshape(-1), lengths=lengths)
        count += 1
        parallel(given["numbers"], ids, given["clicked"]).backward()
        dense.step()
        dense.zero_grad()

    return run


def parts_of(parallel: Any, table: int) -> list[tuple[torch.Tensor, tuple[int, int]]]:
    """This rank's parts of a table of torchrec, each with its first row and column."""
    held = parallel.state_dict()[f"tables.embedding_bags.t{table}.weight"]
    if not hasattr(held, "local_shards"):
        return [(held, (0, 0))]
    return [(one.tensor, tuple(one.metadata.shard_offsets)) for one in held.local_shards()]


class Gathered:
    """The whole parameters of a model of torchrec, under the names of the local one's."""

    def __init__(self, parallel: Any) -> None:
        self.parallel = parallel

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        found = {k: v for k, v in self.parallel.state_dict().items() if k.startswith("dense")}
        for i, rows in enumerate(ROWS):
            whole, times = torch.zeros(rows, DIM), torch.zeros(rows, DIM)
            for part, (first, column) in parts_of(self.parallel, i):
                place = slice(first, first + part.shape[0]), slice(column, column + part.shape[1])
                whole[place] += part
                times[place] += 1
            dist.all_reduce(whole)
            dist.all_reduce(times)
            found[f"tables.{i}.weight"] = whole / times
        return found


def state(model: Any) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = (
        model.full_state_dict() if hasattr(model, "full_state_dict") else model.state_dict()
    )
    return found


if __name__ == "__main__":
    main()
