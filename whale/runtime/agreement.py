"""Agreement of ranks at the start: they compare digests of what each has compiled, and wait for each other.

Ranks compile independently, so ranks with different models, plans or seeds would make different groups and wait for
each other until a timeout. Here they first exchange a few digests and report which ranks differ, and in what. It knows
ranks and texts; not what was compiled.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from whale.errors import PlanMismatchError
from whale.runtime.launch import World

__all__ = ["agree", "agree_on_values", "meet"]

_BYTES = 16


def agree(world: World, texts: Mapping[str, str]) -> None:
    """Compare named texts with those of all ranks.

    Raises:
        PlanMismatchError: on every rank; names what differs and the ranks that differ from the most common text.
        WorkerError: a rank did not come within the timeout; names it.
    """
    if world.size == 1:
        return
    mine = b"".join(hashlib.sha256(text.encode()).digest()[:_BYTES] for text in texts.values())
    local = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(world.device)
    gathered = [torch.empty_like(local) for _ in range(world.size)]
    work = dist.all_gather(gathered, local, async_op=True)
    world.failures.wait(work, "the comparison of what ranks compiled", range(world.size))
    rows = [row.view(len(texts), _BYTES).tolist() for row in gathered]
    for index, name in enumerate(texts):
        column = [bytes(row[index]) for row in rows]
        common, _ = Counter(column).most_common(1)[0]
        others = [rank for rank, digest in enumerate(column) if digest != common]
        if others:
            who = f"rank {others[0]} differs" if len(others) == 1 else f"ranks {others} differ"
            raise PlanMismatchError(
                f"{who} from rank {column.index(common)} in {name}; start the same script with the same arguments, "
                "seed and versions on every rank"
            )


def agree_on_values(world: World, names: Sequence[str], values: Sequence[float]) -> None:
    """Compare a sample of named numbers with those of all ranks, within a thousandth, because processors round
    differently.

    Raises:
        PlanMismatchError: on every rank; names the first value that differs, and the ranks.
        WorkerError: a rank did not come within the timeout; names it.
    """
    if world.size == 1 or not names:
        return
    local = torch.tensor(values, dtype=torch.float32, device=world.device)
    gathered = [torch.empty_like(local) for _ in range(world.size)]
    work = dist.all_gather(gathered, local, async_op=True)
    world.failures.wait(work, "the comparison of the model's values", range(world.size))
    rows = torch.stack(gathered).cpu()
    different = ~torch.isclose(rows, rows[0], rtol=1e-3, atol=1e-8, equal_nan=True)
    if different.any():
        first = int(different.any(dim=0).nonzero()[0])
        ranks = different[:, first].nonzero().flatten().tolist()
        who = f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {ranks} have"
        raise PlanMismatchError(
            f"{who} other values in {names[first]} than rank 0: every rank must build the same model; call "
            "torch.manual_seed with one seed on every rank, or load one checkpoint on all"
        )


def meet(world: World, what: str) -> None:
    """Wait for every rank.

    Raises:
        WorkerError: a rank did not come within the timeout, or failed before; names it.
    """
    if world.size == 1:
        return
    token = torch.zeros(1, device=world.device)
    work = dist.all_reduce(token, async_op=True)
    assert work is not None
    world.failures.wait(work, what, range(world.size))
