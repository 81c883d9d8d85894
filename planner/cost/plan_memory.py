"""Memory of the devices and hosts of a plan, one device of each kind of replica."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from whale.ir.workload import DeviceMemory, NodeMemory
from whale.planner.cost.chain_stage import ChainStage
from whale.planner.cost.hosts import Held, node_memories
from whale.planner.cost.memory import SUMMED_BYTES, StateBytes, message_bytes, sharded_bytes
from whale.planner.cost.optimizers import costs_of
from whale.planner.cost.plan_communicators import PlanCommunicators
from whale.planner.cost.plan_kinds import on_same_ranks
from whale.planner.cost.replica_kinds import Kind, own_bytes, owned_part, ruled
from whale.planner.cost.state_shares import fitting_shares, owned_bytes
from whale.planner.schedules.in_flight import in_flight, peak_kept

__all__ = ["PlanMemory"]


@dataclass(frozen=True, kw_only=True)
class PlanMemory(PlanCommunicators):
    """The memory of a plan."""

    def _whole(self, index: int) -> float:
        """Elements that devices of a stage have besides because what stages share is whole on each of them, as Whale
        runs it, if their meshes are unlike."""
        if not self.prices.runs:
            return 0.0
        owners = [(self._owners(readers), shared) for readers, shared in self.prices.profile.tied]
        unlike = [shared for own, shared in owners if index in own and self._are_unlike(own)]
        return sum(unlike) * (1 - 1 / self.stages[index].tensor)

    def _summing_tied(self, layers: Sequence[int], stage: ChainStage, kind: Kind, kept: int) -> float:
        """Bytes beside *kept* while a device sums the gradients of the readers of a tied parameter, as autograd does:
        that of the last reader waits for that of the first, and then there is the sum too; activations are freed."""
        prices, most = ruled(self.prices, stage), 0.0
        if not prices.runs:
            return 0.0
        for readers, shared in prices.profile.tied:
            here = sorted(set(layers).intersection(readers))
            if len(here) < 2:
                continue
            size = shared / stage.tensor * prices.precision.element_bytes
            between = [
                prices.layer(prices.profile.layers[layer], kind.group, kind.rows, 1)
                for layer in layers
                if layer < here[-1]
            ]
            most = max(most, size + max(price.working for price in between))
            most = max(most, 3 * size - kept)
        return most

    def memory(self) -> Iterator[DeviceMemory]:
        """Memory of the smallest device of each kind of replica."""
        prices, zero = self.prices, 0 if self.prices.runs else self.prices.stack.zero
        if prices.stack.tables_on_host:  # of which stages say themselves whether they have some
            prices = prices.under(prices.stack.recompute, prices.stack.zero)
        any_on_host = any(stage.offload != "none" for stage in self.stages)
        renews = zero >= 2 and len(self.stages) > 1  # weights and gradients are whole, but made anew in each step
        for own in self._devices:
            stage = self.stages[own[0]]
            layers = [layer for index in own for layer in self.stages[index].layers]
            degrees, shards = (stage.tensor, stage.expert), len(stage.data_group)
            more = sum(self._whole(index) for index in own)
            state = prices.state_of(layers, *degrees, shards=shards, zero=1 if renews else zero) + prices.state(more)
            state = replace(state, parameters=state.parameters - self._tables_on_host(own))
            renewed = 0.0
            if renews:  # gradients as they are summed
                state = replace(state, gradients=state.parameters / prices.precision.element_bytes * SUMMED_BYTES)
                renewed = state.parameters + state.gradients
            sharded = self._sharded(layers, *degrees, shards)
            stepping = stepping_whole = round(prices.step_bytes(sum(prices.parameters(layers, *degrees)) + more))
            whole = state
            for place, kind in enumerate(self.kinds[own[0]]):
                device = prices.cluster.devices[kind.rank]
                if stage.level:
                    stepping = 0 if stage.state_on_host else round(stepping_whole * owned_part(prices, stage, kind))
                if prices.step_in_backward:  # of a bucket at a time
                    unit = prices.full_bucket(stage.data_group, layers, *degrees, divided=stage.level > 0)
                    stepping = min(stepping, round(unit))
                kept = self._kept(own, place) + round(sum(self._messages(index, kind) for index in own))
                working = max(self.costs[index][place].working for index in own)
                # the gradient of a part of what is whole is as large as all of it
                padded = more * stage.tensor / (stage.tensor - 1) * prices.gradient_bytes if more else 0.0
                working = round(max(working + padded, stepping - kept, self._summing_tied(layers, stage, kind, kept)))
                if stage.level:
                    one = sum(self.costs[index][place].kept - self._shared_casts(index) for index in own)
                    state, sharded = self._divided(own, layers, kind, whole, (kept, one, working))
                elif prices.summed_bytes is not None and shards > 1:  # two buckets are there as they are exchanged, too
                    held = min(state.gradients, 2 * prices.largest_bucket(stage.data_group, layers, *degrees))
                    sharded = held * prices.summed_bytes / prices.precision.element_bytes
                if prices.step_in_backward and self.micro_batches == 1 and not stage.level:
                    held = min(whole.gradients, 3 * unit) + self._stepping(layers, degrees, unit)
                    state = replace(state, gradients=_passing(whole.gradients, unit, held, kept))
                waiting = 0.0  # gradients that leave the device in the step are no buffers that stay
                if stage.level and not self._exchanged[own[0]].each:
                    waiting = state.gradients
                wasted = round((kept + working + sharded + renewed + waiting) * prices.wasted)
                yield DeviceMemory(
                    rank=kind.rank,
                    device=device.name,
                    capacity=device.memory_bytes,
                    parameters=round(state.parameters),
                    gradients=round(state.gradients),
                    optimizer=round(state.optimizer),
                    activations=kept,
                    workspace=working,
                    buffers=round(sharded) + wasted,
                    framework=round(prices.overhead(device.type, self._communicators(own, place))),
                    **(self._on_host(own, place, kind) if any_on_host else {}),
                )

    def _on_host(self, own: tuple[int, ...], place: int, kind: Kind) -> dict[str, int]:
        """Bytes that a device has on its host."""
        hosted = [index for index in own if self.stages[index].state_on_host]
        state = sum(own_bytes(self.prices, self.stages[index], kind) for index in hosted)
        kept = [self.costs[index][place].hosted for index in own]
        return {
            "host_state": round(state * (2 + self.prices.states) + self._tables_on_host(own)),
            "host_activations": self._in_flight(own, kept) if any(kept) else 0,
        }

    def _tables_on_host(self, own: Sequence[int]) -> float:
        """Bytes of the tables that a device of these stages has on its host, with a number for each row."""
        hosted = [self.stages[index] for index in own if self.stages[index].tables_on_host]
        prices = self.prices
        elements = sum(
            prices.tables_of(prices.profile.layers[layer], stage.tensor, stage.expert)
            for stage in hosted
            for layer in stage.layers
        )
        return elements * prices.precision.element_bytes

    def hosts(self) -> tuple[NodeMemory, ...]:
        """Memory of the nodes on which ranks keep something, one of each kind."""
        if all(stage.offload == "none" for stage in self.stages):
            return ()
        of_kinds = {one.rank: Held(one.host_state, one.host_activations) for one in self.memory()}
        held: dict[int, Held] = {}
        for own in self._devices:
            stage, kinds = self.stages[own[0]], self.kinds[own[0]]
            for replica, place in enumerate(self.of[own[0]]):
                held |= dict.fromkeys(stage.slice(replica), of_kinds[kinds[place].rank])
        return node_memories(self.prices.cluster, held)

    def _divided(
        self,
        own: Sequence[int],
        layers: Sequence[int],
        kind: Kind,
        whole: StateBytes,
        activations: tuple[float, float, float],
    ) -> tuple[StateBytes, float]:
        """Bytes of what a device has of the *whole* state of its stages, and of buckets that are whole for a while, as
        Whale runs it.

        Two buckets of parameters that tasks gather are there: one that is read and the next. Sums of gradients have a
        bucket that is not complete, and two on their way to their owners with what each receives, which on processors
        are the terms of the other ranks, and the sum. They are there while what is kept is freed, unless gradients are
        summed in each micro-batch. *activations* are the bytes that all micro-batches keep, that one keeps, and of what
        runs.
        """
        prices, stage, done = self.prices, self.stages[own[0]], self._exchanged[own[0]]
        size = prices.precision.element_bytes
        frozen = size * sum(prices.frozen_of(prices.profile.layers[one], stage.tensor, stage.expert) for one in layers)
        frozen -= 0.0 if prices.stack.tables_on_host else self._tables_on_host(own)
        trained, share = whole.parameters - frozen, owned_part(self.prices, stage, kind)
        apart = size * sum(
            shared / stage.tensor
            for readers, shared in prices.profile.tied
            if self._is_apart(readers) and set(layers).intersection(readers)
        )
        held = 0.0 if stage.state_on_host else share
        once = trained * held + apart * (1 - held)  # what stages share is whole
        unit = min(trained, prices.largest_bucket(stage.data_group, layers, stage.tensor, stage.expert, divided=True))
        exchanged = prices.gradient_bytes / size
        received = exchanged * share * unit
        if any(type_.is_processor for type_ in kind.group.types):  # of one micro-batch a bucket: small shares need it
            received = exchanged * unit if self.micro_batches == 1 else received * (len(stage.data_group) - 1)
        received = 2 * received + held * unit  # a sum on the host is not here
        if stage.data == 1 and (stage.expert > 1 or len(stage.data_group) == 1):
            received = 0.0  # a rank sums the largest buckets with no other
        kept, kept_one, working = activations
        filled = prices.filled_bucket(stage.data_group, unit)
        summed = min(trained * max(1.0, exchanged), filled + 2 * max(1.0, exchanged) * unit) + received
        gradients, summing = whole.gradients, max(0.0, received - kept_one / 2)
        if done.each:
            gradients, summing = once, summed
        elif self.micro_batches == 1 and (stage.state_on_host or prices.step_in_backward):
            if not stage.state_on_host:
                summed += self._stepping(layers, (stage.tensor, stage.expert), share * unit)
            gradients, summing = 0.0, _passing(trained, unit, summed, kept)
        elif self.micro_batches == 1:
            needed = self._beside_backwards(layers, stage, kind, once, summed / max(1.0, unit), kept) - working
            gradients, summing = min(once, max(0.0, needed)), max(0.0, needed - once)
        casts = prices.casts(layers, (stage.tensor, stage.expert))
        read = trained + casts * (1 - size / 2)  # as they are gathered
        kept_whole = (once + read if casts else trained) if not done.tasks else once
        state = StateBytes(
            parameters=frozen + kept_whole,
            gradients=gradients,
            optimizer=whole.optimizer * held,
        )
        return state, summing + (min(read, 2 * unit * read / max(1.0, trained)) if done.tasks else 0.0)

    def _beside_backwards(
        self, layers: Sequence[int], stage: ChainStage, kind: Kind, once: float, buckets: float, kept: float
    ) -> float:
        """The most bytes beside the *kept* activations of the only micro-batch in its backward, in which layers run one
        after the other: what a layer works with, its own gradients among that, beside those of the layers behind it, or
        these with its own when it is done. A device has a part of those that are made, *once* of all, and as many
        *buckets* as there are at a time are on their way. What layers behind it kept is free again. A gradient that the
        last reader of a tied parameter makes waits for that of the first, and then there is the sum too."""
        prices, size = ruled(self.prices, stage), self.prices.precision.element_bytes
        degrees, of_kinds, kinds = (stage.tensor, stage.expert), {}, prices.profile.layers
        for layer in layers:
            if kinds[layer] not in of_kinds:
                of_kinds[kinds[layer]] = (
                    sum(prices.parameters([layer], *degrees)) * size,
                    prices.largest_bucket(stage.data_group, [layer], *degrees, divided=True),
                    prices.layer(kinds[layer], kind.group, kind.rows, 1),
                )
        tied = [
            (here[0], here[-1], shared / stage.tensor * size)
            for readers, shared in prices.profile.tied
            if len(here := sorted(set(layers).intersection(readers))) > 1
        ]
        whole = max(1.0, sum(of_kinds[kinds[layer]][0] for layer in layers))
        made, freed, most, behind = 0.0, 0.0, -kept, 0.0
        for layer in reversed(layers):
            own, bucket, cost = of_kinds[kinds[layer]]
            held, passing = once * made / whole, min(made, buckets * behind)
            waiting = sum(size for first, last, size in tied if first <= layer < last)
            most = max(most, held + passing + waiting + cost.working - min(freed, kept))
            made, behind = made + own, bucket
            passing = max(min(made, buckets * bucket), sum(3 * size for first, _, size in tied if first == layer))
            most = max(most, once * made / whole + passing - min(freed, kept))
            freed += cost.kept
        return most

    def _stepping(self, layers: Sequence[int], degrees: tuple[int, int], unit: float) -> float:
        """Temporary bytes of an optimizer's step for a bucket of *unit* bytes."""
        prices = self.prices
        costs, size = costs_of(prices.optimizer), prices.precision.element_bytes
        if not any(type_.is_processor for type_ in prices.num_of_types) and costs.in_lists:
            return costs.in_lists * unit
        return costs.one_by_one * min(unit, size * prices.largest_parameter(layers, *degrees))

    def fitting_shares(self) -> list[tuple[float, ...]]:
        """Shares of each stage's state, of its replicas, that fit best where equal ones do not; () are equal ones, or
        where it divides none."""
        held = {device.rank: device for device in self.memory()}
        found: list[tuple[float, ...]] = []
        for index, stage in enumerate(self.stages):
            rooms, owned = [], 0.0
            for place in self.of[index] if stage.level and not stage.state_on_host else ():
                device = held[self.kinds[index][place].rank]
                at_once = self.micro_batches == 1 or self._exchanged[index].each
                parts = device.parameters, device.gradients, device.optimizer
                own = owned_bytes(
                    *parts, level=2 + self._exchanged[index].tasks if stage.level > 1 else 1, at_once=at_once
                )
                rooms.append(device.capacity - device.total + own)
                owned += own
            found.append(fitting_shares(rooms, owned) if rooms else ())
        return found

    def _sharded(self, layers: Sequence[int], tensor: int, expert: int, shards: int) -> float:
        """Bytes of weights and gradients that are whole for a while although devices divide them."""
        prices, zero = self.prices, self.prices.stack.zero
        if zero < 2 or shards == 1:
            return 0.0
        blocks = [layer for layer in layers if prices.repeats(prices.profile.layers[layer])]
        others = [layer for layer in layers if not prices.repeats(prices.profile.layers[layer])]
        return sharded_bytes(
            [sum(prices.parameters([layer], tensor, expert)) for layer in blocks],
            sum(prices.parameters(others, tensor, expert)),
            precision=prices.precision,
            zero=zero,
            shards=shards,
        )

    def _kept(self, own: tuple[int, ...], place: int) -> int:
        """Bytes that ranks which run the stages *own* save at a time for backwards."""
        # A replica without rows casts nothing.
        shared = [min(self._shared_casts(index), self.costs[index][place].kept) for index in own]
        sizes = [self.costs[index][place].kept - casts for index, casts in zip(own, shared, strict=True)]
        gathered = self.stages[own[0]].level > 0  # then the casts are the gathered parameters
        return self._in_flight(own, sizes) + (0 if gathered else round(sum(shared)))

    def _in_flight(self, own: tuple[int, ...], sizes: Sequence[float]) -> int:
        """Bytes at a time of what the micro-batches in flight have, each *sizes* in the stages *own*."""
        depth, whole = len(self.stages), list(map(round, sizes))
        if len(own) == 1:
            return in_flight(self.schedule, depth, own[0], self.micro_batches) * whole[0]
        return peak_kept(self.schedule, self._sets, self.micro_batches, dict(zip(own, whole, strict=True)))

    def _shared_casts(self, index: int) -> float:
        """Bytes of the casts of parameters in what a micro-batch saves of a stage, which are not its own."""
        stage = self.stages[index]
        return self.prices.casts(stage.layers, (stage.tensor, stage.expert)) if stage.recompute == "none" else 0.0

    @cached_property
    def _sets(self) -> tuple[frozenset[int], ...]:
        """For each stage the set of ranks that runs it, as a number."""
        return tuple(frozenset(own[:1]) for own in on_same_ranks(self.stages))

    def _messages(self, index: int, kind: Kind) -> float:
        """Bytes of the messages of a stage that a rank holds at a time."""
        stage, prices = self.stages[index], self.prices
        rows = kind.rows / stage.size * stage.tensor
        if prices.runs:
            rows = kind.group.whole_rows(int(kind.rows)) / stage.expert / stage.context
        entering = prices.handed_bytes(stage.first - 1, rows) if index else 0.0
        leaving = prices.handed_bytes(stage.last - 1, rows) if index < len(self.stages) - 1 else 0.0
        held = in_flight(self.schedule, len(self.stages), index, self.micro_batches)
        return float(message_bytes(entering, leaving, held))


def _passing(gradients: float, unit: float, held: float, kept: float) -> float:
    """Bytes that gradients which leave a device bucket by bucket have beside the *kept* activations of a backward. The
    memory of a bucket of *unit* bytes is there from its first gradient on; most of what is *held* is, once two of them
    are on their way, when the activations of these are freed."""
    return max(min(gradients, unit), held - kept * min(1.0, 2 * unit / max(1.0, gradients)))
