"""Names in a code object: of attributes, of globals, and texts that may be names."""

from __future__ import annotations

import dis
import functools
import re
from collections.abc import Sequence
from types import CodeType

__all__ = ["globals_of", "imported_by", "names_of", "pieces_of", "stored_by", "words_of"]

_FORMAT = re.compile(r"%[-+ #0-9.]*[a-z]|\{[^}]*\}")
"""A value's place in a text."""


@functools.cache
def names_of(code: CodeType) -> tuple[str, ...]:
    """Names in a code and in those in it, in order."""
    inner = [name for x in code.co_consts if isinstance(x, CodeType) for name in names_of(x)]
    return tuple(dict.fromkeys((*code.co_names, *inner)))


@functools.cache
def words_of(code: CodeType) -> frozenset[str]:
    """Names in a code, and texts in it that could be names, as for getattr."""
    inner = [x for x in code.co_consts if isinstance(x, CodeType)]
    texts = (x.split(".") for x in code.co_consts if isinstance(x, str))
    words = [word for text in texts if all(map(str.isidentifier, text)) for word in text]
    return frozenset([*code.co_names, *words]).union(*(words_of(x) for x in inner))


@functools.cache
def globals_of(code: CodeType) -> frozenset[str]:
    """Names that a code looks up among globals."""
    inner = [x for x in code.co_consts if isinstance(x, CodeType)]
    own = (x.argval for x in dis.get_instructions(code) if x.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    return frozenset(own).union(*(globals_of(x) for x in inner))


@functools.cache
def imported_by(code: CodeType) -> frozenset[str]:
    """Names of modules that a code imports when it runs."""
    inner = [x for x in code.co_consts if isinstance(x, CodeType)]
    own = (x.argval for x in dis.get_instructions(code) if x.opname == "IMPORT_NAME")
    return frozenset(own).union(*(imported_by(x) for x in inner))


@functools.cache
def stored_by(code: CodeType) -> frozenset[str]:
    """Names of attributes that a code sets."""
    inner = [x for x in code.co_consts if isinstance(x, CodeType)]
    own = (x.argval for x in dis.get_instructions(code) if x.opname == "STORE_ATTR")
    return frozenset(own).union(*(stored_by(x) for x in inner))


@functools.cache
def pieces_of(code: CodeType) -> frozenset[str]:
    """Texts of which a code puts together the names that it gives getattr; an empty one where it has them from
    elsewhere."""
    found = set[str]()
    own = list(dis.get_instructions(code))
    for place, instruction in enumerate(own):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME") and instruction.argval == "getattr":
            name = _second_argument(own[place + 1 :])
            if len(name) != 1 or name[0].opname != "LOAD_CONST":
                texts = [x.argval for x in name if x.opname == "LOAD_CONST" and isinstance(x.argval, str)]
                parts = {part for text in texts for part in re.split(_FORMAT, text) if part}
                found |= parts or {""}
    return frozenset(found).union(*(pieces_of(x) for x in code.co_consts if isinstance(x, CodeType)))


def _second_argument(after: Sequence[dis.Instruction]) -> list[dis.Instruction]:
    """The instructions that put the second argument of a call on the stack, of those after the one for its function;
    none if they are not in one piece."""
    height, first_ends, second_ends = 0, -1, -1
    for place, instruction in enumerate(after):
        if instruction.opname in ("PRECALL", "RESUME", "CACHE", "KW_NAMES"):
            continue
        if instruction.opname == "CALL":
            if instruction.arg == height:
                return list(after[first_ends + 1 : second_ends])
            height -= (instruction.arg or 0) + 1
        else:
            height += dis.stack_effect(instruction.opcode, instruction.arg, jump=False)
        if height == 1:
            first_ends = place
        elif height == 2:
            second_ends = place + 1
    return []
