"""Assumptions of a command about options that were not given: printed in every output, with the option that changes
them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from whale.cli.model_loader import LoadedModel
from whale.errors import UsageError

if TYPE_CHECKING:
    from whale.ir.cluster import Cluster
    from whale.ir.plan import Plan
    from whale.ir.profile import ModelProfile

__all__ = [
    "assumptions_text",
    "autocast_of",
    "dtype_of",
    "in_precision",
    "is_given",
    "said_of_model",
    "said_of_optimizer",
]


def is_given(option: str) -> bool:
    """Whether the user gave an option, by the name of its parameter, of the verb that runs."""
    source = click.get_current_context().get_parameter_source(option)
    return source not in (None, click.core.ParameterSource.DEFAULT, click.core.ParameterSource.DEFAULT_MAP)


def in_precision(loaded: LoadedModel, precision: str | None) -> str:
    """Put model and batch in a number type, by its name or dtype. Those of ``torch.autocast`` leave them, as None does.
    Returns the name of what it runs in.

    Raises:
        UsageError: models do not run in that one.
    """
    if autocast_of(precision) is not None:
        return str(precision)
    import torch

    from whale.compile.trace import precision_of
    from whale.strategies.layers import converted

    if precision is not None:
        dtype = getattr(torch, dtype_of(precision))
        loaded.model.to(dtype)
        loaded.batch = converted(loaded.batch, dtype)
    return "tf32" if precision == "tf32" else precision_of(loaded.model)


def autocast_of(precision: str | None, profile: ModelProfile | None = None) -> str | None:
    """The precision of ``torch.autocast`` that is asked for, if it is one, or under which a given profile was captured.

    Raises:
        UsageError: the profile is not of the one that is asked for.
    """
    from whale.planner.cost.precision import AUTOCAST, PRECISIONS

    asked = precision if precision in AUTOCAST else None
    captured = None if profile is None else profile.autocast or None
    if precision is None:
        return captured
    if profile is not None and profile.layers and asked != captured:
        under = f"under torch.autocast in {captured}" if captured else "without torch.autocast"
        instead = f"; {PRECISIONS[precision].products[0]} is the number type of a model itself" if asked else ""
        raise UsageError(
            f"--precision {precision}: the profile was captured {under}; make one with 'whale profile model "
            f"--precision {precision}'{instead}"
        )
    return asked


def dtype_of(precision: str) -> str:
    """The number type of a model that runs in a precision, by its name or dtype.

    Raises:
        UsageError: no model runs in that one.
    """
    from whale.planner.cost.precision import BY_DTYPE, DTYPES

    types = DTYPES | {"tf32": "float32"}
    dtype = precision if precision in BY_DTYPE else types.get(precision)
    if dtype is None:
        raise UsageError(
            f"--precision {precision}: a step runs in bf16 or fp16 over parameters in float32, and a model itself in "
            f"{', '.join(dict.fromkeys((*BY_DTYPE, 'fp64', 'fp32', 'tf32')))}"
        )
    return dtype


def said_of_model(loaded: LoadedModel, precision: str, *, rows: int) -> tuple[str, ...]:
    """Assumptions about a model and its batch: the command's options that were not given.

    Args:
        loaded: the model.
        precision: that it has.
        rows: of its batch.
    """
    said = list(loaded.assumptions)
    params = {parameter.name for parameter in click.get_current_context().command.params}
    if "precision" in params and not is_given("precision"):
        said.append(f"{precision}, the model's number type; --precision NAME changes it")
    if "batch_size" in params and not is_given("batch_size"):
        said.append(f"a batch of {rows} row{'s' if rows != 1 else ''}, as in the example; --batch N changes it")
    return (*said, *said_of_optimizer())


def said_of_optimizer() -> tuple[str, ...]:
    """Assumptions about the optimizer, if the command has such an option."""
    context = click.get_current_context()
    if "optimizer" not in context.params or is_given("optimizer"):
        return ()
    return (f"the state of {context.params['optimizer']} in memory; --optimizer NAME changes it",)


def said_of_hosts(plan: Plan, cluster: Cluster) -> tuple[str, ...]:
    """Assumptions about the memory of hosts, if a plan uses it."""
    from whale.planner.cost.hosts import host_text

    return tuple(host_text(cluster)) if any(stage.offload not in (None, "none") for stage in plan.stages) else ()


def assumptions_text(said: Sequence[str]) -> str:
    """The assumptions as lines; empty if there are none."""
    return "\n".join(["assumed:", *(f"  {one}" for one in said)]) if said else ""
