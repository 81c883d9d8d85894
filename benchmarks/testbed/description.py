"""The description of a testbed: emulated devices, their nodes and links; and its file format.

The file looks like a cluster file, but a device type has ``cores`` and ``memory`` instead of speeds. It is pure data:
nothing here touches the machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, ValidationError

from whale.ir.document import Document, parse_document, read_document
from whale.ir.units import Quantity, parse_quantity

__all__ = ["Description", "Device", "DeviceType", "Link", "Node"]

MAX_NODES = 200  # hosts of the switch's network 10.77.0.0/24


def _written(quantity: Quantity) -> Any:
    def parse(given: object) -> float:
        return parse_quantity(given, quantity)

    return Annotated[float, BeforeValidator(parse)]


_Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,60}$")]


class _Table(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class Link(_Table):
    """A node's link to the switch, alike in both directions: bytes per second, and seconds of delay added to what the
    machine takes anyway (which needs ``netem``; 0 needs nothing)."""

    bandwidth: _written("bandwidth")  # type: ignore[valid-type]
    latency: _written("latency") = 0.0  # type: ignore[valid-type]


class _Links(_Table):
    inter_node: Link | None = None


class Node(_Table):
    """An entry of the file: ``count`` nodes of ``devices`` devices, which share the node's link."""

    count: Annotated[int, Field(ge=1, le=MAX_NODES)] = 1
    devices: Annotated[int, Field(ge=1, le=64)] = 1
    device: str
    links: _Links = _Links()


class DeviceType(_Table):
    """``cores`` is the part of a core that a device has, ``memory`` its bytes. Less than a tenth of a core is less than
    the kernel grants in a period of 10 ms."""

    cores: Annotated[float, Field(ge=0.1, le=1)]
    memory: _written("memory")  # type: ignore[valid-type]


class Device(_Table):
    """One emulated device, that is one rank."""

    rank: int
    local_rank: int
    node: int
    type_name: str
    cores: float
    memory_bytes: int


class Description(_Table):
    """Everything that a testbed consists of.

    >>> two = Description.parse('''
    ... [links]
    ... inter_node = {bandwidth = "1 Gbit/s"}
    ... [[nodes]]
    ... device = "cpu-50"
    ... [[nodes]]
    ... device = "cpu-25"
    ... [device_types]
    ... cpu-50 = {cores = 0.5, memory = "2 GiB"}
    ... cpu-25 = {cores = 0.25, memory = "2 GiB"}
    ... ''')
    >>> [(device.rank, device.node, device.cores) for device in two.devices]
    [(0, 0, 0.5), (1, 1, 0.25)]
    """

    links: _Links = _Links()
    nodes: Annotated[list[Node], Field(min_length=1)]
    device_types: Annotated[dict[_Name, DeviceType], Field(min_length=1)]

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Description:
        """Read a file; InputFileError, with file and line, whatever is wrong with it."""
        return _described(read_document(path))

    @classmethod
    def parse(cls, text: str, *, source: str = "<text>") -> Description:
        """Parse the text of a TOML file, with the errors of :meth:`load`."""
        return _described(parse_document(text, "toml", source=source))

    @property
    def devices(self) -> tuple[Device, ...]:
        """All devices in the order of ranks."""
        made: list[Device] = []
        for index, node in enumerate(self._every_node()):
            type_ = self.device_types[node.device]
            made += [
                Device(
                    rank=len(made) + local,
                    local_rank=local,
                    node=index,
                    type_name=node.device,
                    cores=type_.cores,
                    memory_bytes=round(type_.memory),
                )
                for local in range(node.devices)
            ]
        return tuple(made)

    @property
    def node_links(self) -> tuple[Link | None, ...]:
        """The link of each node; None where there is one node only, which needs none."""
        return tuple(node.links.inter_node or self.links.inter_node for node in self._every_node())

    def _every_node(self) -> Iterator[Node]:
        for node in self.nodes:
            for _ in range(node.count):
                yield node

    @property
    def cores(self) -> float:
        """The sum of all quotas."""
        return sum(device.cores for device in self.devices)

    def cluster_file(self) -> str:
        """The testbed as a Whale cluster file.

        Ratios of speeds are those of the quotas; the scale (10 GFLOP/s and 5 GB/s a core, 2 GB/s and 100 us within a
        node, 200 us between nodes) is only of the right magnitude: measure with ``whale profile`` before relying on
        it.
        """
        lines = ["# Ratios of speeds are those of the quotas; the scale is nominal. Measure it with `whale profile`."]
        lines += ["[links]", 'intra_node = {bandwidth = "2 GB/s", latency = "100 us"}']
        for node in self.nodes:
            lines += [
                "",
                "[[nodes]]",
                f"count = {node.count}",
                f"devices = {node.devices}",
                f'device = "{node.device}"',
            ]
            link = node.links.inter_node or self.links.inter_node
            if link is not None:
                bandwidth, latency = f"{link.bandwidth * 8 / 1e6:.10g} Mbit/s", f"{link.latency * 1e6 + 200:.10g} us"
                lines.append(f'links.inter_node = {{bandwidth = "{bandwidth}", latency = "{latency}"}}')
        for name, type_ in self.device_types.items():
            lines += ["", f'[device_types."{name}"]']
            lines.append(f'speed = {{float32 = "{type_.cores * 10:.10g} GFLOP/s"}}')
            lines.append(f'memory = "{round(type_.memory)} B"')
            lines.append(f'memory_bandwidth = "{type_.cores * 5:.10g} GB/s"')
        return "\n".join(lines) + "\n"


def _described(document: Document) -> Description:
    try:
        made = Description.model_validate(document.value)
    except ValidationError as error:
        findings = error.errors(include_url=False)
        findings.sort(key=lambda f: (f["type"] != "extra_forbidden", document.line_of(f["loc"]) or 0))
        place = findings[0]["loc"]
        message = findings[0]["msg"].removeprefix("Value error, ")
        raise document.error(f"{'.'.join(map(str, place))}: {message}", place) from None
    for index, node in enumerate(made.nodes):
        if node.device not in made.device_types:
            known = ", ".join(made.device_types)
            raise document.error(
                f"unknown device type {node.device!r}; known here: {known}", ("nodes", index, "device")
            )
        if not 1 <= round(made.device_types[node.device].memory) < 2**60:
            raise document.error("a memory lies between 1 byte and 1 EiB", ("device_types", node.device, "memory"))
    if len(links := made.node_links) > MAX_NODES:
        raise document.error(f"describes more than {MAX_NODES} nodes", ("nodes",))
    if len(links) > 1 and None in links:
        raise document.error('several nodes need links: add [links] with inter_node = {bandwidth = "1 Gbit/s"}')
    return made
