"""Collectives that a script calls itself, on tensors and objects, over all ranks or those of a mesh axis.

Steps of a parallel model need none of them. They are for what a script computes besides: metrics, samples, losses of
its own. Every call begins with an exchange of what each rank gives, so that ranks whose calls or shapes differ are
named on all of them, instead of waiting for each other. Gradients are those of the sum of all ranks' losses.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from whale.arguments import check_choice, check_number, check_type, known_arguments
from whale.errors import UsageError
from whale.runtime import collectives
from whale.runtime.agreement import agree, meet, take_from
from whale.runtime.ending import end_with_own_code
from whale.runtime.launch import check_device, current, initialize, local_rank_of_launcher
from whale.runtime.members import REDUCTIONS, Group, Members, cut_of, in_words, members_of
from whale.runtime.mesh_axes import Axis
from whale.runtime.module import ParallelModule

__all__ = [
    "Axis",
    "Group",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_object",
    "broadcast",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "init",
    "local_rank",
    "mesh_axis",
    "rank",
    "size",
]


@known_arguments()
def init(*, timeout_seconds: float | None = None, device: str | None = None) -> None:
    """Join the other ranks of the launch, for a script that communicates before or without :func:`whale.parallelize`,
    which joins them too. A process that nothing launched is a world of one, and needs no call.

    A process keeps the rank that its launcher gave it: a cluster file that names hosts in another order is then
    refused by ``parallelize``, which would otherwise seat processes by their devices.

    Args:
        timeout_seconds: limit for every wait of a rank for another; by default a minute here, and ten later.
        device: ``cpu`` or ``cuda``; by default cuda where there is one.

    Raises:
        UsageError: the environment is that of an unknown launcher, or two ranks have one device.
        WorkerError: a rank did not start within the timeout; names it.
    """
    end_with_own_code()
    if timeout_seconds is not None:
        check_number("timeout_seconds", timeout_seconds, above=0)
    check_device(device)
    world = initialize(timeout_seconds, device_type=device)
    meet(world, "all ranks to call whale.init")
    world.begin_steps()


def rank(group: Group = None) -> int:
    """The rank of this process, or its position in a group.

    Raises:
        UsageError: the process has not joined the others yet.

    >>> rank(), size()
    (0, 1)
    """
    return members_of(group).index


def size(group: Group = None) -> int:
    """Number of ranks, of all or of a group."""
    return len(members_of(group).ranks)


def local_rank() -> int:
    """The position of this process among those of its node, as its launcher says it.

    Raises:
        UsageError: the process has not joined the others yet, or no launcher says it.
    """
    return local_rank_of_launcher(current())


@known_arguments()
def mesh_axis(model: ParallelModule, name: str, *, stage: int | None = None) -> Axis:
    """The ranks along an axis of the mesh of this rank's stage, as a ``group`` for the collectives.

    Every rank must call it, also one whose stages do not have the axis, which is alone then. The axes of a plan are
    ``data`` (parallel pipelines), ``replicate`` and ``split``, numbered from the second.

    Args:
        model: the parallel model.
        name: of the axis.
        stage: for a rank that is on several stages.

    Raises:
        UsageError: no stage has such an axis, or this rank has it in several stages.
        WorkerError: a rank did not come within the timeout; names it.
    """
    check_type("model", model, ParallelModule, "the model that whale.parallelize returned")
    axes = model._whale.engine.axes
    assert axes is not None
    return axes.axis(name, stage)


# --- collectives of tensors -------------------------------------------------------------------------------------------

_DENSE = torch.contiguous_format


@known_arguments()
def all_reduce(x: Tensor, op: str = "sum", group: Group = None) -> Tensor:
    """Reduce tensors of one shape over the ranks; every rank gets the result, as a new tensor.

    The gradient of ``sum`` is the sum, and that of ``mean`` the mean, of the ranks' gradients: that of the sum of the
    losses which all ranks compute from the result. Where every rank computes the same loss from it, as of a global
    mean, divide that loss by the number of ranks before ``backward``.

    Args:
        x: of one shape and dtype on all ranks.
        op: ``sum``, ``mean``, ``max``, ``min`` or ``product``.
        group: by default all ranks.

    Raises:
        UsageError: shapes, dtypes or calls of ranks differ, on all of them; or *x* requires a gradient, which only
            ``sum`` and ``mean`` have.
        WorkerError: a rank did not come within the timeout; names it.

    >>> all_reduce(torch.ones(2), "mean")
    tensor([1., 1.])
    """
    check_choice("op", op, tuple(REDUCTIONS))
    check_type("x", x, Tensor, "a tensor")
    if op not in ("sum", "mean") and x.requires_grad and torch.is_grad_enabled():
        raise UsageError(f"all_reduce has no gradient for op={op!r}: give x.detach(), or use 'sum' or 'mean'")
    if op == "mean" and not (x.is_floating_point() or x.is_complex()):
        dtype = str(x.dtype).removeprefix("torch.")
        raise UsageError(f"all_reduce with op='mean' of {dtype} would lose the fraction: give x.double()")
    members = members_of(group)

    def reduced(x: Tensor) -> Tensor:
        members.agree("all_reduce", x, option=list(REDUCTIONS).index(op))
        with members.waiting("all_reduce"):
            found = collectives.all_reduce(x.clone(memory_format=_DENSE), members.group, REDUCTIONS[op])
        return found.div_(members.size) if op == "mean" else found

    return members.apply(reduced, reduced, x)


@known_arguments()
def all_gather(x: Tensor, dim: int = 0, group: Group = None) -> Tensor:
    """Join the tensors of all ranks along a dim, in the order of ranks; every rank gets all of them.

    Ranks may give different lengths along that dim, also zero. The gradient of a rank's part is the sum of all ranks'
    gradients of it.

    Args:
        x: with at least one dim; of one dtype, and one size of the other dims, on all ranks.
        dim: along which parts are joined.
        group: by default all ranks.

    Raises:
        UsageError: other sizes, dtypes or calls of ranks differ, on all of them.
        WorkerError: a rank did not come within the timeout; names it.

    >>> all_gather(torch.ones(2, 3)).shape
    torch.Size([2, 3])
    """
    check_type("x", x, Tensor, "a tensor")
    if not -x.dim() <= dim < x.dim():
        hint = "; give x[None]" if not x.dim() else ""
        raise UsageError(f"all_gather along dim {dim} of a tensor with {x.dim()} dims{hint}")
    members, dim = members_of(group), dim % x.dim()
    rows = members.agree("all_gather", x, free=dim, option=dim)
    cut = cut_of(dim, [row.shape[dim] for row in rows])

    def gathered(x: Tensor) -> Tensor:
        if not any(prod(row.shape) for row in rows):
            return x.new_empty((*x.shape[:dim], cut.extent, *x.shape[dim + 1 :]))
        with members.waiting("all_gather"):
            return collectives.all_gather(x, cut, members.index, members.group).contiguous()

    def scattered(gradient: Tensor) -> Tensor:
        members.agree("the gradient of all_gather", gradient)
        with members.waiting("the gradient of all_gather"):
            return collectives.reduce_scatter(gradient, cut, members.index, members.group)

    return members.apply(gathered, scattered, x)


@known_arguments()
def broadcast(x: Tensor, root: int = 0, group: Group = None) -> Tensor:
    """The tensor of one rank, on every rank, as a new tensor.

    The gradient of the root's tensor is the sum of all ranks' gradients; those of the others are zero.

    Args:
        x: of one shape and dtype on all ranks; values count on the root alone.
        root: rank that gives it; one of the group's.
        group: by default all ranks.

    Raises:
        UsageError: shapes, dtypes or calls of ranks differ, on all of them, or *root* is not in the group.
        WorkerError: a rank did not come within the timeout; names it.
    """
    check_type("x", x, Tensor, "a tensor")
    members = members_of(group)
    members.check_root(root)

    def sent(x: Tensor) -> Tensor:
        members.agree("broadcast", x, option=root)
        found = x.clone(memory_format=_DENSE)
        with members.waiting("broadcast"):
            if members.group is not None:
                dist.broadcast(found, root, group=members.group)
        return found

    def summed(gradient: Tensor) -> Tensor:
        members.agree("the gradient of broadcast", gradient, option=root)
        total = gradient.clone(memory_format=_DENSE)
        with members.waiting("the gradient of broadcast"):
            if members.group is not None:
                dist.reduce(total, root, group=members.group)
        return total if members.ranks[members.index] == root else torch.zeros_like(total)

    return members.apply(sent, summed, x)


@known_arguments()
def all_to_all(pieces: Sequence[Tensor], group: Group = None) -> list[Tensor]:
    """Send piece *i* to the group's rank *i*; returns the pieces that the ranks have sent to this one, in their order.

    Pieces may have different lengths along the first dim, also zero, each on its way from a rank to another. The
    gradient of a piece is sent back.

    Args:
        pieces: one for each rank; of one dtype, and one size of the other dims, on all ranks, as ``x.split(lengths)``
            gives them.
        group: by default all ranks.

    Raises:
        UsageError: there is another number of pieces; or dtypes, other sizes or calls of ranks differ, on all of them.
        WorkerError: a rank did not come within the timeout; names it.
    """
    members = members_of(group)
    if len(pieces) != members.size:
        raise UsageError(f"all_to_all has {len(pieces)} pieces for {members.size} ranks: give one for each")
    return _to_all(members, "all_to_all", pieces)


def _to_all(members: Members, call: str, pieces: Sequence[Tensor]) -> list[Tensor]:
    for number, piece in enumerate(pieces):
        check_type(f"pieces[{number}]", piece, Tensor, "a tensor")
        if not piece.dim() or (piece.shape[1:], piece.dtype) != (pieces[0].shape[1:], pieces[0].dtype):
            raise UsageError(
                f"pieces[{number}] is {in_words(piece.dtype, piece.shape)} and pieces[0] "
                f"{in_words(pieces[0].dtype, pieces[0].shape)}: they may differ in the first of their dims alone"
            )
    sent, whole = [len(piece) for piece in pieces], torch.cat(list(pieces))
    rows = members.agree(call, whole, free=0, extra=sent)
    received = [row.extra[members.index] for row in rows]

    def exchange(x: Tensor, outgoing: Sequence[int], incoming: Sequence[int], what: str) -> Tensor:
        found = x.new_empty((sum(incoming), *x.shape[1:]))
        if members.group is None:
            return x.clone()
        with members.waiting(what):
            dist.all_to_all_single(found, x.contiguous(), list(incoming), list(outgoing), group=members.group)
        return found

    def back(gradient: Tensor) -> Tensor:
        members.agree("the gradient of all_to_all", gradient, free=0)
        return exchange(gradient, received, sent, "the gradient of all_to_all")

    found = members.apply(lambda x: exchange(x, sent, received, call), back, whole)
    return list(found.split(received))


# --- collectives of objects -------------------------------------------------------------------------------------------


@known_arguments()
def all_gather_object(value: Any, group: Group = None) -> list[Any]:
    """The objects of all ranks, in the order of ranks. They are pickled: ranks of one job trust each other.

    Raises:
        UsageError: ranks made different calls.
        WorkerError: a rank did not come within the timeout; names it.

    >>> all_gather_object({"rows": 3})
    [{'rows': 3}]
    """
    members = members_of(group)
    return [pickle.loads(part) for part in members.gather_bytes("all_gather_object", pickle.dumps(value))]  # noqa: S301  # from a rank of this job


@known_arguments()
def broadcast_object(value: Any = None, root: int = 0, group: Group = None) -> Any:
    """The object of one rank, on every rank; what the others give does not count. It is pickled.

    Raises:
        UsageError: ranks made different calls, or *root* is not in the group.
        WorkerError: a rank did not come within the timeout; names it.
    """
    members = members_of(group)
    members.check_root(root)
    is_root = members.ranks[members.index] == root
    given = pickle.dumps(value) if is_root else b""
    own = members.bytes_of(given)
    rows = members.agree("broadcast_object", own, free=0, option=root)
    if members.group is None:
        return value
    held = own if is_root else own.new_empty(rows[members.ranks.index(root)].shape[0])
    with members.waiting("broadcast_object"):
        dist.broadcast(held, root, group=members.group)
    return value if is_root else pickle.loads(held.cpu().numpy().tobytes())  # noqa: S301  # from a rank of this job


@known_arguments()
def all_to_all_object(values: Sequence[Any], group: Group = None) -> list[Any]:
    """Send object *i* to the group's rank *i*; returns those that the ranks have sent to this one. They are pickled.

    Raises:
        UsageError: there is another number of objects than of ranks, or ranks made different calls.
        WorkerError: a rank did not come within the timeout; names it.
    """
    members = members_of(group)
    if len(values) != members.size:
        raise UsageError(f"all_to_all_object has {len(values)} objects for {members.size} ranks: give one for each")
    found = _to_all(members, "all_to_all_object", [members.bytes_of(pickle.dumps(value)) for value in values])
    return [pickle.loads(piece.cpu().numpy().tobytes()) for piece in found]  # noqa: S301  # from a rank of this job


# --- parameters and optimizers ----------------------------------------------------------------------------------------


@known_arguments()
def broadcast_parameters(
    parameters: nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], root: int = 0
) -> None:
    """Overwrite the parameters and buffers of a model with those of one rank, on every rank.

    ``parallelize(..., sync_module_states=True)`` does it for a model that becomes parallel.

    Args:
        parameters: a module, a state dict, or ``model.named_parameters()``.
        root: rank whose values they take.

    Raises:
        UsageError: a parallel model of which ranks have parts, or tensors without names.
        PlanMismatchError: names, shapes or dtypes of ranks differ, on all of them; names the ranks.
        WorkerError: a rank did not come within the timeout; names it.
    """
    if isinstance(parameters, ParallelModule) and not parameters._whale.engine.holds_all:
        raise UsageError(
            "ranks have parts of this parallel model, of which each copy is the same already: give "
            "parallelize(..., sync_module_states=True), or model.load_full_state_dict on every rank"
        )
    if isinstance(parameters, nn.Module):
        named = {**dict(parameters.named_parameters()), **dict(parameters.named_buffers())}
    elif isinstance(parameters, Mapping):
        named = dict(parameters)
    else:
        given: list[Any] = list(parameters)
        if any(isinstance(one, Tensor) for one in given):
            raise UsageError(
                "tensors without names do not show whether ranks have the same ones: give names too: model, "
                "model.state_dict() or model.named_parameters()"
            )
        named = dict(given)
    for name, value in named.items():
        if type(value) not in (Tensor, nn.Parameter):
            raise UsageError(f"{name} is a {type(value).__name__}; broadcast_parameters takes plain, whole tensors")
    members_of(None).check_root(root)
    _take_from(named, root, "the names, shapes or dtypes of the tensors to broadcast")


@known_arguments()
def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root: int = 0) -> None:
    """Give an optimizer the state and the options of one rank's, on every rank; those of the others may have no state.

    It is for optimizers of models of which every rank has all. The states of a parallel model's parts are on the ranks
    that own them, and :func:`whale.load_checkpoint` loads them.

    Args:
        optimizer: made from the same model on every rank.
        root: rank whose state they take.

    Raises:
        UsageError: the optimizer has parts of parameters.
        WorkerError: a rank did not come within the timeout; names it.
    """
    check_type("optimizer", optimizer, torch.optim.Optimizer, "a torch optimizer")
    members_of(None).check_root(root)
    state = optimizer.state_dict()
    leaves = pytree.tree_leaves(state)
    if any(type(leaf) not in (Tensor, nn.Parameter) for leaf in leaves if isinstance(leaf, Tensor)):
        raise UsageError(
            "this optimizer has states of parts of parameters, which are on the ranks that own them: load them with "
            "whale.load_checkpoint"
        )
    is_root = rank() == root
    blanks = pytree.tree_map_only(Tensor, lambda x: _Blank(x.shape, x.dtype, x.device.type), state)
    blanks = broadcast_object(blanks if is_root else None, root)
    if not is_root:
        place = current().device
        state = pytree.tree_map_only(
            _Blank,
            lambda x: torch.empty(x.shape, dtype=x.dtype, device="cpu" if x.kind == "cpu" else place),
            blanks,
        )
    tensors = [leaf for leaf in pytree.tree_leaves(state) if isinstance(leaf, Tensor)]
    named = {str(number): leaf for number, leaf in enumerate(tensors)}
    _take_from(named, root, "the states of the optimizer")
    if not is_root:
        optimizer.load_state_dict(state)


@dataclass(frozen=True)
class _Blank:
    """A tensor without its values."""

    shape: torch.Size
    dtype: torch.dtype
    kind: str


def _take_from(named: Mapping[str, Tensor], root: int, what: str) -> None:
    world = current()
    agree(world, {what: str([(name, tuple(x.shape), x.dtype) for name, x in named.items()])})
    take_from(world, root, named.values())
