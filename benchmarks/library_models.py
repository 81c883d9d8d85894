"""Small models of public libraries in float64, each with a batch and a loss, for `model_libraries.py`.

A library is imported where one of its models is built. Dropout and stochastic depth are off: their numbers are drawn in
another order than by the model alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Example = tuple[nn.Module, dict[str, Any]]
Loss = Callable[..., Tensor]

ROWS = 4
CLASSES = 10


class WithLoss(nn.Module):
    """A model and what it is trained for: a function of the model and the batch."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, **batch: Tensor) -> Tensor:
        return self.loss(self.model, **batch)


def still(model: nn.Module) -> nn.Module:
    """The model without what it drops."""
    for module in model.modules():
        for name in ("p", "drop_prob", "dropout", "dropout_p", "attn_drop_p", "attention_dropout", "drop_rate"):
            is_dropout = "rop" in type(module).__name__ or name not in ("p", "drop_rate")
            if is_dropout and isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model.double()


def example(model: nn.Module, loss: Loss, **batch: Tensor) -> Example:
    return WithLoss(still(model), loss), batch


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def first(output: Any) -> Tensor:
    """The tensor of what a model returns."""
    output = output.get("out", next(iter(output.values()))) if isinstance(output, dict) else output
    output = getattr(output, "sample", output)
    return output[0] if isinstance(output, (tuple, list)) else output


def classified(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    output = first(model(x))
    output = output.mean(1) if output.dim() == 3 else output.flatten(1)
    return F.cross_entropy(output, y % output.shape[1])


def fitted(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(first(model(x)), y)


def segmented(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(first(model(x)), y)


def predicted(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(first(model(x)).transpose(1, 2), y)


def pictures(model: nn.Module, size: int, rows: int = ROWS, channels: int = 3) -> Example:
    labels = torch.randint(0, CLASSES, (rows,))
    return example(model, classified, x=normal(rows, channels, size, size), y=labels)


# --- timm, torchvision and what is built on them


def of_timm(name: str) -> Example:
    import timm

    own = timm.create_model(name, num_classes=CLASSES)
    whole = own.pretrained_cfg["input_size"][-1]
    of_one_size = own.pretrained_cfg.get("fixed_input_size") or hasattr(own, "patch_embed")
    model, size = own, whole
    for size in (64, whole if of_one_size else min(whole, 96), whole):
        try:
            model = timm.create_model(name, num_classes=CLASSES, img_size=64) if size == 64 else own
            model(torch.randn(2, 3, size, size))
        except (AssertionError, IndexError, RuntimeError, TypeError):  # it has other sizes
            continue
        break
    return pictures(model, size, ROWS if size < 128 else 2)


def of_torchvision(name: str) -> Example:
    import torchvision

    options = {"init_weights": False} if name in ("googlenet", "inception_v3") else {}
    return pictures(getattr(torchvision.models, name)(weights=None, num_classes=CLASSES, **options).eval(), 64)


def of_torchvision_segmentation(name: str) -> Example:
    import torchvision

    build = getattr(torchvision.models.segmentation, name)
    model = build(weights=None, weights_backbone=None, num_classes=5)
    return example(model, segmented, x=normal(ROWS, 3, 64, 64), y=torch.randint(0, 5, (ROWS, 64, 64)))


def of_torchvision_video(name: str) -> Example:
    import torchvision

    model = getattr(torchvision.models.video, name)(weights=None, num_classes=CLASSES)
    return example(model, classified, x=normal(ROWS, 3, 8, 32, 32), y=torch.randint(0, CLASSES, (ROWS,)))


def of_segmentation_models(name: str) -> Example:
    import segmentation_models_pytorch as library

    kind, encoder = name.split("-")
    model = getattr(library, kind)(encoder, encoder_weights=None, in_channels=3, classes=2)
    return example(model, fitted, x=normal(ROWS, 3, 64, 64), y=normal(ROWS, 2, 64, 64))


def of_vit_pytorch(name: str) -> Example:
    import vit_pytorch as library
    from vit_pytorch.cait import CaiT
    from vit_pytorch.cct import CCT
    from vit_pytorch.max_vit import MaxViT
    from vit_pytorch.regionvit import RegionViT

    sizes = {"image_size": 32, "patch_size": 8, "num_classes": CLASSES, "dim": 24, "heads": 4, "mlp_dim": 32}
    if name == "vit":
        return pictures(library.ViT(depth=2, **sizes), 32)
    if name == "simple_vit":
        return pictures(library.SimpleViT(depth=2, **sizes), 32)
    if name == "cait":
        return pictures(CaiT(depth=2, cls_depth=1, **sizes), 32)
    if name == "cct":
        model = CCT(
            img_size=(32, 32), embedding_dim=24, n_conv_layers=1, num_layers=2, num_heads=4, mlp_ratio=2.0,
            num_classes=CLASSES, positional_embedding="learnable",
        )  # fmt: skip
        return pictures(model, 32)
    if name == "max_vit":
        model = MaxViT(num_classes=CLASSES, dim_conv_stem=8, dim=8, dim_head=4, depth=(1, 1), window_size=4)
        return pictures(model, 64)
    model = RegionViT(dim=(8, 16, 16, 32), depth=(1, 1, 1, 1), window_size=2, num_classes=CLASSES)
    return pictures(model, 64)


# --- diffusion


def denoised(model: nn.Module, sample: Tensor, timestep: Tensor, target: Tensor, **more: Tensor) -> Tensor:
    output = first(model(sample, timestep, **more))
    return F.mse_loss(output[:, : target.shape[1]], target)


def of_diffusers(name: str) -> Example:
    import diffusers as library

    noise: dict[str, Tensor] = {
        "sample": normal(ROWS, 3, 16, 16),
        "timestep": torch.randint(0, 1000, (ROWS,)),
        "target": normal(ROWS, 3, 16, 16),
    }
    text, pooled = normal(ROWS, 7, 12), normal(ROWS, 10)
    blocks: dict[str, Any] = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 8}
    if name == "unet":
        model = library.UNet2DModel(
            16, down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
            attention_head_dim=8, **blocks,
        )  # fmt: skip
        return example(model, denoised, **noise)
    if name == "conditional unet":
        model = library.UNet2DConditionModel(
            16, 3, 3, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), attention_head_dim=4,
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), cross_attention_dim=12, **blocks,
        )  # fmt: skip
        return example(model, denoised, **noise, encoder_hidden_states=text)
    if name == "3d unet":
        model = library.UNet3DConditionModel(
            8, 3, 3, down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"), attention_head_dim=4,
            up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"), cross_attention_dim=12, **blocks,
        )  # fmt: skip
        video = {"sample": normal(ROWS, 3, 2, 8, 8), "target": normal(ROWS, 3, 2, 8, 8)}
        return example(model, denoised, **{**noise, **video}, encoder_hidden_states=text)
    if name in ("autoencoder", "vector quantized"):
        sizes: dict[str, Any] = {"down_block_types": ("DownEncoderBlock2D",) * 2, "latent_channels": 4, **blocks}
        sizes |= {"up_block_types": ("UpDecoderBlock2D",) * 2, "sample_size": 16}
        if name == "autoencoder":
            return example(library.AutoencoderKL(**sizes), autoencoded, sample=noise["sample"])
        return example(library.VQModel(num_vq_embeddings=32, **sizes), quantized, sample=noise["sample"])
    heads = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2}
    if name == "sd3":
        model = library.SD3Transformer2DModel(
            16, 2, 3, joint_attention_dim=12, caption_projection_dim=16, pooled_projection_dim=10, out_channels=3,
            pos_embed_max_size=16, **heads,
        )  # fmt: skip
        return example(model, with_text, **noise, text=text, pooled=pooled)
    model = library.PixArtTransformer2DModel(
        in_channels=3, out_channels=3, sample_size=16, cross_attention_dim=16, caption_channels=12, norm_num_groups=4,
        **heads,
    )  # fmt: skip
    return example(model, captioned, **noise, text=text, mask=torch.ones(ROWS, 7, dtype=torch.float64))


def autoencoded(model: Any, sample: Tensor) -> Tensor:
    latent = model.encode(sample).latent_dist
    decoded: Tensor = model.decode(latent.mode()).sample
    return F.mse_loss(decoded, sample) + 1e-3 * latent.kl().mean()


def quantized(model: nn.Module, sample: Tensor) -> Tensor:
    output = model(sample)
    return F.mse_loss(output.sample, sample) + output.commit_loss.mean()


def with_text(
    model: nn.Module, sample: Tensor, timestep: Tensor, target: Tensor, text: Tensor, pooled: Tensor
) -> Tensor:
    output = model(
        hidden_states=sample, timestep=timestep, encoder_hidden_states=text, pooled_projections=pooled
    )  # fmt: skip
    return F.mse_loss(output.sample, target)


def captioned(model: nn.Module, sample: Tensor, timestep: Tensor, target: Tensor, text: Tensor, mask: Tensor) -> Tensor:
    known = {"resolution": None, "aspect_ratio": None}
    output = model(
        sample, encoder_hidden_states=text, timestep=timestep, encoder_attention_mask=mask, added_cond_kwargs=known
    )
    return F.mse_loss(output.sample, target)


# --- medicine


def of_monai(name: str) -> Example:
    import monai.networks.nets as library
    from monai.losses import DiceCELoss

    volume = {"x": normal(2, 1, 32, 32, 32), "y": normal(2, 2, 32, 32, 32)}
    picture = {"x": normal(ROWS, 1, 32, 32), "y": normal(ROWS, 2, 32, 32)}
    if name == "dice loss":
        model, loss = library.UNet(2, 1, 3, (4, 8, 16), (2, 2)), DiceCELoss(to_onehot_y=True, softmax=True)
        return example(model, partial(compared, loss), x=picture["x"], y=torch.randint(0, 3, (ROWS, 1, 32, 32)))
    build: dict[str, Callable[[], nn.Module]] = {
        "UNet": lambda: library.UNet(3, 1, 2, (4, 8, 16), (2, 2), num_res_units=1),
        "BasicUNet": lambda: library.BasicUNet(3, 1, 2, (4, 4, 8, 8, 16, 4)),
        "SegResNet": lambda: library.SegResNet(3, 8, 1, 2),
        "UNETR": lambda: library.UNETR(1, 2, (32, 32, 32), feature_size=4, hidden_size=24, mlp_dim=32, num_heads=4),
        "DynUNet": lambda: library.DynUNet(3, 1, 2, [3, 3, 3], [1, 2, 2], [2, 2]),
        "VNet, 2D": lambda: library.VNet(spatial_dims=2, in_channels=1, out_channels=2),
        "AttentionUnet, 2D": lambda: library.AttentionUnet(2, 1, 2, (4, 8, 16), (2, 2)),
        "HighResNet, 2D": lambda: library.HighResNet(2, 1, 2),
        "AutoEncoder, 2D": lambda: library.AutoEncoder(2, 1, 2, (4, 8, 16), (2, 2, 1)),
    }
    return example(build[name](), fitted, **(picture if name.endswith("2D") else volume))


def compared(loss: nn.Module, model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    found: Tensor = loss(model(x), y)
    return found


# --- language, speech and contrastive learning

ATTENTION: dict[str, dict[str, Any]] = {
    "plain": {}, "rotary": {"rotary_pos_emb": True}, "alibi": {"alibi_pos_bias": True, "alibi_num_heads": 4},
    "relative": {"rel_pos_bias": True}, "swiglu": {"ff_swish": True, "ff_glu": True}, "rms norm": {"use_rmsnorm": True},
    "macaron": {"macaron": True}, "sandwich norm": {"sandwich_norm": True}, "qk norm": {"attn_qk_norm": True},
    "memory": {"attn_num_mem_kv": 4}, "gated": {"attn_gate_values": True}, "one kv head": {"attn_one_kv_head": True},
    "talking heads": {"attn_pre_talking_heads": True, "attn_post_talking_heads": True}, "fused": {"attn_flash": True},
    "residual": {"residual_attn": True}, "shifted": {"shift_tokens": 1}, "sparse": {"attn_sparse_topk": 4},
    "two kv heads": {"attn_kv_heads": 2}, "scale norm": {"use_scalenorm": True},
}  # fmt: skip


def of_x_transformers(name: str) -> Example:
    import x_transformers as library

    layers = library.Decoder(dim=32, depth=2, heads=4, attn_dim_head=8, **ATTENTION[name])
    model = library.TransformerWrapper(num_tokens=50, max_seq_len=16, attn_layers=layers)
    tokens = torch.randint(0, 50, (ROWS, 16))
    return example(model, predicted, x=tokens, y=tokens.roll(-1, 1))


def of_conformer(name: str) -> Example:
    from conformer import Conformer

    model = Conformer(dim=16, depth=2, dim_head=8, heads=2, ff_mult=2, conv_expansion_factor=2, conv_kernel_size=7)
    return example(model, fitted, x=normal(ROWS, 12, 16), y=normal(ROWS, 12, 16))


def of_open_clip(name: str) -> Example:
    import open_clip

    vision = {"image_size": 32, "layers": 2, "width": 32, "patch_size": 8, "head_width": 8}
    text = {"context_length": 8, "vocab_size": 50, "width": 32, "heads": 4, "layers": 2}
    model = open_clip.CLIP(16, vision, text, output_dict=True)
    loss = partial(paired, open_clip.ClipLoss())
    return example(model, loss, image=normal(ROWS, 3, 32, 32), text=torch.randint(1, 50, (ROWS, 8)))


def paired(loss: nn.Module, model: nn.Module, image: Tensor, text: Tensor) -> Tensor:
    found: Tensor = loss(**model(image, text))
    return found


def of_lightly(name: str) -> Example:
    import lightly.loss as library

    loss = getattr(library, name)()
    body = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    model = nn.Sequential(body, nn.Linear(8, 8))
    return example(model, partial(viewed, loss), one=normal(8, 3, 16, 16), other=normal(8, 3, 16, 16))


def viewed(loss: nn.Module, model: nn.Module, one: Tensor, other: Tensor) -> Tensor:
    found: Tensor = loss(model(one), model(other))
    return found


MODELS: dict[str, tuple[Callable[[str], Example], tuple[str, ...]]] = {
    "timm": (of_timm, (
        "test_byobnet", "cait_xxs24_224", "coat_tiny", "halonet_h1", "convmixer_768_32", "test_convnext",
        "cpubone_nano", "csatv2", "cs3darknet_focus_s", "davit_tiny", "densenet121", "dla46x_c", "dpn48b",
        "edgenext_xx_small", "efficientformer_l1", "efficientformerv2_s0", "test_efficientnet", "efficientvim_m1",
        "efficientvit_b0", "efficientvit_m0", "eva02_tiny_patch14_224", "fasternet_t0", "fastvit_t8",
        "focalnet_tiny_srf", "gcvit_xxtiny", "hgnetv2_b0", "hiera_tiny_224", "hrnet_w18_small", "iformer_t",
        "inception_next_atto", "levit_128s", "lowformer_b0", "test_mambaout", "test_coatnet", "poolformerv2_s12",
        "lcnet_035", "mobilevit_xxs", "nest_tiny", "nextvit_small", "test_nfnet", "pit_ti_224", "pvt_v2_b0",
        "rdnet_tiny", "regnetx_002", "repvit_m1", "resnest14d", "test_resnet", "resnetv2_18", "rexnet_100", "shvit_s1",
        "skresnet18", "starnet_s1", "swiftformer_xs", "swin_tiny_patch4_window7_224", "swinv2_tiny_window16_256",
        "tiny_vit_5m_224", "twins_svt_small", "test_vit", "test_vit_relpos", "vit_tiny_r_s16_p8_224",
        "ese_vovnet19b_slim_dw", "xception41p", "xcit_nano_12_p8_224",
    )),
    "torchvision": (of_torchvision, (
        "alexnet", "squeezenet1_1", "mobilenet_v2", "mobilenet_v3_small", "shufflenet_v2_x0_5", "mnasnet0_5",
        "googlenet", "densenet121", "efficientnet_b0", "regnet_y_400mf", "convnext_tiny", "resnext50_32x4d",
    )),
    "torchvision segmentation": (of_torchvision_segmentation, (
        "lraspp_mobilenet_v3_large", "deeplabv3_mobilenet_v3_large", "fcn_resnet50",
    )),
    "torchvision video": (of_torchvision_video, ("r3d_18", "mc3_18", "r2plus1d_18")),
    "segmentation_models_pytorch": (of_segmentation_models, (
        "Unet-resnet18", "UnetPlusPlus-resnet18", "FPN-resnet18", "PSPNet-resnet18", "DeepLabV3Plus-mobilenet_v2",
        "Linknet-resnet18", "MAnet-resnet18", "UPerNet-resnet18", "Segformer-mit_b0",
    )),
    "vit-pytorch": (of_vit_pytorch, ("vit", "simple_vit", "cait", "cct", "max_vit", "region_vit")),
    "diffusers": (of_diffusers, (
        "unet", "conditional unet", "3d unet", "autoencoder", "vector quantized", "sd3", "pixart",
    )),
    "monai": (of_monai, (
        "UNet", "BasicUNet", "SegResNet", "UNETR", "DynUNet", "VNet, 2D", "AttentionUnet, 2D", "HighResNet, 2D",
        "AutoEncoder, 2D", "dice loss",
    )),
    "x-transformers": (of_x_transformers, tuple(ATTENTION)),
    "conformer": (of_conformer, ("conformer",)),
    "open_clip_torch": (of_open_clip, ("clip",)),
    "lightly": (of_lightly, ("BarlowTwinsLoss", "VICRegLoss", "NegativeCosineSimilarity", "DCLLoss")),
}  # fmt: skip
"""For each library, what builds a model, and the names of the models."""
