"""Options that every verb shares, and how a verb speaks: results to stdout, notes to stderr."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

_Function = TypeVar("_Function", bound=Callable[..., object])


MOST = 2**40
"""Limit on numbers of rows and other counts, as in plans; more than any machine has, and products fit in 64 bits."""

PRECISION_HELP = "bf16, fp16: of parallelize(precision=); fp32, tf32, fp64, bfloat16, float16: the model's [as it is]."

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
