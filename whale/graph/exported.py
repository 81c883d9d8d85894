"""Programs that torch.export has made: what is done to one before a graph is captured of it, and its signature by the
names of the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.export.graph_signature import InputKind, OutputKind

from whale.graph.canonical import functional
from whale.graph.capture_checks import check_constant
from whale.graph.captured import Captured
from whale.graph.made_once import Attribute
from whale.graph.nodes import inner_modules
from whale.graph.origins import located, place_of_forward, place_of_node
from whale.graph.values import is_call

__all__ = [
    "check_constants",
    "detach_regions",
    "holes_of",
    "lines_of",
    "merge_tied",
    "mutates",
    "note_lines",
    "read_signature",
]


def holes_of(
    program: torch.export.ExportedProgram, leaves: Iterable[str], numbers: Mapping[str, float]
) -> dict[fx.Node, float]:
    """The placeholders of numbers, with their values."""
    specs = [spec for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    values = {spec.arg.name: numbers.get(leaf) for spec, leaf in zip(specs, leaves, strict=True)}
    holes = program.graph.find_nodes(op="placeholder")
    return {node: value for node in holes if (value := values.get(node.name)) is not None}


_BLANKS = {
    getattr(torch.ops.aten, name)
    for name in (
        "empty", "zeros", "ones", "full", "empty_like", "zeros_like", "ones_like", "full_like", "new_empty",
        "new_zeros", "new_ones", "new_full",
    )
}  # fmt: skip
"""Operators whose results have no alias."""


def mutates(graph: fx.Graph) -> bool:
    """Whether an operator changes its arguments, beyond the harmless ``detach_`` of a fresh constant. Writes into an
    unaliased empty tensor become values of their own first, which saves a second trace of the model."""
    for module in [graph.owning_module, *inner_modules(graph)]:
        written = set[fx.Node]()
        for node in module.graph.nodes if module is not None else ():
            schema = getattr(node.target, "_schema", None)
            if node.op != "call_function" or schema is None:
                continue
            if node.target is torch.ops.aten.batch_norm.default and node.args[5]:
                return True
            if not schema.is_mutable or node.target is torch.ops.aten.detach_.default:
                continue
            base, target = node.args[0], functional(node.target)
            blank = base in written or getattr(base.target, "_overloadpacket", None) in _BLANKS
            if target is None or not blank or len(base.users) > 1:
                return True
            node.target = target
            written.add(node)
    return False


def detach_regions(graph: fx.Graph) -> None:
    """Detach the inputs of regions under ``no_grad``: a functionalized program has no such regions any more."""
    for module in [graph.owning_module, *inner_modules(graph)]:
        for node in list(module.graph.nodes) if module is not None else ():
            if getattr(node.target, "__name__", "") != "wrap_with_set_grad_enabled" or node.args[0]:
                continue
            body: Any = module.get_submodule(node.args[1].target)  # type: ignore[union-attr]
            holes = body.graph.find_nodes(op="placeholder")
            first = next(inner for inner in body.graph.nodes if inner.op != "placeholder")
            for hole in holes:
                value = hole.meta.get("val")
                if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
                    continue
                with body.graph.inserting_before(first):
                    detached = body.graph.call_function(torch.ops.aten.detach.default, (hole,))
                detached.meta = dict(hole.meta)
                hole.replace_all_uses_with(detached, delete_user_cb=lambda user, own=detached: user is not own)
            body.recompile()


def lines_of(graph: fx.Graph) -> dict[str, str]:
    """The stacks of operators by name; of a region that of its first operator."""
    found: dict[str, str] = {}
    for node in graph.nodes:
        bodies = [use for use in node.all_input_nodes if use.op == "get_attr"] if node.op == "call_function" else []
        inside = [inner for body in bodies for inner in _nodes_of(graph, str(body.target))]
        for one in (node, *inside):
            if place_of_node(one) is not None:
                found.setdefault(node.name, str(one.meta["stack_trace"]))
    return found


def _nodes_of(graph: fx.Graph, name: str) -> list[fx.Node]:
    body: Any = getattr(graph.owning_module, name, None)
    return list(body.graph.nodes) if isinstance(body, fx.GraphModule) else []


def note_lines(graph: fx.Graph, lines: Mapping[str, str]) -> None:
    """Give operators of a graph that was traced again the stacks of those that they are from."""
    for node in graph.nodes:
        if is_call(node) and place_of_node(node) is None:
            known = [lines[source.name] for source in node.meta.get("from_node", ()) if source.name in lines]
            if known:
                node.meta["stack_trace"] = known[-1]


def read_signature(
    program: torch.export.ExportedProgram,
    model: nn.Module,
    leaves: Sequence[str],
    made_buffers: Mapping[Attribute, torch.Tensor],
) -> Captured:
    """Name every placeholder by the model's name of its tensor; buffers that a forward made are constants."""
    made = {f"{path}.{name}".removeprefix("."): x for (path, name, _), x in made_buffers.items()}
    first_name: dict[int, str] = {}
    aliases: dict[str, str] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in named:
        aliases[name] = first_name.setdefault(id(tensor), name)
    graph_module = program.graph_module
    captured = Captured(graph=graph_module.graph, parameters={}, buffers={}, constants={}, inputs={}, aliases=aliases)
    user_inputs = iter(leaves)
    placeholders = {node.name: node for node in captured.graph.nodes if node.op == "placeholder"}
    for spec in program.graph_signature.input_specs:
        name = spec.arg.name
        target = (spec.target or "").removeprefix("model.")
        if spec.kind is InputKind.PARAMETER:
            captured.parameters[name] = aliases[target]
        elif spec.kind is InputKind.BUFFER and target in made:
            captured.constants[name] = made[target]
        elif spec.kind is InputKind.BUFFER:
            captured.buffers[name] = aliases[target]
        elif spec.kind in (InputKind.CONSTANT_TENSOR, InputKind.CUSTOM_OBJ):
            constant = program.constants[spec.target]
            captured.constants[name] = constant.detach() if isinstance(constant, torch.Tensor) else constant
        else:
            leaf = next(user_inputs)
            if name in placeholders and isinstance(placeholders[name].meta.get("val"), torch.Tensor):
                captured.inputs[name] = leaf
    outputs = program.graph_signature.output_specs
    loss, *returned = [i for i, s in enumerate(outputs) if s.kind is OutputKind.USER_OUTPUT]
    mutated = [i for i, s in enumerate(outputs) if s.kind is OutputKind.BUFFER_MUTATION]
    results: Any = captured.graph.output_node().args[0]
    for spec, node in zip(outputs, results, strict=True):
        if spec.kind is OutputKind.PARAMETER_MUTATION:
            raise located(
                f"the forward writes to the parameter {(spec.target or '').removeprefix('model.')}: a step would have "
                "to do so on every rank that holds a part of it; write to it after optimizer.step(), under "
                "torch.no_grad(), or compute with another tensor",
                place_of_node(node) or place_of_forward(model),
            )
        if spec.kind is OutputKind.USER_INPUT_MUTATION and spec.target in captured.inputs:
            captured.written += ((captured.inputs[spec.target], place_of_node(node)),)
    captured.mutated = tuple(aliases[(outputs[i].target or "").removeprefix("model.")] for i in mutated)
    output = captured.graph.output_node()
    output.args = (tuple(output.args[0][i] for i in [loss, *mutated, *returned]),)  # type: ignore[index]
    return captured


def check_constants(program: torch.export.ExportedProgram, model: nn.Module) -> None:
    """Refuse a tensor without data that is no state of the model, before decompositions compute with it."""
    holes = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    for spec in program.graph_signature.input_specs:
        if spec.kind is InputKind.CONSTANT_TENSOR and spec.arg.name in holes:
            check_constant(program.constants[spec.target], holes[spec.arg.name], model)


def merge_tied(program: torch.export.ExportedProgram, duplicate: nn.Module, model: nn.Module) -> None:
    """Merge the placeholders of tensors that *duplicate* has under several names, those of *model* first: of what is
    written to one, functionalization knows nothing in the other."""
    registered = [*duplicate.named_parameters(remove_duplicate=False), *duplicate.named_buffers(remove_duplicate=False)]
    tensors = {f"model.{name}": tensor for name, tensor in registered}
    own = {f"model.{name}" for name, _ in [*model.named_parameters(), *model.named_buffers()]}
    holes = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    first: dict[int, fx.Node] = {}
    specs = program.graph_signature.input_specs
    for spec in sorted(specs, key=lambda spec: spec.target not in own):
        node, tensor = holes.get(spec.arg.name), tensors.get(spec.target or "")
        if node is None or tensor is None:
            continue
        kept = first.setdefault(id(tensor), node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            program.graph.erase_node(node)
            specs.remove(spec)
