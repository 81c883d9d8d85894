"""Backwards under ``torch.autograd.detect_anomaly``: node by node, with a check of every result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx

from whale.runtime.local_program import LocalCode

__all__ = ["run_checked"]


def run_checked(code: LocalCode, arguments: Sequence[Any]) -> tuple[Any, ...]:
    """Run a graph.

    Raises:
        RuntimeError: an operator returned a number that is not one; names it, and the module in which it is.
    """
    found: tuple[Any, ...] = _Checking(code.root, graph=code.graph).run(*arguments)
    return found


class _Checking(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        found = super().run_node(n)
        results = found if isinstance(found, (tuple, list)) else (found,)
        if n.op in ("call_function", "call_module") and any(map(_has_nan, results)):
            raise RuntimeError(f"{n.target} in the backward of {_place(n)} returned nan values")
        return found


def _has_nan(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point() and bool(x.isnan().any())


def _place(node: fx.Node) -> str:
    source = node.meta.get("source")
    if not isinstance(source, fx.Node):
        return "the model"
    stack = list((source.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]).removeprefix("L['self'].") if stack else ""
    return f"{source.name} of {path or 'the model'}"
