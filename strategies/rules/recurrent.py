"""Rules of recurrent networks: the batch is cut; gates and steps are not."""

from __future__ import annotations

from whale.strategies.rules.registry import Op, OpAxis, Rule, register


def _states(op: Op) -> list[int]:
    return [slot for slot in op.positions["hx"] if slot is not None]


@register("aten.lstm", "aten.gru", "aten.rnn_tanh", "aten.rnn_relu")
def _layers(op: Op) -> Rule | None:
    """``t b i, (layers b h) ... -> t b h, (layers b h) ...``; dropout between layers draws inside."""
    if "batch_sizes" in op.args or len(op.shape(0)) != 3 or (op.args["dropout"] and op.args["train"]):
        return None
    batch = 0 if op.args["batch_first"] else 1
    inputs = {0: batch, **dict.fromkeys(_states(op), 1)}
    return Rule(axes=[OpAxis(inputs, {0: batch, **dict.fromkeys(range(1, len(op.outputs)), 1)})])


@register("aten.lstm_cell", "aten.gru_cell", "aten.rnn_tanh_cell", "aten.rnn_relu_cell")
def _cell(op: Op) -> Rule | None:
    """``b i, (b h) ... -> (b h) ...``."""
    if len(op.shape(0)) != 2:
        return None
    inputs = dict.fromkeys([0, *_states(op)], 0)
    return Rule(axes=[OpAxis(inputs, dict.fromkeys(range(len(op.outputs)), 0))])


@register("aten.mkldnn_rnn_layer")
def _layer_of_processors(op: Op) -> Rule | None:
    """``t b i, w, w, w, w, b h, b h -> t b h, b h, b h``, and what its backward reads, which nothing else does."""
    if len(op.args["batch_sizes"]):
        return None
    states = [slot for name in ("hx_", "cx_") for slot in op.positions[name] if slot is not None]
    return Rule(axes=[OpAxis({0: 1, **dict.fromkeys(states, 0)}, {0: 1, 1: 0, 2: 0})])
