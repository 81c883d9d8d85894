"""Failures of a long run: how often to save, and which part of its time trains.

Nodes fail independently of each other and of their age, at a constant rate, and are repaired likewise. A failure of a
node that a job uses ends its step: what was done since the newest checkpoint is lost, the job starts again and goes on
from there. Failures may come while it saves or starts. This file knows seconds and numbers of nodes: how fast a job is
on how many of them, a plan's prediction says.

References: J. W. Young, "A First Order Approximation to the Optimum Checkpoint Interval", Communications of the ACM 17
(1974); J. T. Daly, "A Higher Order Estimate of the Optimum Checkpoint Interval for Restart Dumps", Future Generation
Computer Systems 22 (2006).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, expm1, inf, isfinite, lgamma, log, log1p, sqrt

from whale.errors import UsageError

__all__ = ["Failures", "Outlook", "daly_interval", "missing", "outlook", "trained", "young_interval"]

NEGLIGIBLE = 1e-12
"""Probability of numbers of missing nodes that are left out."""


def young_interval(saving: float, mtbf: float) -> float:
    """Seconds of training between checkpoints that lose least, to first order (Young 1974).

    Args:
        saving: seconds by which a checkpoint holds training up.
        mtbf: mean seconds between failures of the job.

    >>> young_interval(30.0, 6000.0)
    600.0
    """
    return sqrt(2 * saving * mtbf)


def daly_interval(saving: float, mtbf: float) -> float:
    """The same to higher order (Daly 2006, equation 37): shorter by what it takes to save, as failures come while a job
    saves too.

    >>> round(daly_interval(30.0, 6000.0), 1)
    580.2
    """
    if not isfinite(mtbf):
        return inf
    if saving >= 2 * mtbf:
        return mtbf
    ratio = saving / (2 * mtbf)
    return young_interval(saving, mtbf) * (1 + sqrt(ratio) / 3 + ratio / 9) - saving


def trained(interval: float, saving: float, restart: float, mtbf: float) -> float:
    """The part of the time in which a job trains what is not lost (Daly 2006, equation 20, as a rate).

    Exact where failures have a constant rate: a job trains for *interval* seconds and saves; from a failure until
    training goes on it takes *restart* seconds, unless it fails again before. What follows the newest checkpoint is
    lost.

    >>> round(trained(600.0, 30.0, 60.0, 6000.0), 4), trained(600.0, 0.0, 0.0, float("inf"))
    (0.8943, 1.0)
    """
    if not isfinite(mtbf):
        return interval / (interval + saving) if isfinite(interval) else 1.0
    if (interval + saving + restart) / mtbf > 700:
        return 0.0
    return interval / mtbf * exp(-restart / mtbf) / expm1((interval + saving) / mtbf)


def missing(nodes: int, mtbf: float, repair: float) -> list[float]:
    """Probabilities that 0, 1, ... of *nodes* are being repaired, each of which fails every *mtbf* seconds and is
    repaired after *repair*, on average: the binomial distribution, up to where it is negligible.

    >>> [round(one, 3) for one in missing(100, 1e6, 1e4)[:3]]
    [0.37, 0.37, 0.183]
    """
    away = repair / (mtbf + repair) if isfinite(mtbf) else 0.0
    if not away:
        return [1.0]
    found: list[float] = []
    for count in range(nodes + 1):
        ways = lgamma(nodes + 1) - lgamma(count + 1) - lgamma(nodes - count + 1)
        found.append(exp(ways + count * log(away) + (nodes - count) * log1p(-away)))
        if count > nodes * away and found[-1] < NEGLIGIBLE:
            break
    return found


@dataclass(frozen=True, kw_only=True)
class Failures:
    """How machines fail, and what it takes to go on.

    Attributes:
        mtbf: mean seconds between failures of a device; inf: none fails.
        saving: seconds by which a checkpoint holds training up.
        restart: seconds from a failure until training goes on from the newest checkpoint: until it is noticed and ranks
            are started, have a plan and have loaded.
        repair: mean seconds until a node that failed can be used again.
        node: devices of a node, which fail together.
        spares: nodes that wait to take the place of one that failed.
        interval: seconds of training between checkpoints; None: Daly's.

    Raises:
        UsageError: a figure that makes no sense, with its name.
    """

    mtbf: float
    saving: float
    restart: float = 0.0
    repair: float = 0.0
    node: int = 1
    spares: int = 0
    interval: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("mtbf", self.mtbf), ("every", 1.0 if self.interval is None else self.interval)):
            if not value > 0:
                raise UsageError(f"failures: {name} is {value:g} s; it must be positive")
        for name, value in (("save", self.saving), ("restart", self.restart), ("repair", self.repair)):
            if not 0 <= value < inf:
                raise UsageError(f"failures: {name} is {value:g} s; it must be 0 or more")
        if self.saving == 0 and self.interval is None and self.mtbf < inf:
            raise UsageError("failures: saving takes 0 s, so one would save all the time; say how often, with every=")
        if self.node < 1 or self.spares < 0:
            raise UsageError(f"failures: a node has {self.node} devices, and {self.spares} are spare")


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """The part of a run that failures leave.

    Attributes:
        mtbf: seconds between failures that end a step, while all nodes are there.
        interval: seconds of training between checkpoints.
        trained, saving, lost: parts of the time while all nodes are there: training that counts, saving, and restarts
            with what they repeat. They sum to 1.
        missing: nodes under repair, on average.
        short: part of the time in which fewer nodes are there than the job has devices for.
        waiting: rows per second relative to a run without failures and checkpoints, if the job waits until nodes are
            repaired.
        elastic: the same if it goes on with fewer nodes; None where no speed on fewer is known.
    """

    mtbf: float
    interval: float
    trained: float
    saving: float
    lost: float
    missing: float
    short: float
    waiting: float
    elastic: float | None


def outlook(failures: Failures, devices: int, speeds: Sequence[tuple[int, float]] = ()) -> Outlook:
    """Return what failures leave of a run on a number of devices.

    A job that is elastic starts again where a node that it uses fails, and where one comes back that makes a faster
    plan possible. The time average over the numbers of missing nodes is exact where a plan is known for each number
    that matters, because nothing remembers its age; with fewer plans, those for more missing nodes are used.

    Args:
        failures: of the devices.
        devices: that the job uses.
        speeds: plans for fewer nodes: how many are missing, and rows per second relative to the plan for all.

    Raises:
        UsageError: a plan for more nodes than there are missing, or whose speed makes no sense.

    >>> found = outlook(Failures(mtbf=3.6e7, saving=20, restart=60, repair=7200, node=8), 1024, [(1, 0.99)])
    >>> round(found.interval), round(found.trained, 3), round(found.waiting, 3), round(found.elastic, 3)
    (1173, 0.965, 0.786, 0.932)
    """
    nodes = -(-devices // failures.node)
    for gone, speed in speeds:
        if not 0 < gone < nodes or not 0 < speed < inf:
            raise UsageError(
                f"failures: a plan for {gone} nodes fewer of {nodes}, {speed:g} x as fast, is none that a job could "
                "change to"
            )
    of_node = failures.mtbf / failures.node
    whole = of_node / nodes
    interval = daly_interval(failures.saving, whole) if failures.interval is None else failures.interval
    full = trained(interval, failures.saving, failures.restart, whole)
    saving = full * failures.saving / interval if isfinite(interval) else 0.0
    chances = missing(nodes + failures.spares, of_node, failures.repair)

    def rate(plans: Sequence[tuple[int, float]]) -> float:
        """Time average over the numbers of missing nodes, each with the fastest plan that it leaves."""
        total = 0.0
        for count, chance in enumerate(chances):
            short = max(0, count - failures.spares)
            possible = [plan for plan in plans if plan[0] >= short]
            if not possible:
                break
            gone, speed = max(possible, key=lambda plan: (plan[1], -plan[0]))
            ends = (nodes - gone) / of_node
            if any(other == short - 1 and faster > speed for other, faster in plans):
                ends += count / failures.repair  # one that comes back makes a faster plan possible
            total += chance * speed * trained(interval, failures.saving, failures.restart, 1 / ends if ends else inf)
        return total

    return Outlook(
        mtbf=whole,
        interval=interval,
        trained=full,
        saving=saving,
        lost=max(0.0, 1 - full - saving),
        missing=sum(count * chance for count, chance in enumerate(chances)),
        short=sum(chances[failures.spares + 1 :]),
        waiting=rate([(0, 1.0)]),
        elastic=rate([(0, 1.0), *speeds]) if speeds else None,
    )
