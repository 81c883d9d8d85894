"""Tracing: from a model and an example batch to a graph, with everything that depends on these alone.

A model is traced once and compiled for many plans, clusters and annotations; a trace is their common part. It allocates
nothing, and knows no device and no plan.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from whale.errors import UsageError
from whale.graph.capture import capture
from whale.graph.captured import Captured, mark_gradients
from whale.graph.composites import write_out_composites
from whale.graph.identity import model_hash
from whale.graph.masks import recognize_masks
from whale.graph.ordering import settle_order
from whale.graph.origins import where
from whale.graph.partition import Dataflow, Partition, dataflow, partition
from whale.graph.precision import LOW_PRECISIONS
from whale.graph.scoping import module_paths, scopes_by_module
from whale.graph.values import Value, needs_grad, resolve
from whale.ir.garbage import without_collections
from whale.ir.program import Returns
from whale.ir.strategy import ScopePath
from whale.planner.cost.precision import BY_DTYPE
from whale.strategies.analysis import Analysis, Choice, analyse
from whale.strategies.folding import Kinds
from whale.strategies.lowering import PlacedStage
from whale.strategies.placing import Report, batch_placeholders, place_time
from whale.strategies.rules.registry import rule_of
from whale.strategies.ungroup import ungroup

__all__ = ["Traced", "main_dtype", "precision_of", "set_modes", "trace"]


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A model's step as a graph.

    Attributes:
        captured: the graph of the loss.
        analysis: the axes of its values, and the sharding choices of each operator.
        flow: its operators, and their inputs.
        annotated: its stages, by the annotations with which the model was traced.
        paths: for each operator the modules that computed it, innermost first.
        loss: the value that is the loss.
        dtype: by its speeds the model is placed (:func:`main_dtype`).
        parameters, buffers: bytes of those of the model, by name, whether the loss reads them or not.
    """

    captured: Captured
    analysis: Analysis
    flow: Dataflow
    annotated: Partition
    paths: Mapping[fx.Node, tuple[str, ...]]
    loss: Value
    dtype: str
    parameters: Mapping[str, int]
    buffers: Mapping[str, int]

    @cached_property
    def hash(self) -> str:
        """The model's hash in plans and profiles, independent of batch and annotations."""
        return model_hash(self.captured)

    @cached_property
    def kinds(self) -> Kinds:
        """Numbers of its operators, equal for those of equal layers."""
        return Kinds(self.captured, self.analysis)

    @cached_property
    def placed(self) -> dict[Hashable, tuple[PlacedStage, Report]]:
        """Cached placements of stages, with the warnings about them; many plans have the same stages."""
        return {}

    @cached_property
    def communicating(self) -> dict[Hashable, frozenset[int]]:
        """Cached axes of meshes along which the programs of placed stages communicate."""
        return {}

    @cached_property
    def units(self) -> int:
        """Independent rows of the batch; 1 if the batch cannot be divided."""
        return self.analysis.factors.size(self.analysis.batch_factor) if self.analysis.batch_factor >= 0 else 1

    def stages(self, scopes: Mapping[str, ScopePath]) -> Partition:
        """The stages under other annotations, by module path as `whale.annotations.module_scopes` returns them.

        Raises:
            AnnotationError: the data does not flow from stage to stage in their order, or a stage computes nothing.
        """
        return partition(self.captured, scopes_by_module(self.paths, scopes), self.flow)

    def cut_in_time(self, micro_batches: int) -> Mapping[fx.Node, Choice]:
        """Division of every operator into micro-batches.

        Raises:
            UsageError: an operator computes a row of the batch from others.
        """
        if micro_batches > 1 and self._cut_in_time is not None:
            return self._cut_in_time
        return place_time(self.captured, self.analysis, self.annotated, micro_batches)

    @cached_property
    def _cut_in_time(self) -> Mapping[fx.Node, Choice] | None:
        """The same for any number of micro-batches; None if the batch cannot be divided."""
        try:
            return place_time(self.captured, self.analysis, self.annotated, 2)
        except UsageError:
            return None


@without_collections
def trace(
    model: nn.Module,
    batch: Any,
    *,
    device: torch.device | str,
    training: bool,
    modes: Sequence[bool] = (),
    loss_fn: Callable[..., Any] | None = None,
    promote: bool = False,
    returns: Returns = "loss",
    numbers: Collection[str] = (),
    precision: str | None = None,
    values: Callable[[str], torch.Tensor | None] | None = None,
) -> Traced:
    """Trace the loss of *model* for batches like *batch*.

    Args:
        model: annotated or not; on the meta device where its values are not needed.
        batch: an example of the global batch.
        device: on which the model is to run.
        training: whether it trains; it decides what dropout is, and that there must be something to train.
        modes: whether each module is in training mode, in the order of ``modules()``, where they are not all alike.
        loss_fn: for a model that does not return its loss.
        promote: turn casts to float32 inside the model into casts to float64.
        numbers: leaves of the batch, of type float, that the step takes as tensors.
        precision: ``bf16`` or ``fp16``: that in which ``torch.autocast`` lets it compute.
        values: gives a buffer by its name, where the model's has no data; without it they have any.
        returns: what a step returns. For outputs alone the sum of one of them is in the place of the loss.

    Raises:
        CaptureError: the model cannot be captured.
        AnnotationError: its annotations are not in the order of the data's flow.
        UsageError: its loss depends on nothing that could be trained.
    """
    set_modes(model, training, modes)
    dtype = LOW_PRECISIONS.get(precision or "")
    options: dict[str, Any] = {"loss_fn": loss_fn, "promote": promote, "returns": returns, "numbers": numbers}
    options["values"] = values
    captured = capture(model, batch, device=device, precision=dtype, **options)
    written_out = write_out_composites(captured.graph, lambda node: not rule_of(node).opaque)
    recognize_masks(captured)
    if ungroup(captured.graph) or written_out:
        mark_gradients(captured, model)
    settle_order(captured)
    flow = dataflow(captured)
    stages = partition(captured, flow=flow)
    loss = resolve(captured.graph.output_node().args[0][0])  # type: ignore[index, arg-type]
    _check_loss(loss, stages, training)
    return Traced(
        captured=captured,
        analysis=analyse(captured.graph, batch_placeholders(captured)),
        flow=flow,
        annotated=stages,
        paths=module_paths(captured, model),
        loss=loss,
        dtype=main_dtype(model) if dtype is None else str(dtype).removeprefix("torch."),
        parameters={name: x.nbytes for name, x in model.named_parameters()},
        buffers={name: x.nbytes for name, x in model.named_buffers()},
    )


def set_modes(model: nn.Module, training: bool, modes: Iterable[bool]) -> None:
    """Let a model be in training mode or not, and each of its modules, in the order of ``modules()``, in that of
    *modes*."""
    model.train(training)
    for module, mode in zip(model.modules(), modes, strict=False):
        module.training = mode


def _check_loss(loss: Value, stages: Partition, training: bool) -> None:
    if loss[0] not in stages.stage_of:
        raise UsageError(
            f"the loss{where(loss[0])} depends on no parameter of the model: there is nothing to train; return a loss "
            "that is computed from the parameters"
        )
    if training and not needs_grad(loss):
        raise UsageError(
            f"the loss{where(loss[0])} depends on no parameter that requires a gradient: there is nothing to train; "
            "unfreeze a parameter with requires_grad_(), or call model.eval() first and use eval_step"
        )


def main_dtype(model: nn.Module) -> str:
    """The dtype by whose speeds a model is placed, as clusters name it: that of its first floating parameter.

    float64 counts as float32, because a model in float64 checks one in float32 and must be placed equally.
    """
    name = _first_dtype(model)
    return name if name != "float64" else "float32"


def precision_of(model: nn.Module) -> str:
    """The precision in which a model's step is priced: that of its first floating parameter, ``tf32`` where that is
    float32 and the process lets CUDA multiply it so (``torch.set_float32_matmul_precision("high")``)."""
    name = BY_DTYPE[_first_dtype(model)]
    return "tf32" if name == "fp32" and torch.backends.cuda.matmul.fp32_precision == "tf32" else name


def _first_dtype(model: nn.Module) -> str:
    first = next((p for p in model.parameters() if p.is_floating_point()), None)
    return str(first.dtype).removeprefix("torch.") if first is not None else "float32"
