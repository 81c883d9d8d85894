"""Graph modules whose code is made when they are called.

torch writes Python code for a graph module whenever its graph is set or changed, and an export changes the graph of a
whole model some thirty times, but calls none of these modules. Knows torch's graph modules; nothing of models.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx
from torch.fx.graph import _PyTreeCodeGen

__all__ = ["deferred_code"]


@contextmanager
def deferred_code() -> Iterator[None]:
    """Meanwhile, let graph modules make their code in their first call after a change."""
    recompile: Any = fx.GraphModule.recompile

    def compiled_when_called(module: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        recompile(module)
        return type(module).forward(module, *args, **kwargs)

    def defer(module: fx.GraphModule) -> None:
        generator = module.graph._codegen
        if isinstance(generator, _PyTreeCodeGen):
            module._in_spec, module._out_spec = generator.pytree_info.in_spec, generator.pytree_info.out_spec
        type(module).forward = compiled_when_called  # a class of its own

    fx.GraphModule.recompile = defer  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        fx.GraphModule.recompile = recompile  # type: ignore[method-assign]
