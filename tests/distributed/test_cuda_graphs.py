"""Steps whose operators are recorded and replayed: the bits of training are those without, and what cannot be recorded
runs as it is. A recorder of the CPU stands for CUDA graphs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import whale
from tests.distributed import zoo
from tests.distributed.parity import worlds as worlds_of_a_module
from tests.distributed.two_ranks import Two, refusal
from tests.replays import CpuRecorder
from tests.small_models import decoder, tokens
from whale.compile import exchanges
from whale.runtime import cuda_graphs
from whale.runtime.launch import World

STEPS = 5
ROWS = 6

WHOLE = {"": whale.replicate()}
SPLIT = {"": whale.split()}
STAGES = {"transformer.h.0": whale.stage(), "transformer.h.1": whale.stage()}
OF_LLAMA = {"model.layers.0": whale.stage(), "model.layers.1": whale.stage()}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Two]:
    with worlds_of_a_module() as made:
        yield Two(made)


class Found(NamedTuple):
    """Differences of recorded steps from others, the numbers of pieces recorded and replayed, and warnings."""

    wrong: list[str]
    num_recorded: int
    num_replayed: int
    told: list[str]


def gpt2() -> tuple[nn.Module, dict[str, Tensor]]:
    return zoo.gpt2(dropout=0.2, rows=ROWS)


def trained(
    build: Callable[[], tuple[nn.Module, Any]],
    layout: dict[str, Any],
    between: Callable[[Any], Any] = lambda model: None,
    **options: Any,
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Losses, as they were returned, and parameters of steps with AdamW; *between* is called after each."""
    torch.manual_seed(0)
    model, batch = build()
    whale.annotate(model, layout)
    made: Any = whale.parallelize(model, batch, device="cpu", seed=0, timeout_seconds=60, **options)
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.01)
    losses = []
    for _ in range(STEPS):
        losses.append(made.train_step(**batch))
        optimizer.step()
        optimizer.zero_grad()
        between(made)
    return losses, made.full_state_dict()


def compared(build: Callable[[], tuple[nn.Module, Any]], layout: dict[str, Any], **options: Any) -> Found:
    """Train with and without recordings."""
    losses, state = trained(build, layout, **options)
    CpuRecorder.made.clear()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        patch.setitem(cuda_graphs.RECORDERS, "cpu", CpuRecorder)
        again, found = trained(build, layout, cuda_graphs=True, **options)
    [recorder] = CpuRecorder.made
    wrong = [f"loss {n}" for n, (a, b) in enumerate(zip(losses, again, strict=True)) if not torch.equal(a, b)]
    wrong += [name for name, value in state.items() if not torch.equal(value, found[name])]
    texts = [str(each.message) for each in told if "CUDA graphs" in str(each.message)]
    return Found(wrong, recorder.num_recorded, recorder.num_replayed, texts)


def small() -> tuple[nn.Module, dict[str, Tensor]]:
    return decoder(layers=2), tokens()


MODELS = {"gpt2": gpt2, "llama": zoo.llama, "small": small}


def of_ranks(world: World, name: str, layout: dict[str, Any], dtype: torch.dtype, options: dict[str, Any]) -> Found:
    def build() -> tuple[nn.Module, Any]:
        model, batch = MODELS[name]()
        return model.to(dtype), batch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchanges, "bucket_bytes", lambda *ignored, **more: 2**14)  # several for such models
        return compared(build, layout, **options)


CASES: dict[str, tuple[str, dict[str, Any], torch.dtype, dict[str, Any]]] = {
    "replicas": ("small", WHOLE, torch.float64, {}),
    "llama, 1F1B, bf16": ("llama", OF_LLAMA, torch.float32, {"micro_batches": 4, "precision": "bf16"}),
    "gpt2, zero-bubble": ("gpt2", STAGES, torch.float64, {"micro_batches": 3, "schedule": "zero_bubble"}),
    "gpt2, split, recompute": ("gpt2", SPLIT, torch.float64, {"recompute": "full"}),
    "gpt2, zero 1, fp16": ("gpt2", WHOLE, torch.float32, {"zero": 1, "micro_batches": 3, "precision": "fp16"}),
    "gpt2, zero 3, bf16": ("gpt2", WHOLE, torch.float32, {"zero": 3, "precision": "bf16", "recompute": "selective"}),
}


@pytest.mark.parametrize("case", CASES)
def test_replayed_steps_have_the_bits_of_others(ranks: Two, case: str) -> None:
    for found in ranks.run(of_ranks, *CASES[case]):
        assert found.wrong == []
        assert found.told == []
        assert found.num_replayed >= (STEPS - cuda_graphs.WARM_UP - 1) * found.num_recorded > 0


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], CpuRecorder]]:
    monkeypatch.setitem(cuda_graphs.RECORDERS, "cpu", CpuRecorder)
    CpuRecorder.made.clear()
    yield lambda: CpuRecorder.made[-1]
    CpuRecorder.made.clear()


def test_as_many_recordings_are_kept_as_micro_batches_are_in_flight() -> None:
    counts = [compared(small, {}, micro_batches=4, schedule=name).num_recorded for name in ("1f1b", "gpipe")]
    assert counts[1] == 4 * counts[0]


def test_gradients_are_accumulated_and_kept_by_scripts(recorder: Callable[[], CpuRecorder]) -> None:
    found = []
    for asked in (False, True):
        model, batch = small()
        made: Any = whale.parallelize(model, batch, device="cpu", cuda_graphs=asked)
        for _ in range(4):
            made.train_step(**batch)
        kept = [p.grad for p in made.parameters()]
        made.zero_grad()
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.mul_(0.9)
        made.train_step(**batch)
        found.append([x.clone() for x in [*kept, *(p.grad for p in made.parameters())]])
    assert recorder().num_replayed > 0
    assert all(map(torch.equal, *found))


def test_parameters_with_other_memory_are_recorded_again(recorder: Callable[[], CpuRecorder]) -> None:
    def move(model: Any) -> None:
        if (counts := len(moved)) in (2, 3):
            parameter = next(model.parameters())
            parameter.data = parameter.detach().clone()
        moved.append(counts)

    moved: list[int] = []
    losses, state = trained(small, {}, cuda_graphs=True, between=move)
    again, found = trained(small, {})
    assert all(map(torch.equal, losses, again))
    assert all(torch.equal(state[name], found[name]) for name in state)
    assert recorder().num_recorded == 2 * 4  # in the third step, and in the fifth


class Rotated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 6)
        self.register_buffer("angles", torch.arange(1.0, 7.0))

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * self.get_buffer("angles").cos()).square().mean()


def test_constants_of_buffers_are_renewed_where_recordings_read_them(recorder: Callable[[], CpuRecorder]) -> None:
    def change(model: Any) -> None:
        with torch.no_grad():
            model.get_buffer("angles").mul_(0.9)

    def rotated() -> tuple[nn.Module, dict[str, Tensor]]:
        return Rotated(), {"x": torch.linspace(-1, 1, 24).view(4, 6)}

    losses, state = trained(rotated, {}, cuda_graphs=True, between=change)
    again, found = trained(rotated, {}, between=change)
    assert recorder().num_replayed > 0
    assert all(map(torch.equal, losses, again))
    assert len({loss.item() for loss in losses}) == STEPS
    assert all(torch.equal(state[name], found[name]) for name in state)


def test_memory_that_never_stays_ends_the_recordings(
    recorder: Callable[[], CpuRecorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    def move(model: Any) -> None:
        for parameter in model.parameters():
            parameter.data = parameter.detach().clone()

    monkeypatch.setattr(cuda_graphs, "MOST_RESETS", 1)
    with pytest.warns(UserWarning, match="without CUDA graphs.*have other"):
        trained(small, {}, cuda_graphs=True, between=move)
    assert recorder().num_replayed == 0


def test_what_a_device_cannot_record_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def record(*ignored: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(CpuRecorder, "record", record)
    found = compared(small, {}, micro_batches=2)
    assert found.wrong == []
    [told] = found.told
    assert "operator by operator" in told and "not permitted" in told and "more" not in told


class Picks(nn.Module):
    """Takes what is positive, of which there is another number in each step, and drops from torch's generator."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double()

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x)
        return F.dropout(y, 0.1).square().mean() + torch.poisson(y.detach().abs()).mean()


def test_what_draws_from_a_generator_is_named_once() -> None:
    found = compared(lambda: (Picks(), {"x": torch.linspace(-1, 1, 48).double().view(6, 8)}), {})
    assert found.wrong == []
    [told] = found.told
    assert "poisson" in told and "bernoulli" in told and "run as they are" in told
    assert found.num_replayed > 0


def test_compiled_runs_between_operators_that_draw_numbers_are_recorded() -> None:
    found = compared(gpt2, {}, compile=True)  # the CPU's recorder does not see what compiled functions write
    assert found.num_replayed == 2 * found.num_recorded > 0


def test_refusals(recorder: Callable[[], CpuRecorder]) -> None:
    def make(**options: Any) -> str:
        model, batch = small()
        return refusal(lambda: whale.parallelize(model, batch, device="cpu", cuda_graphs=True, **options))

    assert "leave one of them out" in make(offload="activations")
    del cuda_graphs.RECORDERS["cpu"]
    assert "needs a CUDA device, and this process computes on 'cpu'" in make()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("options", [{}, {"micro_batches": 3}, {"precision": "bf16"}, {"compile": True}], ids=str)
def test_cuda_graphs_on_a_gpu(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def run(cuda_graphs: bool) -> tuple[list[Tensor], list[Tensor]]:
        torch.manual_seed(0)
        model, batch = gpt2()
        made: Any = whale.parallelize(model.float().cuda(), batch, seed=0, cuda_graphs=cuda_graphs, **options)
        optimizer = torch.optim.AdamW(made.parameters(), lr=0.01, fused=True)
        losses = []
        for _ in range(STEPS):
            losses.append(made.train_step(**batch))
            optimizer.step()
            optimizer.zero_grad()
        return losses, [x.detach() for x in made.parameters()]

    replayed: list[Any] = []
    replay = torch.cuda.CUDAGraph.replay

    def counted(graph: Any) -> None:
        replayed.append(graph)
        replay(graph)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", counted)
    plain, recorded = run(False), run(True)
    assert len(replayed) > len(set(map(id, replayed))) > 0
    for one, other in zip(plain, recorded, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
