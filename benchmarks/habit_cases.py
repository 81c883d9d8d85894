"""The habits of `habits.py`: each does with a parallel model what scripts do with a local one, and compares."""

from __future__ import annotations

import copy
import io
import pickle
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel

import whale

WIDTH, WORDS = 16, 32


@whale.row_wise
class Straight(torch.autograd.Function):
    """Rounds, with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (8 * x).round() / 8

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Block(nn.Module):
    """A residual block with normalization and two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.down(self.up(self.norm(x)).relu())
        return found


class Decoder(nn.Module):
    """Tied embeddings around two blocks; options are habits of forwards."""

    def __init__(self, habit: str = "") -> None:
        super().__init__()
        self.habit, self.config, self.calls = habit, {"width": WIDTH}, 0
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.drop = nn.Dropout(0.25 if habit == "dropout" else 0.0)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.other = nn.Linear(WIDTH, 4)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, labels: Tensor | None = None, task: str = "words", weight: float = 1.0) -> Any:
        x = self.embed(tokens)
        for block in self.blocks:
            if self.habit == "layer drop" and self.training and random.random() < 0.5:
                continue
            x = (
                torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
                if self.habit == "recompute"
                else block(x)
            )
        x = self.drop(x)
        if self.habit == "straight":
            x = Straight.apply(x)
        if self.habit == "vmap":
            x = torch.vmap(torch.vmap(self.blocks[0].up))(x) @ torch.ones(32, WIDTH, dtype=x.dtype)
        if self.habit == "counter":
            self.calls += 1
            x = x * self.calls
        if self.habit == "autocast":
            with torch.autocast("cpu", dtype=torch.bfloat16):
                x = x @ torch.eye(WIDTH, dtype=x.dtype)
        logits = self.head(x) if task == "words" else self.other(x)
        if labels is None:
            return {"logits": logits}
        if self.habit == "noise":
            logits = logits + torch.normal(torch.zeros(WORDS), torch.ones(WORDS)).to(x.dtype)
        targets = labels if task == "words" else labels % 4
        if self.habit == "kl_div":
            wanted = nn.functional.one_hot(targets, logits.shape[-1]).to(x.dtype)
            loss = nn.functional.kl_div(logits.log_softmax(-1), wanted, reduction="batchmean", log_target=False)
        else:
            loss = weight * cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0)
        if self.habit == "penalty":
            loss = loss + 0.01 * sum(block.up.weight.square().sum() for block in self.blocks)
        if self.habit == "tuple":
            return (logits.argmax(-1) == targets).double().mean(), loss
        return {"loss": loss, "logits": logits}


LAYOUTS: dict[str, Mapping[str, Any]] = {
    "replicate": {"": whale.replicate()},
    "split": {"": whale.split()},
    "stages": {"blocks.0": whale.stage(), "blocks.1": whale.stage()},
}


def batch(rows: int = 8, length: int = 6, seed: int = 0) -> dict[str, Tensor]:
    """Tokens with labels, some of which do not count."""
    draw = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, WORDS, (rows, length), generator=draw)
    return {"tokens": tokens, "labels": torch.randint(0, WORDS, (rows, length), generator=draw)}


def local_model(habit: str = "") -> Any:
    """The model of the local script, in float64."""
    torch.manual_seed(0)
    return Decoder(habit).double()


def parallel(model: nn.Module, layout: str, **options: Any) -> Any:
    """The model in parallel."""
    whale.annotate(model, LAYOUTS[layout])
    return whale.parallelize(model, batch(), device="cpu", timeout_seconds=10, **options)


def loss_of(output: Any) -> Tensor:
    """The loss of the local model's output."""
    found: Tensor = output[1] if isinstance(output, tuple) else output["loss"]
    return found


class Pair:
    """A local and a parallel script that take the same steps."""

    def __init__(
        self, layout: str, habit: str = "", prepare: Callable[[Any], None] = lambda model: None, **options: Any
    ) -> None:
        self.local, model = local_model(habit), local_model(habit)
        prepare(self.local)
        prepare(model)
        self.model = parallel(model, layout, **options)
        self.optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-4) for m in (self.local, self.model)]
        self.worst = 0.0

    def step(self, *, change: Callable[[Any], None] = lambda model: None, **given: Any) -> None:
        """One step of both; *change* happens between backward and update."""
        arguments = {**batch(), **given}
        expected = loss_of(self.local(**arguments))
        expected.backward()
        found = self.model.train_step(**arguments)
        self.note(found, expected)
        for model, optimizer in zip((self.local, self.model), self.optimizers, strict=True):
            change(model)
            optimizer.step()
            optimizer.zero_grad()

    def note(self, one: Tensor, other: Tensor) -> None:
        """Remember the largest difference."""
        self.worst = max(self.worst, float((one.detach() - other.detach()).abs().max()))

    def error(self) -> float:
        """The largest difference so far, and of all parameters."""
        whole = self.model.full_state_dict()
        for name, parameter in self.local.named_parameters():
            self.note(whole[name], parameter)
        return self.worst


HABITS: dict[str, tuple[str, Callable[[str], float]]] = {}


def habit(name: str, before: str) -> Callable[[Callable[[str], float]], Callable[[str], float]]:
    """Register a habit, and what came of it before."""

    def register(function: Callable[[str], float]) -> Callable[[str], float]:
        HABITS[name] = before, function
        return function

    return register


def steps(layout: str, habit: str = "", count: int = 3, **given: Any) -> float:
    """A few steps with a habit of the forward."""
    pair = Pair(layout, habit)
    for _ in range(count):
        pair.step(**given)
    return pair.error()


@habit("ranks bring different rows", "wrong: trained on parts of each")
def _other_rows(layout: str) -> float:
    pair = Pair(layout)
    pair.model.train_step(**batch(seed=dist.get_rank()))
    return pair.error()


@habit("freeze a layer after parallelize", "wrong: replicas drift")
def _freeze(layout: str) -> float:
    pair = Pair(layout)
    pair.step()
    for model in (pair.local, pair.model):
        for parameter in model.blocks[0].parameters():
            parameter.requires_grad_(False)
    pair.step()
    return pair.error()


@habit("freeze a layer before parallelize", "exact")
def _frozen(layout: str) -> float:
    pair = Pair(layout, prepare=lambda model: model.blocks[0].requires_grad_(False))
    pair.step()
    pair.step()
    return pair.error()


@habit("torch.nn.utils.clip_grad_norm_", "wrong under split and stage: each rank its own norm")
def _clip(layout: str) -> float:
    pair = Pair(layout)
    for _ in range(2):
        pair.step(change=lambda model: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05))
    return pair.error()


@habit("optimizer made before parallelize", "wrong under split: trained nothing")
def _optimizer_before(layout: str) -> float:
    local = local_model()
    model = copy.deepcopy(local)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (local, model)]
    made = parallel(model, layout)
    loss_of(local(**batch())).backward()
    made.train_step(**batch())
    for optimizer in optimizers:
        optimizer.step()
    whole = made.full_state_dict()
    return max(float((whole[n] - p).abs().max()) for n, p in local.named_parameters())


@habit("torch.save(model.state_dict()) on rank 0, loaded by all", "wrong: shards under whole names")
def _save(layout: str) -> float:
    pair = Pair(layout)
    pair.step()
    saved = [io.BytesIO()]
    torch.save(pair.model.state_dict(), saved[0])
    dist.broadcast_object_list(saved)
    saved[0].seek(0)
    pair.model.load_state_dict(torch.load(saved[0]))
    return pair.error()


@habit("torch.save(optimizer.state_dict())", "wrong: shards under whole names")
def _save_optimizer(layout: str) -> float:
    pair = Pair(layout)
    pair.step()
    saved = io.BytesIO()
    torch.save(pair.optimizers[1].state_dict(), saved)
    saved.seek(0)
    pair.optimizers[1] = torch.optim.AdamW(pair.model.parameters())
    pair.optimizers[1].load_state_dict(torch.load(saved))
    pair.step()
    return pair.error()


@contextmanager
def _folder() -> Iterator[str]:
    """A folder of rank 0, whose name all ranks know."""
    with tempfile.TemporaryDirectory() as own:
        shared = [own]
        dist.broadcast_object_list(shared)
        yield shared[0]
        dist.barrier()


@habit("torch.distributed.checkpoint of model and optimizer", "wrong: shards under whole names")
def _checkpoint(layout: str) -> float:
    pair = Pair(layout)
    pair.step()
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    with _folder() as folder:
        optimizer = get_optimizer_state_dict(pair.model, pair.optimizers[1], options=options)
        dcp.save({"model": pair.model.state_dict(), "optimizer": optimizer}, checkpoint_id=folder)
        pair.model = parallel(local_model(), layout)
        pair.optimizers[1] = torch.optim.AdamW(pair.model.parameters())
        state = {
            "model": pair.model.state_dict(),
            "optimizer": get_optimizer_state_dict(pair.model, pair.optimizers[1], options=options),
        }
        planner = dcp.DefaultLoadPlanner(allow_partial_load=True)  # a head without gradients has no state
        dcp.load(state, checkpoint_id=folder, planner=planner)
        set_optimizer_state_dict(pair.model, pair.optimizers[1], state["optimizer"], options=options)
    pair.step()
    return pair.error()


@habit("full_state_dict(to='rank0')", "time-out of gloo")
def _on_rank_0(layout: str) -> float:
    pair = Pair(layout)
    whole = pair.model.full_state_dict(to="rank0")
    if dist.get_rank() == 0:
        return max(float((whole[n] - p).abs().max()) for n, p in pair.local.named_parameters())
    return 0.0


@habit("LayerDrop: random.random() in forward", "wrong: baked in at capture")
def _layer_drop(layout: str) -> float:
    return steps(layout, "layer drop")


@habit("a counter in forward", "wrong: baked in at capture")
def _counter(layout: str) -> float:
    return steps(layout, "counter")


@habit("an attribute set after parallelize", "wrong: ignored")
def _attribute(layout: str) -> float:
    pair = Pair(layout)
    pair.step()
    for model in (pair.local, pair.model):
        model.habit = "kl_div"
    pair.step()
    return pair.error()


@habit("torch.autocast in forward", "wrong: dropped")
def _autocast(layout: str) -> float:
    return steps(layout, "autocast")


@habit("torch.autocast around the step", "capture failed")
def _autocast_around(layout: str) -> float:
    pair = Pair(layout)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pair.step()
    return pair.error()


@habit("torch.utils.checkpoint in forward", "wrong: dropped without a word")
def _recompute(layout: str) -> float:
    return steps(layout, "recompute")


@habit("Adafactor", "wrong: off by 0.01")
def _adafactor(layout: str) -> float:
    pair = Pair(layout)
    pair.optimizers = [torch.optim.Adafactor(m.parameters(), lr=1e-2) for m in (pair.local, pair.model)]
    pair.step()
    return pair.error()


@habit("LBFGS", "wrong: off by 0.01")
def _lbfgs(layout: str) -> float:
    pair = Pair(layout)
    optimizers = [torch.optim.LBFGS(m.parameters(), lr=0.1, max_iter=2) for m in (pair.local, pair.model)]

    def of_local() -> float:
        optimizers[0].zero_grad()
        loss = loss_of(pair.local(**batch()))
        loss.backward()
        return loss.item()

    def of_parallel() -> float:
        optimizers[1].zero_grad()
        return pair.model.train_step(**batch()).item()

    optimizers[0].step(of_local)
    optimizers[1].step(of_parallel)
    return pair.error()


@habit("fused and foreach AdamW, a scheduler, groups by name", "exact")
def _groups(layout: str) -> float:
    pair = Pair(layout)
    pair.optimizers = []
    for model in (pair.local, pair.model):
        named = dict(model.named_parameters())
        decay = [p for n, p in named.items() if "norm" not in n]
        rest = [p for n, p in named.items() if "norm" in n]
        groups = [{"params": part, "weight_decay": w} for part, w in ((decay, 0.1), (rest, 0.0)) if part]
        pair.optimizers.append(torch.optim.AdamW(groups, lr=1e-2, eps=1e-4, foreach=True))
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(one, 5) for one in pair.optimizers]
    for _ in range(3):
        pair.step()
        for scheduler in schedulers:
            scheduler.step()
    return pair.error()


@habit("resume with dropout", "wrong: the clock restarted")
def _resume(layout: str) -> float:
    one, two = (parallel(local_model("dropout"), layout) for _ in range(2))
    losses = [one.train_step(**batch()).item() for _ in range(2)]
    two.train_step(**batch())
    resumed = parallel(local_model("dropout"), layout)
    resumed.set_rng_state(two.get_rng_state())
    return abs(resumed.train_step(**batch()).item() - losses[1])


@habit("classes, config, indices and ties of modules", "wrong: all modules were `_Namespace`")
def _modules(layout: str) -> float:
    pair = Pair(layout)
    model = pair.model
    assert (
        isinstance(model, Decoder)
        and model.config == {"width": WIDTH}
        and isinstance(model.blocks[0].norm, nn.LayerNorm)
    )
    assert model.head.weight is model.embed.weight
    assert [n for n, _ in model.named_modules()] == [n for n, _ in pair.local.named_modules()]
    return 0.0


@habit("assign a parameter after parallelize", "ignored")
def _assign(layout: str) -> float:
    pair = Pair(layout)
    for model in (pair.local, pair.model):
        model.head.weight = nn.Parameter(torch.ones(WORDS, WIDTH, dtype=torch.float64))
    pair.step()
    return pair.error()


@habit("write values with no_grad", "ignored under split")
def _write(layout: str) -> float:
    pair = Pair(layout)
    with torch.no_grad():
        for model in (pair.local, pair.model):
            for parameter in model.parameters():
                parameter.mul_(0.5)
    pair.step()
    return pair.error()


@habit("model.bfloat16() after parallelize", "ignored")
def _cast(layout: str) -> float:
    pair = Pair(layout)
    pair.model.bfloat16()
    return pair.error()


@habit("a hook added after parallelize", "ignored")
def _hook(layout: str) -> float:
    pair = Pair(layout)
    for model in (pair.local, pair.model):
        model.blocks[0].register_forward_hook(lambda module, given, output: output * 2)
    pair.step()
    return pair.error()


@habit("unlike initial values on the ranks", "accepted")
def _initial(layout: str) -> float:
    model = local_model()
    with torch.no_grad():
        model.blocks[0].up.weight[3, 5] += dist.get_rank()
    parallel(model, layout)
    return float("inf")


@habit("the same with sync_module_states=True", "no way")
def _synced(layout: str) -> float:
    torch.manual_seed(dist.get_rank())
    model = parallel(Decoder().double(), layout, sync_module_states=True)
    torch.manual_seed(0)
    whole, expected = model.full_state_dict(), Decoder().double()
    return max(float((whole[n] - p).abs().max()) for n, p in expected.named_parameters())


@habit("a model that returns (metric, loss)", "wrong: trained on the metric")
def _tuple(layout: str) -> float:
    return steps(layout, "tuple")


@habit("F.kl_div", "TypeError")
def _kl_div(layout: str) -> float:
    return steps(layout, "kl_div")


@habit("a head chosen by an argument, the other one first", "shape error under split")
def _task(layout: str) -> float:
    pair = Pair(layout)
    pair.step()
    pair.step(task="other")
    return pair.error()


@habit("a float argument that changes", "compiled every step")
def _float(layout: str) -> float:
    pair = Pair(layout)
    for weight in (0.9, 0.8, 0.7):
        pair.step(weight=weight)
    return pair.error()


@habit("rows and lengths that change", "exact, compiled for each without bound")
def _ragged(layout: str) -> float:
    pair = Pair(layout)
    for rows, length in ((8, 6), (5, 6), (8, 4), (1, 3)):
        pair.step(**batch(rows, length))
    return pair.error()


@habit("logits and evaluation without labels", "only the loss came back")
def _logits(layout: str) -> float:
    pair = Pair(layout)
    given = batch()
    with torch.no_grad():
        expected = pair.local(**given)
    loss, output = pair.model.train_step(**given, outputs=True)
    pair.note(loss, expected["loss"])
    pair.note(output["logits"], expected["logits"])
    pair.note(pair.model.predict_step(tokens=given["tokens"])["logits"], expected["logits"])
    _, output = pair.model.eval_step(tokens=given["tokens"], outputs=True)
    pair.note(output["logits"], expected["logits"])
    return pair.error()


@habit("accumulation with a mean", "no way")
def _accumulate(layout: str) -> float:
    pair = Pair(layout)
    for seed in range(2):
        (loss_of(pair.local(**batch(seed=seed))) / 2).backward()
        pair.model.train_step(**batch(seed=seed), scale=0.5)
    for optimizer in pair.optimizers:
        optimizer.step()
    return pair.error()


@habit("an average by AveragedModel or deepcopy", "raw error")
def _average(layout: str) -> float:
    pair = Pair(layout)
    averages: list[Any] = [AveragedModel(pair.local), AveragedModel(pair.model)]
    for _ in range(2):
        pair.step()
        for average, model in zip(averages, (pair.local, pair.model), strict=True):
            average.update_parameters(model)
    pair.note(averages[1].module.eval_step(**batch()), loss_of(averages[0].module(**batch())))
    return pair.error()


@habit("pickle of the parallel model", "raw error")
def _pickle(layout: str) -> float:
    pickle.dumps(parallel(local_model(), layout))
    return 0.0


@habit("loss.backward() after train_step", "torch's words")
def _backward(layout: str) -> float:
    parallel(local_model(), layout).train_step(**batch()).backward()
    return 0.0


@habit("(loss / n).backward(), or a gradient scaler's", "torch's words")
def _scaled_backward(layout: str) -> float:
    pair = Pair(layout)
    (pair.model.train_step(**batch()) / 4).backward()
    return pair.error()


@habit("train_step under torch.no_grad()", "trained")
def _without_gradients(layout: str) -> float:
    pair = Pair(layout)
    with torch.no_grad():
        pair.model.train_step(**batch())
    return pair.error()


@habit("a straight-through estimator, declared row-wise", "refused")
def _straight(layout: str) -> float:
    return steps(layout, "straight")


@habit("torch.vmap in forward", "raw error")
def _mapped(layout: str) -> float:
    return steps(layout, "vmap")


@habit("model(**batch)", "torch's words")
def _call(layout: str) -> float:
    parallel(local_model(), layout)(**batch())
    return 0.0


@habit("generate from a whole copy", "no way")
def _copy(layout: str) -> float:
    pair = Pair(layout)
    pair.step()
    whole = local_model()
    whole.load_state_dict(pair.model.full_state_dict())
    pair.note(whole(batch()["tokens"])["logits"], pair.local(batch()["tokens"])["logits"])
    return pair.error()


def _wrap(model: Any) -> None:
    up = model.blocks[0].up
    forward = up.forward
    up.forward = lambda x: 2 * forward(x)


@habit("a wrapped forward: old = m.forward; m.forward = lambda x: 2 * old(x)", "wrong: the layer did not train")
def _wrapped(layout: str) -> float:
    pair = Pair(layout, prepare=_wrap)
    pair.step()
    pair.step()
    return pair.error()


@habit("the same after parallelize", "wrong: its gradients were zero")
def _wrapped_later(layout: str) -> float:
    pair = Pair(layout)
    _wrap(pair.local)
    if pair.model.blocks[0].up.weight is not None:
        _wrap(pair.model)
    pair.step()
    return pair.error()


@habit("noise by torch.normal(zeros, ones) in forward", "wrong: the same in every step")
def _noise(layout: str) -> float:
    model = parallel(local_model("noise"), layout)
    one, other = (model.train_step(**batch()).item() for _ in range(2))
    return float(one == other)  # 0: they differ


@habit("a penalty of weights in the loss, two micro-batches", "refused, in words for batch norms")
def _penalty(layout: str) -> float:
    pair = Pair(layout, "penalty", micro_batches=2)
    pair.step()
    pair.step()
    return pair.error()


@habit("clip_grad_norm_ of each parameter", "wrong under stages: norms of unlike parameters were summed")
def _clip_each(layout: str) -> float:
    def clip(model: Any) -> None:
        for parameter in model.parameters():
            torch.nn.utils.clip_grad_norm_(parameter, 0.01)

    pair = Pair(layout)
    pair.step(change=clip)
    return pair.error()


@habit("more rows than the example", "exact, compiled for each number of rows; batch norms refused")
def _more_rows(layout: str) -> float:
    pair = Pair(layout)
    for rows in (8, 20, 12):
        pair.step(**batch(rows))
    return pair.error()


@habit("a parameter that the model does not register", "wrong: it did not train")
def _unregistered(layout: str) -> float:
    def add(model: Any) -> None:
        shift, forward = [nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))], model.blocks[0].norm.forward
        model.blocks[0].norm.forward = lambda x: forward(x) + shift[0]

    pair = Pair(layout, prepare=add)
    pair.step()
    return pair.error()


@habit("an input that requires a gradient", "its gradient stayed None")
def _input_gradient(layout: str) -> float:
    torch.manual_seed(0)
    model = whale.parallelize(
        nn.Linear(4, 2), torch.ones(4, 4), device="cpu", loss_fn=lambda output, _: output.sum(), timeout_seconds=10
    )
    model.train_step(torch.ones(4, 4, requires_grad=True))
    return 0.0


@habit("eval() of the local model after parallelize", "wrong: ignored")
def _mode_of_local(layout: str) -> float:
    model = local_model("dropout")
    made = parallel(model, layout)
    model.eval()
    made.train_step(**batch())
    return 1.0


@habit("a state loaded into the local model after parallelize", "wrong under split and stage: ignored")
def _state_of_local(layout: str) -> float:
    other, model = local_model(), local_model()
    for parameter in other.parameters():
        parameter.data.mul_(1.1)
    made = parallel(model, layout)
    model.load_state_dict(other.state_dict())
    return float((made.train_step(**batch()) - loss_of(other(**batch()))).detach().abs())


@habit("weight decay by module, writes to model.head.weight", "AttributeError of None under stage")
def _by_module(layout: str) -> float:
    pair = Pair(layout)
    for number, model in enumerate((pair.local, pair.model)):
        with torch.no_grad():
            model.head.weight.data.clamp_(-0.1, 0.1)
        linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
        biases = [module.bias for module in linear if module.bias is not None]
        groups: list[Any] = [{"params": [module.weight for module in linear]}, {"params": biases, "weight_decay": 0.0}]
        pair.optimizers[number] = torch.optim.AdamW(groups, lr=1e-2, eps=1e-4)
    pair.step()
    pair.step()
    return pair.error()


@habit("a batch that is a dict in a dict", "refused: holds no tensor")
def _nested(layout: str) -> float:
    model = local_model()
    whale.annotate(model, LAYOUTS[layout])
    whale.parallelize(model, {"batch": batch()}, device="cpu", timeout_seconds=10)
    return 1.0
