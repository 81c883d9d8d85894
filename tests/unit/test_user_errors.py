"""What a user can do wrong, and what it is answered with, before any process group is made.

Each case checks the class, the exit code and the parts of the message: what was given, the rule, what to do.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import whale
from tests.small_models import Decoder, decoder, tokens
from whale import api, errors
from whale.errors import AnnotationError, CaptureError, InfeasibleError, InputFileError, PlanMismatchError, UsageError
from whale.ir.plan import Plan, PlanStage
from whale.runtime.launch import Launch

Launched = Callable[[int], None]
LOOSE: Any = whale
"""The module without its types, which a type checker would hold against wrong calls."""


@pytest.fixture(autouse=True)
def nothing_is_joined(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    yield
    whale.set_default_strategy(None)
    assert not dist.is_initialized()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    """Make this process look like rank 0 of so many; nothing listens there, so joining would fail at once."""

    def launch(size: int) -> None:
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("LOCAL_RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", str(size))

    return launch


def refused(
    kind: type[errors.WhaleError], parts: list[str], model: Any, batch: Any = None, **options: Any
) -> errors.WhaleError:
    """Check that parallelize refuses *model* with an error of this very class, whose message has all *parts*."""
    with pytest.raises(errors.WhaleError) as caught:
        api.parallelize(model, tokens() if batch is None else batch, **{"device": "cpu", **options})
    assert type(caught.value) is kind
    message = str(caught.value)
    assert len(message.splitlines()) == 1, message
    for part in parts:
        assert part in message, message
    return caught.value


def compiles(model: nn.Module, batch: Any = None, **options: Any) -> None:
    """Check that all checks pass: what fails then is joining, of which the environment says nothing."""
    with pytest.raises(UsageError, match="MASTER_"):
        api.parallelize(model, tokens() if batch is None else batch, device="cpu", **options)


# --- names and options ------------------------------------------------------------------------------------------------


def test_a_key_that_matches_nothing_shows_what_is_there_and_near_misses() -> None:
    with pytest.raises(
        AnnotationError, match=r"'layer\.0' matches no module.*embed, head, layers.*did you mean 'layers\.0'"
    ):
        whale.annotate(decoder(), {"layer.0": whale.split()})


@pytest.mark.parametrize("value", ["split", whale.split, 4, None])
def test_a_value_that_is_no_strategy_names_its_key(value: Any) -> None:
    with pytest.raises(AnnotationError, match=r"the key 'head' has .*no strategy; write whale\.replicate"):
        whale.annotate(decoder(), {"head": value})


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda: LOOSE.parallelize(decoder(), tokens(), microbatches=2), UsageError, "did you mean 'micro_batches'?"),
        (lambda: LOOSE.parallelize(decoder()), UsageError, "'example_batch'"),
        (lambda: LOOSE.annotate(decoder(), {}, strict=True), AnnotationError, "no argument 'strict'; use 'model' or"),
        (lambda: LOOSE.cluster(typ="A100"), AnnotationError, "no argument 'typ'; did you mean 'type'?"),
        (lambda: LOOSE.split(degree=2), AnnotationError, "split() has no argument 'degree'; use 'n'"),
        (lambda: whale.cluster("rows", 2), AnnotationError, "cluster('rows'): unknown layout"),
    ],
)
def test_an_unknown_or_missing_argument_is_named(call: Callable[[], Any], kind: type[UsageError], message: str) -> None:
    with pytest.raises(kind) as caught:
        call()
    assert message in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"plan": 123}, ["plan is int 123", "a path or a whale.Plan"]),
        ({"cluster": object()}, ["cluster is ", "a path or a whale.Cluster"]),
        ({"micro_batches": 0}, ["micro_batches=0", "a whole number of at least 1"]),
        ({"micro_batches": 1.5}, ["micro_batches=1.5", "a whole number of at least 1"]),
        ({"micro_batches": True}, ["micro_batches=True", "a whole number of at least 1"]),
        ({"micro_batches": "2"}, ["micro_batches='2'"]),
        ({"schedule": "1f2b"}, ["schedule='1f2b' is unknown", "did you mean '1f1b'?"]),
        ({"schedule": 3}, ["schedule=3", "'gpipe', '1f1b', '1f1b_deep', 'interleaved'"]),
        ({"prefer": "node"}, ["prefer='node'", "'consecutive' or 'replica_in_node'"]),
        ({"seed": "x"}, ["seed is str 'x'", "a whole number"]),
        ({"timeout_seconds": -1}, ["timeout_seconds=-1", "above 0"]),
        ({"timeout_seconds": float("nan")}, ["timeout_seconds=nan"]),
        ({"device": "tpu"}, ["device='tpu'", "did you mean 'cpu'?"]),
        ({"loss_fn": 3}, ["loss_fn is 3"]),
    ],
)
def test_an_option_of_the_wrong_kind_is_refused_with_its_value(options: dict[str, Any], parts: list[str]) -> None:
    refused(UsageError, parts, decoder(), **options)


def test_what_is_no_model_is_refused() -> None:
    refused(UsageError, ["model is str 'gpt2'", "torch.nn.Module"], "gpt2")
    parallel = api.parallelize(decoder(layers=1), tokens(), device="cpu")
    refused(UsageError, ["parallel already"], parallel)


# --- degrees, nests and stages ----------------------------------------------------------------------------------------


def test_degrees_that_do_not_fit_the_devices_name_the_nearest_counts(launched: Launched) -> None:
    launched(4)
    model = decoder()
    whale.annotate(model, {"": whale.split(3)})
    refused(InfeasibleError, ["the model with split(3)", "there are 4", "use 3 or 6 devices"], model)
    whale.annotate(model, {"layers.[0-1]": whale.stage(2), "layers.[2-3]": whale.stage(1)})
    parts = ["stage(2) (layers.[0-1]) on 2", "stage(1) (layers.[2-3]) on 1", "there are 4", "use 3 or 6 devices"]
    refused(InfeasibleError, parts, model)


def test_nests_that_contradict_name_both(launched: Launched) -> None:
    launched(4)
    model = decoder()
    whale.annotate(model, {"": [whale.replicate(), whale.split()]})
    refused(AnnotationError, ["replicate() > split()", "neither", "give one of them a number"], model)
    whale.annotate(model, {"layers.0": [whale.stage(2), whale.split(3)], "layers.1": whale.stage(2)})
    refused(AnnotationError, ["split(3) in stage(2) (layers.0)", "3 devices", "the 2 that it has"], model)


def test_a_stage_in_a_stage_is_refused_at_the_line_that_enters_it(launched: Launched) -> None:
    launched(2)
    with pytest.raises(AnnotationError, match=r"the key 'head': stage\(\) lies in stage\(\)"):
        whale.annotate(decoder(), {"head": [whale.stage(), whale.stage()]})

    class Nested(Decoder):
        def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
            with whale.stage():
                x = self.embed(tokens)
                with whale.stage():
                    return self.head(x).sum()

    line = Nested.forward.__code__.co_firstlineno + 3
    parts = [f"{__file__}:{line}: stage() lies in stage()", "put one after the other"]
    error = refused(AnnotationError, parts, Nested().double())
    assert error.exit_code == 2


def test_more_stages_than_devices_names_the_stages_and_the_count(launched: Launched) -> None:
    launched(2)
    model = decoder()
    whale.annotate(model, {f"layers.{i}": whale.stage() for i in range(3)})
    error = refused(InfeasibleError, ["stage() (layers.2) on 1", "there are 2", "use 3 devices"], model)
    assert error.exit_code == 4


class WithIdleParts(Decoder):
    """Modules that never run, or that compute nothing from parameters."""

    def __init__(self) -> None:
        super().__init__(layers=1)
        self.unused = nn.Linear(3, 3)
        self.shift = nn.Identity()

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        with whale.stage():
            tokens = (tokens + 1) % 32
        with whale.stage():
            return super().forward(self.shift(tokens), labels)


@pytest.mark.parametrize("key", ["unused", "shift"])
def test_a_stage_without_operators_is_named(launched: Launched, key: str) -> None:
    launched(2)
    model = WithIdleParts()
    model.forward = Decoder.forward.__get__(model)  # type: ignore[method-assign]
    whale.annotate(model, {key: whale.stage(), "layers.0": whale.stage()})
    refused(AnnotationError, [f"stage {key!r} is empty", "idle", "with work: 'layers.0'"], model)


class WithNothing(Decoder):
    """A stage that is entered and left at once."""

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        with whale.stage():
            loss = super().forward(tokens, labels)
        with whale.stage():
            pass
        return loss


def test_a_stage_without_operators_in_a_forward_is_named(launched: Launched) -> None:
    launched(2)
    refused(AnnotationError, ["stage 'stage#1' is empty", "computes nothing", "with work: 'stage#0'"], WithNothing())


def test_a_stage_whose_operators_read_no_parameter_is_named_with_the_line(launched: Launched) -> None:
    launched(2)
    line = WithIdleParts.forward.__code__.co_firstlineno + 2
    refused(AnnotationError, ["stage 'stage#0' is empty", f"{__file__}:{line} reads a parameter"], WithIdleParts())


def test_a_module_used_on_both_sides_of_a_stage_is_refused_with_the_line(launched: Launched) -> None:
    launched(2)

    class Loop(Decoder):
        def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
            x = self.layers[1](self.layers[0](self.embed(tokens)))
            return self.head(self.layers[0](x)).sum()

    model = Loop()
    whale.annotate(model, {"layers.0": whale.stage(), "layers.1": whale.stage()})
    parts = ["stage 'layers.0' comes before stage 'layers.1'", "small_models.py:", "in the order of the data's flow"]
    refused(AnnotationError, parts, model)


def test_interleaved_stages_that_cannot_be_dealt_name_counts_that_can(launched: Launched) -> None:
    launched(3)
    model = decoder()
    whale.annotate(model, {f"layers.{i}": whale.stage() for i in range(4)})
    parts = ["schedule='interleaved' deals 4 stages", "the 3 devices", "multiple of 2"]
    refused(InfeasibleError, parts, model, schedule="interleaved")
    launched(3)
    degrees = [1, 2, 2, 1]
    whale.annotate(model, {f"layers.{i}": whale.stage(n) for i, n in enumerate(degrees)})
    parts = ["puts stage(2) (layers.2) on the 1 devices of stage(1) (layers.0)", "every second stage"]
    refused(InfeasibleError, parts, model, schedule="interleaved")


# --- micro-batches ----------------------------------------------------------------------------------------------------


def test_micro_batches_that_do_not_divide_the_batch_name_the_nearest() -> None:
    refused(UsageError, ["micro_batches=3", "batch of 8 rows", "use 2 or 4"], decoder(layers=1), micro_batches=3)


class Coupled(nn.Module):
    """A model whose rows depend on each other."""

    def __init__(self, *, norm: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8) if norm else None

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        x = x - x.mean(0, keepdim=True) if self.norm is None else self.norm(x)
        return x.pow(2).mean()


@pytest.mark.parametrize(("norm", "operator"), [(False, "aten.sub.Tensor"), (True, "batch_norm")])
def test_rows_that_depend_on_each_other_name_the_operator_and_its_line(norm: bool, operator: str) -> None:
    line = Coupled.forward.__code__.co_firstlineno + 2
    parts = ["micro_batches=2", operator, f"{__file__}:{line}", "from other rows", "use micro_batches=1"]
    refused(UsageError, parts, Coupled(norm=norm), torch.randn(4, 8), micro_batches=2)


class Unknown(nn.Module):
    """A model with an operator of which no rule says what its rows are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.svdvals(self.linear(x).reshape(-1, 2, 4)).sum()


def test_an_operator_without_a_rule_is_not_said_to_mix_rows() -> None:
    parts = ["micro_batches=2", "svd", "has no axis rule", "use micro_batches=1"]
    refused(UsageError, parts, Unknown(), torch.randn(4, 8), micro_batches=2)


# --- heads and units --------------------------------------------------------------------------------------------------


def test_an_attention_with_fewer_heads_than_ranks_names_module_heads_and_legal_degrees(launched: Launched) -> None:
    launched(4)
    model = decoder(heads=2, layers=1)
    whale.annotate(model, {"": whale.split()})
    parts = ["split over 4 devices", "the attention in layers.0", "small_models.py:", "has 2 heads", "over 1 or 2"]
    error = refused(InfeasibleError, parts, model)
    assert error.exit_code == 4
    model = decoder(heads=3, width=12, layers=1)
    whale.annotate(model, {"": [whale.replicate(2), whale.split(2)]})
    compiles(model)  # two heads on one rank and one on the other


@pytest.mark.parametrize("kind", ["sdpa", "eager"])
def test_the_heads_of_a_library_s_attention_are_counted_too(launched: Launched, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    launched(4)
    config = transformers.LlamaConfig(
        num_hidden_layers=1,
        hidden_size=32,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=32,
    )
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation=kind)
    whale.annotate(model, {"": whale.split()})
    ids = torch.zeros(2, 4, dtype=torch.long)
    parts = ["model.layers.0.self_attn", "modeling_llama.py:", "has 2 heads"]
    refused(InfeasibleError, parts, model, {"input_ids": ids, "labels": ids})


def test_fewer_key_value_heads_than_ranks_are_legal_with_at_most_one_warning(launched: Launched) -> None:
    transformers = pytest.importorskip("transformers")
    launched(4)
    config = transformers.LlamaConfig(
        num_hidden_layers=2,
        hidden_size=64,
        intermediate_size=64,
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=32,
    )
    model = transformers.LlamaForCausalLM(config)
    whale.annotate(model, {"": whale.split()})
    ids = torch.zeros(2, 4, dtype=torch.long)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiles(model, {"input_ids": ids, "labels": ids})
    assert len([w for w in caught if "split" in str(w.message)]) <= 1


def test_a_matrix_with_fewer_units_than_ranks_is_named_with_its_shape(launched: Launched) -> None:
    launched(4)

    class Tiny(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.score = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.score(x).pow(2).mean()

    model = Tiny()
    whale.annotate(model, {"": whale.split()})
    refused(
        InfeasibleError,
        ["score.weight of shape (2, 3)", "at most 3 parts", "over 3 or fewer"],
        model,
        torch.randn(4, 3),
    )


# --- the world --------------------------------------------------------------------------------------------------------


def test_an_automatic_plan_of_one_process_is_the_model_alone() -> None:
    model = api.parallelize(decoder(layers=1), tokens(), plan="auto", device="cpu")
    assert model.world_size == 1
    assert model.train_step(**tokens()).item() == pytest.approx(decoder(layers=1)(**tokens()).item(), rel=1e-12)


def test_a_plan_for_another_world_or_model_is_refused(launched: Launched) -> None:
    launched(2)
    parts = ["world_size is 3", "2 processes were started", "torchrun with 3"]
    error = refused(PlanMismatchError, parts, decoder(layers=1), plan=Plan(world_size=3))
    assert error.exit_code == 3
    plan = Plan(world_size=2, stages=(PlanStage(ranks=(0,)), PlanStage(ranks=(1,))))
    refused(PlanMismatchError, ["[[0], [1]]", "the model's are on [[0, 1]]"], decoder(layers=1), plan=plan)


CLUSTER = """
[links]
intra_node = {bandwidth = "300 GB/s", latency = "5 us"}
inter_node = {bandwidth = "1 GB/s", latency = "5 us"}
[[nodes]]
count = 2
devices = 8
device = "A100-SXM4-80GB"
"""


def test_a_cluster_of_another_size_names_both_counts(launched: Launched, tmp_path: Path) -> None:
    launched(2)
    parts = ["3 devices", "2 processes were started", "torchrun with 3"]
    refused(PlanMismatchError, parts, decoder(layers=1), cluster=whale.Cluster.homogeneous(3))
    file = tmp_path / "cluster.toml"
    file.write_text(CLUSTER)
    refused(PlanMismatchError, ["16 devices", "2 processes"], decoder(layers=1), cluster=file)


@pytest.mark.parametrize("option", ["plan", "cluster"])
def test_a_missing_file_names_its_path(option: str) -> None:
    parts = ["/nowhere/file.toml: cannot be read", "No such file"]
    error = refused(InputFileError, parts, decoder(layers=1), **{option: "/nowhere/file.toml"})
    assert error.exit_code == 3


def test_a_model_on_the_wrong_device_names_the_parameter_and_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "describe", lambda device: Launch(rank=0, size=1, device=torch.device("cuda", 0)))
    parts = ["embed.weight is on cpu", "computes on cuda:0", ".to('cuda:0')"]
    refused(UsageError, parts, decoder(layers=1), device="cuda")


def test_parameters_on_several_devices_name_one_of_each() -> None:
    model = decoder(layers=1)
    model.head.to("meta")
    refused(UsageError, ["several devices", "embed.weight on cpu", "head.weight on meta"], model)


# --- the loss ---------------------------------------------------------------------------------------------------------


class Returns(nn.Module):
    """A model that returns what it is told to."""

    def __init__(self, make: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(self.linear(x), x)


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda y, x: y, ["must be a scalar", "shape (4, 8)", ".mean()", "loss_fn"]),
        (lambda y, x: None, ["returns NoneType, which has no loss", "loss_fn(output, batch)"]),
        (lambda y, x: {"logits": y}, ["returns dict, which has no loss", "pass labels"]),
    ],
)
def test_an_output_without_a_scalar_loss_names_its_type_and_forward(make: Any, parts: list[str]) -> None:
    line = Returns.forward.__code__.co_firstlineno
    error = refused(CaptureError, parts, Returns(make), torch.randn(4, 8))
    assert isinstance(error, CaptureError)
    assert (error.file, error.line) == (__file__, line)


def test_a_loss_without_a_parameter_or_a_gradient_is_refused_with_its_line() -> None:
    def mean_of_input(y: Tensor, x: Tensor) -> Tensor:
        return x.mean()

    line = mean_of_input.__code__.co_firstlineno + 1
    parts = [f"the loss at {__file__}:{line} depends on no parameter"]
    refused(UsageError, parts, Returns(mean_of_input), torch.randn(4, 8))
    model = Returns(lambda y, x: y.mean()).requires_grad_(False)
    refused(UsageError, ["no parameter that requires a gradient", "requires_grad_()"], model, torch.randn(4, 8))
    parallel = api.parallelize(model.eval(), torch.randn(4, 8), device="cpu")
    parallel.eval_step(torch.randn(4, 8))
    with pytest.raises(UsageError, match="nothing to train"):
        parallel.train_step(torch.randn(4, 8))


# --- batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "parts"),
    [
        ({}, ["holds no tensor (nothing)", "Decoder.forward"]),
        ((None,), ["holds no tensor (args[0]: NoneType)"]),
        ({"tokens": [torch.zeros(4, 6).long()] * 2, "labels": torch.zeros(4, 6).long()}, ["tokens is a list"]),
        ({"tokens": torch.zeros(4, 6).long()}, ["the batch has tokens", "(tokens, labels)", "'labels'"]),
        (tokens() | {"mask": torch.ones(8)}, ["tokens, labels, mask", "unexpected keyword argument 'mask'"]),
        (tuple(tokens().values()) * 2, ["4 positional", "too many positional"]),
        (tokens(rows=0), ["tokens has shape (0, 6)", "no rows"]),
    ],
)
def test_a_batch_that_forward_does_not_take_is_refused(batch: Any, parts: list[str]) -> None:
    refused(UsageError, parts, decoder(layers=1), batch)


def test_steps_take_batches_of_other_sizes_and_refuse_others() -> None:
    model = api.parallelize(decoder(layers=1), tokens(), device="cpu", micro_batches=2)
    local = decoder(layers=1)
    for batch in (tokens(), tokens(rows=16), tokens(rows=3), tokens(length=9)):
        torch.testing.assert_close(
            model.train_step(**batch), local(**batch).detach(), rtol=1e-12, atol=0, check_dtype=False
        )
        torch.testing.assert_close(model.train_step(batch["tokens"], labels=batch["labels"]), model.train_step(batch))
    with pytest.raises(UsageError, match="the batch has tokens, but .*missing a required argument: 'labels'"):
        model.train_step(tokens=tokens()["tokens"])
    with pytest.raises(UsageError, match="the batch has tokens, targets"):
        model.train_step(tokens=tokens()["tokens"], targets=tokens()["labels"])
    with pytest.raises(UsageError, match="the batch has 1 positional"):
        model.train_step(tokens()["tokens"])
    with pytest.raises(
        CaptureError, match=r"small_models\.py:\d+: Decoder cannot be captured: .*but got torch.float32"
    ):
        model.train_step(**tokens() | {"tokens": torch.rand(8, 6)})
    with pytest.raises(UsageError, match="train_step"):
        model(**tokens())


def test_a_batch_of_another_dtype_names_the_operator_and_both_dtypes() -> None:
    model = api.parallelize(Returns(lambda y, x: y.mean()), torch.randn(4, 8), device="cpu")
    with pytest.raises(
        CaptureError, match=r"aten\.linear\.default of float32 and float64; give a batch of the model's"
    ):
        model.train_step(torch.randn(4, 8).double())


# --- what cannot be captured ------------------------------------------------------------------------------------------

SOURCE = """\
import numpy
import torch
from torch import nn


class Wrong(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return 100 * gradient


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)

    def forward(self, x):
        x = torch.relu(self.first(x))
        x = self.between(x)
        return self.last(x).pow(2).mean()

    def between(self, x):
        {code}
        return x
"""
LINE = SOURCE[: SOURCE.index("{code}")].count("\n") + 1


@pytest.fixture
def model_of(tmp_path: Path) -> Callable[[str], nn.Module]:
    def make(code: str) -> nn.Module:
        file = tmp_path / "my_model.py"
        file.write_text(SOURCE.replace("{code}", code))
        specification = importlib.util.spec_from_file_location("my_model", file)
        assert specification is not None and specification.loader is not None
        module: ModuleType = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(module)
        model: nn.Module = module.Model()
        return model

    return make


DATA = ["depends on a tensor's values", "torch.where"]


@pytest.mark.parametrize(
    ("code", "parts"),
    [
        ("x = x if x.sum() > 0 else -x", DATA),
        ("x = x * x.sum().item()", DATA),
        ("x = x[: x.argmax().item() % 3]", DATA),
        ("x = x[x[:, 0].nonzero().squeeze(1)]", DATA),
        ("x = x[x > 0].sum() * x", DATA),
        ("x = x * x.tolist()[0][0]", DATA),
        ("x = sum([x for _ in range(int(x.sum()))], x)", DATA),
        ("x = x * float(x.detach().numpy().sum())", ["numpy reads a tensor's values", "torch's operators"]),
        ("x = x + torch.from_numpy(numpy.tanh(x.detach().numpy()))", ["numpy reads"]),
        ("print('value', x)", ["printed", "remove it from forward"]),
        ("print(f'{x.mean():.3f}')", ["printed", "remove it from forward"]),
        ("x = Wrong.apply(x)", ["custom autograd function Wrong", "torch.library.custom_op"]),
        ("x.register_hook(lambda gradient: 2 * gradient)", ["register_hook", "hook on a gradient"]),
        ("raise ValueError('my own trouble')", ["its forward raised ValueError: my own trouble", "one device"]),
        ("x = x @ torch.ones(3, 3)", ["[4, 8] X [3, 3]", "one device"]),
    ],
)
def test_code_that_cannot_be_captured_is_refused_at_its_own_line(
    model_of: Callable[[str], nn.Module], code: str, parts: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    error = refused(CaptureError, parts, model_of(code), torch.randn(4, 8))
    assert isinstance(error, CaptureError)
    assert error.file is not None
    assert (Path(error.file).name, error.line) == ("my_model.py", LINE)
    assert str(error).startswith(f"{error.file}:{LINE}: ")
    assert error.exit_code == 2
    assert len(str(error)) < 600
    assert capfd.readouterr().err == ""  # no dump of torch's


def test_the_original_error_is_the_cause(model_of: Callable[[str], nn.Module]) -> None:
    error = refused(CaptureError, ["my own trouble"], model_of("raise ValueError('my own trouble')"), torch.randn(4, 8))
    assert isinstance(error.__cause__, ValueError)


def test_hooks_on_gradients_are_refused_by_the_name_of_what_has_them() -> None:
    model = decoder(layers=1)
    handle = model.head.register_full_backward_hook(lambda *ignored: None)
    refused(CaptureError, ["the module 'head' of Decoder has a backward hook", "remove it"], model)
    handle.remove()
    handle = model.head.weight.register_hook(lambda gradient: gradient)
    refused(CaptureError, ["the parameter head.weight of Decoder has a gradient hook", "after train_step"], model)
    handle.remove()
    model.head.register_forward_hook(lambda module, inputs, output: 2 * output)
    twice = api.parallelize(model, tokens(), device="cpu").train_step(**tokens())
    torch.testing.assert_close(twice, model(**tokens()).detach())


def test_capture_leaves_torch_as_it_was(model_of: Callable[[str], nn.Module]) -> None:
    apply = torch.autograd.Function.__dict__["apply"]
    refused(CaptureError, ["Wrong"], model_of("x = Wrong.apply(x)"), torch.randn(4, 8))
    assert torch.autograd.Function.__dict__["apply"] is apply
    model = model_of("x = Wrong.apply(x)")
    model(torch.randn(4, 8)).backward()


def test_a_default_strategy_that_is_a_stage_is_refused() -> None:
    with pytest.raises(AnnotationError, match=r"the default strategy is .*not stage\(\)"):
        whale.set_default_strategy(whale.stage())
