"""Options that every verb shares, and how a verb speaks: results to stdout, notes to stderr."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import click

from whale.errors import UsageError
from whale.ir.state import LEVELS, StateSharding
from whale.ir.strategy import OFFLOADS, STATE_ON_HOST, Offload, Reduce

_Function = TypeVar("_Function", bound=Callable[..., object])


MOST = 2**40
"""Limit on numbers of rows and other counts, as in plans; more than any machine has, and products fit in 64 bits."""

PRECISION_HELP = "bf16, fp16: of parallelize(precision=); fp32, tf32, fp64, bfloat16, float16: the model's [as it is]."

GRADIENT_DTYPE_HELP = "Number type of sums of gradients, as of parallelize(gradient_dtype=) [the gradients']."

STEP_IN_BACKWARD_HELP = "Update parameters in the backward, as of parallelize(step_in_backward=True)."

REDUCE_HELP = "How replicas make one gradient of theirs, as of parallelize(reduce=) [as annotated, else mean]."

STALENESS_HELP = "Steps after which servers have the gradients of one, as of parallelize(staleness=) [0]."

AT_LEAST_1 = click.IntRange(1, MOST)


class Numbers(click.ParamType):
    """Whole numbers between commas, with ranges: ``12,14`` or ``8-15,0-7``; none is below *least* or above `MOST`, and
    none is there twice if they are *distinct*."""

    name = "numbers"

    def __init__(self, *, least: int = 0, distinct: bool = False) -> None:
        self.least, self.distinct = least, distinct

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Read the text."""
        if isinstance(value, tuple):
            return value
        found: list[int] = []
        for part in str(value).split(","):
            first, dash, last = part.strip().partition("-")
            if not first.isdecimal() or (dash and not last.isdecimal()):
                example = f"12,14 or {self.least}-{self.least + 7}"
                self.fail(f"{value!r}: write whole numbers with commas between them, such as {example}", param, ctx)
            if max(len(first), len(last)) > 20 or int(last or first) > MOST:
                self.fail(f"{value!r:.60}: a number is more than {MOST:,}", param, ctx)
            start, stop = int(first), int(last if dash else first)
            if stop < start:
                self.fail(f"{value!r}: the range {part.strip()} goes down; write {stop}-{start}", param, ctx)
            if start < self.least:
                self.fail(f"{value!r}: {start} is less than {self.least}", param, ctx)
            if stop - start > 1_000_000:
                self.fail(f"{value!r} is too long", param, ctx)
            found += range(start, stop + 1)
        if self.distinct and len(set(found)) < len(found):
            twice = next(number for number in found if found.count(number) > 1)
            self.fail(f"{value!r}: {twice} is there twice", param, ctx)
        return tuple(found)


class _Shares(click.ParamType):
    """Numbers between commas, or ``auto``."""

    name = "shares"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[float, ...] | Literal["auto"]:
        """Read the text."""
        if isinstance(value, tuple) or value == "auto":
            return value
        try:
            found = tuple(float(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r}: write numbers with commas between them, such as 3,1, or auto", param, ctx)
        if any(not 0 <= share < float("inf") for share in found) or not sum(found):
            self.fail(f"{value!r}: shares are numbers of at least 0, and one of them more", param, ctx)
        return found


class _Level(click.ParamType):
    """A level of ``zero``, or ``auto``."""

    name = "level"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | Literal["auto"]:
        """Read the text."""
        if value == "auto" or value in LEVELS:
            return value
        if str(value) not in map(str, LEVELS):
            self.fail(f"{value!r}: use 0, 1, 2, 3 or auto", param, ctx)
        return int(value)


def state_options(default: Any, otherwise: str, *, shares: bool = True) -> Callable[[_Function], _Function]:
    """Give a verb ``--zero``, ``--state-shares`` and ``--state-align``: how replicas divide their state.

    Args:
        default: of ``--zero``.
        otherwise: what that means, in the help.
        shares: whether the verb takes shares.
    """
    options = [
        click.option(
            "--zero",
            type=_Level(),
            default=default,
            metavar="0-3|auto",
            help="What replicas divide: 1 optimizer states, 2 gradients too, 3 parameters too; auto: the least that "
            f"fits, by stage [{otherwise}].",
        ),
        click.option(
            "--state-align",
            type=click.Choice(["row", "parameter"]),
            help="Where parts of it end; whole parameters are for optimizers of matrices [row].",
        ),
    ]
    if shares:
        options.append(
            click.option(
                "--state-shares",
                type=_Shares(),
                metavar="S,S,...|auto",
                help="How much each rank or replica owns of it; auto: by what memory leaves [equal].",
            )
        )

    def added(function: _Function) -> _Function:
        for option in reversed(options):
            function = option(function)
        return function

    return added


def offload_option(default: Any, otherwise: str) -> Callable[[_Function], _Function]:
    """Give a verb ``--offload``: what is in the memory of hosts; *otherwise* is what *default* means, in the help."""
    return click.option(
        "--offload",
        type=click.Choice((*OFFLOADS, "auto")),
        default=default,
        help="What is in the host's memory: activations, state (parameters, gradients, optimizer states), both, or "
        f"tables with sparse gradients; auto: the least that fits, by stage [{otherwise}].",
    )


def sharding_of(
    zero: int | Literal["auto"] | None,
    shares: tuple[float, ...] | Literal["auto"] | None,
    align: Any,
    offload: Offload | Literal["auto"] | None = None,
    reduce: Reduce | None = None,
) -> StateSharding | None:
    """How replicas divide their state, by these options; with ``auto`` how they do whatever the level and shares.

    Raises:
        UsageError: they contradict each other.
    """
    if reduce == "server" and not zero:
        zero, align = 1, "parameter"
    if not zero and offload not in STATE_ON_HOST and (shares or align):
        raise UsageError("--state-shares and --state-align say how --zero divides the state: give --zero 1, 2 or 3")
    level = 1 if zero == "auto" or (offload in STATE_ON_HOST and not zero) else zero
    own = shares if isinstance(shares, tuple) else ()
    return None if level is None else StateSharding(level, own, align or "row")


def _add_to_verbosity(ctx: click.Context, parameter: click.Parameter, value: int) -> None:
    step = -1 if parameter.name == "quiet" else 1
    meta = ctx.find_root().meta
    meta["whale.verbosity"] = meta.get("whale.verbosity", 0) + step * value


def verbosity_options(function: _Function) -> _Function:
    """Give a verb ``-v`` (tracebacks and detail) and ``-q`` (no notes). The verb itself receives neither."""
    for flag, name, text in (
        ("-v", "--verbose", "More detail; the traceback of an error."),
        ("-q", "--quiet", "Results only, no notes."),
    ):
        option = click.option(
            flag, name, count=True, expose_value=False, is_eager=True, help=text, callback=_add_to_verbosity
        )
        function = option(function)
    return function


def note(message: str) -> None:
    """Say something on stderr that is not the result; silent under ``-q``."""
    if not is_quiet():
        click.echo(message, err=True)


def is_quiet() -> bool:
    """Whether ``-q`` was given."""
    ctx = click.get_current_context(silent=True)
    return ctx is not None and ctx.find_root().meta.get("whale.verbosity", 0) < 0
