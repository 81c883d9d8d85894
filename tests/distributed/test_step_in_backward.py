"""The optimizer's step inside of the backward: bits of the step after it, and what cannot be so is refused."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import whale
from tests.distributed.parity import Worlds
from tests.distributed.parity import worlds as worlds_of_a_module
from tests.distributed.test_zero import LAYOUTS
from tests.distributed.trained import MODELS, built
from tests.distributed.two_ranks import refusal
from whale.compile import exchanges
from whale.runtime.launch import World


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    with worlds_of_a_module() as made:
        yield made


def trained(model: Any, batch: Any, made: Any) -> tuple[list[float], dict[str, Tensor], Any]:
    """Losses, whole parameters and this rank's optimizer states of some steps, in the loop of any script."""
    parameters = dict(model.named_parameters())
    kept = [p for name, p in parameters.items() if "norm" in name or p.dim() < 2]
    rest = [p for p in parameters.values() if not any(p is x for x in kept)]
    groups = [{"params": kept, "weight_decay": 0.0}, {"params": rest, "weight_decay": 0.1}]
    optimizer = made([group for group in groups if group["params"]], lr=1e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    losses = []
    for _ in range(3):
        losses.append(model.train_step(**batch).item())
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    states = [dict(optimizer.state[p]) for p in parameters.values() if p in optimizer.state]
    return losses, model.full_state_dict(), states


def both(world: World | None, name: str, kind: str, options: dict[str, Any], optimizer: str = "AdamW") -> bool:
    """Whether all bits are those of the step after the backward, where buckets are small."""
    model, batch = built(name)
    if "precision" in options or options.get("compile"):
        model = model.float()
    found = []
    for own in (options, {**options, "step_in_backward": True}):
        made = copy.deepcopy(model)
        whale.annotate(made, LAYOUTS[kind](MODELS[name].stages))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(exchanges, "bucket_bytes", lambda *of, **options: 1024)
            parallel: Any = whale.parallelize(made, batch, device="cpu", **own)
        found.append(trained(parallel, batch, getattr(torch.optim, optimizer)))
        if own is not options:
            assert all(p.grad is None for p in parallel.parameters())
    (losses, state, states), other = found
    torch.testing.assert_close(other, (losses, state, states), rtol=0, atol=0)
    return len(losses) == len(set(losses))


class Counting(torch.optim.SGD):
    """Counts its steps in a group, as some optimizers of scripts do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return super().step(closure)


def refused(world: World) -> dict[str, str]:
    model, batch = built("decoder")
    whale.annotate(model, {"": whale.replicate()})

    def made(**options: Any) -> Any:
        return whale.parallelize(copy.deepcopy(model).float(), batch, device="cpu", step_in_backward=True, **options)

    def stepped(parallel: Any) -> str:
        return refusal(lambda: parallel.train_step(**batch))

    found = {"fp16": refusal(lambda: made(precision="fp16")), "none": stepped(made())}
    makers: dict[str, Any] = {"counts": Counting, "all at once": torch.optim.LBFGS}
    for name, optimizer in makers.items():
        parallel = made()
        alive = optimizer(parallel.parameters(), lr=0.1)
        found[name] = stepped(parallel)
        assert alive.param_groups
    parallel = made()
    kept = torch.optim.SGD(parallel.parameters(), lr=0.1)
    parallel.train_step(**batch)
    found["again"] = stepped(parallel)
    found["clipped"] = refusal(lambda: torch.nn.utils.clip_grad_norm_(parallel.parameters(), 1.0))
    found["clipped by the model"] = refusal(lambda: parallel.clip_grad_norm_(1.0))
    found["read"] = refusal(parallel.full_gradients)
    kept.param_groups[0]["lr"] = 0.2
    found["changed"] = refusal(lambda: kept.step())
    kept.step()
    next(parallel.parameters()).grad = torch.zeros_like(next(parallel.parameters()))
    found["a gradient"] = stepped(parallel)
    kept.zero_grad()
    other = torch.optim.SGD(parallel.parameters(), lr=0.1)
    found["several"] = stepped(parallel)
    del other
    parallel.train_step(**batch)
    return found


def test_what_needs_all_gradients_is_refused(worlds: Worlds) -> None:
    for found in worlds.run(2, refused):
        assert all("step_in_backward" in said for said in found.values()), found
        assert "bf16" in found["fp16"] and "make it after parallelize" in found["none"]
        assert "count in a step" in found["counts"] and "LBFGS" in found["all at once"]
        assert "micro_batches=" in found["again"] and "optimizer.zero_grad()" in found["a gradient"]
        assert "clip_grad" in found["clipped"] and "clip_grad_norm_" in found["clipped by the model"]
        assert "lr of the optimizer" in found["changed"] and "several optimizers" in found["several"]


CASES: list[tuple[int, str, str, dict[str, Any], str]] = [
    (1, "gpt2", "dp", {}, "AdamW"),
    (2, "gpt2", "dp", {}, "AdamW"),
    (2, "gpt2", "dp", {"zero": 1}, "AdamW"),
    (2, "gpt2", "dp", {"zero": 2, "micro_batches": 2, "recompute": "selective"}, "AdamW"),
    (2, "decoder", "dp", {"gradient_dtype": "bf16", "recompute": "full"}, "AdamW"),
    (2, "decoder", "dp", {"precision": "bf16", "micro_batches": 2}, "AdamW"),
    (2, "decoder", "dp", {"zero": 1, "offload": "both"}, "AdamW"),
    (2, "decoder", "dp", {}, "Adafactor"),
    (2, "decoder", "dp", {"compile": True}, "AdamW"),
    (4, "gpt2", "dp x tp", {"zero": 3, "recompute": "full"}, "AdamW"),
    (4, "decoder", "dp x pp", {"micro_batches": 4, "schedule": "zero_bubble"}, "AdamW"),
    (4, "gpt2", "pp x dp", {"micro_batches": 2, "zero": 1, "recompute": "full"}, "AdamW"),
    (4, "t5", "pp x dp", {"micro_batches": 2, "zero": 2, "schedule": "zero_bubble"}, "AdamW"),
    (4, "decoder", "each stage its own", {"micro_batches": 2}, "AdamW"),
]


@pytest.mark.parametrize(("ranks", "name", "kind", "options", "optimizer"), CASES, ids=lambda x: str(x))
def test_bits_are_those_of_the_step_after_the_backward(
    worlds: Worlds, ranks: int, name: str, kind: str, options: dict[str, Any], optimizer: str
) -> None:
    given = name, kind, options, optimizer
    assert all(worlds.run(ranks, both, *given) if ranks > 1 else [both(None, *given)])
