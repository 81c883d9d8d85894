"""Cost of one layer on one device: seconds and bytes, by device type, degrees, rows, precision and stack.

The only place that turns a layer of the profile into prices. The search asks for the degrees that the profile has, the
prediction of a compiled plan for any fraction of a layer. It knows neither groups nor links.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any, Literal, Self

from whale.errors import UsageError
from whale.ir.cluster import DeviceType
from whale.ir.profile import Affine, Kernel, LayerKind, LayerVariant, ModelProfile, Skip
from whale.ir.strategy import Offload, Recompute
from whale.planner.cost.layers import LayerSeconds, forward_flops, layer_seconds_by_rows, variant_of
from whale.planner.cost.memory import (
    Largest,
    StateBytes,
    cast_bytes,
    gradient_bytes,
    kept_bytes,
    run_hosted,
    run_kept_bytes,
    run_state_bytes,
    run_working_bytes,
    state_bytes,
    under_rule,
    working_bytes,
)
from whale.planner.cost.optimizers import Optimizer, costs_of
from whale.planner.cost.precision import Precision
from whale.planner.cost.stack import WHALE, Stack

__all__ = ["Degrees", "LayerCosts", "LayerMemo", "with_part"]

MOST_USUAL_ROWS = 4096
"""Limit of the powers of two of rows, and thrice these, that are priced together; a search asks for most of them."""

MOST_FEW_ROWS = 16
"""Numbers of rows below it are all priced together."""

MOST_ADDING = 16
"""Number of micro-batches beyond which tables do not distinguish: 15 of 16 accumulate gradients."""

Degrees = tuple[int, int, int]
"""The tensor, the expert and the context degree of a device's part of a layer."""


Side = Literal["all", "look-ups", "others"]
"""Kernels of a layer."""

Price = Callable[["LayerCosts", DeviceType], LayerSeconds]


class LayerMemo:
    """Seconds and bytes of layers that were worked out already, for one profile, precision, stack and optimizer."""

    def __init__(self) -> None:
        self.seconds: dict[Any, LayerSeconds] = {}
        self.amounts: dict[Any, tuple[Affine, Largest, Affine]] = {}


@dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """Prices of a model's layers, each worked out once.

    Attributes:
        profile: of the model.
        precision: of the run.
        stack: that runs it.
        optimizer: of Whale's stack; others have a fused Adam.
        summed_bytes: per element of a gradient in a sum over ranks of Whale's stack; None: as the gradient has them.
        step_in_backward: whether parameters are updated, and gradients freed, when these are summed.
        side: of layers that are priced: all, what looks up in tables with sparse gradients, or all but that.
        memo: what is known already.
    """

    profile: ModelProfile
    precision: Precision
    stack: Stack = WHALE
    optimizer: Optimizer = "adamw"
    summed_bytes: int | None = None
    step_in_backward: bool = False
    side: Side = "all"
    memo: LayerMemo = field(default_factory=LayerMemo)

    @property
    def runs(self) -> bool:
        """Whether Whale's executor is the stack."""
        return self.stack.name == "whale"

    # Seconds

    def seconds(
        self, kind: int, type_: DeviceType, degrees: Degrees, rows: float, micro_batches: int, shards: int = 1
    ) -> LayerSeconds:
        """Return the seconds of a layer on a device, without its collectives, on average over the micro-batches.

        Args:
            kind: of the layer, a position in the profile's kinds.
            type_: of the device.
            degrees: over which the layer and its experts are split, and rows are cut; the profile has the first one.
            rows: of a micro-batch on the device.
            micro_batches: of the step.
            shards: devices that share the optimizer's states.
        """
        key = (kind, type_, degrees, shards, self.stack.recompute, self.side)
        known = self.memo.seconds
        if (*key, rows) not in known:
            wanted = _usual_rows(rows)
            priced = layer_seconds_by_rows(
                _side_of(self.profile.kinds[kind], self.side),
                type_,
                wanted,
                tensor_degree=degrees[0],
                expert_degree=degrees[1],
                context_degree=degrees[2],
                precision=self.precision,
                fused_attention=self.stack.fuses(type_, self.precision),
                eager=self.stack.eager,
                fsdp=self.stack.name == "fsdp",
                recompute=self._recompute(kind),
                sequence_parallel=self.stack.sequence_parallel,
                optimizer=self.optimizer if self.runs else None,
                optimizer_shards=shards if self.stack.zero else 1,
                accumulate=self.runs or self.stack.zero < 2,
                calibration=self.stack.calibration,
            )
            share = self.stack.calibration.sustained.get(type_.name, 1.0)
            known.update(((*key, count), _sustained(one, share)) for count, one in zip(wanted, priced, strict=True))
        found = known[*key, rows]
        if micro_batches > 1 and self.is_sparse(kind):  # an update goes over what the whole step has looked up
            found = replace(found, update=self.seconds(kind, type_, degrees, rows * micro_batches, 1, shards).update)
        return found.averaged(micro_batches) if micro_batches > 1 and found.accumulation else found

    def seconds_of_part(
        self, kind: int, type_: DeviceType, fraction: float, expert: int, rows: float, micro_batches: int,
        context: int = 1, part: float = 1.0,
    ) -> LayerSeconds:  # fmt: skip
        """Return the seconds of any *fraction* of a layer: between the tensor degrees that the profile knows they are
        linear in it. Collectives of such a part are not among them. Rows are cut over *context* devices, of which this
        one has *part* times an equal share; where the profile does not know it, they are taken as a fraction."""
        if not rows:
            return LayerSeconds(forward=0.0, backward=0.0, weights=0.0, update=0.0)
        given = _side_of(self.profile.kinds[kind], self.side)
        if context > 1:
            known = [one.tensor_degree for one in given.context_variants if one.context_degree == context]
            if (degree := next((one for one in known if abs(one * fraction - 1) < 1e-9), None)) is not None:
                cut = self.seconds(kind, type_, (degree, expert, context), rows, micro_batches)
                return with_part(cut, part)
            fraction *= part / context
        measured = {times.tensor_degree for times in given.measured if times.device_type == type_.name}
        degrees = sorted(measured or {variant.tensor_degree for variant in given.variants})

        def at(degree: int) -> LayerSeconds:
            return self.seconds(kind, type_, (degree, expert, 1), rows, micro_batches)

        exact = next((degree for degree in degrees if abs(degree * fraction - 1) < 1e-9), None)
        if exact is not None:
            return at(exact)
        if len(degrees) < 2:
            return _blend(at(degrees[0]), at(degrees[0]), fraction * degrees[0], 0.0)
        above = max((degree for degree in degrees if 1 / degree >= fraction), default=degrees[0])
        below = min((degree for degree in degrees if degree > above), default=degrees[-1])
        if below == above:
            above = degrees[-2]
        share = (fraction - 1 / below) / (1 / above - 1 / below)
        return _blend(at(above), at(below), share, 1 - share)

    def beside_tables(self, kind: int, type_: DeviceType, host: DeviceType, price: Price) -> tuple[LayerSeconds, bool]:
        """Seconds of a layer whose tables with sparse gradients are on a host, as *price* finds those on a device; and
        whether it does more than to look up."""
        computes = host != type_ and any(one.looks_up == "no" for one in _kernels(self.profile.kinds[kind]))
        if not computes:
            return price(self, host), False
        return _sum_of(price(self._of_side("look-ups"), host), price(self._of_side("others"), type_)), True

    def _of_side(self, side: Side) -> Self:
        """The prices of a side of layers, which share all that is known."""
        found = copy(self)
        found.__dict__["side"] = side
        return found

    def adding(self, micro_batches: int) -> int:
        """The number of micro-batches for which those of tables are priced: a power of two, and at most
        `MOST_ADDING`, as more of them accumulate gradients in nearly the same part; 1 if no layer's time depends on
        it; their own number where the update of a table depends on what the step looks up."""
        found = self._adding.get(micro_batches)
        if found is None:
            adds = any(self._accumulates)
            found = min(MOST_ADDING, 1 << (micro_batches - 1).bit_length()) if adds else 1
            if any(map(self.is_sparse, range(len(self.profile.kinds)))):
                found = micro_batches
            self._adding[micro_batches] = found
        return found

    @cached_property
    def _adding(self) -> dict[int, int]:
        return {}

    @cached_property
    def _accumulates(self) -> list[bool]:
        """Whether a layer's time depends on the number of micro-batches: where accumulating gradients costs time."""
        return [self.runs or any(times.accumulation for times in kind.measured) for kind in self.profile.kinds]

    @cached_property
    def meeting(self) -> frozenset[int]:
        """The kinds of layers that have collectives between replicas."""
        return frozenset(index for index, kind in enumerate(self.profile.kinds) if _meets(kind))

    def repeats(self, kind: int) -> bool:
        """Whether layers of a kind are blocks, and not the embeddings or the head."""
        return self._counts[kind] > 1

    def _recompute(self, kind: int) -> Recompute:
        """The rule for a kind of layer: in other stacks only blocks are computed again; of those that Whale runs the
        profile says what a rule changes."""
        return self.stack.recompute if self.runs or self.repeats(kind) else "none"

    def under(self, rule: Recompute, zero: int = 0, offload: Offload = "none") -> Self:
        """The same prices under another rule of what Whale's backward computes again, and where its replicas divide
        their state as *zero* says, and have on the host what *offload* says.

        Raises:
            UsageError: the profile does not say what that costs.
        """
        key = (rule, zero, offload)
        if key == (self.stack.recompute, self.stack.zero, self.stack.offload) or not self.runs:
            return self
        known = self._under
        if key not in known:
            if rule not in self.profile.rules and any(kind.variants for kind in self.profile.kinds):
                raise UsageError(
                    f"the profile of {self.profile.name} does not say what recompute {rule!r} keeps and computes "
                    "again; make it again with whale profile, or give --model"
                )
            known[key] = copy(self)
            known[key].__dict__["stack"] = replace(self.stack, recompute=rule, zero=zero, offload=offload)
        return known[key]

    @cached_property
    def _under(self) -> dict[tuple[Recompute, int, Offload], Self]:
        """The prices under each rule that was asked for; they share all that they know."""
        return {(self.stack.recompute, self.stack.zero, self.stack.offload): self}

    @cached_property
    def _counts(self) -> Counter[int]:
        """How many layers there are of each kind."""
        return Counter(self.profile.layers)

    @cached_property
    def flops(self) -> float:
        """Multiplications and additions of a row's forward."""
        degree = min(self.tensor_degrees, default=1)
        return sum(count * forward_flops(self.profile.kinds[kind], degree) for kind, count in self._counts.items())

    @cached_property
    def tensor_degrees(self) -> tuple[int, ...]:
        """The degrees over which all layers can be split, ascending."""
        common: set[int] | None = None
        for kind in self.profile.kinds:
            known = {one.tensor_degree for one in kind.variants} or {one.tensor_degree for one in kind.measured}
            common = known if common is None else common & known
        refused = {degree for degree, _ in self.profile.refused}
        return tuple(sorted((common or set()) - refused))

    @cached_property
    def expert_degrees(self) -> tuple[int, ...]:
        """The degrees over which all experts can be split by themselves, as Whale runs it, ascending."""
        known = [
            {variant.expert_degree for variant in kind.expert_variants}
            for kind in self.profile.kinds
            if kind.expert_variants or any(variant.expert_parameters for variant in kind.variants)
        ]
        usable = known and self.runs and self.profile.experts and 1 in self.tensor_degrees
        return tuple(sorted(set.intersection(*known))) if usable else ()

    @cached_property
    def cuts(self) -> tuple[tuple[int, int], ...]:
        """Tensor and context degrees at which all layers know how their rows are cut, as Whale runs it, ascending."""
        known = [
            {(one.tensor_degree, one.context_degree) for one in kind.context_variants} for kind in self.profile.kinds
        ]
        return tuple(sorted(set.intersection(*known))) if known and self.runs else ()

    # Bytes

    def kept(self, kind: int, type_: DeviceType, degrees: Degrees, rows: float) -> float:
        """Bytes that a micro-batch of *rows* rows on a device saves of a layer for its backward."""
        amounts, multiple = self._amounts(kind, type_, degrees, rows)
        return amounts[0](-(-rows // multiple) * multiple if multiple > 1 else rows)

    def casts(self, layers: Iterable[int], degrees: Sequence[int]) -> float:
        """Bytes of casts of the parameters of *layers* to the precision of autocast, one of each: micro-batches that
        save them share them, and stretches of parameters are gathered as these."""
        kinds = Counter(map(self.profile.layers.__getitem__, layers))
        return sum(count * self.casts_of(kind, degrees) for kind, count in kinds.items())

    def casts_of(self, kind: int, degrees: Sequence[int]) -> float:
        """The same of a layer of a kind."""
        if not self.runs:
            return 0.0
        how: dict[str, Any] = {"tensor_degree": degrees[0], "expert_degree": degrees[1], "precision": self.precision}
        return cast_bytes(self.profile.kinds[kind], **how)

    def shared_casts_of(self, kind: int, degrees: Sequence[int]) -> float:
        """Bytes of the casts that micro-batches keep together: none where backwards cast again."""
        return self.casts_of(kind, degrees) if self.stack.recompute == "none" else 0.0

    def working(self, kind: int, type_: DeviceType, degrees: Degrees, rows: float) -> float:
        """Bytes that a layer needs beside them while it runs."""
        amounts, multiple = self._amounts(kind, type_, degrees, rows)
        return amounts[1](-(-rows // multiple) * multiple if multiple > 1 else rows)

    def hosted(self, kind: int, type_: DeviceType, degrees: Degrees, rows: float) -> float:
        """Bytes that it saves in the host's memory."""
        return self._amounts(kind, type_, degrees, rows)[0][2](rows)

    def _amounts(
        self, kind: int, type_: DeviceType, degrees: Degrees, rows: float
    ) -> tuple[tuple[Affine, Largest, Affine], int]:
        """Amounts that a layer keeps, works with and has on the host, by the rows of micro-batches that are placed as
        one of *rows* rows is; and the number of devices that divide these."""
        hosted = self.stack.activations_on_host
        given, precision = self.profile.kinds[kind], self.precision
        rule: Recompute = self._recompute(kind) if self.runs else "none"
        variant = variant_of(given, *degrees) if self.runs and given.variants else None
        ruled = under_rule(variant, rule, rows * precision.element_bytes) if variant and variant.rules else None
        key = (kind, type_, degrees, self.stack.recompute, hosted, ruled.least if ruled else 0)
        if key not in self.memo.amounts:
            how: dict[str, Any] = {"tensor_degree": degrees[0], "precision": precision}
            if self.runs:
                costs = costs_of(self.optimizer)
                one_by_one = costs.one_by_one if type_.is_processor or costs.steps_one_by_one else 0
                how |= {"expert_degree": degrees[1], "context_degree": degrees[2], "recompute": rule}
                both = (
                    run_kept_bytes(given, **how, rows=rows),
                    run_working_bytes(given, **how, one_by_one=one_by_one, rows=rows),
                )
                found = run_hosted(given, *both, **how) if hosted else (*both, Affine(0.0, 0.0))
            else:
                how |= {
                    "fused_attention": self.stack.fuses(type_, precision),
                    "eager": self.stack.eager,
                    "recompute": self._recompute(kind),
                    "sequence_parallel": self.stack.sequence_parallel,
                }
                found = kept_bytes(given, **how), working_bytes(given, **how), Affine(0.0, 0.0)
            self.memo.amounts[key] = found
        return self.memo.amounts[key], ruled.multiple if ruled else 1

    def output_bytes(self, layer: int, rows: float) -> float:
        """Bytes that cross the cut after a layer (a position in the chain) for the given rows."""
        if not self.profile.skips:
            return self.output_of_kind(layer, rows)
        return self._handed_to_next(layer, rows) + self._passing(
            rows, lambda skip: skip.layer <= layer < skip.readers[-1]
        )

    def handed_on(self, source: range, target: range, rows: float) -> float:
        """Bytes that a stage of layers *source* sends to a later stage of layers *target* for the given rows: what the
        last of its layers makes if the other stage is the next one, and what is read beyond the next layer."""
        found = self._handed_to_next(source.stop - 1, rows) if source.stop == target.start else 0.0
        return found + self._passing(
            rows, lambda skip: skip.layer in source and any(layer in target for layer in skip.readers)
        )

    def output_of_kind(self, layer: int, rows: float) -> float:
        """Bytes that cross the cut after the first layer of the same kind."""
        return self.profile.kinds[self.profile.layers[layer]].output.total(rows, self.precision.element_bytes)

    def _handed_to_next(self, layer: int, rows: float) -> float:
        """Bytes that a layer makes and only the next one reads: as much as the first layer of its kind makes, without
        what is read later."""
        first = self.profile.layers.index(self.profile.layers[layer])
        passing = self._passing(rows, lambda skip: skip.layer == layer or skip.layer < first < skip.readers[-1])
        return max(0.0, self.output_of_kind(layer, rows) - passing)

    def _passing(self, rows: float, counts: Callable[[Skip], bool]) -> float:
        """Bytes of the values that pass over layers and that count."""
        size = self.precision.element_bytes
        return sum(skip.size.total(rows, size) for skip in self.profile.skips if counts(skip))

    def parameters(self, layers: Iterable[int], degree: int, expert: int = 1) -> tuple[float, float]:
        """Elements of parameters of *layers* on a device: dense, and of experts. Tied ones count once."""
        positions = set(layers)
        dense = experts = 0.0
        for kind, count in Counter(map(self.profile.layers.__getitem__, positions)).items():
            own, of_experts = self.parameters_of(kind, degree, expert)
            dense, experts = dense + count * own, experts + count * of_experts
        for readers, shared in self.profile.tied:
            dense -= max(0, len(positions.intersection(readers)) - 1) * shared / degree
        return max(0.0, dense), experts

    def parameters_of(self, index: int, degree: int, expert: int = 1) -> tuple[float, float]:
        """Elements of parameters of a kind of layer on a device: dense, and of experts. Those with sparse gradients
        are counted by `frozen_of`: ranks exchange rows of these."""
        kind = self.profile.kinds[index]
        if not kind.variants:
            return (kind.parameters or 0.0) / degree, 0.0
        variant = variant_of(kind, degree, expert)
        split = expert if variant.expert_degree == 1 else 1  # where the profile has whole experts
        dense = variant.parameters - variant.expert_parameters - sum(one.elements for one in variant.sparse)
        return dense, variant.expert_parameters / split

    def frozen_of(self, index: int, degree: int, expert: int = 1) -> float:
        """Elements that a kind of layer has on a device and that have no gradient of their size: those that it does not
        train, and those with sparse gradients, with a number for each of their rows."""
        kind = self.profile.kinds[index]
        if not kind.variants:
            return 0.0
        tables = 0.0 if self.stack.tables_on_host else self.tables_of(index, degree, expert)
        return variant_of(kind, degree, expert).buffers + tables

    def tables_of(self, index: int, degree: int, expert: int = 1) -> float:
        """Elements of tables with sparse gradients, with a number for each of their rows."""
        kind = self.profile.kinds[index]
        return sum(one.elements + one.rows for one in variant_of(kind, degree, expert).sparse) if kind.variants else 0.0

    def vector_bytes(self, index: int, fraction: float, rows: float) -> float:
        """Bytes of what a *fraction* of a kind of layer looks up in tables with sparse gradients for *rows* rows, bags
        summed."""
        kind = self.profile.kinds[index]
        variant = min(kind.variants, key=lambda one: abs(one.tensor_degree * fraction - 1), default=None)
        kernels = variant.forward if variant is not None else ()
        last = [one.written for one in kernels if one.looks_up == "last"] or [one.written for one in kernels[-1:]]
        return sum(one.total(rows, self.precision.element_bytes) for one in last or [kind.output])

    def touched(self, layers: Iterable[int], degree: int, rows: float) -> float:
        """Elements of the rows of tables with sparse gradients that a replica looks up for *rows* rows."""
        kinds = (self.profile.kinds[self.profile.layers[layer]] for layer in layers)
        variants = (variant_of(kind, degree) for kind in kinds if kind.variants)
        return sum(one.updated(rows) for variant in variants for one in variant.sparse)

    def is_sparse(self, index: int) -> bool:
        """Whether a kind of layer has parameters whose update depends on the rows of a micro-batch."""
        return any(variant.sparse for variant in self.profile.kinds[index].variants)

    def held_shares(
        self, kinds: tuple[int, int], tensors: tuple[int, int], rows: tuple[float, float]
    ) -> tuple[float, float]:
        """The parts of what is handed on that a device has of the stage that ends with a kind of layer, and one of the
        stage that begins with another, by their tensor degrees and the most rows of their replicas."""
        ending, beginning = (self.profile.kinds[index] for index in kinds)
        sent = variant_of(ending, tensors[0]).sent.at(rows[0]) if ending.variants else 1.0
        received = variant_of(beginning, tensors[1]).received.at(rows[1]) if beginning.variants else 1.0
        return sent, received

    def state(self, parameters: float, frozen: float = 0.0, *, shards: float = 1, zero: int = 0) -> StateBytes:
        """Bytes of weights, gradients and optimizer states of a number of parameters, of which *shards* devices divide
        the part of *zero*, and of a number that are not trained."""
        if self.runs:
            return run_state_bytes(
                parameters,
                frozen=frozen,
                precision=self.precision,
                states=self.states,
                zero=zero,
                shards=shards,
                on_host=bool(zero) and self.stack.state_on_host,
            )
        return state_bytes(parameters, precision=self.precision, zero=zero, shards=shards)

    def lasting(self, state: StateBytes, micro_batches: int) -> float:
        """Bytes of a state that are there all through a step: gradients are not, if each is freed in its backward."""
        return state.total - (state.gradients if self.step_in_backward and micro_batches == 1 else 0.0)

    @cached_property
    def states(self) -> float:
        """States of the optimizer, in tensors of the size of the parameters; of one that factors them as many as the
        whole model has, and one where the profile does not say it."""
        costs = costs_of(self.optimizer)
        if not costs.factored:
            return costs.states
        variants = [variant for kind in self.profile.chain() for variant in kind.variants[:1]]
        factored, whole = sum(one.factored for one in variants), sum(one.parameters for one in variants)
        return factored / whole if factored and whole else 1.0

    @property
    def gradient_bytes(self) -> int:
        """Bytes per element of a gradient in a reduction; float16 gradients are reduced in float16 (Megatron)."""
        if self.runs:
            return self.precision.element_bytes if self.summed_bytes is None else self.summed_bytes
        return 2 if self.precision.name == "fp16" else gradient_bytes(self.precision, self.stack.zero)


def _kernels(kind: LayerKind) -> Iterator[Kernel]:
    """The kernels of a layer on one device."""
    return chain.from_iterable((*one.forward, *one.backward) for one in kind.variants[:1])


def _side_of(kind: LayerKind, side: Side) -> LayerKind:
    """The layer with some of its kernels alone, those of look-ups or the others, as the model prices it."""
    if side == "all":
        return kind
    return kind.model_copy(update={"variants": tuple(_side(one, side) for one in kind.variants), "measured": ()})


def _side(variant: LayerVariant, side: Side) -> LayerVariant:
    looks_up = side == "look-ups"
    tables = sum(one.elements for one in variant.sparse)
    chosen: dict[str, Any] = {
        name: tuple(one for one in getattr(variant, name) if (one.looks_up != "no") == looks_up)
        for name in ("forward", "backward")
    }
    if looks_up:
        nothing = dict.fromkeys(("forward_communications", "backward_communications"), ())
        return variant.model_copy(update=chosen | nothing | {"parameters": tables, "expert_parameters": 0.0})
    return variant.model_copy(update=chosen | {"parameters": variant.parameters - tables, "sparse": ()})


def _sum_of(there: LayerSeconds, here: LayerSeconds) -> LayerSeconds:
    """The seconds of two parts of a layer, one after the other, of which *here* has the collectives."""
    added = ("forward", "backward", "weights", "update", "accumulation", "forward_slack", "backward_slack")
    return replace(here, **{name: getattr(there, name) + getattr(here, name) for name in added})


def _meets(kind: LayerKind) -> bool:
    both = [(*one.forward_communications, *one.backward_communications) for one in kind.variants[:1]]
    return any(one.group == "replica" for one in chain(*both))


def _sustained(one: LayerSeconds, share: float) -> LayerSeconds:
    """Times at a share of the rate, unless they were measured or are the host's."""
    if one.measured or share == 1:
        return one
    return replace(
        one,
        forward=max(one.forward, (one.forward - one.forward_slack) / share),
        backward=max(one.backward, (one.backward - one.backward_slack) / share),
        weights=one.weights / share,
        accumulation=one.accumulation / share,
        forward_attention=one.forward_attention / share,
        backward_attention=one.backward_attention / share,
        forward_slack=max(0.0, one.forward - (one.forward - one.forward_slack) / share),
        backward_slack=max(0.0, one.backward - (one.backward - one.backward_slack) / share),
    )


def _blend(one: LayerSeconds, other: LayerSeconds, share: float, rest: float) -> LayerSeconds:
    def mixed(name: str) -> float:
        return max(0.0, share * getattr(one, name) + rest * getattr(other, name))

    backward = mixed("backward")
    return LayerSeconds(
        forward=mixed("forward"),
        backward=backward,
        weights=min(backward, mixed("weights")),
        update=mixed("update"),
        measured=one.measured and other.measured,
    )


def with_part(one: LayerSeconds, part: float) -> LayerSeconds:
    """Return the times of a device that has *part* times as much of each row; parameters it has whole."""
    names = ("forward", "backward", "weights", "forward_attention", "backward_attention")
    return one if part == 1 else replace(one, **{name: part * getattr(one, name) for name in names})


def _usual_rows(rows: float) -> tuple[float, ...]:
    """Numbers of rows that are priced together with one that a search asks for: powers of two and thrice these, and all
    below `MOST_FEW_ROWS`; of others that number alone.

    >>> _usual_rows(27), _usual_rows(2)[:5], _usual_rows(0.5)
    ((27,), (1, 2, 3, 4, 5), (0.5,))
    """
    whole = int(rows)
    odd = whole // (whole & -whole or 1)
    if whole != rows or not whole or (whole >= MOST_FEW_ROWS and odd not in (1, 3)):
        return (rows,)
    most = max(MOST_USUAL_ROWS, whole)
    larger = (odd << power for power in range(2, most.bit_length()) for odd in (1, 3))
    return (*range(1, MOST_FEW_ROWS), *(count for count in larger if MOST_FEW_ROWS <= count <= most))
