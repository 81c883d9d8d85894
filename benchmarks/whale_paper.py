"""Predictions compared with the figures of the Whale paper (USENIX ATC 2022, arXiv 2011.09208).

    python benchmarks/whale_paper.py                        # all tables, in Markdown; captures the models first
    python benchmarks/whale_paper.py --profiles /tmp/whale  # keeps the models' profiles there, for the next time

Nothing is measured here, and nothing is fitted to a row: layers are priced by ``whale.planner.cost.layers``,
collectives by ``whale.planner.network.communication``, pipelines simulated with the programs that ranks would run. The
paper does not say its batches; one set is assumed for each model (`ASSUMED`), and its reader judges whether the
figures agree under it.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from whale.ir.cluster import Cluster, Link
from whale.ir.profile import Affine, Amount, Kernel, LayerKind, LayerVariant, ModelProfile, Saved
from whale.ir.workload import Reduction, StageWork, Workload
from whale.planner.balance.by_speed import rows_by_speed
from whale.planner.catalog import device_types
from whale.planner.cost.configuration import Configuration, Layout
from whale.planner.cost.estimate import Estimate, estimate
from whale.planner.cost.memory import framework_bytes, state_bytes
from whale.planner.cost.precision import precision_named
from whale.planner.cost.step import GPU_OVERLAP_SLOWDOWN
from whale.planner.cost.uniform import Stages
from whale.planner.simulation.simulate import simulate

V100, P100 = "V100-SXM2-32GB", "P100-PCIe-16GB"
ETHERNET = Link(bandwidth=50e9 / 8, latency=30e-6, adapters=1, network="tcp")
"""50 Gbit/s between nodes of 8."""

BUCKET_BYTES = 25 * 2**20
"""Gradients are summed in buckets of this size while the backward goes on; the size is DDP's."""

ZOO = Path(__file__).resolve().parent.parent / "examples" / "models"
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "ResNet50": ("resnet.py:resnet", {}),
    "BERT-large": ("bert.py:bert", {"seq": 128}),
    "T5-large": ("t5.py:t5", {"seq": 128}),
    "M6-10B": ("t5.py:t5", {"hidden": 4096, "ffn": 16384, "heads": 32, "seq": 512, "vocab": 50304}),
}
MIXTURES = {  # layers, experts, hidden size of an expert, devices
    "M6-MoE-100B": (24, 512, 4096, 128),
    "M6-MoE-1T": (24, 960, 21248, 480),
    "M6-MoE-10T": (48, 10240, 9984, 512),
}


@dataclass(frozen=True)
class Assumed:
    """Assumptions that the paper does not state: samples per GPU in a step, and per micro-batch in a pipeline."""

    batch: int
    micro_batch: int | None = None


ASSUMED = {
    "ResNet50": Assumed(64),
    "GNMT": Assumed(64),
    "BERT-large": Assumed(16, 8),
    "T5-large": Assumed(16, 8),
    "M6-10B": Assumed(35, 1),  # 35 micro-batches are the paper's
    "M6-MoE": Assumed(8),
}


@dataclass(frozen=True)
class Figure:
    name: str
    paper: float
    ours: float

    @property
    def error(self) -> float:
        return self.ours / self.paper - 1


# --- machines and models ----------------------------------------------------------------------------------------------


def cluster_of(*counts: tuple[str, int]) -> Cluster:
    """Nodes of 8 devices (or fewer) of each type."""
    devices = []
    for name, count in counts:
        devices += [(f"{name} {index // 8}", device_types()[name]) for index in range(count)]
    made = Cluster.of(devices, inter=ETHERNET)
    nodes = tuple(replace(node, intra=made.devices[node.ranks[0]].type.intra_node) for node in made.nodes)
    return replace(made, nodes=nodes)


def captured(name: str, spec: str, settings: dict[str, Any], folder: Path | None) -> ModelProfile:
    """The profile of a model of the zoo, or the one that an earlier run left in *folder*."""
    kept = folder / f"{name}.json" if folder else None
    if kept and kept.exists():
        return ModelProfile.load(kept)
    from whale.cli.model_loader import load_model
    from whale.strategies.profile import profile_model

    loaded = load_model(str(ZOO / spec), settings, batch_size=4, device="meta")
    profile = profile_model(loaded.model, loaded.batch, tensor_degrees=(1,), name=name)
    if kept:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(profile.dumps(), encoding="utf-8")
    return profile


def mixture(layers: int, experts: int, ffn: int, folder: Path | None) -> ModelProfile:
    settings = {"layers": layers, "hidden": 1024, "ffn": ffn, "heads": 16, "kv_heads": 16, "experts": experts}
    settings |= {"top_k": 2, "seq": 512, "vocab": 50304}
    return captured(f"moe-{layers}-{experts}-{ffn}", "moe.py:moe", {**settings, "mlp": "gelu"}, folder)


def gnmt(length: int = 50, hidden: int = 1024, vocab: int = 32_000) -> ModelProfile:
    """GNMT as 8 + 8 layers of LSTM, an attention and the vocabulary; written down, since the zoo has no LSTM."""
    encoder = lstm("encoder", length, hidden, hidden)
    decoder = lstm("decoder", length, 2 * hidden, hidden)
    scores = LayerKind(
        name="attention", variants=(products("scores", length, length, hidden, weights=False, by_row=True),)
    )
    head = LayerKind(name="head", variants=(products("head", length, vocab, hidden, softmax=True),))
    embedding = LayerKind(name="embedding", variants=(LayerVariant(tensor_degree=1, parameters=2.0 * vocab * hidden),))
    layers = (0, *(1,) * 9, *(2,) * 8, 3, 4)  # the first layer of the encoder goes both ways
    return ModelProfile(
        name="GNMT", layers=layers, kinds=(embedding, encoder, decoder, scores, head), row_tokens=length
    )


def lstm(name: str, length: int, inputs: int, hidden: int) -> LayerKind:
    """A layer of ``length`` steps: one product for all inputs, then one for each step, which waits for the last."""
    gates = 4 * hidden
    whole = products(name, length, gates, inputs)
    step = _product("step", Affine(0, 1), gates, hidden, length)
    back = _product("step", Affine(0, 1), hidden, gates, length)
    weights = Kernel(
        name="step's weights",
        kind="matmul",
        dims=(Affine(1, 0), Affine(gates, 0), Affine(hidden, 0), Affine(0, length)),
        flops=Affine(0, 2 * length * gates * hidden),
        read=Amount(elements=Affine(0, length * (gates + hidden))),
        written=Amount(elements=Affine(gates * hidden, 0)),
    )
    moved = Amount(elements=Affine(0, length * gates))
    pointwise = Kernel(name="gates", kind="memory", read=moved, written=moved)
    variant = LayerVariant(
        tensor_degree=1,
        forward=(*whole.forward, step, pointwise),
        backward=(*whole.backward, back, weights, pointwise),
        saved=(Saved(origin=name, size=Amount(elements=Affine(0, length * (gates + 3 * hidden)))),),
        parameters=gates * (inputs + hidden + 2),
    )
    return LayerKind(name=name, variants=(variant,), output=Amount(elements=Affine(0, length * hidden)))


def products(
    name: str, length: int, out: int, inner: int, *, weights: bool = True, by_row: bool = False, softmax: bool = False
) -> LayerVariant:
    """A product of ``length`` tokens a row by an (inner, out) matrix, of weights or of the row's own, and its
    backward."""
    forward = _product(name, Affine(0, length), out, inner, 1)
    logits = Amount(elements=Affine(0, length * out))
    extra = (Kernel(name="softmax", kind="memory", read=logits, written=logits),) if softmax else ()
    return LayerVariant(
        tensor_degree=1,
        forward=(forward, *extra),
        backward=(
            _product(name, Affine(0, length), inner, out, 1),
            Kernel(
                name=f"{name}'s weights",
                kind="matmul",
                dims=(Affine(1, 0), Affine(out, 0), Affine(inner, 0), Affine(0, length)),
                flops=Affine(0, 2 * length * out * inner),
                read=Amount(elements=Affine(0, length * (out + inner))),
                written=Amount(elements=Affine(out * inner, 0)),
            ),
            *extra,
        ),
        saved=(Saved(origin=name, size=Amount(elements=Affine(0, length * (out if softmax else inner)))),),
        parameters=out * inner if weights else 0,
    )


def _product(name: str, m: Affine, n: int, k: int, count: int) -> Kernel:
    return Kernel(
        name=name,
        kind="matmul",
        dims=(Affine(1, 0), m, Affine(n, 0), Affine(k, 0)),
        flops=Affine(2 * m.fixed * n * k, 2 * m.per_row * n * k),
        read=Amount(elements=Affine(n * k, m.per_row * k)),
        written=Amount(elements=Affine(0, m.per_row * n)),
        count=count,
    )


# --- data parallel ----------------------------------------------------------------------------------------------------


def data_parallel(profile: ModelProfile, cluster: Cluster, rows: Sequence[float], *, head: float = 0.0) -> float:
    """Seconds of a step, gradients summed in buckets while the backward goes on; *head* comes between forward and
    backward on all devices, not overlapped."""
    stages = _stages(profile, cluster, sum(rows))
    whole = range(len(profile.layers))
    kinds = list({(cluster.devices[rank].type.name, share): rank for rank, share in enumerate(rows)}.values())
    costs = [stages.cost(whole, 0, rank, rows[rank]) for rank in kinds]
    group = tuple(range(len(cluster.devices)))
    reductions: list[Reduction] = []
    first, total, size = stages.cost(whole, 0, kinds[0], rows[kinds[0]]).backward, 0.0, 0.0
    done = 0.0
    for layer in reversed(whole):
        done += stages.cost(range(layer, layer + 1), 0, kinds[0], rows[kinds[0]]).backward
        size += stages.prices.parameters([layer], 1)[0] * 4
        while size >= BUCKET_BYTES or (layer == 0 and size > 0):
            part, size = min(size, BUCKET_BYTES), max(0.0, size - BUCKET_BYTES)
            total += part
            reductions.append(
                Reduction(
                    ranks=tuple(range(len(kinds))),
                    stages=(0,),
                    bytes=round(part),
                    seconds=stages.prices.all_reduce(group, 1, part),
                    ready=min(1.0, done / first),
                )
            )
    work = StageWork(
        ranks=tuple(range(len(kinds))),
        forward=tuple(cost.forward + head for cost in costs),
        backward=tuple(cost.backward for cost in costs),
        weights=tuple(cost.weights for cost in costs),
        kept_bytes=(0,) * len(kinds),
    )
    workload = Workload(
        world_size=len(kinds),
        micro_batches=1,
        stages=(work,),
        reductions=tuple(reductions),
        update=tuple(cost.update for cost in costs),
        overlap_slowdown=GPU_OVERLAP_SLOWDOWN,
    )
    return simulate(workload).step_seconds


def _stages(profile: ModelProfile, cluster: Cluster, batch: float) -> Stages:
    configuration = Configuration(batch=round(batch), micro_batch=1, precision="fp32", balance="speed")
    layout = Layout.of(replace(configuration, micro_batch=max(1, round(batch) // len(cluster.devices))), cluster)
    return Stages.of(profile, layout)


def balanced_batch(name: str, profile: ModelProfile, paper: float) -> Figure:
    """Equal shares against shares by speed, on 8 V100 and 8 P100."""
    cluster = cluster_of((V100, 8), (P100, 8))
    batch = 16 * ASSUMED[name].batch
    even = [batch / 16] * 16
    stages = _stages(profile, cluster, batch)
    shares = rows_by_speed(stages, (range(len(profile.layers)),))
    ours = data_parallel(profile, cluster, even) / data_parallel(profile, cluster, shares)
    return Figure(f"{name}: {shares[0]:.0f} and {shares[-1]:.0f} instead of {batch // 16} samples", paper, ours)


# --- a large classifier -----------------------------------------------------------------------------------------------


def speed_ratio(name: str, profile: ModelProfile, paper: float) -> Figure:
    """How much faster a V100 computes a step of the assumed batch than a P100."""
    batch = ASSUMED[name].batch
    v100, p100 = (data_parallel(profile, cluster_of((card, 1)), [batch]) for card in (V100, P100))
    return Figure(name, paper, p100 / v100)


def classifier(resnet: ModelProfile, classes: int, devices: int, *, hybrid: bool) -> float:
    """Samples a second: all replicated, or the trunk replicated and the classifier split over all devices."""
    cluster = cluster_of((V100, devices))
    batch, width = ASSUMED["ResNet50"].batch, 2048
    trunk = replace_layers(resnet, resnet.layers[:-1])
    parts = devices if hybrid else 1
    head = LayerKind(name="head", variants=(products("head", 1, classes // parts, width, softmax=True),))
    if not hybrid:
        whole = replace_layers(resnet, (*resnet.layers[:-1], len(resnet.kinds)), (*resnet.kinds, head))
        return devices * batch / data_parallel(whole, cluster, [batch] * devices)
    alone = replace_layers(resnet, (0,), (head,))
    stages = _stages(alone, cluster_of((V100, devices)), batch * devices)
    cost = stages.cost(range(1), 0, 0, batch * devices)
    group = tuple(range(devices))
    features = batch * devices * width * 4
    seconds = cost.forward + cost.backward
    over = stages.prices.over
    seconds += over("all_gather", group, 1, features) + over("reduce_scatter", group, 1, features)
    seconds += 2 * over("all_reduce", group, 1, batch * devices * 4)  # of the largest logit and of the sum
    return devices * batch / (data_parallel(trunk, cluster, [batch] * devices, head=seconds) + cost.update)


def replace_layers(
    profile: ModelProfile, layers: tuple[int, ...], kinds: tuple[LayerKind, ...] | None = None
) -> ModelProfile:
    return ModelProfile(name=profile.name, layers=layers, kinds=kinds or profile.kinds, row_tokens=profile.row_tokens)


# --- pipelines --------------------------------------------------------------------------------------------------------


def pipeline(
    name: str, profile: ModelProfile, cluster: Cluster, num_stages: int, cuts: Sequence[range] | None = None
) -> Estimate:
    """A pipeline with all replicas that the devices allow, consecutive within a stage; cut by speed unless *cuts* are
    passed."""
    assumed, devices = ASSUMED[name], len(cluster.devices)
    configuration = Configuration(
        batch=assumed.batch * devices,
        micro_batch=assumed.micro_batch or assumed.batch,
        pipeline=num_stages,
        precision="fp32",
        balance="speed",
        layers_per_stage=None if cuts is None else tuple(map(len, cuts)),
    )
    return estimate(profile, cluster, configuration)


def balanced_pipeline(name: str, profile: ModelProfile, paper: float) -> Figure:
    """Cuts by speed compared with cuts that are even on equal devices."""
    cluster = cluster_of((V100, 4), (P100, 4))
    balanced = pipeline(name, profile, cluster, 4)
    even = pipeline(name, profile, cluster, 4, pipeline(name, profile, cluster_of((V100, 8)), 4).cuts)
    before, after = (", ".join(str(len(part)) for part in found.cuts) for found in (even, balanced))
    label = f"{name}: {after} instead of {before} layers"
    return Figure(label, paper, even.prediction.step_seconds / balanced.prediction.step_seconds)


# --- tables -----------------------------------------------------------------------------------------------------------


def table(title: str, figures: Sequence[Figure], digits: int = 2) -> str:
    lines = [f"## {title}", "", "| | paper | predicted | difference |", "|---|---|---|---|"]
    for figure in figures:
        lines.append(
            f"| {figure.name} | {figure.paper:,.{digits}f} | {figure.ours:,.{digits}f} | {figure.error:+.0%} |"
        )
    lines.append(f"\nMean difference {statistics.mean(abs(figure.error) for figure in figures):.1%}.\n")
    return "\n".join(lines)


def tables(folder: Path | None) -> list[str]:
    models = {name: captured(name, spec, settings, folder) for name, (spec, settings) in MODELS.items()}
    models["GNMT"] = gnmt()
    found = [
        "## Assumed, since the paper does not say\n\n| | samples for each GPU in a step | micro-batch |\n|---|---|---|"
    ]
    found += [f"| {name} | {one.batch} | {one.micro_batch or 'whole'} |" for name, one in ASSUMED.items()]
    found.append("")

    paper = {"ResNet50": 1.301, "GNMT": 1.27, "BERT-large": 1.448}
    rows = [balanced_batch(name, models[name], value) for name, value in paper.items()]
    found.append(table("Data parallel on 8 V100 + 8 P100: balanced over equal shares, speed-up", rows, 3))

    implied = {"ResNet50": 1.60, "GNMT": 1.54, "BERT-large": 1.90}
    rows = [speed_ratio(name, models[name], value) for name, value in implied.items()]
    found.append(table("V100 over P100 in computation, as the paper's speed-ups imply if nothing else took time", rows))

    rows = [balanced_pipeline(name, models[name], value) for name, value in (("BERT-large", 1.23), ("T5-large", 1.233))]
    found.append(table("4 stages on 4 V100 + 4 P100: balanced over even layers, speed-up", rows, 3))

    rows = []
    for classes, hybrid, values in (
        (100_000, False, {1: 317, 8: 2244, 16: 2842, 32: 3610}),
        (100_000, True, {1: 317, 8: 2545, 16: 4729, 32: 8791}),
        (1_000_000, True, {8: 1729, 16: 3397, 32: 6578}),
    ):
        how = "split classifier" if hybrid else "data parallel"
        for devices, value in values.items():
            ours = classifier(models["ResNet50"], classes, devices, hybrid=hybrid)
            rows.append(Figure(f"{classes:,} classes, {how}, {devices} V100", value, ours))
    found.append(table("ResNet50 with a large classifier, samples/s", rows, 0))
    state = state_bytes(2048 * 1_000_000, precision=precision_named("fp32")).total / 2**30
    logits = 2 * ASSUMED["ResNet50"].batch * 1_000_000 * 4 / 2**30
    framework = framework_bytes(device_types()[V100], 8) / 2**30
    found.append(
        f"Data parallel with 1,000,000 classes: the classifier's state takes {state:.1f} GiB, the logits and their "
        f"gradient {logits:.1f}, and the framework {framework:.1f}, of 32: no room for the trunk.\n"
    )

    bert, batch = models["BERT-large"], ASSUMED["BERT-large"].batch
    alone = data_parallel(bert, cluster_of((V100, 1)), [batch])
    rows = []
    for devices, value in {8: 7.26, 16: 8.71, 32: 14.06}.items():
        seconds = data_parallel(bert, cluster_of((V100, devices)), [batch] * devices)
        rows.append(Figure(f"data parallel, {devices} V100", value, devices * alone / seconds))
    for num_stages, values in (
        (2, {8: 6.60, 16: 12.50, 32: 23.00}),
        (4, {8: 7.25, 16: 11.99, 32: 23.30}),
        (8, {8: 4.99, 16: 9.90, 32: 18.60}),
    ):
        for devices, value in values.items():
            seconds = pipeline("BERT-large", bert, cluster_of((V100, devices)), num_stages).prediction.step_seconds
            rows.append(Figure(f"{num_stages} stages, {devices} V100", value, devices * alone / seconds))
    found.append(table("BERT-large, times one GPU", rows))

    found.append(giants(models["M6-10B"], folder))
    return found


def giants(m6: ModelProfile, folder: Path | None) -> str:
    """Predicted step times of the paper's largest models, for which it gives none."""
    lines = [
        "## M6 on V100-32GB, Adam in mixed precision, full recomputation: step and memory (the paper gives neither)",
        "",
        "| | parameters | devices | step | fullest device | fits | bytes left for each parameter |",
        "|---|---|---|---|---|---|---|",
    ]
    assumed = ASSUMED["M6-10B"]
    configuration = Configuration(batch=assumed.batch, micro_batch=1, pipeline=8, precision="fp16", recompute="full")
    cluster = cluster_of((V100, 8))
    lines.append(_giant("M6-10B, 8 stages, 35 micro-batches", m6, cluster, configuration))
    for name, (layers, experts, ffn, devices) in MIXTURES.items():
        profile = mixture(layers, experts, ffn, folder)
        configuration = Configuration(
            batch=ASSUMED["M6-MoE"].batch * devices,
            micro_batch=ASSUMED["M6-MoE"].batch,
            expert=devices,
            precision="fp16",
            recompute="full",
        )
        lines.append(_giant(name, profile, cluster_of((V100, devices)), configuration))
    return "\n".join(lines) + "\n"


def _giant(name: str, profile: ModelProfile, cluster: Cluster, configuration: Configuration) -> str:
    found = estimate(profile, cluster, configuration)
    fullest = max(found.prediction.memory, key=lambda device: device.share)
    total = sum(kind.variants[0].parameters for kind in profile.chain()) - sum(
        elements * (len(layers) - 1) for layers, elements in profile.tied
    )
    state = fullest.parameters + fullest.gradients + fullest.optimizer
    own = state / 18  # 2 bytes of weight, 4 of gradient, 12 of master weight and moments
    left = (fullest.capacity - (fullest.total - state)) / own
    fits = "yes" if found.prediction.fits else "no"
    size, capacity = fullest.total / 2**30, fullest.capacity / 2**30
    return (
        f"| {name} | {total / 1e9:,.0f} billion | {len(cluster.devices)} | {found.prediction.step_seconds:.2f} s "
        f"| {size:,.0f} of {capacity:.0f} GiB | {fits} | {left:.1f} of 18 |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profiles", type=Path, metavar="FOLDER", help="where profiles of the models are kept")
    options = parser.parse_args()
    print("\n".join(tables(options.profiles)))


if __name__ == "__main__":
    main()
