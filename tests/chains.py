"""Chains of layers with measured times, and clusters of few devices, for tests of the search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from whale.ir.cluster import Cluster, DeviceType, Link
from whale.ir.profile import Affine, Amount, LayerKind, MeasuredTimes, ModelProfile

GIB = 2**30
LINK = Link(bandwidth=1e10, latency=1e-5)


def card(name: str, gib: float = 64) -> DeviceType:
    """A device type without a driver that takes memory, so that small numbers are exact."""
    return DeviceType.of(f"cpu-{name}", speed={"float32": 1e12}, memory_bytes=round(gib * GIB), memory_bandwidth=1e12)


def machines(types: Sequence[DeviceType], link: Link = LINK) -> Cluster:
    """One node with devices of these types."""
    return Cluster.of([("node", type_) for type_ in types], intra=link)


def layer(
    seconds: Mapping[str, float],
    *,
    degrees: Sequence[int] = (1,),
    fixed: float = 0.0,
    parameters: float = 1e6,
    kept: float = 1e6,
    output: float = 1e4,
    name: str = "layer",
    ahead: float = 1 / 3,
) -> LayerKind:
    """A kind of layer that takes *seconds* a row on each type, *ahead* of them forward, and *fixed* besides; degree
    t takes 1 / t of it and a tenth more for its collectives."""
    times = []
    for device, spent in seconds.items():
        for degree in degrees:
            share = (1.0 if degree == 1 else 1.1) / degree
            rows = (1, 64)
            both = [(fixed + spent * count) * share for count in rows]
            times.append(
                MeasuredTimes(
                    device_type=device,
                    tensor_degree=degree,
                    rows=rows,
                    forward=tuple(value * ahead for value in both),
                    backward=tuple(value * (1 - ahead) for value in both),
                    update=(1e-4 / degree,) * 2,
                    includes_communication=True,
                )
            )
    return LayerKind(
        name=name,
        measured=tuple(times),
        parameters=parameters,
        activations=Amount(bytes=Affine(0, kept)),
        output=Amount(bytes=Affine(0, output)),
    )


def chain(kinds: Sequence[LayerKind], layers: Sequence[int]) -> ModelProfile:
    """Layers of these kinds, by position."""
    return ModelProfile(name="chain", layers=tuple(layers), kinds=tuple(kinds))
