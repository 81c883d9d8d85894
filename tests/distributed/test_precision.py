"""Steps in low precision: the casts of torch.autocast, and the scale of a float16 loss."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
)

import whale
from tests.distributed.parity import cluster_of
from tests.distributed.parity import worlds as worlds_of_a_module
from tests.distributed.two_ranks import LAYOUTS, Two, refusal
from tests.small_models import decoder, tokens
from whale.ir.strategy import RECOMPUTES, Recompute
from whale.runtime.launch import World

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Two]:
    with worlds_of_a_module() as made:
        yield Two(made)


class Mixed(nn.Module):
    """Products of operators that autocast casts, inside of others that it does not know, and regions."""

    def __init__(self, *, off: bool = True, on: bool = False) -> None:
        super().__init__()
        self.off, self.on = off, on
        self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.core = nn.Parameter(torch.randn(8, 8) / 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.norm(x)
        h = self.first(h) + self.second(h)
        h = torch.einsum("bi,ij->bj", h, self.core)
        with torch.autocast("cpu", dtype=torch.bfloat16) if self.on else nullcontext():
            h = h + self.first(h)
            with torch.autocast("cpu", enabled=False) if self.off else nullcontext():
                h = h.float()
                h = self.third(h) + torch.softmax(h @ self.core, -1)
            h = self.second(h)
        return F.mse_loss(h, y) + (h.to(h.dtype) * 0.5).square().mean()


class Layers(nn.Module):
    """Recurrent layers, whose cells are operators of one call."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.tanh = nn.GRU(8, 8, batch_first=True, bidirectional=True), nn.RNN(16, 8, batch_first=True)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.tanh(self.gru(torch.stack([x, y], 1))[0])[1][0], y)


class Recurrent(nn.Module):
    """An LSTM, whose kernel for float32 on processors keeps its workspace only while autograd is on."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 8, 2, batch_first=True, bidirectional=True), nn.Linear(16, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.head(self.lstm(x[:, None])[0][:, 0]), y)


class Cells(nn.Module):
    """Recurrent cells, which read a state in its own dtype and cast, and a loss that is written in other words."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.lstm, self.linear = nn.GRUCell(8, 8), nn.LSTMCell(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.gru(x, y)
        first, c = self.lstm(h, (h, y))
        second, c = self.lstm(first, (h, c))
        steps = [first, second, self.gru(second, c)]
        logits = self.linear(torch.stack(steps)).log_softmax(-1)
        words = torch.arange(1, 3).expand(len(x), 2)
        length, words_length = (torch.full((len(x),), each) for each in (3, 2))
        return F.ctc_loss(logits, words, length, words_length) + h.square().mean()


def seeded(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def built() -> nn.Module:
        torch.manual_seed(0)
        return build()

    return built


def words(rows: int = 4) -> dict[str, Tensor]:
    drawn = tokens(rows)["tokens"]
    return {"input_ids": drawn, "labels": drawn}


def numbers(rows: int = 4) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, rows, 8, generator=generator)
    return {"x": x, "y": y}


def pictures() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {"pixel_values": torch.randn(4, 3, 32, 32, generator=generator), "labels": torch.arange(4) % 2}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Tensor]]]] = {
    "decoder": (lambda: decoder(layers=2).float(), tokens),
    "regions": (Mixed, numbers),
    "llama": (lambda: LlamaForCausalLM(LlamaConfig(**SIZES)), words),
    "gemma": (  # its attention, with a dropout, casts inside of the kernel too
        lambda: GemmaForCausalLM(GemmaConfig(**SIZES, head_dim=4, num_key_value_heads=4, attention_dropout=0.2)),
        words,
    ),
    "bert": (
        lambda: BertForMaskedLM(BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)),
        words,
    ),
    "resnet": (
        lambda: ResNetForImageClassification(
            ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
        ),
        pictures,
    ),
}


def loss_of(output: Any) -> Tensor:
    found: Tensor = output if isinstance(output, Tensor) else output.loss
    return found


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def locally(model: nn.Module, batch: dict[str, Tensor], dtype: torch.dtype | None) -> Tensor:
    """The loss of a local step under autocast."""
    with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
        loss = loss_of(model(**batch))
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_autocast_bit_for_bit(name: str, precision: str) -> None:
    build, batch_of = MODELS[name]
    local, batch = seeded(build)().train(), batch_of()
    model = whale.parallelize(copy.deepcopy(local), batch, precision=precision, device="cpu")
    if model.loss_scaler is not None:
        model.loss_scaler.scale = 1.0
    torch.manual_seed(1)
    found = model.train_step(**batch)
    torch.manual_seed(1)
    expected = locally(local, batch, torch.bfloat16 if precision == "bf16" else torch.float16)
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)  # means are sums over a count
    own = gradients(model)
    assert own.keys() == gradients(local).keys()
    for key, gradient in gradients(local).items():
        assert torch.equal(own[key], gradient), key
        assert own[key].dtype == torch.float32


def test_a_region_of_autocast_inside_of_a_model() -> None:
    local, batch = seeded(lambda: Mixed(on=True))(), numbers()
    model = whale.parallelize(copy.deepcopy(local), batch, device="cpu")
    model.train_step(**batch)
    locally(local, batch, None)
    plain = seeded(lambda: Mixed(on=False))()
    locally(plain, batch, None)
    for key, gradient in gradients(local).items():
        assert torch.equal(gradients(model)[key], gradient), key
    assert not torch.equal(gradients(plain)["first.weight"], gradients(local)["first.weight"])


def test_autocast_around_parallelize_and_steps() -> None:
    local, batch = seeded(MODELS["decoder"][0])(), tokens()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model = whale.parallelize(copy.deepcopy(local), batch, device="cpu")
        inside = model.train_step(**batch)
    assert inside == model.train_step(**batch)
    assert inside.item() == pytest.approx(locally(local, batch, torch.bfloat16).item(), rel=1e-6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "but precision is 'fp16'" in refusal(
            lambda: whale.parallelize(copy.deepcopy(local), batch, device="cpu", precision="fp16")
        )


def test_outputs_have_their_dtypes() -> None:
    local, batch = seeded(MODELS["llama"][0])(), words()
    model = whale.parallelize(copy.deepcopy(local), batch, device="cpu", precision="bf16")
    found = model.predict_step(**batch)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        expected = local.eval()(**batch)
    assert found.logits.dtype == expected.logits.dtype == torch.bfloat16
    assert torch.equal(found.logits, expected.logits)


# --- on two ranks -----------------------------------------------------------------------------------------------------


def in_low_precision(world: World, kind: str, precision: str) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of steps with an optimizer, and the gradients of the first."""
    model = decoder(layers=2).float()
    whale.annotate(model, LAYOUTS[kind])
    made = whale.parallelize(
        model, tokens(), device="cpu", precision=precision, micro_batches=2 if kind == "stages" else 1
    )
    optimizer = torch.optim.SGD(made.parameters(), lr=0.5)
    losses, first = [], {}
    for step in range(4):
        losses.append(made.train_step(**tokens()).item())
        if step == 0:
            first = made.full_gradients()
        optimizer.step()
        optimizer.zero_grad()
    return losses, first


def in_halves(dtype: torch.dtype) -> tuple[list[float], dict[str, Tensor]]:
    """The same in one process, of two halves of the batch one after the other."""
    model, batch = decoder(layers=2).float(), tokens()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses, first = [], {}
    for step in range(4):
        total = 0.0
        for half in range(2):
            part = {name: x[4 * half : 4 * half + 4] for name, x in batch.items()}
            with torch.autocast("cpu", dtype=dtype):
                loss = model(**part) / 2
            loss.backward()
            total += loss.item()
        losses.append(total)
        if step == 0:
            first = {name: x.clone() for name, x in gradients(model).items()}
        optimizer.step()
        optimizer.zero_grad()
    return losses, first


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_two_ranks_train_as_one(ranks: Two, kind: str, precision: str) -> None:
    expected, reference = in_halves(torch.bfloat16 if precision == "bf16" else torch.float16)
    for losses, found in ranks.run(in_low_precision, kind, precision):
        # Rows and layers of other ranks change no rounding; parts of a product do, by the last bit of its dtype.
        exact = kind != "split" and precision == "bf16"
        assert losses == pytest.approx(expected, rel=1e-6 if exact else 5e-3)
        for name, gradient in reference.items():
            error = float((found[name] - gradient).norm() / gradient.norm().clamp(min=1e-3))
            assert error <= (1e-6 if exact else 2e-2), name


def overflow(world: World, kind: str) -> tuple[list[bool], list[float], list[Tensor], int]:
    """Whether steps left gradients, the scales after them, and the parameters."""
    model = decoder(layers=2).float()
    whale.annotate(model, LAYOUTS[kind])
    made = whale.parallelize(model, tokens(), device="cpu", precision="fp16")
    scaler = made.loss_scaler
    assert scaler is not None
    scaler.scale, scaler.growth_interval = 2.0**34, 2
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.1)
    kept, scales = [], []
    for _ in range(24):
        made.train_step(**tokens())
        gradients = [x.grad for x in made.parameters() if x.grad is not None]
        kept.append(all(bool(gradient.isfinite().all()) for gradient in gradients))
        assert kept[-1] or all(bool(gradient.isnan().all()) for gradient in gradients)
        if not any(kept):
            optimizer.step()
        optimizer.zero_grad()
        scales.append(scaler.scale)
    untouched = [x.detach().clone() for x in made.full_state_dict().values()]
    assert optimizer.state_dict()["state"] == {}
    restored = type(scaler)()
    restored.load_state_dict(scaler.state_dict())
    assert restored.state_dict() == scaler.state_dict()
    return kept, scales, untouched, scaler.skipped


@pytest.mark.parametrize("kind", LAYOUTS)
def test_an_overflow_skips_the_step_on_all_ranks(ranks: Two, kind: str) -> None:
    (kept, scales, parameters, skipped), (same, others, _, _) = ranks.run(overflow, kind)
    assert (kept, scales) == (same, others)
    assert skipped == kept.count(False) > 2
    first = kept.index(True)
    assert scales[first - 1] == 2.0 ** (34 - first)
    assert scales[first + 1] == 2 * scales[first]  # two steps without an overflow
    for own, initial in zip(parameters, decoder(layers=2).float().state_dict().values(), strict=True):
        assert torch.equal(own, initial)


def test_a_scaled_step_is_that_of_a_scaler_of_torch() -> None:
    local, batch = seeded(MODELS["decoder"][0])(), tokens()
    model = whale.parallelize(copy.deepcopy(local), batch, device="cpu", precision="fp16")
    own, optimizer = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, local))
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(3):
        model.train_step(**batch)
        own.step()
        own.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = local(**batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    for (name, x), (_, y) in zip(model.named_parameters(), local.named_parameters(), strict=True):
        assert torch.allclose(x, y, rtol=1e-5, atol=1e-6), name


def test_a_scaler_of_torch_is_refused() -> None:
    model = whale.parallelize(decoder(layers=1).float(), tokens(), device="cpu", precision="fp16")
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    scaler.scale(model.train_step(**tokens()))
    for call in (scaler.unscale_, scaler.step):
        assert "leave it out" in refusal(lambda call=call: call(optimizer))  # type: ignore[misc]
    disabled = torch.amp.GradScaler("cpu", enabled=False)
    disabled.step(optimizer)


@pytest.mark.parametrize("recompute", RECOMPUTES)
def test_an_lstm_in_float32_trains(recompute: Recompute) -> None:
    local, batch = seeded(Recurrent)(), numbers()
    model = whale.parallelize(copy.deepcopy(local), batch, device="cpu", recompute=recompute)
    for _ in range(2):
        model.train_step(**batch)
        locally(local, batch, None)
    for key, gradient in gradients(local).items():
        assert torch.equal(gradients(model)[key], gradient), key


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("build", [Cells, Layers])
def test_recurrent_layers_compute_as_under_autocast(build: Callable[[], nn.Module], precision: str) -> None:
    local, batch = seeded(build)(), numbers()
    model: Any = whale.parallelize(copy.deepcopy(local), batch, precision=precision, device="cpu")
    loss = model.train_step(**batch)
    assert loss.item() == pytest.approx(
        locally(local, batch, torch.bfloat16 if precision == "bf16" else torch.float16).item(), rel=1e-6
    )
    for key, gradient in gradients(local).items():
        assert torch.allclose(gradients(model)[key], gradient, rtol=2e-2, atol=1e-4), key


class Gates(nn.Module):
    """Three gates in one product, of which a part of each, or whole ones, may be on a rank."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.linear = nn.GRUCell(8, 12), nn.Linear(12, 8)
        self.start = nn.Parameter(torch.zeros(12))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.start.expand(len(x), 12)
        for _ in range(2):
            h = self.cell(x, h)
        return F.mse_loss(self.linear(h), y)


def split_gates(world: World) -> tuple[float, dict[str, Tensor]]:
    model = seeded(Gates)()
    whale.annotate(model, {"": whale.split()})
    made = whale.parallelize(model, numbers(8), device="cpu", precision="bf16")
    return made.train_step(**numbers(8)).item(), made.full_gradients()


def test_gates_are_split(ranks: Two) -> None:
    local = seeded(Gates)()
    expected = locally(local, numbers(8), torch.bfloat16)
    for loss, found in ranks.run(split_gates):
        assert loss == pytest.approx(expected.item(), rel=1e-3)
        for name, gradient in gradients(local).items():
            assert torch.allclose(found[name], gradient, rtol=2e-2, atol=1e-3), name


RECURRING: dict[str, dict[str, Any]] = {
    "stages": {"lstm": whale.stage(), "head": whale.stage()},
    "replicas": {"": whale.replicate()},
    "split": {"": whale.split()},
}


def recur(world: World, layout: str, micro_batches: int) -> tuple[float, dict[str, Tensor]]:
    model = seeded(Recurrent)()
    whale.annotate(model, RECURRING[layout])
    made = whale.parallelize(model, numbers(8), device="cpu", precision="bf16", micro_batches=micro_batches)
    return made.train_step(**numbers(8)).item(), made.full_gradients()


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(),
    reason="this processor has no bfloat16 instructions: torch's own LSTM fails under autocast",
)
@pytest.mark.parametrize(("layout", "micro_batches"), [("stages", 1), ("stages", 2), ("replicas", 2), ("split", 2)])
def test_an_lstm_computes_in_the_kernel_of_its_device(ranks: Two, layout: str, micro_batches: int) -> None:
    local = seeded(Recurrent)()
    tolerance = 1e-4 if micro_batches == 1 else 5e-4  # a bias's gradient of all rows is one sum in bfloat16
    expected = locally(local, numbers(8), torch.bfloat16)
    for loss, found in ranks.run(recur, layout, micro_batches):
        assert loss == pytest.approx(expected.item(), rel=1e-6)
        for name, gradient in gradients(local).items():
            assert torch.allclose(found[name], gradient, rtol=1e-2, atol=tolerance), name


def steps_under_autocast(
    world: World, kind: str, folder: str, under: bool
) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Numbers and tensors of a script that has all or nothing under autocast, after a parallelize outside of it."""
    model = decoder(layers=2).float()
    whale.annotate(model, LAYOUTS[kind])
    made = whale.parallelize(model, tokens(), device="cpu", precision="bf16")
    optimizer = whale.optim.FusedAdamW(made.parameters(), lr=0.1)
    numbers, states = [], []
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=under):
        for _ in range(2):
            numbers += [made.train_step(**tokens()).detach(), made.eval_step(**tokens()), made.clip_grad_norm_(1.0)]
            states.append(made.full_gradients())
            optimizer.step()
            optimizer.zero_grad()
        whale.save_checkpoint(folder, made, step=1, optimizer=optimizer)
        whale.wait_for_checkpoints()
    states.append(made.full_state_dict())
    numbers.append(made.train_step(**tokens()).detach())
    optimizer.step()
    whale.load_checkpoint(folder, made, optimizer=optimizer)
    states.append(made.full_state_dict())
    del model  # it was there until now: steps compare it with what it was
    return numbers, states


@pytest.mark.parametrize("kind", LAYOUTS)
def test_steps_alone_stand_under_autocast(ranks: Two, kind: str, tmp_path: Path) -> None:
    without = ranks.run(steps_under_autocast, kind, str(tmp_path / "without"), False)
    for found, expected in zip(ranks.run(steps_under_autocast, kind, str(tmp_path), True), without, strict=True):
        assert [float(x) for x in found[0]] == [float(x) for x in expected[0]]
        for own, other in zip(found[1], expected[1], strict=True):
            assert own.keys() == other.keys()
            assert all(torch.equal(own[name], other[name]) for name in own)
        assert all(torch.equal(loaded, found[1][-2][name]) for name, loaded in found[1][-1].items())


def other_values_under_autocast(world: World) -> str:
    model = decoder(layers=2).float()
    with torch.no_grad():
        model.embed.weight.mul_(1000.0)  # the square of the norm is none of float16
        model.embed.weight[3, 3] += world.rank
    whale.annotate(model, LAYOUTS["replicate"])
    with torch.autocast("cpu", dtype=torch.float16):
        return refusal(lambda: whale.parallelize(model, tokens(), device="cpu"))


def test_values_are_compared_under_autocast(ranks: Two) -> None:
    assert all("other values in " in text for text in ranks.run(other_values_under_autocast))


def test_verify_under_autocast() -> None:
    local, batch = seeded(Mixed)(), numbers()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = whale.verify(local, batch, device="cpu")
    assert found.passed
    assert found.tolerance == whale.verify(local, batch, device="cpu", precision="bf16").tolerance


def accumulate(world: World, kind: str) -> dict[str, Tensor]:
    """Parameters after accumulations of which some have a call that overflows; see `accumulate_locally`."""
    model = decoder(layers=2).float()
    whale.annotate(model, LAYOUTS[kind])
    made = whale.parallelize(model, tokens(), device="cpu", precision="fp16")
    assert made.loss_scaler is not None
    optimizer = torch.optim.SGD(made.parameters(), lr=0.5, momentum=0.9)
    for factors in FACTORS:
        for factor in factors:
            made.train_step(**tokens(), scale=factor)
        made.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=factors is not FACTORS[0])
        assert (made.loss_scaler.scale, made.loss_scaler.skipped) == SCALES[factors]
    return made.full_state_dict()


def accumulate_locally() -> dict[str, Tensor]:
    model, scaler = decoder(layers=2).float(), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for factors in FACTORS:
        for factor in factors:
            with torch.autocast("cpu", dtype=torch.float16):
                loss = model(**tokens())
            scaler.scale(loss * factor).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == SCALES[factors][0]
    return model.state_dict()


TOO_LARGE = 2.0**40
FACTORS = (TOO_LARGE, 0.5), (0.5, 0.5), (0.5, TOO_LARGE), (TOO_LARGE, TOO_LARGE, 0.5), (0.5, 0.25)
SCALES = dict(zip(FACTORS, [(2.0**15, 1), (2.0**15, 1), (2.0**14, 2), (2.0**13, 3), (2.0**13, 3)], strict=True))


@pytest.mark.parametrize("kind", LAYOUTS)
def test_an_overflow_skips_all_of_an_accumulation_as_a_scaler_of_torch_does(ranks: Two, kind: str) -> None:
    expected = accumulate_locally()
    assert not torch.equal(expected["head.weight"], decoder(layers=2).float().state_dict()["head.weight"])
    for found in ranks.run(accumulate, kind):
        for name, x in expected.items():
            assert torch.allclose(found[name], x, rtol=1e-3, atol=1e-3), name


class Lookups(nn.Module):
    """Two tables, of which the second is looked up in some rows of the batch alone."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.items, self.users = (nn.Embedding(rows, 4, sparse=sparse) for rows in (9, 5))
        self.top = nn.Linear(8, 1)

    def forward(self, ids: Tensor) -> Tensor:
        found = self.top(torch.cat([self.items(ids[:, 0]), self.users(ids[:, 1] % 5)], 1))
        return found.square().mean()


def look_up(world: World | None, sparse: bool) -> tuple[dict[str, Tensor], list[float]]:
    model, ids = Lookups(sparse), torch.tensor([[0, 7], [8, 1], [3, 3], [3, 2]])
    whale.annotate(model, {"": whale.replicate()})
    made = whale.parallelize(model, ids, device="cpu", precision="fp16")
    assert made.loss_scaler is not None
    optimizer, scales = torch.optim.SGD(made.parameters(), lr=0.5), []
    for number, factors in enumerate(FACTORS):
        for factor in factors:
            made.train_step(ids, scale=factor)
        optimizer.step()
        optimizer.zero_grad(set_to_none=number % 2 == 0)
        scales.append(made.loss_scaler.scale)
    return made.full_state_dict(), scales


def test_tables_with_sparse_gradients_are_scaled_as_dense_ones(ranks: Two) -> None:
    expected, scales = look_up(None, sparse=False)
    assert not torch.equal(expected["items.weight"], Lookups(sparse=False).items.weight)
    for found, same in ranks.run(look_up, True):
        assert same == scales
        for name, x in expected.items():
            assert torch.allclose(found[name], x, rtol=1e-3, atol=1e-3), name


def test_what_is_no_precision_is_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text = refusal(lambda: whale.parallelize(decoder(), tokens(), device="cpu", precision="float16"))
    assert "precision" in text and "fp16" in text


def test_a_precision_that_changes_nothing_is_refused() -> None:
    text = refusal(lambda: whale.parallelize(decoder().double(), tokens(), device="cpu", precision="bf16"))
    assert "float64" in text and "model.float()" in text


# --- parameters in stretches ------------------------------------------------------------------------------------------


def step_in_stretches(world: World, options: dict[str, Any]) -> tuple[float, dict[str, Tensor], list[str]]:
    """The loss and all gradients of a step in bfloat16, and the dtypes in which matrices and norms are gathered."""
    torch.manual_seed(0)
    model = decoder(layers=2, heads=2, width=16).float()
    options = {"strategy": whale.replicate(), "speeds": (), **options}
    whale.annotate(model, {"": options.pop("strategy")})
    options["cluster"] = cluster_of(options.pop("speeds"))
    made: Any = whale.parallelize(model, tokens(), device="cpu", precision="bf16", timeout_seconds=30, **options)
    loss = made.train_step(**tokens()).item()
    units = (made._whale.engine.tensors.units or {}).values()
    read = {name: str(dtype) for held in units for name, dtype in zip(held.unit.names, held.unit.read_as, strict=True)}
    return loss, made.full_gradients(), [read.get(name, "") for name in ("layers.0.up.weight", "embed.weight")]


@pytest.mark.parametrize("options", [{}, {"recompute": "full"}, {"state_shares": [3, 1]}], ids=str)
def test_stretches_are_gathered_in_the_dtype_in_which_they_are_read(ranks: Two, options: dict[str, Any]) -> None:
    shares = options.get("state_shares")
    for micro_batches in (1, 2):
        plain = {name: value for name, value in options.items() if name != "state_shares"}
        how = {"micro_batches": micro_batches}
        (loss, expected, _), _ = ranks.run(step_in_stretches, {**plain, **how})
        for zero in (1, 3) if shares else (1, 2, 3):
            for found, gradients, read in ranks.run(step_in_stretches, {**options, **how, "zero": zero}):
                assert found == loss
                torch.testing.assert_close(gradients, expected, rtol=0, atol=0)
                assert read == ["torch.bfloat16", "torch.float32"]


@pytest.mark.parametrize("options", [{}, {"recompute": "full"}], ids=str)
def test_parts_of_parameters_are_taken_of_those_that_are_gathered_in_low_precision(
    ranks: Two, options: dict[str, Any]
) -> None:
    options = {**options, "strategy": whale.split(), "speeds": (3.0, 1.0)}
    (loss, expected, _), _ = ranks.run(step_in_stretches, options)
    for zero in (1, 3):
        for found, gradients, _ in ranks.run(step_in_stretches, {**options, "zero": zero}):
            assert found == loss
            torch.testing.assert_close(gradients, expected, rtol=0, atol=0)
