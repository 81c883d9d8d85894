"""Less memory for a plan that does not fit: for each stage a rule of recompute, a level of divided state and what is on
hosts, no more of each than its devices need.

Plans are compiled and their memory is counted; how fast they are is for the caller to compare.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from whale.commands.least_offload import offload_that_fits
from whale.compile.compilation import Compilation
from whale.compile.compile import compile_traced
from whale.compile.options import Options, offloads_told, states_of
from whale.compile.trace import Traced
from whale.ir.plan import Plan, PlanStage, PlanState
from whale.ir.state import LEVELS, StateSharding
from whale.ir.strategy import OFFLOADS, RECOMPUTES, Offload, Recompute
from whale.ir.workload import DeviceMemory
from whale.planner.balance.least_recompute import least_recompute, least_steps
from whale.planner.cost.hosts import has_hosts
from whale.planner.cost.state_shares import fitting_states
from whale.predict.costs import Costs
from whale.predict.peak_memory import PeakMemory, brief_peak_memory, peak_memory
from whale.predict.prediction import Predicted, predict, predicted_memory

__all__ = ["MemoryLadders", "PlanTrials", "all_fit", "level_of", "sharding_of"]


@dataclass(frozen=True, kw_only=True)
class PlanTrials:
    """Plans of one traced model, compiled and predicted.

    Attributes:
        traced: the annotated model.
        costs: its layers and the cluster's links, and the optimizer whose states must fit.
        options: for all plans.
        auto_shares: whether ranks own of divided state what their memory leaves, where equal shares do not fit.
        known: memory that was counted already, by the plan's text and how.
    """

    traced: Traced
    costs: Costs
    options: Options
    auto_shares: bool
    known: dict[tuple[str, Callable[..., PeakMemory]], tuple[DeviceMemory, ...]] = field(default_factory=dict)

    def compiled(self, plan: Plan) -> Compilation:
        """The model compiled as the plan says."""
        chosen = replace(self.options, plan=plan, micro_batches=plan.micro_batches)
        return compile_traced(self.traced, self.costs.cluster, chosen, device=self.costs.device)

    def predicted(self, plan: Plan, memory_of: Callable[..., PeakMemory] = peak_memory) -> Predicted:
        """The plan's step, with its memory as it is counted by *memory_of*."""
        found, own = self.compiled(plan), replace(self.costs, micro_batches=plan.micro_batches)
        return predict(found, own, schedule=self.options.schedule, memory_of=memory_of)

    def fits(self, plan: Plan) -> bool:
        """Whether devices and hosts hold a plan, counted briefly."""
        return self.predicted(plan, brief_peak_memory).prediction.fits

    def settled(self, plan: Plan) -> tuple[Plan, Predicted]:
        """A plan predicted, with shares of its state that fit if equal ones do not."""
        found = self.predicted(plan)
        if self.auto_shares and not found.prediction.fits:
            other = _with_state(plan, found.prediction.memory)
            again = self.predicted(other) if other != plan else found
            if again.prediction.fits:
                return other, again
        return plan, found

    def memory_of(self, plan: Plan) -> tuple[DeviceMemory, ...]:
        """The memory of a plan's devices, counted briefly, with shares of its state that fit if equal ones do not."""
        memory = self._memory(plan, brief_peak_memory)
        other = _with_state(plan, memory) if self.auto_shares and not all_fit(memory) else plan
        return memory if other == plan else self._memory(other, brief_peak_memory)

    def holds(self, plan: Plan) -> bool:
        """Whether devices hold a plan, counted in full; the profile may not say how long it takes."""
        return all_fit(self._memory(plan, peak_memory))

    def _memory(self, plan: Plan, counted: Callable[..., PeakMemory]) -> tuple[DeviceMemory, ...]:
        key = plan.dumps(), counted
        if key not in self.known:
            given: Any = {"optimizer": self.costs.optimizer, "device": self.costs.device, "memory_of": counted}
            compiled = self.compiled(plan)
            self.known[key] = predicted_memory(compiled, self.costs.cluster, schedule=self.options.schedule, **given)
        return self.known[key]


@dataclass(frozen=True, kw_only=True)
class MemoryLadders:
    """Changes by which the stages of a plan take less memory.

    Attributes:
        trials: of plans.
        compilation: of the annotations, which may have decided some of it.
        start: the plan that does not fit.
        rules: whether backwards may compute again what their stages need to fit.
        way: in which way, whatever its level, replicas may divide as much of their state as they need; None: they may
            not.
        hosts: whether stages may have on the host what they need to fit.
    """

    trials: PlanTrials
    compilation: Compilation
    start: Plan
    rules: bool
    way: StateSharding | None
    hosts: bool

    def fitting(self) -> list[Plan]:
        """Plans that fit, counted briefly: those with one of the changes, else those with rules and levels, else with
        something on hosts, the least that does."""
        ways = [
            *([partial(self._with_rules, self.start)] if self.rules else []),
            *([partial(self._with_levels, self.start)] if self._divides else []),
        ]
        plans = self._tried(ways)
        if not plans and self.rules and self._divides:
            plans = self._tried([lambda: self._with_rules(self._with_levels(self._under_all()))])
        if not plans and self.hosts:
            plans = self._tried([partial(self._with_hosts, self.start)])
            plans = plans or self._tried([lambda: self._with_hosts(self._most_of_all())])
        return plans

    def raised(self, plan: Plan) -> Plan:
        """The plan with the next level of each stage whose level is open; the same where there is none."""
        if not self._divides or not self._may_divide:
            return plan
        now = [level_of(stage) for stage in plan.stages]
        levels = [
            min(own + 1, LEVELS[-1]) if level is None else level for own, level in zip(now, self._levels, strict=True)
        ]
        return _divided(plan, levels, self.way or StateSharding(1))

    def cures(self, *, lacking: bool) -> list[str]:
        """Options with which the plan would fit, of those that it was not made with; *lacking*: whether devices lack
        memory, else hosts do."""
        trials, start, found = self.trials, self.start, list[str]()
        if lacking and not self.rules:
            ruled = [plan for plan in self._tried([partial(self._with_rules, start)]) if _most(plan) != _most(start)]
            found += [f"--recompute {_most(plan)}" for plan in ruled if trials.holds(plan)]
        if lacking and not self._divides and self._may_divide:
            divided = self._tried([partial(self._with_levels, start)])
            divided = [plan for plan in divided if _most_level(plan) > _most_level(start)]
            found += [f"--zero {_most_level(plan)}" for plan in divided if trials.holds(plan)]
        if not self.hosts and not found and has_hosts(trials.costs.cluster):
            hosted = self._tried([partial(self._with_hosts, start)])
            found += [f"--offload {_most_offload(plan)}" for plan in hosted if trials.settled(plan)[1].prediction.fits]
        return found

    @property
    def _has_rows(self) -> bool:
        """Whether ranks exchange rows of gradients, which are no part of a state that is divided."""
        return any(spec.rows for spec in self.compilation.reduces)

    @property
    def _divides(self) -> bool:
        return self.way is not None and not self._has_rows

    @property
    def _may_divide(self) -> bool:
        return not self._has_rows and any(len(spec.ranks) > 1 for spec in self.compilation.reduces)

    @cached_property
    def _ranks(self) -> list[tuple[int, ...]]:
        return [stage.ranks for stage in self.start.stages]

    @cached_property
    def _asked(self) -> list[Recompute | None]:
        """The rules that annotations have decided."""
        cuts = [graph.cut.stage for graph in self.compilation.partition.stages]
        return [None if stage is None else stage.strategy.recompute for stage in cuts]

    @cached_property
    def _levels(self) -> list[int | None]:
        """The levels that they have decided."""
        states = states_of(self.compilation.partition, replace(self.trials.options, state=None))
        return [None if own is None else own.level for own in states]

    def _with_rules(self, plan: Plan) -> Plan:
        memory = lambda rules: self.trials.memory_of(_under(plan, rules))  # noqa: E731
        return _under(plan, least_recompute(self._ranks, memory, given=self._asked))

    def _with_levels(self, plan: Plan) -> Plan:
        way = (self.way if self._divides else None) or StateSharding(1)
        memory = lambda levels: self.trials.memory_of(_divided(plan, levels, way))  # noqa: E731
        return _divided(plan, least_steps(self._ranks, LEVELS, memory, given=self._levels), way)

    def _with_hosts(self, plan: Plan) -> Plan:
        told = offloads_told(self.compilation.partition, None)
        memory = lambda words: self.trials.memory_of(_hosted(plan, words))  # noqa: E731
        return _hosted(plan, offload_that_fits(self.compilation, memory, given=told))

    def _under_all(self) -> Plan:
        """The plan whose stages keep least, as far as that is open."""
        return _under(self.start, [rule or RECOMPUTES[-1] for rule in self._asked])

    def _most_of_all(self) -> Plan:
        """The plan whose stages keep least and divide most, as far as that is open."""
        plan = self._under_all() if self.rules else self.start
        if self.way is None or not self._divides or not self._may_divide:
            return plan
        return _divided(plan, [LEVELS[-1] if level is None else level for level in self._levels], self.way)

    def _tried(self, ways: Sequence[Callable[[], Plan]]) -> list[Plan]:
        """The plans of some changes that fit."""
        plans = [one for way in ways if (one := way()) != self.start]
        return [one for one in plans if all_fit(self.trials.memory_of(one))]


def all_fit(memory: Sequence[DeviceMemory]) -> bool:
    """Whether each device holds what it has to."""
    return all(held.total <= held.capacity for held in memory)


def level_of(stage: PlanStage) -> int:
    """How much of its state a stage divides."""
    return stage.state.level if stage.state is not None else 0


def sharding_of(stage: PlanStage) -> StateSharding | None:
    """How a stage divides its state; None: not at all."""
    return None if stage.state is None else stage.state.sharding


def _most(plan: Plan) -> Recompute:
    """The rule of a plan's stages that keeps least."""
    return max((stage.recompute or "none" for stage in plan.stages), key=RECOMPUTES.index)


def _most_level(plan: Plan) -> int:
    """The level of a plan's stages that divides most."""
    return max(map(level_of, plan.stages))


def _under(plan: Plan, rules: Sequence[Recompute]) -> Plan:
    """The plan with a rule for each stage."""
    stages = zip(plan.stages, rules, strict=True)
    return plan.model_copy(
        update={"stages": tuple(stage.model_copy(update={"recompute": rule}) for stage, rule in stages)}
    )


def _most_offload(plan: Plan) -> Offload:
    """The word of a plan's stages by which most is on the host."""
    return max((stage.offload or "none" for stage in plan.stages), key=OFFLOADS.index)


def _hosted(plan: Plan, words: Sequence[Offload]) -> Plan:
    """The plan with what is on the host for each stage."""
    stages = zip(plan.stages, words, strict=True)
    return plan.model_copy(
        update={"stages": tuple(stage.model_copy(update={"offload": word}) for stage, word in stages)}
    )


def _divided(plan: Plan, levels: Sequence[int], way: StateSharding) -> Plan:
    """The plan with a level for each stage, which divides its state in some way."""
    stages = []
    for stage, level in zip(plan.stages, levels, strict=True):
        of_stage = replace(way, level=level).of_stage(stage.ranks, plan.world_size) if level else None
        state = None if of_stage is None else PlanState.of(of_stage)
        if level_of(stage) == level:
            state = stage.state
        stages.append(stage.model_copy(update={"state": state}))
    return plan.model_copy(update={"stages": tuple(stages)})


def _with_state(plan: Plan, memory: Sequence[DeviceMemory]) -> Plan:
    """The plan with shares of state that fit best, by what devices hold with those that it has."""
    states = fitting_states(
        [stage.ranks for stage in plan.stages],
        [sharding_of(stage) for stage in plan.stages],
        memory,
        micro_batches=plan.micro_batches,
    )
    stages = [
        stage if state is None or not state.level else stage.model_copy(update={"state": PlanState.of(state)})
        for stage, state in zip(plan.stages, states, strict=True)
    ]
    return plan.model_copy(update={"stages": tuple(stages)})
