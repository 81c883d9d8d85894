"""``whale estimate``: what given degrees give on a cluster, without running anything.

The prediction is ``whale.planner.cost.estimate``; this file finds the model's profile and the cluster, and shows what
it returns. torch is loaded only to capture a model, not where a profile is given.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from whale.arguments import check_updates
from whale.cli.assumptions import assumptions_text, is_given, said_of_optimizer
from whale.cli.model_loader import load_model, parse_settings
from whale.cli.options import (
    AT_LEAST_1,
    GRADIENT_DTYPE_HELP,
    STEP_IN_BACKWARD_HELP,
    Numbers,
    note,
    offload_option,
    sharding_of,
    state_options,
    verbosity_options,
)
from whale.errors import UsageError
from whale.ir.state import LEVELS
from whale.ir.strategy import REDUCES, STATE_ON_HOST, offload_steps
from whale.ir.units import bytes_text, time_text
from whale.planner.cost.optimizers import OPTIMIZERS, costs_of
from whale.planner.schedules.orders import SCHEDULES

if TYPE_CHECKING:
    from whale.ir.profile import ModelProfile
    from whale.planner.cost.configuration import Configuration
    from whale.planner.cost.estimate import Estimate


@click.command()
@click.option("--model", "spec", metavar="SPEC", help="file.py:callable, or hf:<model_type>.")
@click.option("--set", "settings", multiple=True, metavar="KEY=VALUE", help="A setting of the model; may be repeated.")
@click.option("--profile", "profile_file", type=click.Path(path_type=Path), metavar="FILE", help="In place of --model.")
@click.option("--cluster", "cluster_file", required=True, metavar="FILE", help="The machines.")
@click.option("--batch", required=True, type=AT_LEAST_1, metavar="N", help="Samples in a step.")
@click.option(
    "--micro-batch", type=AT_LEAST_1, default=1, metavar="N", help="Rows of a micro-batch on each replica [1]."
)
@click.option("--tp", "tensor", type=AT_LEAST_1, default=1, metavar="N", help="Tensor degree [1].")
@click.option("--pp", "pipeline", type=AT_LEAST_1, default=1, metavar="N", help="Pipeline stages [1].")
@click.option("--dp", "data", type=AT_LEAST_1, metavar="N", help="Data degree [the remaining devices].")
@click.option("--cp", "context", type=AT_LEAST_1, default=1, metavar="N", help="Context degree [1].")
@click.option("--ep", "expert", type=AT_LEAST_1, default=1, metavar="N", help="Expert degree, within --dp [1].")
@click.option("--virtual-stages", type=AT_LEAST_1, default=1, metavar="N", help="Virtual stages per device [1].")
@click.option("--schedule", default="1f1b", metavar="NAME", help=f"One of {', '.join(SCHEDULES)} [1f1b].")
@click.option("--recompute", type=click.Choice(["none", "selective", "full"]), default="none", help="[none]")
@state_options(0, "0")
@offload_option("none", "none")
@click.option(
    "--sequence-parallel/--no-sequence-parallel",
    default=None,
    help="Shard norms and dropouts too [if attention is fused].",
)
@click.option(
    "--precision",
    metavar="NAME",
    help="fp32, tf32, fp16, bf16, fp8 or fp64 [bf16; fp16 where a device has no bfloat16].",
)
@click.option("--gradient-dtype", type=click.Choice(["fp32", "bf16", "fp16"]), help=GRADIENT_DTYPE_HELP)
@click.option("--step-in-backward", is_flag=True, help=STEP_IN_BACKWARD_HELP)
@click.option("--reduce", type=click.Choice(REDUCES), default="mean", help="How replicas make one gradient [mean].")
@click.option(
    "--optimizer", type=click.Choice(OPTIMIZERS), default="adamw", help="Its states must fit in memory [adamw]."
)
@click.option("--attention", type=click.Choice(["auto", "fused", "unfused"]), default="auto", help="[auto]")
@click.option(
    "--stack",
    type=click.Choice(["whale", "megatron", "fsdp"]),
    help="Whose kernels and communication [whale, unless its own are not priced].",
)
@click.option("--layers-per-stage", type=Numbers(), metavar="N,N,...", help="Layers of each stage [even].")
@click.option("--balance", type=click.Choice(["even", "speed"]), default="even", help="Unlike devices [even].")
@click.option("--device-order", type=Numbers(), metavar="R,R,...", help="Ranks of the cluster, in the layout's order.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@verbosity_options
def estimate(
    spec: str | None,
    settings: tuple[str, ...],
    profile_file: Path | None,
    cluster_file: str,
    as_json: bool,
    **degrees: Any,
) -> None:
    """Predict step time and memory of given degrees, on any cluster.

    Ranks go tensor innermost, then context, data, pipeline outermost, through the devices in the order of the file:
    tp x cp x dp x pp devices, experts inside of dp.

    --cp cuts each row along a dim of the batch, such as the length of a sequence or the depth of a volume, as
    split(N, dim=D) does.

    Some of this is predicted as other stacks run it: --sequence-parallel and --precision fp8, which Whale does not run,
    and of a --profile what that says nothing of: --cp, --recompute, or bf16 and fp16 under torch.autocast. The output
    says so where one of these is chosen.
    """
    from whale.cli.clusters import load_cluster
    from whale.ir.profile import ModelProfile
    from whale.planner.cost.configuration import Configuration, Layout
    from whale.planner.cost.estimate import estimate as predict
    from whale.planner.cost.hosts import host_text
    from whale.planner.cost.precision import mixed_precision_of

    zero, shares = degrees.pop("zero"), degrees.pop("state_shares")
    offload = degrees.pop("offload")
    align = degrees.pop("state_align")
    if costs_of(degrees["optimizer"]).factored and (zero or offload in STATE_ON_HOST) and align == "row":
        raise UsageError(f"--state-align row: {degrees['optimizer']} computes with whole matrices; use parameter")
    asked = sharding_of(zero, shares, align, offload, degrees["reduce"])
    auto_shares = shares == "auto"
    if (spec is None) == (profile_file is None):
        raise UsageError("give either --model, to capture a model, or --profile, to use a profile")
    known = None if profile_file is None else ModelProfile.load(profile_file)
    cluster = load_cluster(cluster_file, known)
    if degrees["precision"] is None:
        of_profile = known.autocast if known is not None else ""
        degrees["precision"] = of_profile or mixed_precision_of(device.type for device in cluster.devices)
    configuration = Configuration(
        **degrees, zero=asked.level if asked is not None else 0, state_shares=asked.shares if asked is not None else ()
    )
    as_whale = configuration.stack in (None, "whale") and not of_other_stacks(configuration)
    Layout.of(configuration, cluster)  # refuses degrees that cannot be, before a model is captured
    profile, said = _profile(spec, settings, known, configuration, as_whale=as_whale)
    beyond = of_other_stacks(configuration, profile)
    if beyond and configuration.stack == "whale":
        raise UsageError(f"--stack whale: only other stacks are priced for {beyond[0]}; leave --stack out")
    if (configuration.state_shares or auto_shares) and (beyond or configuration.stack not in (None, "whale")):
        raise UsageError("--state-shares: stacks other than Whale's divide state equally; leave it out")
    if configuration.gradient_dtype is not None and (beyond or configuration.stack not in (None, "whale")):
        raise UsageError("--gradient-dtype: other stacks sum gradients in a number type of their own; leave it out")
    if configuration.step_in_backward and (beyond or configuration.stack not in (None, "whale")):
        raise UsageError("--step-in-backward: it is predicted as Whale runs it, not as other stacks do; leave it out")
    if configuration.reduce != "mean" and (beyond or configuration.stack not in (None, "whale")):
        raise UsageError("--reduce: stacks other than Whale's sum gradients; leave it out")
    if configuration.optimizer != "adamw" and (beyond or configuration.stack not in (None, "whale")):
        raise UsageError("--optimizer: the step of other stacks is that of adamw; leave it out")
    check_updates(configuration.precision, step_in_backward=configuration.step_in_backward, name="--step-in-backward")
    if offload != "none" and (beyond or configuration.stack not in (None, "whale")):
        raise UsageError("--offload: it is priced as Whale runs it, not as other stacks do; leave it out")
    if not beyond and configuration.stack is None:
        configuration = replace(configuration, stack="whale")
    if beyond and as_whale:
        note("for what Whale does, make the profile with 'whale profile model', and with its --precision bf16 or fp16")
    levels = LEVELS if zero == "auto" else (configuration.zero,)
    words = offload_steps(has_tables=profile.has_tables) if offload == "auto" else (offload,)
    for word, level in product(words, levels):  # the first that fits
        configuration = replace(configuration, zero=level, auto_shares=auto_shares and level > 0, offload=word)
        found = predict(profile, cluster, configuration)
        if found.prediction.fits:
            break
    if configuration.balance == "speed" and configuration.layers_per_stage is not None:
        note("--balance speed balances the rows of replicas only, because --layers-per-stage is given")
    hosts = host_text(cluster) if configuration.offload != "none" else ()
    said = (*said, *_defaults(configuration), *found.assumptions, *hosts)
    cut = found.layout.num_micro_batches > 1 and configuration.stack == "whale"
    if cut and profile.coupled:
        note(f"Whale does not run {found.layout.num_micro_batches} micro-batches of this model: {profile.coupled}")
    beyond = [] if configuration.stack == "whale" else beyond
    click.echo(json.dumps(as_data(found, said, beyond), indent=2) if as_json else as_text(found, said, beyond))


def _defaults(given: Configuration) -> list[str]:
    """The unset options that change the result most."""
    said = []
    if not is_given("precision"):
        said.append(f"{given.precision} beside weights and optimizer state in float32; --precision NAME changes it")
    if not is_given("micro_batch"):
        said.append(f"micro-batches of {given.micro_batch} row a replica; --micro-batch N changes it")
    if not is_given("stack"):
        whose = "Whale" if given.stack == "whale" else "FSDP where weights or gradients are shared, else of Megatron"
        said.append(f"kernels and communication of {whose}; --stack NAME changes it")
    return [*said, *(said_of_optimizer() if given.stack == "whale" else ("the state of adamw in memory",))]


def of_other_stacks(given: Configuration, profile: ModelProfile | None = None) -> list[str]:
    """Parts of a configuration that are predicted as other stacks run them: that Whale does not run, or of which a
    *profile* does not say what they cost."""
    from whale.planner.cost.precision import precision_named

    low = precision_named(given.precision).mixed and given.precision != "fp8"
    every = (
        (
            profile is not None and given.recompute not in profile.rules,
            f"--recompute {given.recompute}: activations computed again in the backward",
        ),
        (
            given.context > 1 and profile is not None and not _knows_cut(profile, given),
            f"--cp {given.context}: parts of a row on {given.context} devices by ring attention",
        ),
        (
            given.context > 1 and given.expert > 1,
            f"--cp {given.context} and --ep {given.expert}: experts over devices that have parts of rows",
        ),
        (bool(given.sequence_parallel), "--sequence-parallel: norms and dropouts divided by the tensor group"),
        (given.precision == "fp8", "--precision fp8: products in float8"),
        (
            profile is not None and low and given.precision != profile.autocast,
            f"--precision {given.precision}: weights in float32 beside those in {given.precision}",
        ),
    )
    return [what for chosen, what in every if chosen]


def _knows_cut(profile: ModelProfile, given: Configuration) -> bool:
    """Whether a profile says what its layers cost on devices that cut each row."""
    wanted = given.tensor, given.context
    return all(
        any((one.tensor_degree, one.context_degree) == wanted for one in kind.context_variants)
        for kind in profile.kinds
    )


def _profile(
    spec: str | None, settings: tuple[str, ...], known: ModelProfile | None, given: Configuration, *, as_whale: bool
) -> tuple[ModelProfile, tuple[str, ...]]:
    """The profile: that which is known, or of a model *as_whale* runs it or as other stacks do; and what was assumed of
    the model."""
    from whale.planner.cost.precision import AUTOCAST

    if known is not None:
        if settings:
            raise UsageError("--set is for --model: a profile is of a model whose settings are fixed")
        return known, ()
    loaded = load_model(spec or "", parse_settings(settings), batch_size=4, any_batch=True, device="meta")
    from whale.strategies.profile import profile_model

    note(f"capturing {loaded.name}")
    profile = profile_model(
        loaded.model,
        loaded.batch,
        tensor_degrees=sorted({1, given.tensor}),
        context_degrees=[given.context] if as_whale else [],
        name=loaded.name,
        precision=given.precision if as_whale and given.precision in AUTOCAST else None,
        rules=as_whale and given.recompute != "none",
    )
    refused = dict(profile.refused)
    if given.tensor in refused:
        raise UsageError(f"--tp {given.tensor}: {refused[given.tensor]}")
    if given.context > 1 and as_whale and not _knows_cut(profile, given):
        reason = dict(profile.uncut).get(given.context, f"its layers cannot be cut so at --tp {given.tensor}")
        raise UsageError(f"--cp {given.context}: {reason}")
    return profile, loaded.assumptions


def as_data(found: Estimate, said: Sequence[str], beyond: Sequence[str]) -> dict[str, Any]:
    """The estimate as JSON has it; *beyond* is predicted as other stacks run it."""
    prediction = found.prediction
    fullest = max(prediction.memory, key=lambda device: device.share)
    given = found.layout.configuration
    return {
        "step_seconds": prediction.step_seconds,
        "step_seconds_interval": list(prediction.step_seconds_interval),
        "memory_bytes": max(device.total for device in prediction.memory),
        "fits": prediction.fits,
        "breakdown": prediction.breakdown,
        "breakdown_rank": prediction.breakdown_rank,
        "memory": {"fullest": fullest.device, **_parts(fullest), "total": fullest.total, "capacity": fullest.capacity},
        "hosts": [{**host.model_dump(), "total": host.total} for host in prediction.hosts],
        "devices": [{"device": device.device, **_parts(device), "total": device.total} for device in prediction.memory],
        "tokens_per_second": found.tokens_per_second,
        "samples_per_second": given.batch / prediction.step_seconds,
        "flops": prediction.flops,
        "mfu": prediction.mfu,
        "bubble": prediction.bubble,
        "source": prediction.source,
        "micro_batches": found.layout.num_micro_batches,
        "rows": list(found.rows),
        "stages": [len(layers) for layers in found.cuts],
        "assumptions": list(said),
        "of_other_stacks": list(beyond),
    }


_PARTS = ("parameters", "gradients", "optimizer", "activations", "buffers", "workspace", "framework")


def _parts(device: Any) -> dict[str, int]:
    return {part: getattr(device, part) for part in _PARTS}


def as_text(found: Estimate, said: Sequence[str], beyond: Sequence[str]) -> str:
    """The estimate for a reader: the step, where it goes, the fullest device, and what to know of these numbers;
    *beyond* is predicted as other stacks run it."""
    prediction = found.prediction
    seconds, (low, high) = prediction.step_seconds, prediction.step_seconds_interval
    fullest = max(prediction.memory, key=lambda device: device.share)
    lines = [
        f"step     {time_text(seconds)}  ({time_text(low)} to {time_text(high)}, {prediction.source})",
        f"speed    {_speed(found)}  {prediction.mfu:.1%} MFU  "
        f"{prediction.flops / seconds / len(found.layout.order) / 1e12:.1f} TFLOP/s per device",
        f"memory   {bytes_text(fullest.total)} of {bytes_text(fullest.capacity)} on {fullest.device} "
        f"({fullest.share:.0%}): {'fits' if fullest.total <= fullest.capacity else 'DOES NOT FIT'}",
        *(
            f"host     {bytes_text(host.total)} of {bytes_text(host.capacity)} on {host.node} "
            f"({host.total / host.capacity:.0%}): {'fits' if host.total <= host.capacity else 'DOES NOT FIT'}"
            for host in prediction.hosts
        ),
        "",
        f"where the time goes on rank {prediction.breakdown_rank}, the busiest",
    ]
    for part, spent in prediction.breakdown.items():
        if spent > 0:
            lines.append(f"  {part:<14} {time_text(spent):>11}  {spent / seconds:6.1%}")
    lines += ["", f"memory of {fullest.device}"]
    for part, size in _parts(fullest).items():
        if size:
            lines.append(f"  {part:<14} {bytes_text(size):>11}  {size / fullest.capacity:6.1%}")
    if beyond:
        lines += ["", "predicted as other stacks run it:", *(f"  {what}" for what in beyond)]
    if said:
        lines += ["", assumptions_text(said)]
    return "\n".join(lines)


def _speed(found: Estimate) -> str:
    rows = found.layout.configuration.batch / found.prediction.step_seconds
    has_tokens = found.tokens_per_second > rows * 1.5  # an image is one row
    return f"{found.tokens_per_second:,.0f} tokens/s" if has_tokens else f"{rows:,.1f} rows/s"
