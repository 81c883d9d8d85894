"""Argument checks of the public functions, with errors in the caller's words.

It knows names, types and ranges; combinations of arguments are checked where they are used. It imports neither torch
nor anything of Whale except its errors.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

from whale.errors import UsageError

__all__ = [
    "check_choice",
    "check_count",
    "check_flag",
    "check_number",
    "check_type",
    "check_updates",
    "known_arguments",
    "nearest",
]

P = ParamSpec("P")
R = TypeVar("R")


def known_arguments(error: type[UsageError] = UsageError) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function so that an unknown, repeated or missing argument is *error*, with the nearest known name.

    >>> @known_arguments()
    ... def plan(model, *, micro_batches=1): ...
    >>> plan(None, microbatches=2)
    Traceback (most recent call last):
        ...
    whale.errors.UsageError: plan() has no argument 'microbatches'; did you mean 'micro_batches'?
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        name = function.__name__
        keywords = [p.name for p in signature.parameters.values() if p.kind is not p.POSITIONAL_ONLY]

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                signature.bind(*args, **kwargs)
            except TypeError as problem:
                unknown = next((key for key in kwargs if key not in keywords), None)
                if unknown is None:
                    raise error(f"{name}(): {problem}; write {name}{signature_text(signature)}") from None
                raise error(f"{name}() has no argument {unknown!r}{nearest(unknown, keywords)}") from None
            return function(*args, **kwargs)

        return call

    return decorate


def signature_text(signature: inspect.Signature) -> str:
    """The names of a signature's arguments, without types and defaults.

    >>> signature_text(inspect.signature(check_choice))
    '(name, value, choices)'
    """
    names = [p.name if p.default is p.empty else f"{p.name}=..." for p in signature.parameters.values()]
    return f"({', '.join(names)})"


def nearest(word: object, words: Sequence[str]) -> str:
    """The end of a message about an unknown word: the nearest known one, or all of them.

    >>> nearest("1f2b", ["gpipe", "1f1b"]), nearest("x", ["gpipe", "1f1b"])
    ("; did you mean '1f1b'?", "; use 'gpipe' or '1f1b'")
    """
    close = difflib.get_close_matches(str(word), words, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    shown = [repr(w) for w in words]
    return f"; use {', '.join(shown[:-1])}{' or ' if len(shown) > 1 else ''}{shown[-1]}" if shown else ""


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Refuse a value that is none of *choices*."""
    if not isinstance(value, str) or value not in choices:
        raise UsageError(f"{name}={value!r} is unknown{nearest(value, choices)}")


def check_count(name: str, value: object, *, least: int = 1, most: int | None = None) -> None:
    """Refuse anything except a whole number of at least *least*, and at most *most*; True is not one."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{name}={value!r}: it must be a whole number of at least {least}")
    if most is not None and value > most:
        raise UsageError(f"{name}={value!r}: it must be at most {most}")


def check_number(name: str, value: object, *, above: float) -> None:
    """Refuse anything except a finite number above *above*."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > above
    if not good:
        raise UsageError(f"{name}={value!r}: it must be a number above {above:g}")


def check_flag(name: str, value: object) -> None:
    """Refuse anything except True and False."""
    check_type(name, value, bool, "True or False")


def check_updates(precision: str | None, *, step_in_backward: bool, name: str) -> None:
    """Refuse updates in the backward, asked for by *name*, under a precision that skips steps."""
    if step_in_backward and precision == "fp16":
        raise UsageError(
            f"{name} updates parameters before all gradients are known, but with precision='fp16' a step is skipped if "
            f"any of them is not finite: use bf16, or leave {name.removesuffix('=True')} out"
        )


def check_type(name: str, value: object, kinds: type | tuple[type, ...], wanted: str) -> None:
    """Refuse a value of another type; *wanted* says in words what it should be."""
    if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is int):
        raise UsageError(f"{name} is {_shown(value)}; it must be {wanted}")


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text}" if len(text) <= 60 else f"a {type(value).__name__}"
