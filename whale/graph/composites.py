"""Composites: operators of torch that are a few lines of other operators, written out where nothing is known of them.

A captured graph has some of them whole, as ``triplet_margin_loss`` or ``feature_dropout``. Autograd sees their parts
in eager mode too, so that values and gradients stay the same bit for bit. Kernels without a form that needs no data are
written out here, with the same values and gradients. This module knows no rules: its caller says which operators are
known.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import DataDependentOutputException
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from whale.graph.canonical import canonicalize, emit, functional
from whale.graph.capture_checks import DATA_DEPENDENT
from whale.graph.origins import located, place_of_node
from whale.graph.values import is_call

__all__ = ["inline_parts", "parts_of", "write_out_composites"]

aten = torch.ops.aten


def write_out_composites(graph: fx.Graph, is_known: Callable[[fx.Node], bool]) -> bool:
    """Replace composites that are not known by their parts, in canonical form; whether there were some."""
    found = False
    for node in list(graph.nodes):
        if is_call(node) and (node.target in _KERNELS or (_is_composite(node.target) and not is_known(node))):
            parts = parts_of(node)
            if parts is not None:
                inline_parts(graph, node, parts)
                found = True
    if found:
        canonicalize(graph)
    return found


def _is_composite(target: Any) -> bool:
    if not isinstance(target, torch._ops.OpOverload):
        return False
    implicit = torch._C.DispatchKey.CompositeImplicitAutograd
    return target.has_kernel_for_dispatch_key(implicit) and not target._schema.is_mutable


def parts_of(node: fx.Node) -> fx.Graph | None:
    """The operators of a call as a graph of its tensors; None where it is one operator, or writes to them."""
    leaves, structure = pytree.tree_flatten((node.args, node.kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, fx.Node)]
    values = [leaves[place].meta["val"] for place in places]
    mode = next((x.fake_mode for x in values if isinstance(x, torch._subclasses.FakeTensor)), None)
    target: Any = _KERNELS.get(node.target, node.target)

    def call(*tensors: Tensor) -> Any:
        given = dict(zip(places, tensors, strict=True))
        args, kwargs = pytree.tree_unflatten([given.get(i, leaf) for i, leaf in enumerate(leaves)], structure)
        return target(*args, **kwargs)

    if mode is None:
        return None
    with mode, torch.no_grad():
        try:
            parts: fx.Graph = make_fx(functionalize(call))(*values).graph
        except DataDependentOutputException as error:
            message = f"the model cannot be captured: in {node.target}, {DATA_DEPENDENT}"
            raise located(message, place_of_node(node)) from error
    calls = [part for part in parts.nodes if part.op not in ("placeholder", "output")]
    if any(part.op == "get_attr" or part.target is node.target for part in calls) or not _without_writes(parts):
        return None
    return parts


def _without_writes(graph: fx.Graph) -> bool:
    """Let operators that write to what another has just made return it; whether that is all they write to."""
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.is_mutable:
            continue
        made, target = node.args[0], functional(node.target)
        source = made.args[0] if made.target is operator.getitem else made
        fresh = getattr(getattr(source.target, "_schema", None), "returns", ())
        if target is None or not fresh or any(result.alias_info is not None for result in fresh):
            return False
        node.target = target
        made.replace_all_uses_with(node, delete_user_cb=lambda user, own=node: user is not own and own < user)
    return True


def inline_parts(
    graph: fx.Graph, node: fx.Node, parts: fx.Graph, known: Mapping[fx.Node, fx.Node] = MappingProxyType({})
) -> set[fx.Node]:
    """Replace a call by its parts, of which *known* are in the graph already; returns those that have its results in
    another dtype."""
    given = iter(leaf for leaf in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(leaf, fx.Node))
    values: dict[fx.Node, Any] = {}
    with graph.inserting_before(node):
        for part in parts.nodes:
            if part in known:
                values[part] = known[part]
            elif part.op == "placeholder":
                values[part] = next(given)
            elif part.op == "output":
                result = fx.map_arg(part.args[0], values.__getitem__)
            else:
                args, kwargs = fx.map_arg((part.args, part.kwargs), values.__getitem__)
                values[part] = emit(graph, node, part.target, *args, **kwargs)
    replaced = [(node, result)]
    if isinstance(result, (tuple, list)):
        replaced = [(user, result[user.args[1]]) for user in node.users]  # type: ignore[index]
    retyped = {new for old, new in replaced if new.meta["val"].dtype != old.meta["val"].dtype}
    for old, new in replaced:
        old.replace_all_uses_with(new)
        graph.erase_node(old)
    if node not in dict(replaced):
        graph.erase_node(node)
    return retyped


# Kernels


def _multi_margin_loss(
    x: Tensor, target: Tensor, p: float = 1, margin: float = 1, weight: Tensor | None = None, reduction: int = 1
) -> Tensor:
    index = target.unsqueeze(-1)
    own = x.gather(-1, index)
    terms = (x - own + margin).relu()
    terms = terms * terms if p == 2 else terms
    if weight is not None:
        terms = terms * weight[target].unsqueeze(-1)
    others = torch.arange(x.shape[-1], device=x.device) != index
    return _reduced(terms.where(others, 0.0).sum(-1) / x.shape[-1], reduction)


def _multilabel_margin_loss(x: Tensor, target: Tensor, reduction: int = 1) -> Tensor:
    given = (target >= 0).cumprod(-1) != 0  # classes up to the first -1
    index = target.where(given, 0)
    own = x.gather(-1, index).unsqueeze(-1)
    classes = torch.arange(x.shape[-1], device=x.device)
    named = ((index.unsqueeze(-1) == classes) & given.unsqueeze(-1)).any(-2)
    terms = (x.unsqueeze(-2) - own + 1).relu()
    counted = given.unsqueeze(-1) & ~named.unsqueeze(-2)
    return _reduced(terms.where(counted, 0.0).sum((-2, -1)) / x.shape[-1], reduction)


def _reduced(rows: Tensor, reduction: int) -> Tensor:
    return rows if reduction == 0 else rows.mean() if reduction == 1 else rows.sum()


def _rrelu(x: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False) -> Tensor:
    if not training:
        return torch.nn.functional.leaky_relu(x, (lower + upper) / 2)
    return torch.where(x > 0, x, x * torch.empty_like(x).uniform_(lower, upper))


def _quantized(x: Tensor, scale: Any, inverse: Any, zero: Any, low: int, high: int, dtype: torch.dtype) -> Tensor:
    """The nearest of the numbers ``(i - zero) * scale``, multiplied in *dtype*, with the gradient of the identity in
    their range."""
    place = (x.to(torch.promote_types(x.dtype, torch.float32)) * inverse).round() + zero
    inside = (place >= low) & (place <= high)
    value = ((place.clamp(low, high) - zero).to(dtype) * scale).to(x.dtype)
    return value.detach() + torch.where(inside, x - x.detach(), 0.0)


def _fake_quantize(x: Tensor, scale: Any, zero: Any, low: int, high: int) -> Tensor:
    if isinstance(scale, Tensor):
        return _quantized(x, scale, 1 / scale, zero, low, high, torch.float32)
    exact = np.float32(scale)  # as the kernel reads it
    return _quantized(x, float(exact), float(1 / exact), zero, low, high, torch.float32)


def _fake_quantize_channels(x: Tensor, scale: Tensor, zero: Tensor, axis: int, low: int, high: int) -> Tensor:
    shape = [-1 if dim == axis % x.dim() else 1 for dim in range(x.dim())]
    scale, dtype = scale.reshape(shape), torch.promote_types(x.dtype, torch.float32)
    return _quantized(x, scale, 1 / scale, zero.reshape(shape), low, high, dtype)


def _channel_shuffle(x: Tensor, groups: int) -> Tensor:
    n, channels, *space = x.shape
    return x.reshape(n, groups, channels // groups, *space).transpose(1, 2).reshape(x.shape)


def _padded(window: Tensor | None, width: int, x: Tensor, n_fft: int) -> Tensor:
    """A window of short Fourier transforms, in the middle of one of *n_fft* samples."""
    window = torch.ones(width, dtype=x.dtype.to_real(), device=x.device) if window is None else window
    left = (n_fft - width) // 2
    return torch.nn.functional.pad(window, (left, n_fft - width - left)) if width != n_fft else window


def _stft(
    x: Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    normalized: bool = False,
    onesided: bool | None = None,
    return_complex: bool | None = None,
    align_to_window: bool | None = None,
) -> Tensor:
    """``stft`` of signals as torch computes it, whose frames are windows of a dim."""
    width = win_length or n_fft
    given = x if x.dim() == 2 else x.unsqueeze(0)
    if align_to_window:
        given = torch.nn.functional.pad(given, ((n_fft - width) // 2, n_fft - width - (n_fft - width) // 2))
    frames = given.unfold(1, n_fft, hop_length or n_fft // 4)
    if window is not None or width != n_fft:
        frames = frames * _padded(window, width, x, n_fft)
    norm = "ortho" if normalized else "backward"
    is_half = onesided if onesided is not None else not frames.is_complex()
    found = (torch.fft.rfft if is_half else torch.fft.fft)(frames, dim=-1, norm=norm).transpose(1, 2)
    found = found if x.dim() == 2 else found.squeeze(0)
    return found if return_complex else torch.view_as_real(found)


def _istft(
    x: Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Tensor | None = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: int | None = None,
    return_complex: bool = False,
) -> Tensor:
    """``istft`` (frequencies, frames) as torch computes it, without its check that windows leave no gap."""
    hop = hop_length or n_fft // 4
    spectra = (x if x.dim() == 3 else x.unsqueeze(0)).transpose(1, 2)
    count = spectra.shape[1]
    whole = n_fft + hop * (count - 1)
    window = _padded(window, win_length or n_fft, x, n_fft)
    norm = "ortho" if normalized else "backward"
    if return_complex:
        frames = torch.fft.ifft(spectra, dim=-1, norm=norm)
    else:
        frames = torch.fft.irfft(spectra[..., : n_fft // 2 + 1], n_fft, dim=-1, norm=norm)
    frames = frames * window.view(1, 1, n_fft)
    places = torch.arange(whole, device=x.device).unfold(0, n_fft, hop).flatten()

    def added(frames: Tensor) -> Tensor:
        return frames.new_zeros(len(frames), whole).index_add(1, places, frames.flatten(1))

    start = n_fft // 2 if center else 0
    end = whole - start if length is None else start + length
    squares = window.pow(2).expand(1, count, n_fft)
    found = added(frames)[:, start:end] / added(squares)[:, start:end]
    found = torch.nn.functional.pad(found, (0, end - whole)) if end > whole else found
    return found if x.dim() == 3 else found.squeeze(0)


_KERNELS: dict[Any, Callable[..., Tensor]] = {
    aten.multi_margin_loss.default: _multi_margin_loss,
    aten.multilabel_margin_loss.default: _multilabel_margin_loss,
    aten.rrelu.default: _rrelu,
    aten.fake_quantize_per_tensor_affine.default: _fake_quantize,
    aten.fake_quantize_per_tensor_affine.tensor_qparams: _fake_quantize,
    aten.fake_quantize_per_channel_affine.default: _fake_quantize_channels,
    aten.channel_shuffle.default: _channel_shuffle,
    aten.stft.default: _stft,
    aten.istft.default: _istft,
}
