"""Patterns of module paths, the keys of ``whale.annotate``: matching, and which of two patterns is more specific.

A pattern is a module path whose components may hold ``*`` (any text without a dot), ``[0-7]`` (an integer in an
inclusive range) or ``[0,2,5]`` (a list, which may hold ranges). It knows paths as strings only: no module and no torch.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from whale.errors import AnnotationError

__all__ = ["ModulePattern", "explain_no_match", "most_specific"]

_TOKEN = re.compile(r"\*|\[[^\]]*\]|[^*\[\]]+")


@dataclass(frozen=True)
class _Numbers:
    """The integers of a bracket, as inclusive ranges, so that a large range costs nothing."""

    ranges: tuple[tuple[int, int], ...]

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and any(low <= number <= high for low, high in self.ranges)

    def covers(self, other: _Numbers) -> bool:
        """Whether every integer of *other* is one of these; ranges are sorted and do not touch."""
        return all(any(low <= first and last <= high for low, high in self.ranges) for first, last in other.ranges)


_Token = str | _Numbers | None
"""A piece of a component: literal text, a bracket, or None for ``*``."""


@dataclass(frozen=True)
class ModulePattern:
    """One key of an annotation mapping.

    >>> pattern = ModulePattern("model.layers.[0-7]")
    >>> pattern.matches("model.layers.7"), pattern.matches("model.layers.8"), pattern.matches("model.layers.7.attn")
    (True, False, False)
    >>> ModulePattern("").matches("")
    True
    """

    text: str
    _components: tuple[tuple[_Token, ...], ...] = field(init=False, repr=False, compare=False)
    _regex: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        components = tuple(_tokens(part, self.text) for part in _split_components(self.text)) if self.text else ()
        object.__setattr__(self, "_components", components)
        object.__setattr__(self, "_regex", re.compile(r"\.".join(map(_component_regex, components))))

    def matches(self, path: str) -> bool:
        """Whether *path*, a module's dotted name, is one that this pattern means."""
        found = self._regex.fullmatch(path)
        if found is None:
            return False
        brackets = [token for component in self._components for token in component if isinstance(token, _Numbers)]
        return all(int(number) in bracket for number, bracket in zip(found.groups(), brackets, strict=True))

    @property
    def wildcards(self) -> tuple[int, int]:
        """Number of ``*`` and of brackets: the fewer, compared in this order, the more specific."""
        tokens = [token for component in self._components for token in component]
        return tokens.count(None), sum(isinstance(token, _Numbers) for token in tokens)

    def is_narrower_than(self, other: ModulePattern) -> bool:
        """Whether the two differ only in brackets, and each bracket here lies within the other's."""
        if self._components == other._components or list(map(len, self._components)) != list(
            map(len, other._components)
        ):
            return False
        mine = [token for component in self._components for token in component]
        others = [token for component in other._components for token in component]
        return all(
            theirs.covers(token) if isinstance(token, _Numbers) and isinstance(theirs, _Numbers) else token == theirs
            for token, theirs in zip(mine, others, strict=True)
        )

    def is_more_specific_than(self, other: ModulePattern) -> bool:
        """Whether this pattern wins where both match.

        Fewer ``*`` win; then fewer brackets; then, for patterns that differ only in their brackets, those that lie
        within the other's. Anything else is a tie.

        >>> ModulePattern("layers.3").is_more_specific_than(ModulePattern("layers.[0-7]"))
        True
        >>> ModulePattern("layers.[0-3]").is_more_specific_than(ModulePattern("layers.[0-7]"))
        True
        >>> ModulePattern("layers.[0-3]").is_more_specific_than(ModulePattern("layers.[2-5]"))
        False
        """
        if self.wildcards != other.wildcards:
            return self.wildcards < other.wildcards
        return self.is_narrower_than(other)


def most_specific(patterns: Sequence[ModulePattern], path: str) -> ModulePattern:
    """The pattern that wins at *path*, which all *patterns* match.

    Raises:
        AnnotationError: two patterns tie; the message names both.
    """
    best = patterns[0]
    for pattern in patterns[1:]:
        if pattern.is_more_specific_than(best):
            best = pattern
    for pattern in patterns:
        if pattern is not best and not best.is_more_specific_than(pattern):
            raise AnnotationError(
                f"the keys {pattern.text!r} and {best.text!r} both match the module {path!r} and neither is more "
                f"specific; narrow one of them, or add the key {path!r}"
            )
    return best


def explain_no_match(pattern: ModulePattern, paths: Collection[str]) -> str:
    """Explain why *pattern* matches none of *paths*: where matching stops, what exists there, and the nearest paths.

    >>> explain_no_match(ModulePattern("layers.1"), ["", "layers", "layers.0", "head"])
    "the key 'layers.1' matches no module; 'layers' has: 0; did you mean 'layers.0' or 'layers'?"
    """
    reached: list[str] = [""]
    parts = _split_components(pattern.text)
    for length in range(1, len(parts)):
        prefix = ModulePattern(".".join(parts[:length]))
        further = [path for path in paths if prefix.matches(path)]
        if not further:
            break
        reached = further
    children = sorted({_child_of(path, parent) for parent in reached for path in paths} - {""}, key=_natural_order)
    where = "the model" if reached == [""] else f"{reached[0]!r}"
    shown = ", ".join(children[:12]) + (f", and {len(children) - 12} more" if len(children) > 12 else "")
    message = f"the key {pattern.text!r} matches no module; {where} has: {shown or 'no children'}"
    near = difflib.get_close_matches(pattern.text, [path for path in paths if path], n=3, cutoff=0.6)
    return message + (f"; did you mean {' or '.join(map(repr, near))}?" if near else "")


def _child_of(path: str, parent: str) -> str:
    """Name of the direct child of *parent* that *path* is, or the empty string if it is none."""
    head, _, name = path.rpartition(".")
    return name if head == parent and path != parent else ""


def _natural_order(name: str) -> tuple[int, int, str]:
    return (0, int(name), "") if name.isdecimal() else (1, 0, name)


def _split_components(text: str) -> list[str]:
    """Cut a pattern at its dots; a dot inside a bracket would not be one, but is refused later as no number."""
    return text.split(".")


def _tokens(component: str, pattern: str) -> tuple[_Token, ...]:
    if not component:
        raise AnnotationError(
            f"the key {pattern!r} has an empty component; write a module path such as 'model.layers.[0-7]'"
        )
    pieces = _TOKEN.findall(component)
    if "".join(pieces) != component:
        raise AnnotationError(f"the key {pattern!r} has an unpaired bracket in {component!r}; write [0-7] or [0,2,5]")
    return tuple(
        None if piece == "*" else _numbers(piece, pattern) if piece.startswith("[") else piece for piece in pieces
    )


def _numbers(bracket: str, pattern: str) -> _Numbers:
    ranges: list[tuple[int, int]] = []
    for item in bracket[1:-1].split(","):
        found = re.fullmatch(r"\s*([0-9]{1,9})\s*(?:-\s*([0-9]{1,9})\s*)?", item)
        if found is None:
            raise AnnotationError(
                f"the key {pattern!r} has the bracket {bracket}: write an inclusive range of integers such as [0-7], "
                f"or a list such as [0,2,5]"
            )
        low, high = int(found[1]), int(found[2] or found[1])
        if low > high:
            raise AnnotationError(
                f"the key {pattern!r} has the empty range {low}-{high}: write the smaller number first"
            )
        ranges.append((low, high))
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return _Numbers(tuple(merged))


def _component_regex(component: tuple[_Token, ...]) -> str:
    return "(?=[^.])" + "".join(
        "[^.]*" if token is None else "([0-9]{1,9})" if isinstance(token, _Numbers) else re.escape(token)
        for token in component
    )
