"""Canonical form: rewrites a captured graph to a smaller set of operators with the same meaning.

The rewrites remove no-op operators, inline higher-order wrappers, and express means of losses as a sum over a count, so
that a part of a batch adds its part of the sum over the *global* count. Each rewrite preserves values bit for bit or,
for means, up to the order of a sum.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import fx

from whale.graph.nodes import create_node, node_copy
from whale.graph.origins import located, place_of_node

aten = torch.ops.aten


def canonicalize(graph: fx.Graph, *, promote: bool = False) -> None:
    """Rewrite *graph* in place. Fake values stay in ``node.meta["val"]``."""
    if promote:
        _promote_casts(graph)
    for node in list(graph.nodes):
        rewrite = _REWRITES.get(node.target) if node.op == "call_function" else None
        if rewrite is not None:
            rewrite(graph, node)
    drop_dead(graph)
    graph.lint()


def inline_regions(graph: fx.Graph) -> None:
    """Inline the regions of ``torch.no_grad`` and ``torch.autocast``, and remove checks, in place. The operators of a
    region of autocast have its arguments in ``node.meta["autocast"]``."""
    for node in graph.nodes:  # torch forgets what is never read when it cuts out a region
        for source in node.all_input_nodes:
            source.users.setdefault(node)
    _inline_wrappers(graph)
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target in _DROPPED:
            graph.erase_node(node)


def emit(graph: fx.Graph, like: fx.Node, target: Callable[..., Any], /, *args: Any, **kwargs: Any) -> fx.Node:
    """Insert a call with its fake value, scopes and source line taken over from *like*."""
    node = create_node(graph, "call_function", target, args, kwargs)
    node.meta = {k: v for k, v in like.meta.items() if k in ("custom", "stack_trace", "nn_module_stack")}
    node.meta["val"] = _evaluate(node, like)
    return node


def _evaluate(node: fx.Node, *like: fx.Node) -> Any:
    """The fake value of a call, in the mode of its inputs or of *like*."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    mode = next(
        (
            leaf.fake_mode
            for n in (*node.all_input_nodes, *like)
            for leaf in _leaves(n.meta["val"])
            if isinstance(leaf, torch._subclasses.FakeTensor)
        ),
        None,
    )
    with torch.no_grad():
        if mode is None:
            return node.target(*args, **kwargs)  # type: ignore[operator]
        with mode:
            return node.target(*args, **kwargs)  # type: ignore[operator]


def functional(target: Any) -> Any:
    """The functional variant of an operator that writes into its first argument; None if there is none."""
    packet = getattr(aten, target._schema.name.removeprefix("aten::").removesuffix("_"), None)

    def given(one: Any) -> list[tuple[str, str]]:
        return [(a.name, str(a.type)) for a in one._schema.arguments]

    variants = [getattr(packet, name) for name in packet.overloads()] if packet else []  # names may differ, too
    return next((one for one in variants if not one._schema.is_mutable and given(one) == given(target)), None)


def _leaves(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


_DROPPED = {aten._assert_tensor_metadata.default}


def drop_dead(graph: fx.Graph, *, keep: Collection[fx.Node] = ()) -> None:
    """Remove unused nodes, except *keep*. After functionalization no operator remains for a side effect."""
    for node in reversed(list(graph.nodes)):
        if node.op in ("call_function", "get_attr") and not node.users and node not in keep:
            graph.erase_node(node)


def _replace(graph: fx.Graph, node: fx.Node, value: fx.Node) -> None:
    node.replace_all_uses_with(value)
    graph.erase_node(node)


def _identity(graph: fx.Graph, node: fx.Node) -> None:
    _replace(graph, node, node.args[0])  # type: ignore[arg-type]


def _detach(graph: fx.Graph, node: fx.Node) -> None:
    """``detach_`` of a fresh constant becomes ``detach``: there is no alias to change."""
    node.target = aten.detach.default


def _cast(graph: fx.Graph, node: fx.Node) -> None:
    """Remove casts to the dtype and device that a tensor already has."""
    source = node.args[0]
    if not isinstance(source, fx.Node):
        return
    old, new = source.meta["val"], node.meta["val"]
    same = old.dtype == new.dtype and old.device == new.device and old.shape == new.shape
    if same and node.kwargs.get("memory_format") in (None, torch.preserve_format):
        _identity(graph, node)
    else:
        _normalize_cast(graph, node, new)


def _normalize_cast(graph: fx.Graph, node: fx.Node, new: torch.Tensor) -> None:
    node.target = aten._to_copy.default
    node.args, node.kwargs = (node.args[0],), {"dtype": new.dtype, "device": new.device}


def _promote_casts(graph: fx.Graph) -> None:
    """Turn casts to float32 into casts to float64 (for comparisons in float64), with their fake values."""
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if torch.float32 in node.args:
            node.args = tuple(torch.float64 if a is torch.float32 else a for a in node.args)
        if node.kwargs.get("dtype") is torch.float32:
            node.kwargs = {**node.kwargs, "dtype": torch.float64}
        node.meta["val"] = _evaluate(node)


def _squeeze(graph: fx.Graph, node: fx.Node) -> None:
    """Express squeezes and unsqueezes as views with known sizes."""
    with graph.inserting_before(node):
        view = emit(graph, node, aten.reshape.default, node.args[0], list(node.meta["val"].shape))
    _replace(graph, node, view)


def _reshape_like(graph: fx.Graph, node: fx.Node) -> None:
    node.target = aten.reshape.default
    node.args, node.kwargs = (node.args[0], list(node.meta["val"].shape)), {}


_PRIMES = (2, 3, 5, 7, 11, 13, 17, 19)


def _permute(graph: fx.Graph, node: fx.Node) -> None:
    """Express transpositions of every name as permutations, read off an example."""
    source: fx.Node = node.args[0]  # type: ignore[assignment]
    sizes = _PRIMES[: source.meta["val"].dim()]
    if len(sizes) < source.meta["val"].dim():
        return
    example = node.target(torch.empty(sizes, device="meta"), *node.args[1:], **node.kwargs)  # type: ignore[operator]
    node.target = aten.permute.default
    node.args, node.kwargs = (source, [sizes.index(size) for size in example.shape]), {}


def _split(graph: fx.Graph, node: fx.Node) -> None:
    """Express every split with explicit sizes, because chunk counts change on a shard of the dim."""
    bound = _bound(node)
    dim = bound["dim"]
    node.target = aten.split_with_sizes.default
    node.args, node.kwargs = (node.args[0], [part.shape[dim] for part in node.meta["val"]], dim), {}


def _expand(graph: fx.Graph, node: fx.Node) -> None:
    node.target = aten.expand.default
    node.args, node.kwargs = (node.args[0], list(node.meta["val"].shape)), {}


def _broadcast_tensors(graph: fx.Graph, node: fx.Node) -> None:
    """Expand tensors that are broadcast together to the common shape."""
    sources: list[fx.Node] = list(node.args[0])  # type: ignore[arg-type]
    for user in list(node.users):
        source = sources[user.args[1]]  # type: ignore[index]
        if source.meta["val"].shape == user.meta["val"].shape:
            _replace(graph, user, source)
            continue
        with graph.inserting_before(user):
            wide = emit(graph, node, aten.expand.default, source, list(user.meta["val"].shape))
        _replace(graph, user, wide)
    graph.erase_node(node)


def _repeat(graph: fx.Graph, node: fx.Node) -> None:
    """Express repetitions of a tensor as an expanded view."""
    source: fx.Node = node.args[0]  # type: ignore[assignment]
    times: list[int] = list(node.args[1])  # type: ignore[arg-type]
    shape = [1] * (len(times) - source.meta["val"].dim()) + list(source.meta["val"].shape)
    apart = [size for pair in zip([1] * len(shape), shape, strict=True) for size in pair]
    whole = [size for pair in zip(times, shape, strict=True) for size in pair]
    with graph.inserting_before(node):
        view = emit(graph, node, aten.reshape.default, source, apart)
        wide = emit(graph, node, aten.expand.default, view, whole)
        result = emit(graph, node, aten.reshape.default, wide, list(node.meta["val"].shape))
    _replace(graph, node, result)


def _copy(graph: fx.Graph, node: fx.Node) -> None:
    """Express a full overwrite as the new value in the tensor's shape and dtype; the functional operator has no
    derivative."""
    source = node.args[1]
    val, given = node.meta["val"], source.meta["val"]  # type: ignore[union-attr]
    with graph.inserting_before(node):
        if given.dtype != val.dtype or given.device != val.device:
            source = emit(graph, node, aten._to_copy.default, source, dtype=val.dtype, device=val.device)
        if given.shape != val.shape:
            source = emit(graph, node, aten.expand.default, source, list(val.shape))
    _replace(graph, node, source)  # type: ignore[arg-type]


def _arange(graph: fx.Graph, node: fx.Node) -> None:
    """Express a slice with explicit start, end and step, so that it can be sharded."""
    bounds = (0, *node.args) if node.target is aten.arange.default else node.args
    node.target = aten.arange.start_step
    node.args = (*bounds, 1)[:3]
    node.kwargs = {**node.kwargs, "dtype": node.meta["val"].dtype}


def _narrow(graph: fx.Graph, node: fx.Node) -> None:
    dim, start, length = node.args[1:]
    if isinstance(start, int):
        node.target = aten.slice.Tensor
        start = start if start >= 0 else start + node.args[0].meta["val"].shape[dim]  # type: ignore[union-attr]
        node.args = (node.args[0], dim, start, start + length)  # type: ignore[operator]


def _slice(graph: fx.Graph, node: fx.Node) -> None:
    """Express strided slices (such as interleaved gates) as a choice from each pair, because pairs can be sharded."""
    bound = _bound(node)
    source: fx.Node = bound["self"]
    shape, dim, step = list(source.meta["val"].shape), bound["dim"], bound["step"]
    if step == 1:
        return
    dim, start = dim % len(shape), bound["start"] or 0
    if shape[dim] % step or not 0 <= start < step or node.meta["val"].shape[dim] != shape[dim] // step:
        return
    with graph.inserting_before(node):
        groups = [*shape[:dim], shape[dim] // step, step, *shape[dim + 1 :]]
        grouped = emit(graph, node, aten.reshape.default, source, groups)
        chosen = emit(graph, node, aten.select.int, grouped, dim + 1, start)
    _replace(graph, node, chosen)


def _slice_scatter(graph: fx.Graph, node: fx.Node) -> None:
    """Express a write into a slice as a concatenation of the parts before, inside and after it."""
    bound = _bound(node)
    base, dim = bound["self"], bound["dim"] % node.meta["val"].dim()
    size = node.meta["val"].shape[dim]
    first, stop, _ = slice(bound["start"], bound["end"]).indices(size)
    if bound["step"] != 1 or first >= stop:
        return
    with graph.inserting_before(node):
        before, after = _within(graph, node, base, dim, 0, first), _within(graph, node, base, dim, stop, size)
        parts = [*before, bound["src"], *after]
        joined = emit(graph, node, aten.cat.default, parts, dim) if len(parts) > 1 else parts[0]
    _replace(graph, node, joined)


def _as_strided_scatter(graph: fx.Graph, node: fx.Node) -> None:
    """Express a write to a strided view, as that of ``fill_diagonal_``, as a scatter into the flat tensor: torch's
    operator has a wrong derivative."""
    bound = _bound(node)
    source, val = bound["self"], bound["self"].meta["val"]
    order = sorted(range(val.dim()), key=lambda dim: -val.stride(dim))
    stored = val.permute(order)
    if not stored.is_contiguous():
        raise located(
            "a forward writes to a strided view of a tensor that is no dense block of memory: take its contiguous()",
            place_of_node(node),
        )
    offset = bound["storage_offset"] if bound["storage_offset"] is not None else val.storage_offset()
    with graph.inserting_before(node):
        flat = emit(graph, node, aten.permute.default, source, order)
        flat = emit(graph, node, aten.reshape.default, flat, [val.numel()])
        places = emit(graph, node, aten.arange.start_step, 0, val.numel(), 1, device=val.device, dtype=torch.int64)
        places = emit(graph, node, aten.as_strided.default, places, bound["size"], bound["stride"], offset)
        places, written = (
            emit(graph, node, aten.reshape.default, x, [bound["src"].meta["val"].numel()])
            for x in (places, bound["src"])
        )
        found = emit(graph, node, aten.scatter.src, flat, 0, places, written)
        found = emit(graph, node, aten.reshape.default, found, list(stored.shape))
        found = emit(graph, node, aten.permute.default, found, [order.index(dim) for dim in range(val.dim())])
    _replace(graph, node, found)


def _within(graph: fx.Graph, like: fx.Node, x: fx.Node, dim: int, first: int, stop: int) -> list[fx.Node]:
    """Express a slice of a concatenation as the concatenated parts that it covers."""
    parts: list[fx.Node] = []
    joins = x.target is aten.cat.default and len(x.args) > 1 and x.args[1] == dim
    base = 0
    for piece in x.args[0] if joins else [x]:  # type: ignore[union-attr]
        size = piece.meta["val"].shape[dim]  # type: ignore[union-attr]
        a, b = max(first - base, 0), min(stop - base, size)
        if a < b:
            parts.append(piece if b - a == size else emit(graph, like, aten.slice.Tensor, piece, dim, a, b))  # type: ignore[arg-type]
        base += size
    return parts


def _dropout(graph: fx.Graph, node: fx.Node) -> None:
    probability, train = (*node.args[1:3], *node.kwargs.values())
    if probability == 0 or train is False:
        if node.target is aten.native_dropout.default:
            picks = [u for u in node.users if u.target is operator.getitem and u.args[1] == 0]
            if len(picks) != len(node.users):
                return
            for pick in picks:
                _replace(graph, pick, node.args[0])  # type: ignore[arg-type]
            graph.erase_node(node)
        else:
            _identity(graph, node)


def _draw(graph: fx.Graph, node: fx.Node) -> None:
    """Detach what tells the shape and the parameters of random numbers, whose derivative is zero or unknown."""

    def detached(x: fx.Node) -> fx.Node:
        return emit(graph, node, aten.detach.default, x) if x.meta["val"].is_floating_point() else x

    if node.target is aten.bernoulli.p and _bound(node)["p"] is None:
        node.args = (*node.args, 0.5)  # the default of bernoulli_, which torch leaves out, but bernoulli.p has none
    with graph.inserting_before(node):
        node.args, node.kwargs = fx.map_arg((node.args, dict(node.kwargs)), detached)


DRAWS: frozenset[Any] = frozenset(
    getattr(getattr(aten, name), overload)
    for name in (
        "uniform", "normal_functional", "exponential", "geometric", "cauchy", "log_normal", "random", "bernoulli",
        "normal", "poisson", "rand_like", "randn_like", "randint_like", "multinomial",
    )
    for overload in getattr(aten, name).overloads()
    if not getattr(getattr(aten, name), overload)._schema.is_mutable
)  # fmt: skip
"""Operators that draw random numbers, through which no gradient flows."""


def _new(graph: fx.Graph, node: fx.Node) -> None:
    """Name the dtype and the device that a tensor gives to a new one, which then does not depend on it."""
    val, bound = node.meta["val"], _bound(node)
    filled = (bound["fill_value"],) if "fill_value" in bound else ()
    with graph.inserting_before(node):
        made = emit(graph, node, _NEW[node.target], bound["size"], *filled, dtype=val.dtype, device=val.device)
    _replace(graph, node, made)


_NEW: dict[Any, Any] = {
    aten.new_empty.default: aten.empty.memory_format,
    aten.new_zeros.default: aten.zeros.default,
    aten.new_ones.default: aten.ones.default,
    aten.new_full.default: aten.full.default,
}


COMPUTED: dict[Any, Any] = {
    aten._conj.default: aten.conj_physical.default,
    aten._neg_view.default: aten.neg.default,
}
"""Operators that only mark a view, as of a conjugate, and those that compute the same values. Marks depend on how a
tensor came to be, which graphs do not know of what they receive; and not all operators take marked tensors."""


def _computed(graph: fx.Graph, node: fx.Node) -> None:
    with graph.inserting_before(node):
        made = emit(graph, node, COMPUTED[node.target], *node.args)
    _replace(graph, node, made)


def _cat(graph: fx.Graph, node: fx.Node) -> None:
    """Remove concatenations with empty tensors (an empty key-value cache)."""
    node.target = aten.cat.default
    tensors: list[fx.Node] = list(node.args[0])  # type: ignore[arg-type]
    full = [t for t in tensors if t.meta["val"].numel() > 0]
    if len(full) == 1 and full[0].meta["val"].dtype == node.meta["val"].dtype:
        _replace(graph, node, full[0])
    elif 0 < len(full) < len(tensors):
        node.args = (full, *node.args[1:])


def _index(graph: fx.Graph, node: fx.Node) -> None:
    """Express ``x[arange(len(x)), i]``, which picks one position of each row, as a gather, which treats rows
    independently."""
    arguments: tuple[Any, ...] = node.args
    source, indices = arguments
    if len(indices) != 2 or not all(isinstance(i, fx.Node) for i in indices):
        return
    rows, picked = indices
    x, index = source.meta["val"], picked.meta["val"]
    if not _counts(rows, x.shape[0]) or index.shape != (x.shape[0],) or index.dtype == torch.bool:
        return
    rest = [1] * (x.dim() - 2)
    with graph.inserting_before(node):
        wrapped = emit(graph, node, aten.remainder.Scalar, picked, x.shape[1])  # negative indices count from the end
        column = emit(graph, node, aten.reshape.default, wrapped, [x.shape[0], 1, *rest])
        column = emit(graph, node, aten.expand.default, column, [x.shape[0], 1, *x.shape[2:]])
        found = emit(graph, node, aten.gather.default, source, 1, column)
        found = emit(graph, node, aten.reshape.default, found, [x.shape[0], *x.shape[2:]])
    _replace(graph, node, found)


def _counts(node: fx.Node, length: int) -> bool:
    """Whether a node is 0, 1, ..., length - 1."""
    while node.target in (aten.to.device, aten.to.dtype, aten._to_copy.default):
        node = node.args[0]  # type: ignore[assignment]
    return node.target is aten.arange.start_step and node.args == (0, length, 1)  # as every arange is written


def _number_of_sum(graph: fx.Graph, node: fx.Node) -> None:
    """Express a number that is added to a scalar, as to a loss, as a tensor: a term that one part of a sum has, and the
    others have not. In half precision the number would be rounded."""
    bound = _bound(node)
    val, number = node.meta["val"], bound["other"]
    if val.dim() or val.dtype not in (torch.float32, torch.float64) or isinstance(number, fx.Node):
        return
    tensor, alpha = bound["self"], bound["alpha"]
    with graph.inserting_before(node):
        if node.target is aten.rsub.Scalar:
            term = emit(graph, node, aten.full.default, [], number, dtype=val.dtype, device=val.device)
            found = emit(graph, node, aten.sub.Tensor, term, tensor, alpha=alpha)
        else:
            target = aten.add.Tensor if node.target in (aten.add.Tensor, aten.add.Scalar) else aten.sub.Tensor
            term = emit(graph, node, aten.full.default, [], number * alpha, dtype=val.dtype, device=val.device)
            found = emit(graph, node, target, tensor, term)
    _replace(graph, node, found)


def _index_put(graph: fx.Graph, node: fx.Node) -> None:
    """Express ``x[mask] = number``, a write to where a mask of the leading dims is set, as a choice, which treats rows
    independently."""
    bound = _bound(node)
    source, indices, value = bound["self"], bound["indices"], bound["values"]
    x, number = source.meta["val"], value.meta["val"]
    if len(indices) != 1 or bound["accumulate"] or number.numel() != 1:
        return
    mask = indices[0].meta["val"]
    if mask.dtype != torch.bool or number.dtype != x.dtype:
        return
    with graph.inserting_before(node):
        wide = emit(graph, node, aten.reshape.default, indices[0], [*mask.shape, *[1] * (x.dim() - mask.dim())])
        number = emit(graph, node, aten.reshape.default, value, [])
        chosen = emit(graph, node, aten.where.self, wide, number, source)
    _replace(graph, node, chosen)


_MEAN, _NONE, _SUM = 1, 0, 2


def _bound(node: fx.Node) -> dict[str, Any]:
    """The call's arguments by name, in the schema's order."""
    schema = node.target._schema  # type: ignore[union-attr]
    given = dict(zip((a.name for a in schema.arguments), node.args, strict=False)) | dict(node.kwargs)
    return {a.name: given.get(a.name, a.default_value) for a in schema.arguments}


def _emit_bound(graph: fx.Graph, node: fx.Node, bound: Mapping[str, Any]) -> fx.Node:
    """The call again, with other arguments by name."""
    keyword_only = {a.name for a in node.target._schema.arguments if a.kwarg_only}  # type: ignore[union-attr]
    positional = [value for name, value in bound.items() if name not in keyword_only]
    return emit(graph, node, node.target, *positional, **{name: bound[name] for name in keyword_only})  # type: ignore[arg-type]


def _elementwise_loss(graph: fx.Graph, node: fx.Node) -> None:
    """Express a reduced loss as its elementwise form, reduced."""
    bound = _bound(node)
    reduction = bound.get("reduction", _MEAN)
    if reduction == _NONE:
        return
    with graph.inserting_before(node):
        bound["reduction"] = _NONE
        parts = _emit_bound(graph, node, bound)
        reduced = emit(graph, node, aten.mean.default if reduction == _MEAN else aten.sum.default, parts)
    _replace(graph, node, reduced)


def _cross_entropy(graph: fx.Graph, node: fx.Node) -> None:
    """Express a mean cross-entropy as a sum over the count (or the weight) of the targets that are not ignored."""
    bound = _bound(node)
    reduction = bound.get("reduction", _MEAN)
    if reduction == _NONE:
        return
    target = bound["target"]
    with graph.inserting_before(node):
        bound["reduction"] = _NONE
        parts = _emit_bound(graph, node, bound)
        total = emit(graph, node, aten.sum.default, parts)
        if reduction == _MEAN:
            if target.meta["val"].is_floating_point():
                logits = bound["self"].meta["val"]
                count: Any = logits.numel() // logits.shape[1 if logits.dim() > 1 else 0]
            else:
                kept = emit(graph, node, aten.ne.Scalar, target, bound["ignore_index"])
                if bound.get("weight") is not None:
                    zero = emit(graph, node, aten.mul.Tensor, target, kept)
                    each = emit(graph, node, aten.index.Tensor, bound["weight"], [zero])
                    kept = emit(graph, node, aten.mul.Tensor, each, kept)
                count = emit(graph, node, aten.sum.default, kept)
            total = emit(graph, node, aten.div.Tensor, total, count)
    _replace(graph, node, total)


def _forward_of_loss(graph: fx.Graph, node: fx.Node) -> None:
    """Express the kernel of a loss, into which autocast on a GPU cuts a cross-entropy, as the loss; its second result,
    the weight of all targets, is for its backward alone."""
    bound = _bound(node)
    with graph.inserting_before(node):
        loss = emit(graph, node, aten.nll_loss_nd.default, *bound.values())
    _splice(graph, node, (loss, None))
    _cross_entropy(graph, loss)


def _convolution(graph: fx.Graph, node: fx.Node) -> None:
    """Express named padding as a number if it is equal on both sides."""
    bound = _bound(node)
    kernel = bound["weight"].meta["val"].shape[2:]
    dilation = [bound["dilation"]] if isinstance(bound["dilation"], int) else list(bound["dilation"])
    dilation *= len(kernel) // len(dilation)
    total = [d * (k - 1) if bound["padding"] == "same" else 0 for d, k in zip(dilation, kernel, strict=True)]
    if not any(amount % 2 for amount in total):
        bound["padding"] = [amount // 2 for amount in total]
        node.target = node.target.overloadpacket.default  # type: ignore[union-attr]
        node.args, node.kwargs = tuple(bound.values()), {}


def _adaptive_mean(graph: fx.Graph, node: fx.Node) -> None:
    """Express pooling to one position as a mean over space."""
    source, size = node.args
    if all(length == 1 for length in size):  # type: ignore[union-attr]
        with graph.inserting_before(node):
            mean = emit(graph, node, aten.mean.dim, source, list(range(-len(size), 0)), True)  # type: ignore[arg-type]
        _replace(graph, node, mean)


def _embedding_bag(graph: fx.Graph, node: fx.Node) -> None:
    """Express bags of one size, [rows, k] indices, as looked-up rows and their sum, mean or maximum.

    Bags that begin where another tensor says stay as they are, and so do a maximum that leaves padding out, and a
    gradient divided by frequencies, which torch's bags count otherwise than its look-ups.
    """
    bound = _bound(node)
    if bound["scale_grad_by_freq"]:
        return
    offsets, weights = bound["offsets"], bound["per_sample_weights"]
    padding = -1 if bound.get("padding_idx") is None else bound["padding_idx"]
    bags = _of_bags(graph, bound["indices"], offsets)
    of_weights = None if weights is None else _of_bags(graph, weights, offsets)
    is_mean, is_max = bound["mode"] == _MEAN_OF_BAG, bound["mode"] == _MAX_OF_BAG
    results = [user for user in node.users if user.target is operator.getitem and user.args[1] == 0]
    if bags is None or (weights is not None and of_weights is None) or (is_max and padding >= 0):
        return
    if any(user.users for user in node.users if user not in results):  # which say where bags begin
        return
    shape = list(bags.meta["val"].shape)
    if shape[0] != len(node.meta["val"][0]):  # where the last of what says where bags begin ends one
        return
    options = (padding, False, bound["sparse"])
    with graph.inserting_before(node):
        found = emit(graph, node, aten.embedding.default, bound["weight"], bags, *options)
        if of_weights is not None:
            column = emit(graph, node, aten.reshape.default, of_weights, [*shape, 1])
            found = emit(graph, node, aten.mul.Tensor, found, column)
        if padding >= 0:
            is_padding = emit(graph, node, aten.eq.Scalar, bags, padding)
            column = emit(graph, node, aten.reshape.default, is_padding, [*shape, 1])
            found = emit(graph, node, aten.masked_fill.Scalar, found, column, 0.0)
        if is_max:  # of equal rows the first has the gradient, in bags as here
            total = emit(graph, node, operator.getitem, emit(graph, node, aten.max.dim, found, 1), 0)
        else:
            total = emit(graph, node, aten.sum.dim_IntList, found, [1])
        if is_mean and padding < 0:
            total = emit(graph, node, aten.div.Scalar, total, shape[1])
        elif is_mean:
            counted = emit(graph, node, aten.logical_not.default, is_padding)
            count = emit(graph, node, aten.sum.dim_IntList, counted, [1], True)
            total = emit(graph, node, aten.div.Tensor, total, emit(graph, node, aten.clamp_min.default, count, 1))
    for user in list(node.users):
        _replace(graph, user, total)
    graph.erase_node(node)


_MEAN_OF_BAG, _MAX_OF_BAG = 1, 2


def _of_bags(graph: fx.Graph, flat: fx.Node, offsets: fx.Node) -> fx.Node | None:
    """The tensor [rows, k] whose rows are the bags of a flat one; None where bags are others."""
    begins = offsets.target is aten.arange.start_step and tuple(offsets.args)
    if begins == (0, len(flat.meta["val"]), 1):
        with graph.inserting_after(flat):
            return emit(graph, flat, aten.reshape.default, flat, [len(flat.meta["val"]), 1])
    if flat.target is not aten.reshape.default:
        return None
    source: Any = flat.args[0]
    shape = tuple(source.meta["val"].shape)
    return source if len(shape) == 2 and begins == (0, shape[0] * shape[1], shape[1]) else None


def _instance_norm(graph: fx.Graph, node: fx.Node) -> None:
    """Express a normalisation by running statistics, which are the same for every row, as a batch norm's."""
    bound = _bound(node)
    if bound["use_input_stats"]:
        return
    x, weight, bias, mean, var, _, momentum, eps, cudnn = bound.values()
    node.target, node.args = aten.batch_norm.default, (x, weight, bias, mean, var, False, momentum, eps, cudnn)
    node.kwargs = {}


def _inline_wrappers(graph: fx.Graph) -> None:
    """Inline ``wrap_with_set_grad_enabled`` and ``wrap_with_autocast``; values made without gradient are detached."""
    owner: Any = graph.owning_module
    wrappers = {"wrap_with_set_grad_enabled", "wrap_with_autocast"}
    again = True
    while again:
        again = False
        for node in list(graph.nodes):
            name = getattr(node.target, "__name__", "")
            if node.op != "call_function" or name not in wrappers:
                continue
            body_at = next(i for i, a in enumerate(node.args) if isinstance(a, fx.Node) and a.op == "get_attr")
            attr: Any = node.args[body_at]
            body: Any = owner.get_submodule(attr.target)
            enabled = name == "wrap_with_set_grad_enabled" and not node.args[0]
            autocast = node.args[:body_at] if name == "wrap_with_autocast" else node.meta.get("autocast")
            holes = [n for n in body.graph.nodes if n.op == "placeholder"]
            values: dict[fx.Node, Any] = dict(zip(holes, node.args[body_at + 1 :], strict=True))
            value_of = values.__getitem__
            with graph.inserting_before(node):
                for inner in body.graph.nodes:
                    if inner.op == "placeholder":
                        continue
                    if inner.op == "output":
                        results = fx.map_arg(inner.args[0], value_of)
                        break
                    if inner.op == "get_attr":
                        fresh = graph.get_attr(f"{attr.target}.{inner.target}")
                        fresh.meta = dict(inner.meta)
                    else:
                        fresh = node_copy(graph, inner, value_of)
                    if autocast is not None:
                        fresh.meta["autocast"] = autocast
                    values[inner] = fresh
                    again = True
                if enabled:
                    results = fx.map_arg(results, lambda n: _detached(graph, n))
            _splice(graph, node, results)


def _detached(graph: fx.Graph, node: fx.Node) -> fx.Node:
    val = node.meta.get("val")
    if isinstance(val, torch.Tensor) and val.is_floating_point():
        return emit(graph, node, aten.detach.default, node)
    return node


def _splice(graph: fx.Graph, node: fx.Node, results: Any) -> None:
    if isinstance(results, fx.Node):
        results = (results,)
    for user in list(node.users):
        if user.target is operator.getitem:
            user.replace_all_uses_with(results[user.args[1]])
            graph.erase_node(user)
    if node.users:
        node.replace_all_uses_with(results[0])
    graph.erase_node(node)


_REWRITES: dict[Any, Callable[[fx.Graph, fx.Node], None]] = {
    aten.alias.default: _identity,
    aten.lift_fresh_copy.default: _identity,
    aten.detach_.default: _detach,
    aten.to.dtype: _cast,
    aten.to.dtype_layout: _cast,
    aten.to.device: _cast,
    aten.to.other: _cast,
    aten._to_copy.default: _cast,
    aten.type_as.default: _cast,
    aten.contiguous.default: _identity,
    aten.resolve_conj.default: _identity,
    aten.resolve_neg.default: _identity,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.unsqueeze.default: _squeeze,
    aten.flatten.using_ints: _squeeze,
    aten.unflatten.int: _squeeze,
    aten.view.default: _reshape_like,
    aten._unsafe_view.default: _reshape_like,
    aten.reshape.default: _reshape_like,
    aten.view_as.default: _reshape_like,
    aten.reshape_as.default: _reshape_like,
    aten.dropout.default: _dropout,
    aten.native_dropout.default: _dropout,
    **dict.fromkeys(DRAWS, _draw),
    aten.cat.default: _cat,
    aten.concat.default: _cat,
    aten.concatenate.default: _cat,
    aten.index.Tensor: _index,
    aten.index_put.default: _index_put,
    aten.add.Tensor: _number_of_sum,
    aten.add.Scalar: _number_of_sum,
    aten.sub.Tensor: _number_of_sum,
    aten.sub.Scalar: _number_of_sum,
    aten.rsub.Scalar: _number_of_sum,
    aten.cross_entropy_loss.default: _cross_entropy,
    aten.nll_loss.default: _cross_entropy,
    aten.nll_loss_nd.default: _cross_entropy,
    aten.nll_loss_forward.default: _forward_of_loss,
    aten.nll_loss2d_forward.default: _forward_of_loss,
    aten.t.default: _permute,
    aten.numpy_T.default: _permute,
    aten.mT.default: _permute,
    aten.movedim.int: _permute,
    aten.movedim.intlist: _permute,
    aten.swapaxes.default: _permute,
    aten.swapdims.default: _permute,
    aten.split.Tensor: _split,
    aten.split.sizes: _split,
    aten.chunk.default: _split,
    aten.unsafe_chunk.default: _split,
    aten.unsafe_split.Tensor: _split,
    aten.tensor_split.sections: _split,
    aten.tensor_split.indices: _split,
    aten.expand_as.default: _expand,
    aten.broadcast_to.default: _expand,
    aten.narrow.default: _narrow,
    aten.slice.Tensor: _slice,
    aten.slice_scatter.default: _slice_scatter,
    aten.as_strided_scatter.default: _as_strided_scatter,
    aten.repeat.default: _repeat,
    aten.broadcast_tensors.default: _broadcast_tensors,
    aten.copy.default: _copy,
    aten.arange.default: _arange,
    aten.arange.start: _arange,
    aten.arange.start_step: _arange,
    aten.embedding_bag.default: _embedding_bag,
    aten.embedding_bag.padding_idx: _embedding_bag,
    aten._embedding_bag.default: _embedding_bag,
    aten.instance_norm.default: _instance_norm,
    aten.conv1d.padding: _convolution,
    aten.conv2d.padding: _convolution,
    aten.conv3d.padding: _convolution,
    aten.adaptive_avg_pool1d.default: _adaptive_mean,
    aten.adaptive_avg_pool2d.default: _adaptive_mean,
    aten.adaptive_avg_pool3d.default: _adaptive_mean,
} | dict.fromkeys(_NEW, _new) | dict.fromkeys(COMPUTED, _computed) | {
    getattr(aten, name).default: _elementwise_loss
    for name in (
        "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy",
        "binary_cross_entropy_with_logits", "kl_div", "soft_margin_loss",
    )
}  # fmt: skip
