"""The plan: all decisions of the planner, as readable, diffable, editable, versioned data, never executable.

A plan says which ranks compute which stage, along which mesh axes and in which shares, for which batch and schedule;
for an unmodified model also the annotations. It names the model and the cluster that it was made for, and has its
prediction. It knows no graph and no torch: it is checked for consistency here, against the launch and the cluster by
its methods, and against the model where the model is compiled.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from math import ceil, isfinite, prod
from os import PathLike
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    StringConstraints,
    WithJsonSchema,
    model_validator,
)

from whale.errors import AnnotationError, PlanMismatchError, UsageError
from whale.ir.cluster import Cluster, HostMemory, Node
from whale.ir.files import write_file
from whale.ir.json_text import format_json
from whale.ir.module_pattern import ModulePattern
from whale.ir.ranks import MAX_RANKS, read_ranks, write_ranks
from whale.ir.record import FileRecord, Record
from whale.ir.schedule import SCHEDULES, check_devices
from whale.ir.state import Align, StateSharding
from whale.ir.strategy import (
    MAX_STALENESS,
    Offload,
    Recompute,
    Reduce,
    Role,
    Strategy,
    check_nesting,
    divides_batch,
    parse_strategy,
)
from whale.ir.units import started
from whale.ir.workload import Prediction, Workload

__all__ = ["ClusterIdentity", "ModelIdentity", "Plan", "PlanAxis", "PlanStage", "PlanState"]


def _strategies(given: object) -> object:
    return (given,) if isinstance(given, str) else given


def _check_strategy(text: str) -> str:
    parse_strategy(text)
    return text


def _check_schedule(name: str) -> str:
    if name not in SCHEDULES:
        near = difflib.get_close_matches(name, SCHEDULES, n=1)
        raise ValueError(f"unknown schedule {name!r}; " + (f"did you mean {near[0]!r}?" if near else _SCHEDULES))
    return name


_SCHEDULES = f"use one of {', '.join(SCHEDULES)}"


def _check_key(text: str) -> str:
    ModulePattern(text)
    return text


_RANKS_SCHEMA = {
    "type": "array",
    "items": {"anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": "^[0-9]+-[0-9]+(:[0-9]+)?$"}]},
    "description": 'Ranks, ranges such as "0-7", and ranges with a step such as "0-14:2".',
}
Ranks = Annotated[
    tuple[int, ...], BeforeValidator(read_ranks), PlainSerializer(write_ranks), WithJsonSchema(_RANKS_SCHEMA)
]
Name = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")]
Hash = Annotated[str, StringConstraints(max_length=100, pattern=r"^[0-9a-z:]*$")]
Strategies = Annotated[
    tuple[Annotated[str, AfterValidator(_check_strategy)], ...],
    Field(strict=False, min_length=1),
    BeforeValidator(_strategies),
]
Schedule = Annotated[
    str,
    StringConstraints(max_length=40),
    AfterValidator(_check_schedule),
    WithJsonSchema({"type": "string", "enum": list(SCHEDULES)}),
]
Share = int | float

Autocast = Literal["fp32", "bf16", "fp16"]
"""The precisions of ``parallelize``."""

GradientDtype = Literal["fp32", "bf16", "fp16"]
"""The number types in which ranks may sum gradients."""

_LATER = frozenset(
    (
        "gradient_dtype",
        "step_in_backward",
        "precision",
        "recompute",
        "state",
        "offload",
        "reduce",
        "staleness",
        "distinct",
    )
)
"""Fields that plans did not have at first: where they say nothing, a plan has the digest that it had without them."""


class PlanAxis(Record):
    """One axis of a stage's mesh.

    Attributes:
        name: ``data`` for parallel pipelines, else ``replicate`` or ``split``, numbered from the second.
        size: number of positions along the axis.
        role: ``replicate``, each replica computes its share of the batch, or ``split``, each device its shard of
            operators.
        shares: of each position; by default equal. Whole numbers are rows of a micro-batch, or units of a split, such
            as heads; where something else is divided (a last batch, another matrix) they are proportions, rounded to
            whole units. Decimal numbers are always proportions.
    """

    name: Name
    size: Annotated[int, Field(ge=2, le=MAX_RANKS)]
    role: Role
    shares: Annotated[tuple[Share, ...], Field(strict=False)] = ()

    @model_validator(mode="after")
    def _check(self) -> PlanAxis:
        if self.shares and len(self.shares) != self.size:
            raise ValueError(f"shares: there are {len(self.shares)} for an axis of size {self.size}")
        if any(share < 0 or share > 1e12 or not isfinite(share) for share in self.shares):
            raise ValueError(f"shares: {_shown(self.shares)} must lie between 0 and 1e12")
        if self.shares and (not any(self.shares) or (not self.divides_batch and not all(self.shares))):
            raise ValueError(f"shares: {_shown(self.shares)} leaves a slice of the axis without work")
        return self

    @property
    def divides_batch(self) -> bool:
        """Whether its shares are of the rows; else they are of the operators' units."""
        return divides_batch(self.role)

    @property
    def counts_units(self) -> bool:
        """Whether the shares are whole numbers, and so exact."""
        return bool(self.shares) and all(isinstance(share, int) for share in self.shares)


class PlanState(Record):
    """How the replicas of a stage divide the state of its parameters.

    Attributes:
        level: as ``zero`` of ``parallelize``.
        shares: of each rank of the stage, in the order of its ranks, or of each replica; by default equal.
        align: as ``state_align`` of ``parallelize``.
    """

    level: Literal[0, 1, 2, 3]
    shares: Annotated[tuple[Share, ...], Field(strict=False)] = ()
    align: Align = "row"

    @model_validator(mode="after")
    def _check(self) -> PlanState:
        try:
            _ = self.sharding
        except UsageError as error:
            raise ValueError(str(error)) from None
        return self

    @property
    def sharding(self) -> StateSharding:
        """The same for the compiler."""
        return StateSharding(self.level, tuple(map(float, self.shares)), self.align)

    @classmethod
    def of(cls, state: StateSharding) -> PlanState:
        """The form of *state* in a plan."""
        shares = tuple(int(share) if share == int(share) else share for share in state.shares)
        return cls(level=state.level, shares=shares, align=state.align)  # type: ignore[arg-type]


class PlanStage(Record):
    """The devices of a stage: its ranks, row-major over its axes, from the outermost axis to the innermost.

    Attributes:
        ranks: of its devices.
        axes: of its mesh; None: the annotations decide them.
        recompute: what its backward computes again, as ``parallelize`` takes it; None: as that says.
        state: how its replicas divide their state; None: as ``parallelize`` says.
        offload: what is in the host's memory; None: as ``parallelize`` says.
        reduce: how its replicas make one gradient of theirs; None: as ``parallelize`` says.
        distinct: the expected part of its looked-up rows that are distinct, of which each is sent once; None: all are.
    """

    ranks: Annotated[Ranks, Field(min_length=1)]
    axes: Annotated[tuple[PlanAxis, ...] | None, Field(strict=False)] = None
    recompute: Recompute | None = None
    state: PlanState | None = None
    offload: Offload | None = None
    reduce: Reduce | None = None
    distinct: Annotated[float, Field(gt=0, le=1)] | None = None

    @model_validator(mode="after")
    def _check(self) -> PlanStage:
        if len(set(self.ranks)) < len(self.ranks):
            twice = next(rank for rank, count in Counter(self.ranks).items() if count > 1)
            raise ValueError(f"ranks: rank {twice} is listed twice")
        num = len(self.state.shares) if self.state is not None else 0
        replicas = len(self.ranks) if self.axes is None else prod(axis.size for axis in self.axes if axis.divides_batch)
        if num not in (0, len(self.ranks), replicas) and not (self.axes is None and num < len(self.ranks)):
            raise ValueError(
                f"state.shares: there are {num}, but the stage has {len(self.ranks)} ranks and {replicas} replicas"
            )
        if self.axes is None:
            return self
        size = prod(axis.size for axis in self.axes)
        if size != len(self.ranks):
            sizes = " x ".join(str(axis.size) for axis in self.axes) or "no axes"
            raise ValueError(f"ranks: there are {len(self.ranks)}, but {sizes} need {size}")
        if len({axis.name for axis in self.axes}) < len(self.axes):
            raise ValueError("axes: two of them have the same name")
        stride = 1
        for axis in reversed(self.axes):
            for position, rank in enumerate(self.ranks):
                after = position + stride
                if position // stride % axis.size < axis.size - 1 and self.ranks[after] < rank:
                    raise ValueError(
                        f"ranks: along the axis {axis.name!r} rank {self.ranks[after]} comes after rank {rank}, but "
                        "ranks must ascend along every axis; change the order of ranks and shares together"
                    )
            stride *= axis.size
        return self

    @property
    def batch_axis(self) -> PlanAxis | None:
        """The outermost axis along which the rows of a micro-batch are divided, if there is one."""
        return next((axis for axis in self.axes or () if axis.divides_batch), None)


class ModelIdentity(Record):
    """The model that a plan was made for; a hash that is empty is not checked.

    Attributes:
        name: as passed to ``whale plan --model``, or of its class.
        hash: of the captured graph, independent of the number of rows in a batch.
    """

    name: Name
    hash: Hash = ""


class ClusterIdentity(Record):
    """The machines that a plan was made for.

    Attributes:
        hash: of nodes, devices and links; empty: not checked.
        devices: the ranks of each device type.
    """

    hash: Hash = ""
    devices: dict[Name, Ranks] = Field(default_factory=dict)

    @classmethod
    def of(cls, cluster: Cluster) -> ClusterIdentity:
        """The identity of a cluster."""
        devices: dict[str, list[int]] = {}
        for device in cluster.devices:
            devices.setdefault(device.type.name, []).append(device.rank)
        return cls(hash=cluster_hash(cluster), devices={name: tuple(ranks) for name, ranks in devices.items()})


class Plan(FileRecord):
    """A plan for a model on a number of ranks.

    Attributes:
        version: of the format.
        model, cluster: what it was made for; None: anything of that many ranks.
        world_size: ranks.
        batch: rows of the global batch; None: any.
        micro_batches: parts of the batch that a pipeline works on at a time; see `micro_batch_rows`.
        schedule: as ``parallelize`` takes it.
        precision: as ``parallelize`` takes it; None: as that says.
        gradient_dtype: as ``parallelize`` takes it; None: as that says.
        step_in_backward: as ``parallelize`` takes it; None: as that says.
        staleness: as ``parallelize`` takes it; None: as that says.
        annotations: for an unmodified model, by module path as ``whale.annotate`` takes them; each strategy is written
            as ``"split(4)"``, several from outer to inner as a list. Empty: the model is annotated.
        stages: of the pipeline, in order; empty: the annotations decide.
        assumptions: what was not given when it was made and how it was taken, for a reader.
        prediction, workload: the predicted step, and the numbers from which it was computed.
        predicted: the digest of the decisions to which ``prediction`` belongs.
    """

    version: Literal[1] = 1
    model: ModelIdentity | None = None
    cluster: ClusterIdentity | None = None
    world_size: Annotated[int, Field(ge=1, le=MAX_RANKS)]
    batch: Annotated[int, Field(ge=1, le=2**40)] | None = None
    micro_batches: Annotated[int, Field(ge=1, le=2**40)] = 1
    schedule: Schedule = "1f1b"
    precision: Autocast | None = None
    gradient_dtype: GradientDtype | None = None
    step_in_backward: bool | None = None
    staleness: Annotated[int, Field(ge=0, le=MAX_STALENESS)] | None = None
    annotations: dict[Annotated[str, AfterValidator(_check_key)], Strategies] = Field(default_factory=dict)
    stages: Annotated[tuple[PlanStage, ...], Field(strict=False)] = ()
    assumptions: Annotated[tuple[Annotated[str, StringConstraints(max_length=400)], ...], Field(strict=False)] = ()
    predicted: Hash = ""
    prediction: Prediction | None = None
    workload: Workload | None = None

    @model_validator(mode="after")
    def _check(self) -> Plan:
        for index, stage in enumerate(self.stages):
            if max(stage.ranks) >= self.world_size:
                raise ValueError(
                    f"stages.{index}.ranks: rank {max(stage.ranks)} is not among the {self.world_size} of world_size"
                )
        if self.stages:
            try:
                check_devices(self.schedule, [stage.ranks for stage in self.stages])
            except UsageError as error:
                raise ValueError(f"schedule: {error}") from None
        if self.cluster is not None and self.cluster.devices:
            named = sorted(chain.from_iterable(self.cluster.devices.values()))
            if named != list(range(self.world_size)):
                raise ValueError(
                    f"cluster.devices: every one of the {self.world_size} ranks of world_size needs one device type"
                )
        for key, texts in self.annotations.items():
            try:
                check_nesting(map(parse_strategy, texts))
            except AnnotationError as error:
                raise ValueError(f"annotations.{key}: {error}") from None
        self._check_rows()
        return self

    @property
    def micro_batch_rows(self) -> int | None:
        """Rows of every micro-batch except the last, which has the rest of the batch; None if the batch is not fixed.

        If the number of micro-batches divides the batch all are equal. Otherwise the rows in the stages' shares are
        those of a micro-batch; without such shares, they are the fewest that this number of micro-batches needs.

        >>> Plan(world_size=1, batch=16, micro_batches=3).micro_batch_rows
        6
        """
        if self.batch is None or self.batch % self.micro_batches == 0:
            return None if self.batch is None else self.batch // self.micro_batches
        counted = [axis for stage in self.stages if (axis := stage.batch_axis) is not None and axis.counts_units]
        rows = sum(counted[0].shares) if counted else 0
        return int(rows) or ceil(self.batch / self.micro_batches)

    def _check_rows(self) -> None:
        """Check that whole-number rows sum to a micro-batch along the outermost axis of the batch in each stage."""
        if self.batch is None:
            return
        rows = self.micro_batch_rows or 0
        if not rows * (self.micro_batches - 1) < self.batch <= rows * self.micro_batches:
            raise ValueError(
                f"micro_batches: {self.micro_batches} of {rows} rows are not a batch of {self.batch} rows, of which "
                f"the last may have fewer: that takes {ceil(self.batch / rows)}"
            )
        for index, stage in enumerate(self.stages):
            axis = stage.batch_axis
            if axis is not None and axis.counts_units and sum(axis.shares) != rows:
                position = (stage.axes or ()).index(axis)
                raise ValueError(
                    f"stages.{index}.axes.{position}.shares: {_shown(axis.shares)} sum to {sum(axis.shares)}, "
                    f"but a micro-batch has {rows} rows"
                )

    # Files

    def dumps(self) -> str:
        """The plan as JSON, the same bytes for the same plan."""
        written = self.model_dump(mode="json", exclude_defaults=True)
        written |= {"version": self.version, "micro_batches": self.micro_batches, "schedule": self.schedule}
        return format_json({name: written[name] for name in type(self).model_fields if name in written})

    def save(self, path: str | PathLike[str]) -> None:
        """Write `dumps` to a file."""
        write_file(path, (self.dumps(),))

    @staticmethod
    def published_schema() -> dict[str, Any]:
        """The JSON schema of the file, as published."""
        return Plan.model_json_schema()

    # Content

    def digest(self) -> str:
        """A hash of all decisions, without the prediction."""
        decided = self.model_dump(mode="json", exclude={"assumptions", "prediction", "workload", "predicted"})
        return hash_of(_without_later(decided))

    @property
    def prediction_is_current(self) -> bool:
        """Whether the prediction belongs to these decisions: the plan was not edited afterwards."""
        return self.prediction is not None and self.predicted in ("", self.digest())

    def with_prediction(self, prediction: Prediction, workload: Workload | None) -> Plan:
        """The plan with a prediction."""
        return self.model_copy(update={"prediction": prediction, "workload": workload, "predicted": self.digest()})

    def strategies(self) -> dict[str, tuple[Strategy, ...]]:
        """The annotations, as data."""
        return {key: tuple(map(parse_strategy, texts)) for key, texts in self.annotations.items()}

    @property
    def decides_meshes(self) -> bool:
        """Whether it has axes for its stages."""
        return bool(self.stages) and all(stage.axes is not None for stage in self.stages)

    # Checks against the launch and the model

    def check_world(self, world_size: int) -> None:
        """Refuse a number of ranks that the plan was not made for."""
        if world_size != self.world_size:
            raise PlanMismatchError(
                f"the plan's world_size is {self.world_size}, but {started(world_size)}; use "
                f"torchrun with {self.world_size} processes in total, or make a plan for {world_size}"
            )

    def check_options(
        self,
        *,
        micro_batches: int | None,
        schedule: str | None,
        precision: str | None = None,
        gradient_dtype: str | None = None,
        step_in_backward: bool | None = None,
        staleness: int | None = None,
        recompute: str | None = None,
        zero: int | None = None,
        state_shares: Sequence[float] | str | None = None,
        state_align: str | None = None,
        offload: str | None = None,
        reduce: str | None = None,
    ) -> None:
        """Refuse arguments that contradict the plan. Where it leaves the precision, the dtype of sums, or the rule, the
        state or the offload of a stage open, any does; and ``"auto"`` is what it says, where it says something."""
        hosted = [(f"stages.{index}.offload", stage.offload) for index, stage in enumerate(self.stages)]
        sums = [(f"stages.{index}.reduce", stage.reduce) for index, stage in enumerate(self.stages)]
        rules = [(f"stages.{index}.recompute", stage.recompute) for index, stage in enumerate(self.stages)]
        for name, given, field, planned in (
            ("micro_batches", micro_batches, "micro_batches", self.micro_batches),
            ("schedule", schedule, "schedule", self.schedule),
            ("precision", precision, "precision", self.precision),
            ("gradient_dtype", gradient_dtype, "gradient_dtype", self.gradient_dtype),
            ("step_in_backward", step_in_backward, "step_in_backward", self.step_in_backward),
            ("staleness", staleness, "staleness", self.staleness),
            *(("recompute", None if recompute == "auto" else recompute, *rule) for rule in rules),
            *(("offload", None if offload == "auto" else offload, *told) for told in hosted),
            *(("reduce", reduce, *told) for told in sums),
            *self._states(zero, state_shares, state_align),
        ):
            if None not in (given, planned) and given != planned:
                raise PlanMismatchError(
                    f"the plan's {field} is {planned!r}, but {name}={given!r} was given; leave the argument out, or "
                    "change the plan"
                )

    def _states(self, zero: Any, shares: Any, align: Any) -> Iterator[tuple[str, Any, str, Any]]:
        """Arguments that say how state is divided, each with what the plan says of each stage."""
        for index, stage in enumerate(self.stages):
            if (state := stage.state) is None:
                continue
            own = shares
            if shares == "auto":
                own = None
            elif shares is not None:
                own = list(shares)
                if len(own) == self.world_size:
                    own = [own[rank] for rank in stage.ranks]
            yield "zero", zero, f"stages.{index}.state.level", state.level
            yield "state_shares", own, f"stages.{index}.state.shares", list(state.shares)
            yield "state_align", align, f"stages.{index}.state.align", state.align

    def check_batch(self, rows: int | None) -> None:
        """Refuse an example batch of another number of rows."""
        if self.batch is not None and rows is not None and rows != self.batch:
            raise PlanMismatchError(
                f"the plan's batch is {self.batch} rows, but the example batch has {rows}; give the global batch that "
                "the plan was made for, or make a plan for this one"
            )

    def check_cluster(self, cluster: Cluster) -> None:
        """Refuse other machines than those that the plan was made for."""
        if self.cluster is None:
            return
        found = ClusterIdentity.of(cluster)
        types = {device.rank: device.type.name for device in cluster.devices}
        for name, ranks in self.cluster.devices.items():
            for rank in ranks:
                if types.get(rank) != name:
                    raise PlanMismatchError(
                        f"the plan's cluster has {name} at rank {rank}, but this one has {types.get(rank, 'no device')}"
                        "; give the cluster that the plan was made for, or make a plan for this one"
                    )
        if self.cluster.hash and self.cluster.hash != found.hash:
            raise PlanMismatchError(
                f"the plan's cluster.hash is {self.cluster.hash}, but this cluster's is {found.hash}: its nodes, links "
                "or figures of devices differ; give the cluster that the plan was made for, make a plan for this one, "
                "or remove the hash from the plan"
            )

    def check_model(self, found: str) -> None:
        """Refuse a model of another hash."""
        if self.model is not None and self.model.hash and self.model.hash != found:
            raise PlanMismatchError(
                f"the plan's model.hash is {self.model.hash} (of {self.model.name}), but this model's is {found}: its "
                "code, sizes or number types differ; give the model that the plan was made for, or make a new plan"
            )

    def check_stages(self, stages: Sequence[Sequence[int]]) -> None:
        """Refuse a model whose annotated stages are on other ranks than the plan's."""
        planned = [list(stage.ranks) for stage in self.stages]
        found = [list(ranks) for ranks in stages]
        if planned and planned != found:
            raise PlanMismatchError(
                f"the plan's stages are on ranks {planned}, but the model's are on {found}; annotate the model as it "
                "was when the plan was made, or make a new plan"
            )


def _without_later(data: Any) -> Any:
    """Plain data without fields of `_LATER` that say nothing."""
    if isinstance(data, list):
        return [_without_later(item) for item in data]
    if not isinstance(data, dict):
        return data
    said = {name: item for name, item in data.items() if item is not None or name not in _LATER}
    return {name: _without_later(item) for name, item in said.items()}


def hash_of(data: object) -> str:
    """A hash of plain data, the same wherever it is computed."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()[:16]


def cluster_hash(cluster: Cluster) -> str:
    """A hash of nodes, devices and links."""
    types: Mapping[str, Any] = {device.type.name: repr(device.type) for device in cluster.devices}
    nodes = [
        [node.name, write_ranks(node.ranks), repr(node.intra), repr(node.inter), *_told(node)] for node in cluster.nodes
    ]
    return hash_of([nodes, dict(types), [device.type.name for device in cluster.devices]])


def _told(node: Node) -> list[str]:
    """The memory and the region of a node, if something is said of them."""
    told = [] if node.host_memory == HostMemory() else [repr(node.host_memory)]
    return told if node.region is None else [*told, repr(node.region)]


def _shown(shares: Sequence[Share]) -> str:
    text = ", ".join(map(str, shares[:8]))
    return f"[{text}, ... {len(shares) - 8} more]" if len(shares) > 8 else f"[{text}]"
