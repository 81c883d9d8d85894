"""Functions of torch.nn, each as the end of a small model: what is built of them must be exact in every layout."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import whale
from tests.largest import largest

F: Any = torch.nn.functional

Function = Callable[[Tensor, Tensor], Tensor]
"""A loss, or a tensor, of hidden rows and of labels from 0 to 5."""


def signs(y: Tensor) -> Tensor:
    return y % 2 * 2 - 1


def named(h: Tensor, y: Tensor) -> Tensor:
    return F.one_hot(y, 6).to(h.dtype)


def several(y: Tensor) -> Tensor:
    """Labels of which a -1 ends those that count."""
    return torch.stack([y, (y + 1) % 6, -torch.ones_like(y), y, y, y], 1)


def classes(h: Tensor) -> Tensor:
    return torch.linspace(1, 2, 6, dtype=h.dtype)


def paths(h: Tensor) -> Tensor:
    """Log-probabilities of 12 moments."""
    return h.transpose(0, 1).log_softmax(-1)


def words(y: Tensor) -> Tensor:
    return (y[:, None] + torch.arange(3)) % 4 + 1


def angles(h: Tensor) -> Tensor:
    return h[:, :2, 0, :3] * 0.3


def spoken(h: Tensor) -> Tensor:
    """Signals with more of their higher frequencies."""
    window = torch.hann_window(8, dtype=h.dtype)
    spectra = torch.stft(h, 8, window=window, return_complex=True)
    return torch.istft(spectra * torch.arange(5)[:, None], 8, window=window, length=16)


FLAT: dict[str, Function] = {
    "l1_loss with weights": lambda h, y: F.l1_loss(h, named(h, y), weight=named(h, y) + 0.5),
    "multi_margin_loss": lambda h, y: F.multi_margin_loss(h, y),
    "multi_margin_loss, squared": lambda h, y: F.multi_margin_loss(h, y, p=2, margin=0.5, weight=classes(h)),
    "multi_margin_loss, summed": lambda h, y: F.multi_margin_loss(h, y, reduction="sum"),
    "multilabel_margin_loss": lambda h, y: F.multilabel_margin_loss(h, several(y)),
    "multilabel_margin_loss of rows": lambda h, y: F.multilabel_margin_loss(h, several(y), reduction="none"),
    "triplet_margin_loss": lambda h, y: F.triplet_margin_loss(h, h.flip(1), h * 2 + named(h, y), swap=True, p=1),
    "triplets by a distance": lambda h, y: F.triplet_margin_with_distance_loss(h, h.flip(1), h * 2 + named(h, y)),
    "cosine_embedding_loss": lambda h, y: F.cosine_embedding_loss(h, h.flip(1), signs(y), margin=0.1),
    "poisson_nll_loss": lambda h, y: F.poisson_nll_loss(h.exp(), 3 * named(h, y), log_input=False, full=True),
    "hinge_embedding_loss": lambda h, y: F.hinge_embedding_loss(h, signs(y)[:, None].expand(8, 6), margin=0.5),
    "margin_ranking_loss": lambda h, y: F.margin_ranking_loss(h[:, 0], h[:, 1], signs(y), margin=0.2),
    "gaussian_nll_loss": lambda h, y: F.gaussian_nll_loss(h, named(h, y), h.clamp(min=0), eps=0.1, full=True),
    "gaussian_nll_loss of rows": lambda h, y: F.gaussian_nll_loss(h, named(h, y), h.exp().mean(1), reduction="sum"),
    "products with a conjugate": lambda h, y: (torch.complex(h, 2 * h) * torch.complex(h, h + 1).conj()).angle(),
    "parts of a conjugate": lambda h, y: torch.polar(h.exp(), h).conj().imag * torch.complex(h, -h).conj().real,
    "correlation by transforms": lambda h, y: torch.fft.ifft(torch.fft.fft(h) * torch.fft.fft(2 * h + 1).conj()).real,
    "norms of conjugates": lambda h, y: torch.linalg.vector_norm(torch.complex(h, h + 1).conj(), dim=1),
    "pairwise_distance": lambda h, y: F.pairwise_distance(h, h.flip(1), p=1.5),
    "fake_quantize_per_tensor_affine": lambda h, y: torch.fake_quantize_per_tensor_affine(h, 0.1, 3, -8, 7),
    "fake quantization by tensors": lambda h, y: torch.fake_quantize_per_tensor_affine(
        h, torch.tensor(0.1), torch.tensor(3, dtype=torch.int32), -8, 7
    ),
    "fake_quantize_per_channel_affine": lambda h, y: torch.fake_quantize_per_channel_affine(
        h, torch.linspace(0.1, 0.2, 6), torch.arange(6, dtype=torch.int32), 1, -8, 7
    ),
    "hardswish": lambda h, y: F.hardswish(4 * h),
    "rrelu in evaluation": lambda h, y: F.rrelu(h, training=False),
    "normal likelihood": lambda h, y: -torch.distributions.Normal(h, h.exp()).log_prob(named(h, y)),
}
ROWS_OF: dict[str, tuple[tuple[int, ...], Function]] = {
    **{name: ((6,), function) for name, function in FLAT.items()},
    "stft and back": ((16,), lambda h, y: spoken(h)),
    "ctc_loss": ((12, 5), lambda h, y: F.ctc_loss(paths(h), words(y), (12,) * 8, (3,) * 8)),
    "ctc_loss with tensors": ((12, 5), lambda h, y: F.ctc_loss(paths(h), words(y), 12 - y, y % 3 + 1)),
    "ctc_loss of rows": (
        (12, 5),
        lambda h, y: torch.ctc_loss(paths(h), words(y), 12 - 2 * y, y % 3 + 1, 0, 0, True),
    ),
    "cdist": ((4, 6), lambda h, y: torch.cdist(h, h.flip(1) + 0.1)),
    "channel_shuffle": ((4, 3, 3), lambda h, y: F.channel_shuffle(h, 2) * torch.arange(4.0)[:, None, None]),
    "max_unpool1d": ((3, 6), lambda h, y: F.max_unpool1d(*F.max_pool1d(h, 2, return_indices=True), 2)),
    "max_unpool2d": ((3, 4, 4), lambda h, y: F.max_unpool2d(*F.max_pool2d(h, 2, return_indices=True), 2)),
    "max_unpool3d": ((2, 4, 4, 4), lambda h, y: F.max_unpool3d(*F.max_pool3d(h, 2, return_indices=True), 2)),
    "affine_grid": (
        (3, 4, 4),
        lambda h, y: F.grid_sample(h, F.affine_grid(angles(h), h.shape, False), "bilinear", "zeros", False),
    ),
    "a decoder with a mask": ((4, 6), lambda h, y: h),
    "instance norm in evaluation": ((3, 2, 2), lambda h, y: h),
    "spectral norm": ((6,), lambda h, y: h),
}


COUPLED: dict[str, tuple[tuple[int, ...], Function]] = {
    "cov": ((6,), lambda h, y: torch.cov(h.T)),
    "cov of weighted rows": ((6,), lambda h, y: h.T.cov(correction=0, fweights=y + 1, aweights=h[:, 0].exp())),
    "products with an adjoint": ((6,), lambda h, y: (torch.complex(h, 2 * h) @ torch.complex(h, h).mH).abs()),
    "corrcoef": ((6,), lambda h, y: torch.corrcoef(h.T)),
}
"""Functions that need all rows at once."""


def layer(name: str) -> nn.Module:
    """The layer before a function that is named for one."""
    if name == "instance norm in evaluation":
        norm = nn.InstanceNorm2d(3, affine=True, track_running_stats=True)
        norm.running_mean, norm.running_var = torch.rand(3), torch.rand(3) + 0.5
        return norm.eval()
    if name == "a decoder with a mask":
        return nn.TransformerDecoder(nn.TransformerDecoderLayer(6, 2, 8, 0.0, batch_first=True), 1)
    return nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)) if name == "spectral norm" else nn.Identity()


class Ending(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.shape, self.function = {**ROWS_OF, **COUPLED}[name]
        self.scale, self.layer = nn.Parameter(torch.tensor(1.1)), layer(name)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.scale * x.reshape(-1, *self.shape)
        if isinstance(self.layer, nn.TransformerDecoder):
            h = self.layer(h, h, tgt_mask=nn.Transformer.generate_square_subsequent_mask(4, dtype=h.dtype))
        else:
            h = self.layer(h)
        found = self.function(h, y)
        return found if not found.dim() else found.square().mean()


class Model(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        width = 1
        for size in {**ROWS_OF, **COUPLED}[name][0]:
            width *= size
        self.first, self.ending = nn.Linear(5, width), Ending(name)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        found: Tensor = self.ending(self.first(x), y)
        return found


def batch() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(8, 5, generator=draw, dtype=torch.float64)
    return {"x": x, "y": torch.randint(0, 6, (8,), generator=draw)}


def error(name: str, annotations: dict[str, Any] | None = None, **options: Any) -> float:
    """The largest difference of losses and gradients from the local model's, in two steps; of large ones, relative."""
    return error_of(Model(name).double(), batch(), annotations, timeout_seconds=20, **options)


def error_of(local: nn.Module, batch: dict[str, Tensor], annotations: dict[str, Any] | None, **options: Any) -> float:
    """The largest difference of a model's losses and gradients in two steps from those of its parallel model."""
    model = copy.deepcopy(local)
    if annotations:
        whale.annotate(model, annotations)
    parallel = whale.parallelize(model, batch, device="cpu", **options)
    worst = 0.0
    for _ in range(2):
        expected = local(**batch)
        expected.backward()
        difference = abs(parallel.train_step(**batch).item() - expected.item())
        worst = largest(worst, difference / max(1.0, abs(expected.item())))
    found = parallel.full_gradients()
    for own, parameter in local.named_parameters():
        assert parameter.grad is not None
        worst = largest(
            worst, float((found[own] - parameter.grad).abs().max()) / max(1.0, float(parameter.grad.abs().max()))
        )
    return worst
