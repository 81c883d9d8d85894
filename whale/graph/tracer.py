"""torch's tracer while it traces a model: the one at work, and the nodes of its graph.

Its functions are not public: where torch lacks one of them, no tracer is found, and nothing calls the others.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, fx

disable_proxy_modes_tracing: Any = None
get_current_meta: Any = None
track_tensor_tree: Any = None
_mode: Any = None
_slot: Any = None
try:
    from torch.fx.experimental import proxy_tensor
    from torch.fx.traceback import get_current_meta

    disable_proxy_modes_tracing = proxy_tensor.disable_proxy_modes_tracing
    track_tensor_tree = proxy_tensor.track_tensor_tree
    _mode, _slot = proxy_tensor.get_proxy_mode, proxy_tensor.get_proxy_slot
except (ImportError, AttributeError):
    _mode = None

__all__ = ["current_tracer", "disable_proxy_modes_tracing", "get_current_meta", "node_in", "track_tensor_tree"]


def current_tracer() -> Any:
    """The tracer at work; None if nothing is traced."""
    mode = None if _mode is None else _mode()
    return None if mode is None else mode.tracer


def node_in(tracer: Any, x: Tensor) -> fx.Node | None:
    """The node of a tensor in a tracer's graph; None if the tracer does not know it."""
    slot = _slot(x, tracer, None)
    return None if slot is None else slot.proxy.node
