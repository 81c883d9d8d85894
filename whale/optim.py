"""Optimizers: AdamW in one pass over memory, with the states of torch's; row-wise Adagrad for embedding tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from whale.errors import UsageError
from whale.runtime.adamw import is_triton, step_rows, step_runs
from whale.runtime.adamw_runs import Kind, Run, wide_of
from whale.runtime.adamw_table import Held, Table
from whale.runtime.columns import sum_over_columns
from whale.runtime.precision import in_own_dtypes

__all__ = ["FusedAdamW", "RowWiseAdagrad"]

_LOW = (torch.bfloat16, torch.float16)


class FusedAdamW(AdamW):
    """``torch.optim.AdamW`` in one pass over memory, which reads and writes each parameter and moment once.

    On a processor it is one loop that Inductor compiles, which takes some seconds before the first step; on a GPU one
    kernel in Triton for all parameters of a group. The loop takes parameters that follow each other in memory, as the
    stretches that a rank owns with ``zero=``, together. Updates are those of torch's AdamW up to 2 units in the last
    place, and ``state_dict`` has the same form: either loads what the other saved.

    Args:
        params, lr, betas, eps, weight_decay, amsgrad, maximize, capturable: as of torch's.
        masters: for parameters in bfloat16 or float16: keep a float32 copy of each in the state (``master``), with
            float32 moments. The step updates these, and writes the parameter in the same pass. Else low-precision
            parameters have moments in their own number type, are computed in float32 and rounded, as torch's with
            ``fused=True``.
        foreach, fused: they choose among torch's implementations, and have no effect here.
        differentiable: refused.

    Raises:
        UsageError: *differentiable*, or *foreach* and *fused* together; or, in a step, there is no compiler, gradients
            are sparse, or a parameter has gaps in memory.

    A ``torch.amp.GradScaler`` passes its factor to the step, which divides gradients in the same pass.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float | Tensor, float | Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        masters: bool = False,
    ) -> None:
        if differentiable:
            raise UsageError(
                "FusedAdamW updates in place, and has no gradient: use torch.optim.AdamW(differentiable=True)"
            )
        if foreach and fused:
            raise UsageError(
                "foreach=True and fused=True choose two implementations of torch's: leave one out, or both"
            )
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, capturable=capturable)
        self.defaults["masters"] = masters
        self.__setstate__({})

    _step_supports_amp_scaling = True

    states_of = "AdamW"
    """The class whose states these are: checkpoints of either are loaded into the other."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._tables: dict[tuple[Any, ...], Table] = {}
        for group in self.param_groups:  # those of torch's have no masters
            group.setdefault("masters", self.defaults["masters"])
        if not self.__dict__.get("_keeps_wide"):
            self._keeps_wide = True
            self.register_load_state_dict_pre_hook(_note_wide_states)
            self.register_load_state_dict_post_hook(_take_wide_states)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step; returns what *closure* does, which computes the loss again."""
        loss = _loss_of(closure)
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        for number, group in enumerate(self.param_groups):
            for kinds, own in _alike(group["params"]).items():
                if is_triton(kinds[0]):
                    self._step_rows((number, *kinds, id(own[0])), group, own, scale, found_inf)
                else:
                    self._step_runs(group, own, scale, found_inf)
        return loss

    @in_own_dtypes
    def _step_rows(
        self,
        key: tuple[Any, ...],
        group: Mapping[str, Any],
        own: Sequence[Tensor],
        scale: Tensor | None,
        found_inf: Tensor | None,
    ) -> None:
        """A step of parameters on one GPU, of one number type: what stays from step to step is in a table."""
        _check_step(own, group)
        if found_inf is not None and not _counts_on_device(group) and bool(found_inf):
            return
        table = self._table(key, group, own)
        if table.count is None:
            steps = [self.state[p]["step"] for p in own]
            found_inf = _count_on_device(steps, found_inf)
            scalars, rows = _scalars_on_device(group, own[0], steps, scale), list(range(len(own)))
        else:
            found_inf = None
            table.count.add_(1)
            scalars, rows = _scalars(group, own[0], table.count.tolist(), scale)
        gradients = self._gradients(own, table.strides)
        step_rows(table.rows(gradients, rows), scalars, _kind(group, scale), found_inf)

    @in_own_dtypes
    def _step_runs(
        self, group: Mapping[str, Any], own: list[Tensor], scale: Tensor | None, found_inf: Tensor | None
    ) -> None:
        """A step of parameters on a processor, of one number type: those that follow each other are one run."""
        _check_step(own, group)
        _check_layouts(own)
        if found_inf is not None and bool(found_inf):
            return
        own.sort(key=Tensor.data_ptr)
        self._make_states(group, own)
        steps = [self.state[p]["step"] for p in own]
        torch._foreach_add_(steps, 1)
        scalars, rows = _scalars(group, own[0], [float(step) for step in steps], scale)
        gradients = self._gradients(own, [p.stride() for p in own])
        held = self._held(group, own)
        columns: list[Sequence[Tensor | None]] = [held[0], gradients, *held[1:3]]
        columns += [[None] * len(own) if column is None else column for column in held[3:]]
        vectors = ([None if x is None else _flat(x) for x in column] for column in columns)
        pieces = [_Piece(memory, row) for memory, row in zip(zip(*vectors, strict=True), rows, strict=True)]
        step_runs(_joined(pieces), scalars, _kind(group, scale))

    def _table(self, key: tuple[Any, ...], group: Mapping[str, Any], own: Sequence[Tensor]) -> Table:
        """The table of these parameters: the last step's if they and their states are where they were."""
        options = (_counts_on_device(group), _has_master(group, own[0]))
        table = self._tables.get(key)
        if table is None or not table.holds(options, self._watched(group, own)):
            _check_layouts(own)
            self._make_states(group, own)
            count = None if options[0] else self._joined_counts(own)
            held = self._held(group, own)
            watched = [x for x in self._watched(group, own) if x is not None]
            if len(self._tables) >= _MOST_TABLES:
                self._tables.clear()
            table = self._tables[key] = Table(options, watched, held, count)
        return table

    def _watched(self, group: Mapping[str, Any], own: Sequence[Tensor]) -> list[Tensor | None]:
        """Parameters and their states, None for one that is not there."""
        states = [self.state[p] for p in own]
        names = ("step", *_names(group, own[0]))
        return [*own, *(state.get(name) for name in names for state in states)]

    def _joined_counts(self, own: Sequence[Tensor]) -> Tensor:
        """The counts of steps as one vector, of which the states are views from here on, so that one operator counts.

        They stay tensors without dims on the host, as torch's, which others may read, write and save.
        """
        states = [self.state[p] for p in own]
        dtype = states[0]["step"].dtype
        joined = torch.stack([state["step"].to("cpu", dtype).view(()) for state in states])
        for number, state in enumerate(states):
            state["step"] = joined[number]
        return joined

    def _gradients(self, own: Sequence[Tensor], strides: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Gradients in the layouts of their parameters: copies of those in others."""
        gradients: list[Any] = [p.grad for p in own]
        for n, (gradient, stride) in enumerate(zip(gradients, strides, strict=True)):
            if gradient.stride() != stride or gradient.is_neg() or gradient.is_conj():
                gradients[n] = torch.empty_like(own[n], dtype=gradient.dtype).copy_(gradient)
                if getattr(self, "grad_scale", None) is not None:
                    own[n].grad = gradients[n]
        return gradients

    def _held(self, group: Mapping[str, Any], own: Sequence[Tensor]) -> Held:
        """The parameters and states that a pass updates, in the layouts of the parameters."""
        columns: dict[str, list[Tensor]] = {}
        for name in _names(group, own[0]):
            dtype = self.state[own[0]][name].dtype
            for p in own:
                found = self.state[p][name]
                if found.stride() != p.stride() or found.dtype != dtype:  # of a state dict with another layout
                    self.state[p][name] = torch.empty_like(p, dtype=dtype).copy_(found)
            columns[name] = [self.state[p][name] for p in own]
        master, largest = columns.get("master"), columns.get("max_exp_avg_sq")
        wide, low = (list(own), None) if master is None else (master, list(own))
        return Held(wide, columns["exp_avg"], columns["exp_avg_sq"], largest, low)

    def _make_states(self, group: Mapping[str, Any], own: Sequence[Tensor]) -> None:
        """Make the states that are not there, those of parameters next to each other side by side."""
        on_device = _counts_on_device(group)
        new = [p for p in own if not self.state[p]]
        kept = [*_KEPT, *(["max_exp_avg_sq"] if group["amsgrad"] else [])]
        for p in new:
            self.state[p]["step"] = torch.zeros((), dtype=torch.float32, device=p.device if on_device else "cpu")
        if new:
            dtype = wide_of(new[0].dtype) if _has_master(group, new[0]) else new[0].dtype
            for key in kept:
                for p, held in zip(new, _side_by_side(new, dtype), strict=True):
                    self.state[p][key] = held
        bare = [p for p in own if _has_master(group, p) and "master" not in self.state[p]]
        for p, held in zip(bare, _side_by_side(bare, torch.float32), strict=True):
            self.state[p]["master"] = held.copy_(p)
        for p in own:  # as torch's, whose option was set later
            if group["amsgrad"] and "max_exp_avg_sq" not in self.state[p]:
                self.state[p]["max_exp_avg_sq"] = torch.zeros_like(self.state[p]["exp_avg_sq"])


_KEPT = ("exp_avg", "exp_avg_sq")

_MOST_TABLES = 512
"""Tables of an optimizer: one for each set of parameters that is stepped at once, as in a backward with
``step_in_backward=True``."""


class _Piece(NamedTuple):
    """The vectors of one parameter, in the order of a `Run`, and the row of its scalars."""

    vectors: tuple[Tensor | None, ...]
    row: int


def _alike(parameters: Iterable[Tensor]) -> dict[tuple[torch.device, torch.dtype, torch.dtype], list[Tensor]]:
    """Parameters that have gradients, by device, number type, and that of the gradient."""
    found: dict[tuple[torch.device, torch.dtype, torch.dtype], list[Tensor]] = {}
    for p in parameters:
        gradient = p.grad
        if gradient is not None:
            found.setdefault((p.device, p.dtype, gradient.dtype), []).append(p)
    return found


def _names(group: Mapping[str, Any], p: Tensor) -> list[str]:
    """The states of a pass over parameters like one."""
    names = [*_KEPT, *(["max_exp_avg_sq"] if group["amsgrad"] else [])]
    return [*names, "master"] if _has_master(group, p) else names


def _kind(group: Mapping[str, Any], scale: Tensor | None) -> Kind:
    return Kind(bool(group["maximize"]), bool(group["amsgrad"]), scale is not None)


def _counts_on_device(group: Mapping[str, Any]) -> bool:
    return bool(group["capturable"] or group["fused"])


def _count_on_device(steps: list[Tensor], found_inf: Tensor | None) -> Tensor | None:
    """Count a step on the device unless *found_inf*; returns that, on the device."""
    if found_inf is None:
        torch._foreach_add_(steps, 1)
        return None
    found_inf = found_inf.to(steps[0].device)
    torch._foreach_add_(steps, (1 - found_inf).to(steps[0].dtype).view(()))
    return found_inf


def _scalars(
    group: Mapping[str, Any], p: Tensor, counts: Sequence[float], scale: Tensor | None
) -> tuple[Tensor, list[int]]:
    """The scalars of a pass, for each number of steps that was taken, and the row of each parameter."""
    lr, decay, eps = group["lr"], group["weight_decay"], group["eps"]
    beta1, beta2 = group["betas"]
    factor = 1.0 if scale is None else 1 / float(scale)
    inverts = -1 if is_triton(p.device) else 1
    distinct = {count: row for row, count in enumerate(dict.fromkeys(counts))}
    # A learning rate that is a tensor is computed with in its own number type, as torch's does.
    numbers = [
        [
            float(1 - lr * decay),
            float(1 - beta1),
            float(beta2),
            float(1 - beta2),
            float(-(lr / (1 - beta1**count))),
            float((1 - beta2**count) ** 0.5) ** inverts,
            eps,
            factor,
        ]
        for count in distinct
    ]
    found = torch.tensor(numbers, dtype=wide_of(p.dtype), device="cpu", pin_memory=p.device.type == "cuda")
    return found.to(p.device, non_blocking=True), [distinct[count] for count in counts]


def _scalars_on_device(group: Mapping[str, Any], p: Tensor, steps: list[Tensor], scale: Tensor | None) -> Tensor:
    """The scalars of a pass on a device that counts the steps, a row for each parameter."""
    lr, decay, eps = group["lr"], group["weight_decay"], group["eps"]
    beta1, beta2 = group["betas"]
    count = torch.stack(steps).to(torch.float64)
    ones = torch.ones_like(count)
    lr = lr.to(p.device, torch.float64).view(()) if isinstance(lr, Tensor) else lr
    columns = [
        ones * (1 - lr * decay),
        ones * (1 - beta1),
        ones * beta2,
        ones * (1 - beta2),
        -lr / (1 - beta1**count),
        (1 - beta2**count).rsqrt(),
        ones * eps,
        ones if scale is None else ones / scale.to(p.device, torch.float64).view(()),
    ]
    return torch.stack(columns, dim=1).to(wide_of(p.dtype))


def _has_master(group: Mapping[str, Any], p: Tensor) -> bool:
    return bool(group["masters"]) and p.dtype in _LOW


def _check_step(own: Sequence[Tensor], group: Mapping[str, Any]) -> None:
    if any(p.grad.is_sparse for p in own if p.grad is not None):
        raise UsageError(
            "FusedAdamW needs dense gradients, and a parameter has a sparse one: use torch.optim.SparseAdam"
        )
    device = own[0].device.type
    if group["capturable"] and device != "cuda":
        raise UsageError(
            f"capturable=True is for CUDA graphs, but a parameter is on {device}: leave it out, as for "
            "parameters that offload keeps on the host"
        )
    if device == "cuda" and torch.cuda.is_current_stream_capturing() and not group["capturable"]:
        raise UsageError("a step of FusedAdamW is captured in a CUDA graph: make the optimizer with capturable=True")


def _check_layouts(own: Sequence[Tensor]) -> None:
    for p in own:
        if not _is_dense(p):
            raise UsageError(
                f"a parameter of shape {tuple(p.shape)} has strides {p.stride()}, with gaps or overlaps in memory: "
                "make it contiguous, or use torch.optim.AdamW"
            )


def _is_dense(x: Tensor) -> bool:
    """Whether the elements of a tensor fill a stretch of memory, in any order."""
    if x.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _flat(x: Tensor) -> Tensor:
    """The memory of a dense tensor as a vector of real numbers."""
    x = x.detach()
    if x.is_complex():
        x = torch.view_as_real(x)
    return x.as_strided((x.numel(),), (1,), x.storage_offset())


def _side_by_side(tensors: Sequence[Tensor], dtype: torch.dtype) -> Iterable[Tensor]:
    """Zeros in the layouts of tensors, one after the other in one buffer; for the kernel at addresses that it can load
    from in one piece."""
    if not tensors:
        return
    unit = 64 if is_triton(tensors[0].device) else 1
    sizes = [-(-x.numel() // unit) * unit for x in tensors]
    held = torch.zeros(sum(sizes), dtype=dtype, device=tensors[0].device)
    for x, start in zip(tensors, accumulate(sizes, initial=0), strict=False):
        yield held.as_strided(x.shape, x.stride(), start)


def _joined(pieces: Sequence[_Piece]) -> list[Run]:
    """Runs of pieces: those that follow each other in all of their memories are one."""
    found: list[list[_Piece]] = []
    for piece in pieces:
        if found and piece.row == found[-1][-1].row and _follows(found[-1][-1], piece):
            found[-1].append(piece)
        else:
            found.append([piece])
    runs = []
    for several in found:
        length = sum(len(piece.vectors[0]) for piece in several if piece.vectors[0] is not None)
        whole = (None if x is None else x.as_strided((length,), (1,), x.storage_offset()) for x in several[0].vectors)
        runs.append(Run(*whole, several[0].row))  # type: ignore[arg-type,call-arg]
    return runs


def _follows(first: _Piece, second: _Piece) -> bool:
    return all(
        (x is None and y is None)
        or (
            x is not None
            and y is not None
            and x.untyped_storage()._cdata == y.untyped_storage()._cdata
            and x.storage_offset() + len(x) == y.storage_offset()
        )
        for x, y in zip(first.vectors, second.vectors, strict=True)
    )


class RowWiseAdagrad(Optimizer):
    """Adagrad with one state for each row of a table, the sum of the mean squares of its gradients.

    Its states take 1 / columns of the memory of Adagrad's. With a sparse gradient, as ``nn.EmbeddingBag(...,
    sparse=True)`` has, it reads and writes only the rows that were looked up; a dense one gives the same update. A row
    that was looked up several times counts with the sum of its gradients, as in FBGEMM's ``EXACT_ROWWISE_ADAGRAD``::

        sum[row] += mean(gradient[row] ** 2)
        parameter[row] -= lr * gradient[row] / (sqrt(sum[row]) + eps)

    Rows are along the first dim. The state of each parameter is ``sum``, [rows]. Where ranks have some columns of a
    table each, they add up the squares of each row that was looked up, so that all have the row's state.

    Args:
        params: as of torch's optimizers.
        lr: learning rate.
        eps: is added to the root.
        initial_accumulator_value: with which each sum starts.

    Raises:
        UsageError: an argument is negative.
    """

    joins_columns = True
    """Ranks that have some columns of a parameter each update them as one that has all of them."""

    def __init__(
        self, params: Any, lr: float | Tensor = 1e-2, eps: float = 1e-10, *, initial_accumulator_value: float = 0.0
    ) -> None:
        given = {"lr": lr, "eps": eps, "initial_accumulator_value": initial_accumulator_value}
        for name, value in given.items():
            if not value >= 0:
                raise UsageError(f"{name} is {value}: it must be at least 0")
        super().__init__(params, given)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step; returns what *closure* does, which computes the loss again."""
        loss = _loss_of(closure)
        self._step()
        return loss

    @in_own_dtypes
    def _step(self) -> None:
        own = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        rows = [_Rows.of(p) for p, _ in own]
        squares = [_squares(each.values) for each in rows]
        columns = sum_over_columns([p for p, _ in own], squares)
        for (p, group), each, square, count in zip(own, rows, squares, columns, strict=True):
            self._update(p, each, square / count, group)

    def _update(self, p: Tensor, rows: _Rows, mean: Tensor, group: Mapping[str, Any]) -> None:
        if "sum" not in self.state[p]:
            start = group["initial_accumulator_value"]
            self.state[p]["sum"] = torch.full(p.shape[:1], start, dtype=p.dtype, device=p.device)
        sums: Tensor = self.state[p]["sum"]
        own = (sums if rows.numbers is None else sums[rows.numbers]) + mean
        step = rows.values / (own.sqrt() + group["eps"]).view(own.shape + (1,) * (p.dim() - own.dim()))
        if rows.numbers is None:
            sums.copy_(own)
            p.add_(step, alpha=-float(group["lr"]))
        else:  # each row is there once
            sums[rows.numbers] = own
            updated = p.index_select(0, rows.numbers).add_(step, alpha=-float(group["lr"]))
            p.index_copy_(0, rows.numbers, updated)  # the same bits as index_add_, in less time on a processor


def _squares(rows: Tensor) -> Tensor:
    """The sum of the squares of each row."""
    return rows.square() if rows.dim() < 2 else rows.square().flatten(1).sum(1)


class _Rows(NamedTuple):
    """Rows of a gradient, and their numbers; None: all of them, in order."""

    values: Tensor
    numbers: Tensor | None

    @classmethod
    def of(cls, p: Tensor) -> _Rows:
        assert p.grad is not None
        if not p.grad.is_sparse:
            return cls(p.grad, None)
        gradient = p.grad.coalesce()
        return cls(gradient.values(), gradient.indices()[0])


def _loss_of(closure: Callable[[], Any] | None) -> Any:
    """The loss, which a step's closure computes again; None without a closure."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


# --- states in float32, which torch's optimizers cast to the parameter's number type when they load them --------------

_loaded: dict[int, dict[Any, dict[str, Any]]] = {}


def _note_wide_states(optimizer: Any, state_dict: dict[str, Any]) -> None:
    _loaded[id(optimizer)] = state_dict["state"]


def _take_wide_states(optimizer: Any) -> None:
    states = _loaded.pop(id(optimizer), {})
    parameters = [(group, p) for group in optimizer.param_groups for p in group["params"]]
    for number, (group, p) in enumerate(parameters):
        for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "master"):
            if _has_master(group, p) and name in states.get(number, {}):
                own = torch.empty_like(p, dtype=torch.float32)
                optimizer.state[p][name] = own.copy_(states[number][name])
