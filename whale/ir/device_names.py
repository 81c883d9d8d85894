"""Device types by the names that people and drivers give them, such as ``NVIDIA GeForce RTX 4090`` or ``rtx-4090``.

A name is a model and words that narrow it: a form (SXM4, PCIe, NVL), a size of memory, a kind of memory. Makers, brands
and punctuation do not count. This file knows how names are written, and no list of devices: it compares a name with
those of the types that it is passed.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping

__all__ = ["matching_types", "near_types"]

_BRANDS = re.compile(r"^(nvidia|amd|intel|habana|tesla|geforce|quadro|instinct|radeon|rtx|gtx|gpu|hpu)+")
"""Makers and brands before a model, which do not tell it from others: the numbers after RTX and GTX are distinct."""

_FORMS = ("pcie", "nvl")
_MEMORY = re.compile(r"(\d+)(g|gb|gib)?")
_MEMORY_KIND = re.compile(r"hbm\d?e?")


def matching_types(name: str, types: Mapping[str, int]) -> list[str]:
    """The names of those *types*, given with their bytes of memory, that *name* may mean, in their order: none where
    the model is unknown or a word contradicts, several where a form or a size of memory is left open.

    >>> types = {"A100-SXM4-80GB": 80 * 2**30, "A100-PCIe-80GB": 80 * 2**30, "RTX4090": 24 * 2**30}
    >>> matching_types("NVIDIA GeForce RTX 4090", types), matching_types("a100 80gb", types)
    (['RTX4090'], ['A100-SXM4-80GB', 'A100-PCIe-80GB'])
    >>> matching_types("NVIDIA A100-SXM4-80GB", types), matching_types("RTX 4090 Ti", types)
    (['A100-SXM4-80GB'], [])
    """
    if name in types:
        return [name]
    words = _words(name)
    return [known for known, memory_bytes in types.items() if _means(words, _words(known), memory_bytes)]


def _words(name: str) -> tuple[str, ...]:
    """Lower-case words without brands; what stands in brackets is one word, and ``x40`` after a number is another."""
    name = re.sub(r"\(([^)]*)\)", lambda inner: " " + re.sub(r"[^a-z0-9]", "", inner[1].lower()) + " ", name)
    name = re.sub(r"(\d)x(\d)", r"\1 \2", name.lower())
    words: list[str] = []
    for word in re.split(r"[^a-z0-9]+", name):
        word = word if words else _BRANDS.sub("", word)  # TITAN RTX is a model
        if word and word != "generation":
            words.append(word)
    return tuple(words)


def _means(words: tuple[str, ...], known: tuple[str, ...], memory_bytes: int) -> bool:
    """Whether *words* begin with the model of a type whose name has the words *known*, and all others hold of it."""
    for end in range(1, len(words) + 1):
        for known_end in range(1, len(known) + 1):
            if "".join(words[:end]) == "".join(known[:known_end]):
                said, own = words[end:], known[known_end:]
                if all(_is_true(word, own, known[0], memory_bytes) for word in said) and _form_fits(said, own):
                    return True
    return False


def _is_true(word: str, own: tuple[str, ...], model: str, memory_bytes: int) -> bool:
    """Whether a word of a name after the model holds of a type."""
    if any(word == other or (word[:3] == other[:3] == "sxm" and (len(word) == 3 or len(other) == 3)) for other in own):
        return True
    size = _MEMORY.fullmatch(word)
    if size:
        gib = round(memory_bytes / 2**30)
        return int(size[1]) == gib or (model[:2] in ("gh", "gb") and int(size[1]) > gib)  # with the memory of Grace
    return _MEMORY_KIND.fullmatch(word) is not None and not any(map(_MEMORY_KIND.fullmatch, own))


def _form_fits(said: tuple[str, ...], own: tuple[str, ...]) -> bool:
    """Drivers name the form of cards alone: where a name has the kind of memory and no form, it is no card."""
    if not any(map(_MEMORY_KIND.fullmatch, said)):
        return True
    return not any(form in own and form not in said for form in _FORMS)


def near_types(name: str, types: Iterable[str]) -> list[str]:
    """Names of device types that begin with a name, or look like it.

    >>> near_types("T5", ["K80 (per GK210 die)", "T4", "A100-SXM4-80GB"])
    ['T4']
    """
    near = [known for known in types if known.lower().startswith(name.lower())][:6]
    return near or difflib.get_close_matches(name, types, n=3, cutoff=0.5)
