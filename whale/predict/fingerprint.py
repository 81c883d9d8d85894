"""A structural fingerprint of a rank's program: equal for ranks that compute, save and exchange the same, in any stages
of any plans for one captured model.

Stages, values, parameters, edges, buckets, peers, groups of ranks and the axis factors of placements are numbered in
order of appearance; everything else that the executor reads appears unchanged. An object that is not known to be data
represents itself, so that its owner is equal to nothing else. This module runs nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from whale.compile.compilation import Compilation
from whale.graph.origins import is_checkpointed, layer_of
from whale.graph.values import value_name, value_tensor
from whale.ir.placement import Placement
from whale.ir.program import Program
from whale.runtime.collectives import Bridge
from whale.runtime.local_program import LocalGraph, LocalProgram
from whale.runtime.random import RNGPosition
from whale.strategies.folding import Fold
from whale.strategies.lowering import PlacedStage

__all__ = ["Fingerprint", "fingerprint", "sketch"]

_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.memory_format,
    torch.layout,
)

_OF_ALL_MODULES = frozenset(vars(nn.Module()))
"""Attributes of every module: its name, and its children."""


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """Fingerprint of a rank, with its numbered stages and groups of ranks."""

    description: Hashable
    stages: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]


def fingerprint(compilation: Compilation, rank: int, program: Program, clock: RNGPosition | None) -> Fingerprint:
    """Return the fingerprint of *rank* when it runs *program*."""
    known, stages = _Numbers(), _stages(compilation, rank)
    for stage in stages:
        known.number("stage", stage.index)
    parameters = tuple(
        (known.number("parameter", name), part.shape, part.dtype, part.trainable)
        for name, part in compilation.local_parameters(rank).items()
    )
    given = _given(compilation)
    computed = tuple(
        (
            tuple(known.number("value", value_name(value)) for value in stage.sent),
            stage.loss is not None,
            tuple(stage.mutated),
            tuple(known.local_program(local, given) for local in compilation.local_programs(stage, rank, clock)),
            tuple(known.fold(compilation, fold) for fold in compilation.folds.get(stage.index, ())),
            (stage.recompute, stage.offload),
            _regions(compilation, stage, rank, clock, known) if compilation.computes_again else (),
        )
        for stage in stages
    )
    return _fingerprint(compilation, rank, program, known, (parameters, computed))


def sketch(compilation: Compilation, rank: int, program: Program, clock: RNGPosition | None) -> Fingerprint:
    """Return a stricter fingerprint, which is found without lowering: equal only for ranks at the same place in the
    mesh of the same stages, whose local programs are then equal up to names of ranks."""
    known, computed = _NumbersAndNames(), []
    for stage in _stages(compilation, rank):
        known.number("stage", stage.index)
        lines = [tuple(sorted(stage.mesh.group(axis, rank))) for axis in range(len(stage.mesh.axes))]
        groups = (known.number("ranks", line) for line in lines)
        computed.append((stage.origin, stage.mesh.coordinates(rank), stage.recompute, stage.offload, *groups))
    return _fingerprint(compilation, rank, program, known, (tuple(computed), compilation.rows, clock))


def _regions(
    compilation: Compilation, stage: PlacedStage, rank: int, clock: RNGPosition | None, known: _Numbers
) -> Hashable:
    """For each operator of a stage's programs the layer it is in, and whether it is in a checkpoint: in these regions
    values are computed again."""
    programs = {id(one): one for one in compilation.local_programs(stage, rank, clock)}
    sources = [node.meta.get("source") for one in programs.values() for node in one.micro_batch.code.graph.nodes]
    return tuple(
        (known.number("layer", layer_of(node)), is_checkpointed(node)) if isinstance(node, fx.Node) else None
        for node in sources
    )


def _stages(compilation: Compilation, rank: int) -> list[PlacedStage]:
    return [stage for stage in compilation.stages if rank in stage.mesh.ranks]


def _fingerprint(
    compilation: Compilation, rank: int, program: Program, known: _Numbers, computed: Hashable
) -> Fingerprint:
    """The fingerprint of *rank* whose stages are described by *computed*."""
    stages = tuple(stage.index for stage in _stages(compilation, rank))
    own = set(stages)
    edges = tuple(
        (
            known.number("edge", edge.index),
            known.number("value", edge.value),
            edge.source_stage in own and known.number("stage", edge.source_stage),
            edge.target_stage in own and known.number("stage", edge.target_stage),
            edge.needs_grad,
            edge.dtype,
            edge.distinct,
            tuple(shapes.get(rank) for shapes in edge.source_shapes[: len(compilation.rows)]),
            tuple(shapes.get(rank) for shapes in edge.target_shapes[: len(compilation.rows)]),
        )
        for edge in compilation.edges
        if own & {edge.source_stage, edge.target_stage}
    )
    units = {unit.spec.index: (unit.on_host, unit.read_as) for unit in compilation.units}
    buckets = tuple(
        (
            known.number("bucket", spec.index),
            tuple(known.number("parameter", name) for name in names),
            tuple(known.number("stage", stage) for stage in spec.stages if stage in own),
            len(spec.ranks),
            spec.rows,
            None if spec.adasum is None else (len(spec.adasum.ranks), *map(len, spec.adasum.replicas)),
            (spec.bounds, spec.ranks.index(rank), spec.gathers, spec.each, units.get(spec.index))
            if spec.bounds
            else (),
        )
        for spec, names in zip(compilation.reduces, compilation.bucket_parameters, strict=True)
        if rank in spec.ranks
    )
    instructions = tuple(
        (
            type(one),
            tuple(
                known.number(name, x) if name in ("stage", "edge", "bucket", "peer") else x
                for name, x in zip(one._fields, one, strict=True)
            ),
        )
        for one in program
    )
    return Fingerprint(
        description=(computed, edges, buckets, instructions), stages=stages, groups=tuple(known.of_kind("ranks"))
    )


def _given(compilation: Compilation) -> dict[str, Hashable]:
    """Shapes and dtypes of everything that exists before the step, except parameters, whole on every rank."""
    captured = compilation.captured
    found: dict[str, Hashable] = {}
    for node in captured.graph.nodes:
        if node.op == "placeholder" and isinstance(node.meta.get("val"), Tensor):
            kind = value_tensor((node, 0))
            found[captured.buffers.get(node.name, node.name)] = tuple(kind.shape), kind.dtype
    return found


class _Numbers:
    """Numbers for names, by kind, in order of appearance; and descriptions of their objects."""

    def __init__(self) -> None:
        self._known: dict[str, dict[Any, int]] = {}

    def number(self, kind: str, name: Any) -> Any:
        """The number of a name."""
        known = self._known.setdefault(kind, {})
        return known.setdefault(name, len(known))

    def of_kind(self, kind: str) -> list[Any]:
        """All names, by number."""
        return list(self._known.get(kind, ()))

    def fold(self, compilation: Compilation, fold: Fold) -> Hashable:
        """The layers that a fold leaves out, by their parameters."""
        name = compilation.parameter_name
        return fold.omitted, tuple(
            tuple(self.number("parameter", name(value)) for value in (own, *others))
            for own, others in fold.parameters.items()
        )

    def local_program(self, program: LocalProgram, given: Mapping[str, Hashable]) -> Hashable:
        """A local program, and the sources of its inputs."""
        graphs = (program.constant, program.step, program.micro_batch)
        return tuple(self._graph(graph, given) for graph in graphs), program.nothing

    def _graph(self, graph: LocalGraph, given: Mapping[str, Hashable]) -> Hashable:
        places: dict[fx.Node, int] = {}
        found = []
        for node in graph.code.graph.nodes:
            target: Hashable = node.target
            if node.op == "call_module":
                target = self._token(graph.code.root.get_submodule(str(node.target)), places)
            elif node.op == "placeholder":
                target = None  # its source determines it
            found.append((node.op, target, self._token(node.args, places), self._token(node.kwargs, places)))
            places[node] = len(places)
        return tuple(found), tuple(self._source(kind, what, given) for kind, what in graph.sources)

    def _source(self, kind: str, what: Any, given: Mapping[str, Hashable]) -> Hashable:
        if kind == "parameter":
            return kind, self.number("parameter", what)
        if kind == "buffer" or (kind == "constant" and isinstance(what, str)):
            return kind, self.number("given", (kind, what)), given.get(what)
        if kind in ("rows", "columns"):  # how many there are
            return kind, tuple(sum(stop - start for start, stop in dim) for dim in what[0])
        return kind, what

    def _token(self, x: Any, places: Mapping[fx.Node, int]) -> Hashable:
        """Canonical form of data, equal for data that are equal up to names; a node of the graph becomes its
        position."""
        if isinstance(x, fx.Node):
            return fx.Node, places[x]
        if isinstance(x, _PLAIN):
            return type(x), x
        if isinstance(x, Placement):
            return Placement, x.kind, x.dim, self.number("factor", x.factor)
        if isinstance(x, tuple | list):
            return type(x), tuple(self._token(item, places) for item in x)
        if isinstance(x, dict):
            return type(x), tuple((key, self._token(value, places)) for key, value in x.items())
        if isinstance(x, slice):
            return slice, tuple(self._token(item, places) for item in (x.start, x.stop, x.step))
        if is_dataclass(x) and not isinstance(x, type):
            return type(x), self._named({field.name: getattr(x, field.name) for field in fields(x)}, places)
        if isinstance(x, nn.Module) and not x._parameters and not x._buffers:
            names = _OF_ALL_MODULES | {"value"} if isinstance(x, Bridge) else _OF_ALL_MODULES  # it is for profiles
            own = {name: value for name, value in vars(x).items() if name not in names}
            return type(x), self._named(own, places), self._named(x._modules, places)
        return _Itself(x)

    def _named(self, values: Mapping[str, Any], places: Mapping[fx.Node, int]) -> Hashable:
        def token(name: str, x: Any) -> Hashable:
            if name == "ranks":
                return self.number("ranks", tuple(sorted(x))), len(x)
            return self._token(x, places)

        return tuple((name, token(name, x)) for name, x in values.items())


class _NumbersAndNames(_Numbers):
    """The same with parameters and values by their names: what is known of them has these names."""

    def number(self, kind: str, name: Any) -> Any:
        return name if kind in ("parameter", "value") else super().number(kind, name)


@dataclass(frozen=True)
class _Itself:
    """An object that is equal to no other; kept alive, so that its address is not reused."""

    x: Any

    def __hash__(self) -> int:
        return id(self.x)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.x is other.x
