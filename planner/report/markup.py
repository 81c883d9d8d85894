"""HTML and SVG as text. Everything that is not `Markup` is escaped, so that no name in a plan can become markup.

It knows elements and numbers, and no picture.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

__all__ = ["Markup", "element", "join", "number", "picture", "short", "table"]

_WITHOUT_CONTENT = frozenset(("circle", "line", "meta", "path", "rect", "use"))


class Markup(str):
    """Text that is already markup. Ordinary string operations on it return plain text."""

    __slots__ = ()


def element(name: str, /, *children: str, **attributes: str | float | None) -> Markup:
    """An element with children; plain text is escaped, and attributes that are None are omitted.

    Underscores in attribute names become hyphens; a trailing one is dropped.

    >>> element("text", "a < b", x=1.25, text_anchor="end", class_="label")
    '<text x="1.2" text-anchor="end" class="label">a &lt; b</text>'
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_attribute(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if not children and name in _WITHOUT_CONTENT:
        return Markup(f"<{name}{written}/>")
    return Markup(f"<{name}{written}>{join(children)}</{name}>")


def join(parts: Iterable[str]) -> Markup:
    """Concatenate parts; plain text is escaped.

    >>> join([element("b", "1"), " < 2"])
    '<b>1</b> &lt; 2'
    """
    return Markup("".join(part if isinstance(part, Markup) else escape(_printable(part)) for part in parts))


def _attribute(value: str | float) -> str:
    return escape(_printable(value)) if isinstance(value, str) else number(value)


def _printable(text: str) -> str:
    """Make invisible characters visible, such as those that change the writing direction."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else " " if character.isspace() else "\N{REPLACEMENT CHARACTER}"
        for character in text
    )


def number(value: float) -> str:
    """Format a coordinate to a tenth.

    >>> number(2.0), number(0.26), number(-0.01)
    ('2', '0.3', '0')
    """
    return f"{round(value, 1) + 0.0:.1f}".removesuffix(".0")


def short(text: str, most: int) -> str:
    """The text, truncated to ``most`` characters.

    >>> short("A100-SXM4-80GB", 8)
    'A100-SX…'
    """
    return text if len(text) <= most else text[: most - 1] + "…"


def picture(name: str, title: str, description: str, width: float, height: float, *parts: str) -> Markup:
    """An SVG with a text description; ``name`` is its id, unique on a page."""
    return element(
        "svg",
        element("title", title, id=f"{name}-title"),
        element("desc", description, id=f"{name}-desc"),
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {number(width)} {number(height)}",
        role="img",
        aria_labelledby=f"{name}-title {name}-desc",
        class_="picture",
    )


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Sequence[int] = ()) -> Markup:
    """A table; columns at the positions ``numbers`` are right-aligned, and long texts are wrapped."""
    kinds = ["number" if position in numbers else None for position in range(len(head))]
    titles = [element("th", title, scope="col", class_=kind) for title, kind in zip(head, kinds, strict=True)]
    body = [
        element("tr", *(element("td", cell, class_=kind or _room(cell)) for cell, kind in zip(row, kinds, strict=True)))
        for row in rows
    ]
    content = element(
        "table",
        element("caption", caption),
        element("thead", element("tr", *titles)),
        element("tbody", *body),
    )
    return element("div", content, class_="scroll", tabindex="0", role="region", aria_label=caption)


def _room(cell: str) -> str | None:
    return "long" if len(cell) > 30 and not isinstance(cell, Markup) else None
