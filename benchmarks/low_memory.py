"""Recompute and low precision: GPT-2 (its 12 layers, 256 wide, 8 x 128) on two replicas.

Recompute is compared with steps of Whale that keep everything, and with PyTorch's checkpoints in every block
(`gradient_checkpointing_enable`) under DistributedDataParallel. Memory is the peak of a step's live bytes beside
parameters and gradients, which are there all the time: it has what one layer computes again, too. *Two in flight* is
the first of two stages, which has two micro-batches of half of the layers. Time is that of a forward and backward.
bfloat16 is compared with DistributedDataParallel under torch.autocast, by time, and by the largest difference of the
losses of ten steps of AdamW.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from harness import HEAD, Row, arguments, on_two_ranks, over_ranks, report, side_by_side, table
from live_bytes import LiveBytes, living, peak_of
from models import batch, gpt2
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import whale
from whale.ir.strategy import Recompute

LAYERS, ROWS, LENGTH = 12, 8, 128


def replicated(**options: Any) -> Any:
    model = gpt2(layers=LAYERS)
    whale.annotate(model, {"": whale.replicate()})
    return whale.parallelize(model, batch(ROWS, LENGTH), device="cpu", **options)


def own_rows() -> dict[str, Tensor]:
    half = ROWS // 2
    return {name: x[half * dist.get_rank() :][:half] for name, x in batch(ROWS, LENGTH).items()}


def whale_step(model: Any, *, keeps_gradients: bool = False) -> None:
    model.zero_grad(set_to_none=not keeps_gradients)
    model.train_step(**batch(ROWS, LENGTH))


def torch_step(model: nn.Module, dtype: torch.dtype | None = None, *, keeps_gradients: bool = False) -> float:
    model.zero_grad(set_to_none=not keeps_gradients)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        loss: Tensor = model(**own_rows()).loss
    loss.backward()
    return loss.item()


def activations(make: Callable[[], Callable[[], object]]) -> float:
    """Peak bytes of a step beside parameters and gradients, of the rank with more."""
    others = frozenset(living())
    with LiveBytes(others) as live:
        step: Any = make()
        step.keywords["keeps_gradients"] = True
        peak = peak_of(step, live)
    parameters = sum(x.numel() * x.element_size() for x in step.args[0].parameters())
    return over_ranks(float(peak - 2 * parameters), dist.ReduceOp.MAX)


def with_rule(rule: Recompute) -> Callable[[], object]:
    return partial(whale_step, replicated(recompute=rule))


def in_stages(rule: Recompute) -> Callable[[], object]:
    model = gpt2(layers=LAYERS)
    whale.annotate(model, {"transformer.wte": whale.stage(), f"transformer.h.{LAYERS // 2}": whale.stage()})
    options = {"recompute": rule, "micro_batches": 2, "device": "cpu"}
    return partial(whale_step, whale.parallelize(model, batch(ROWS, LENGTH), **options))


def checkpointed() -> Callable[[], object]:
    model: Any = gpt2(layers=LAYERS)
    model.gradient_checkpointing_enable()
    return partial(torch_step, DistributedDataParallel(model.train(), gradient_as_bucket_view=True))


def losses_apart() -> float:
    """The largest difference of ten losses in bfloat16."""
    model, plain = replicated(precision="bf16"), DistributedDataParallel(copy.deepcopy(gpt2(layers=LAYERS)))
    own, other = AdamW(model.parameters()), AdamW(plain.parameters())
    largest = 0.0
    for _ in range(10):
        found = model.train_step(**batch(ROWS, LENGTH)).item()
        expected = over_ranks(torch_step(plain, torch.bfloat16), dist.ReduceOp.SUM) / 2
        largest = max(largest, abs(found - expected))
        for optimizer in (own, other):
            optimizer.step()
            optimizer.zero_grad()
    return largest


def main() -> None:
    options = arguments("recompute and low precision")
    on_two_ranks()
    rows = []
    timed = partial(side_by_side, repeats=options.repeats)
    everything = activations(partial(with_rule, "none"))
    torch_bytes = activations(checkpointed)
    for rule, most, longest in (("selective", 0.40, 1.10), ("full", 0.25, 1.30)):
        replicas = activations(partial(with_rule, rule))
        rows.append(Row(f"{rule} against none, memory", replicas, everything, most, unit="B").cells())
        kept, whole = (activations(partial(in_stages, one)) for one in (rule, "none"))
        rows.append(Row(f"{rule} against none, memory, two in flight", kept, whole, most, unit="B").cells())
        if rule == "full":
            rows.append(Row("full against torch's checkpoints, memory", replicas, torch_bytes, 1.0, unit="B").cells())
        rows.append(timed(f"{rule} against none, time", with_rule(rule), with_rule("none"), target=longest).cells())
    rows.append(timed("full against torch's checkpoints, time", with_rule("full"), checkpointed(), target=1.0).cells())
    low, plain = replicated(precision="bf16"), DistributedDataParallel(gpt2(layers=LAYERS))
    case = "bf16 against DDP under autocast, time"
    one, other = partial(whale_step, low), partial(torch_step, plain, torch.bfloat16)
    rows.append(timed(case, one, other, target=1.05).cells())
    apart = losses_apart()
    report("low_memory", options, f"{table(HEAD, rows)}\n\nLosses of ten steps in bfloat16: at most {apart:.1e} apart.")


if __name__ == "__main__":
    main()
