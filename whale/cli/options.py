"""Options that every verb shares, and how a verb speaks: results to stdout, notes to stderr."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import click

_Function = TypeVar("_Function", bound=Callable[..., object])


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
    ctx = click.get_current_context(silent=True)
    if ctx is None or ctx.find_root().meta.get("whale.verbosity", 0) >= 0:
        click.echo(message, err=True)
