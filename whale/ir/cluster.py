"""The cluster: nodes, devices with their speed and memory, and the links between them; and its file format.

A ``Cluster`` is frozen data, made from a file, from the detected devices of a launch, or of equal devices. It knows no
catalog: known device types are passed in. It describes hardware and predicts no times.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from os import PathLike
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, ValidationError, WithJsonSchema
from pydantic_core import ErrorDetails

from whale.errors import InputFileError, PlanMismatchError, UsageError
from whale.ir.device_names import matching_types, near_types
from whale.ir.document import Document, Format, parse_document, read_document
from whale.ir.file_kinds import said_of_another_kind
from whale.ir.json_text import format_json
from whale.ir.record import in_words
from whale.ir.units import PATTERNS, Quantity, counted, parse_quantity, started

__all__ = ["DTYPES", "Cluster", "Device", "DeviceType", "HostMemory", "Link", "Network", "Node", "Region"]

DTYPES = ("float64", "float32", "tfloat32", "float16", "bfloat16", "float8")
"""The dtypes for which a speed may be given; ``tfloat32`` is float32 multiplied on NVIDIA's tensor cores."""

Network = Literal["tcp", "rdma", "efa"]
"""Ethernet through the kernel; InfiniBand, RoCE and the like; Amazon's Elastic Fabric Adapter."""

MAX_DEVICES = 131_072
MAX_ADAPTERS = 1_024
MAX_ADAPTER_BANDWIDTH = 50e9
"""Bytes per second, 400 Gbit/s: the fastest adapter in wide use (InfiniBand NDR, 400 GbE, EFA of AWS p5)."""


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link within a node or between nodes, in one direction.

    Attributes:
        bandwidth: bytes per second. Within a node: from a device to the others of its node. Between nodes: of all
            adapters of a node together.
        latency: seconds from one device to another.
        adapters: between nodes: number of network adapters of a node, of which a message uses one; see
            :attr:`num_adapters`.
        network: between nodes: the protocol, if known.
    """

    bandwidth: float
    latency: float
    adapters: int | None = None
    network: Network | None = None

    @property
    def num_adapters(self) -> int:
        """Number of adapters; by default the fewest that reach the bandwidth at 400 Gbit/s each.

        >>> Link(bandwidth=400e9, latency=5e-6).num_adapters
        8
        """
        return self.adapters or ceil(self.bandwidth / MAX_ADAPTER_BANDWIDTH)


@dataclass(frozen=True, kw_only=True)
class DeviceType:
    """A kind of accelerator.

    Attributes:
        name: such as ``A100-SXM4-80GB``.
        rates: FLOP/s per dtype, as pairs sorted by name; see :meth:`speed`.
        memory_bytes: capacity.
        memory_bandwidth: bytes per second.
        intra_node: default link between such devices in a node; None: a cluster file must give it.
    """

    name: str
    rates: tuple[tuple[str, float], ...]
    memory_bytes: int
    memory_bandwidth: float
    intra_node: Link | None = None

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.rates, self.memory_bytes, self.memory_bandwidth, self.intra_node))

    def __hash__(self) -> int:
        """Worked out once: types are part of the keys by which costs are looked up."""
        return self._hash

    @property
    def is_processor(self) -> bool:
        """Whether devices of this type are processors: their names begin with ``cpu``, because they have no driver of
        their own.

        >>> DeviceType.of("cpu-50", speed={"float32": 1e10}, memory_bytes=1, memory_bandwidth=1.0).is_processor
        True
        """
        return self.name.lower().startswith("cpu")

    @classmethod
    def of(
        cls,
        name: str,
        *,
        speed: Mapping[str, float],
        memory_bytes: int,
        memory_bandwidth: float,
        intra_node: Link | None = None,
    ) -> DeviceType:
        """Make a type from a mapping of number types to FLOP/s.

        Raises:
            UsageError: an unknown number type, none at all, or a figure that is not positive.
        """
        unknown = sorted(set(speed) - set(DTYPES))
        if unknown or not speed:
            what = f"unknown number type {unknown[0]!r}" if unknown else "no speed"
            raise UsageError(f"device type {name!r} has {what}; give speeds for {', '.join(DTYPES)}")
        if min(*speed.values(), memory_bytes, memory_bandwidth) <= 0:
            raise UsageError(f"device type {name!r}: speeds, memory and memory bandwidth must be positive")
        return cls(
            name=name,
            rates=tuple(sorted(speed.items())),
            memory_bytes=memory_bytes,
            memory_bandwidth=memory_bandwidth,
            intra_node=intra_node,
        )

    def speed(self, dtype: str) -> float:
        """FLOP/s in *dtype*; an unlisted dtype runs as fast as float32, or else as the slowest listed one.

        This holds for bfloat16 on devices without it, and is too high for float64, whose rate differs most between
        devices: list it where it matters.

        >>> card = DeviceType.of("card", speed={"float32": 9.3e12}, memory_bytes=2**34, memory_bandwidth=7e11)
        >>> card.speed("bfloat16")
        9300000000000.0
        """
        if dtype not in DTYPES:
            raise UsageError(f"unknown number type {dtype!r}; use one of {', '.join(DTYPES)}")
        rates = dict(self.rates)
        return rates.get(dtype) or rates.get("float32") or min(rates.values())


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator, which one rank drives.

    Attributes:
        rank: of the process, and position in ``Cluster.devices``.
        name: unique in the cluster, such as ``A100-SXM4-80GB:3``, where 3 is the rank.
        type: its device type.
        node: name of its node.
    """

    rank: int
    name: str
    type: DeviceType
    node: str

    @property
    def memory_bytes(self) -> int:
        """Capacity."""
        return self.type.memory_bytes

    def speed(self, dtype: str) -> float:
        """FLOP/s in *dtype*; see :meth:`DeviceType.speed`."""
        return self.type.speed(dtype)


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Memory of a node beside that of its devices, as it is described; None: it is not (`whale.planner.cost.hosts` has
    what is assumed then).

    Attributes:
        size_bytes: of all its ranks together.
        bandwidth: bytes per second that all its processors together read and write.
        device_link: bytes per second that each of its devices copies from it, and as many to it, all devices at once.
    """

    size_bytes: int | None = None
    bandwidth: float | None = None
    device_link: float | None = None


@dataclass(frozen=True, kw_only=True)
class Region:
    """A place with several nodes, far from those of others: its name, and the link from all its nodes together to the
    other regions."""

    name: str
    link: Link


@dataclass(frozen=True, kw_only=True)
class Node:
    """One machine: the ranks of its devices, its links within and to other nodes (None: it needs none), its host name,
    if the file gives it, its memory, and the region in which it is (None: all nodes are in one place)."""

    name: str
    ranks: tuple[int, ...]
    intra: Link | None
    inter: Link | None
    host: str | None = None
    host_memory: HostMemory = HostMemory()
    region: Region | None = None


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """All nodes and devices, in the order of ranks.

    >>> cluster = Cluster.parse('''
    ... [links]
    ... intra_node = {bandwidth = "300 GB/s", latency = "5 us"}
    ... [[nodes]]
    ... devices = 2
    ... device = "card"
    ... [device_types.card]
    ... speed = {float32 = "9.3 TFLOP/s"}
    ... memory = "16 GiB"
    ... memory_bandwidth = "732 GB/s"
    ... ''')
    >>> [device.name for device in cluster.devices], cluster.link(0, 1).bandwidth
    (['card:0', 'card:1'], 300000000000.0)
    """

    nodes: tuple[Node, ...]
    devices: tuple[Device, ...]

    @classmethod
    def load(cls, path: str | PathLike[str], *, catalog: Mapping[str, DeviceType] | None = None) -> Cluster:
        """Read a cluster file, TOML or YAML by its suffix.

        Args:
            path: of the file.
            catalog: device types that the file may name without defining them.

        Raises:
            InputFileError: with file and line, whatever is wrong with the file.
        """
        return _cluster_of(read_document(path), catalog or {})

    @classmethod
    def parse(
        cls,
        text: str,
        format: Format = "toml",
        *,
        source: str = "<text>",
        catalog: Mapping[str, DeviceType] | None = None,
    ) -> Cluster:
        """Parse the text of a cluster file; *source* is its name in errors."""
        return _cluster_of(parse_document(text, format, source=source), catalog or {})

    @classmethod
    def of(
        cls, devices: Sequence[tuple[str, DeviceType]], *, intra: Link | None = None, inter: Link | None = None
    ) -> Cluster:
        """A cluster of devices given in the order of ranks, each as the name of its node and its type.

        Raises:
            UsageError: there is no device, or the ranks of a node are not consecutive.
        """
        if not devices:
            raise UsageError("a cluster needs at least one device")
        members: dict[str, list[int]] = {}
        made: list[Device] = []
        for rank, (node, type_) in enumerate(devices):
            if node in members and members[node][-1] != rank - 1:
                raise UsageError(f"the ranks of node {node!r} are not consecutive: it has {members[node]}, then {rank}")
            members.setdefault(node, []).append(rank)
            made.append(Device(rank=rank, name=f"{type_.name}:{rank}", type=type_, node=node))
        nodes = tuple(Node(name=name, ranks=tuple(ranks), intra=intra, inter=inter) for name, ranks in members.items())
        return cls(nodes=nodes, devices=tuple(made))

    @classmethod
    def homogeneous(
        cls,
        num_devices: int,
        type: DeviceType | None = None,
        *,
        num_devices_per_node: int | None = None,
        intra: Link | None = None,
        inter: Link | None = None,
    ) -> Cluster:
        """Equal devices on equal nodes, for a launch without a cluster file.

        Without *type* the devices have 1 TFLOP/s, 16 GiB and 1 TB/s: placeholders, sufficient where only ratios matter.
        """
        if num_devices < 1:
            raise UsageError(f"a cluster needs at least one device, not {num_devices}")
        per_node = num_devices_per_node or num_devices
        if num_devices % per_node:
            raise UsageError(f"{num_devices} devices cannot lie on nodes of {per_node}")
        equal = type or DeviceType.of("device", speed={"float32": 1e12}, memory_bytes=2**34, memory_bandwidth=1e12)
        return cls.of([(f"node{rank // per_node}", equal) for rank in range(num_devices)], intra=intra, inter=inter)

    def dumps(self, *, catalog: Mapping[str, DeviceType] | None = None) -> str:
        """The text of a cluster file in JSON that describes this cluster, with its device types that are not those of
        the *catalog* with which it will be read.

        Raises:
            UsageError: a node has devices of several types, for which files have no form.

        >>> two = Cluster.homogeneous(2, intra=Link(bandwidth=1e9, latency=1e-5))
        >>> Cluster.parse(two.dumps(), "json") == two
        True
        """
        known = catalog or {}
        types = dict.fromkeys(device.type for device in self.devices if known.get(device.type.name) != device.type)
        nodes = [_written_node(node, {self.devices[rank].type.name for rank in node.ranks}) for node in self.nodes]
        return format_json(
            {"format_version": 1, "nodes": nodes, "device_types": {type_.name: _written_type(type_) for type_ in types}}
        )

    @property
    def names_hosts(self) -> bool:
        """Whether the nodes have host names: all of them have, or none."""
        return self.nodes[0].host is not None

    def on_hosts(self, hosts: Sequence[str]) -> Cluster:
        """The cluster with its nodes in the order of the ranks that run on them.

        Args:
            hosts: host name of each rank, in full or up to the first dot.

        Raises:
            PlanMismatchError: a node has another number of devices than its host has ranks, or these are not
                consecutive.

        >>> card = DeviceType.of("card", speed={"float32": 1e12}, memory_bytes=2**30, memory_bandwidth=1e9)
        >>> two = Cluster.of([("a", card), ("b", card), ("b", card)])
        >>> named = replace(two, nodes=tuple(replace(node, host=node.name) for node in two.nodes))
        >>> [node.name for node in named.on_hosts(["b.lab", "b.lab", "a.lab"]).nodes]
        ['b', 'a']
        """
        short = [host.partition(".")[0] for host in hosts]
        found: dict[int, Node] = {}
        for node in self.nodes:
            host = str(node.host)
            ranks = [rank for rank, (full, first) in enumerate(zip(hosts, short, strict=True)) if host in (full, first)]
            if len(ranks) != len(node.ranks):
                raise PlanMismatchError(
                    f"the cluster's node {node.name} on host {host} needs {len(node.ranks)} ranks, but {len(ranks)} "
                    f"run there (ranks are on {', '.join(dict.fromkeys(hosts))}); start as many processes on each host "
                    "as its node has devices, or correct the cluster file"
                )
            if ranks[-1] - ranks[0] >= len(ranks):
                raise PlanMismatchError(f"the ranks on host {host} are {ranks}, which are not consecutive")
            found[ranks[0]] = node
        nodes: list[Node] = []
        devices: list[Device] = []
        for first, node in sorted(found.items()):
            for old in node.ranks:
                device, rank = self.devices[old], len(devices)
                devices.append(replace(device, rank=rank, name=f"{device.type.name}:{rank}"))
            nodes.append(replace(node, ranks=tuple(range(first, first + len(node.ranks)))))
        return replace(self, nodes=tuple(nodes), devices=tuple(devices))

    def check_world(self, world_size: int) -> None:
        """Refuse a number of ranks other than that of the devices.

        Raises:
            PlanMismatchError: there are more or fewer.
        """
        if len(self.devices) != world_size:
            raise PlanMismatchError(
                f"the cluster has {counted(len(self.devices), 'device')}, but {started(world_size)}; use torchrun with "
                f"{len(self.devices)} in total, or another cluster file"
            )

    def node_of(self, rank: int) -> Node:
        """The node of the device of *rank*."""
        return self._nodes_by_name[self._device(rank).node]

    def link(self, first: int, second: int) -> Link:
        """The link between two ranks in the file: that of their node, or that of the slower of two nodes, or of their
        regions (with the largest latency), whose adapters all devices of the node share.

        ``whale.planner.network.topology`` computes the bandwidth of a message.

        Raises:
            UsageError: the cluster does not say what that link is.
        """
        here, there = self.node_of(first), self.node_of(second)
        if here is there:
            links = [here.intra]
        else:
            links = [here.inter, there.inter]
            if here.region is not None and there.region is not None and here.region != there.region:
                links += [here.region.link, there.region.link]
        known = [link for link in links if link is not None]
        if len(known) < len(links):
            kind = "intra" if here is there else "inter"
            raise UsageError(
                f"no {kind}_node link is known between ranks {first} and {second}; describe it in a cluster file"
            )
        return replace(min(known, key=lambda link: link.bandwidth), latency=max(link.latency for link in known))

    def least_bandwidth(self, ranks: Iterable[int]) -> float:
        """Bytes per second of the slowest link among ranks, as `link` has them; 0 if one is unknown. Linear in the
        ranks."""
        on = Counter(self.devices[rank].node for rank in ranks)
        nodes = [self._nodes_by_name[name] for name in on]
        links = {node.intra for node in nodes if on[node.name] > 1}
        if len(nodes) > 1:
            links |= {node.inter for node in nodes}
            regions = {node.region for node in nodes} - {None}
            links |= {region.link for region in regions if region is not None and len(regions) > 1}
        return min((link.bandwidth if link is not None else 0.0 for link in links), default=0.0)

    @cached_property
    def _nodes_by_name(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes}

    def _device(self, rank: int) -> Device:
        if not 0 <= rank < len(self.devices):
            raise UsageError(f"rank {rank} does not exist: the cluster has {len(self.devices)} devices")
        return self.devices[rank]

    @staticmethod
    def schema() -> dict[str, Any]:
        """The JSON schema of the file, as published."""
        return _File.model_json_schema()


# --- the file
# -----------------------------------------------------------------------------------------------------------


LIMITS: dict[Quantity, tuple[float, float, str]] = {
    "memory": (2**10, 2**60, "1 KiB and 1 EiB"),
    "bandwidth": (1e3, 1e17, "1 kB/s and 100 PB/s"),
    "latency": (0.0, 60.0, "0 and 60 s"),
    "speed": (1e6, 1e21, "1 MFLOP/s and 1000 EFLOP/s"),
}
"""Least and greatest figure of a cluster file, far beyond what hardware has: others are slips, such as a wrong unit."""


def _written(quantity: Quantity) -> Any:
    least, most, words = LIMITS[quantity]

    def parse(given: object) -> float:
        value = parse_quantity(given, quantity)
        if not least <= value <= most:
            raise ValueError(f"a {quantity} lies between {words}, not {given}")
        return value

    return Annotated[float, BeforeValidator(parse), WithJsonSchema({"type": "string", "pattern": PATTERNS[quantity]})]


_Name = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"^[^\x00-\x1f\x7f]+$")]


class _Table(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)


class _Link(_Table):
    bandwidth: _written("bandwidth")  # type: ignore[valid-type]
    latency: _written("latency")  # type: ignore[valid-type]


class _InterNodeLink(_Link):
    adapters: Annotated[int, Field(ge=1, le=MAX_ADAPTERS)] | None = None
    network: Network | None = None


class _InterRegionLink(_Link):
    network: Network = "tcp"


class _Links(_Table):
    intra_node: _Link | None = None
    inter_node: _InterNodeLink | None = None
    inter_region: _InterRegionLink | None = None


class _HostMemory(_Table):
    size: _written("memory") | None = None  # type: ignore[valid-type]
    bandwidth: _written("bandwidth") | None = None  # type: ignore[valid-type]
    device_link: _written("bandwidth") | None = None  # type: ignore[valid-type]


class _Node(_Table):
    count: Annotated[int, Field(ge=1, le=MAX_DEVICES)] = 1
    devices: Annotated[int, Field(ge=1, le=MAX_DEVICES)]
    device: _Name
    name: _Name | None = None
    hosts: Annotated[list[_Name], Field(max_length=MAX_DEVICES)] | None = None
    region: _Name | None = None
    links: _Links = _Links()
    host_memory: _HostMemory = _HostMemory()


class _Type(_Table):
    speed: Annotated[dict[Literal[*DTYPES], _written("speed")], Field(min_length=1)]  # type: ignore[valid-type]
    memory: _written("memory")  # type: ignore[valid-type]
    memory_bandwidth: _written("bandwidth")  # type: ignore[valid-type]


class _File(_Table):
    """A cluster: kinds of nodes, the links of their devices, and device types that are not known already."""

    format_version: Literal[1] = 1
    links: _Links = _Links()
    host_memory: _HostMemory = _HostMemory()
    nodes: Annotated[list[_Node], Field(min_length=1)]
    device_types: dict[_Name, _Type] = {}


def _cluster_of(document: Document, catalog: Mapping[str, DeviceType]) -> Cluster:
    try:
        file = _File.model_validate(document.value)
    except ValidationError as error:
        if said := said_of_another_kind(document.value, Cluster.__name__):
            raise document.error(said) from None
        raise _first_error(document, error) from None
    own = {
        name: DeviceType.of(
            name, speed=given.speed, memory_bytes=round(given.memory), memory_bandwidth=given.memory_bandwidth
        )
        for name, given in file.device_types.items()
    }
    types = {**catalog, **own}
    if sum(entry.count * entry.devices for entry in file.nodes) > MAX_DEVICES:
        raise document.error(f"describes more than {MAX_DEVICES} devices", ("nodes",))
    num_nodes = sum(entry.count for entry in file.nodes)
    nodes: list[Node] = []
    devices: list[Device] = []
    regions = _regions(document, file)
    names: set[str] = set()
    for index, entry in enumerate(file.nodes):
        named = matching_types(entry.device, {name: type_.memory_bytes for name, type_ in types.items()})
        if len(named) != 1:
            raise document.error(_no_type(entry.device, named, types), ("nodes", index, "device"))
        type_ = types[named[0]]
        intra = _link(entry.links.intra_node or file.links.intra_node) or type_.intra_node
        inter = _link(entry.links.inter_node or file.links.inter_node)
        for needed, link, kind in ((entry.devices > 1, intra, "intra_node"), (num_nodes > 1, inter, "inter_node")):
            if needed and link is None:
                raise document.error(
                    f"no {kind} link is given for these nodes; add {kind} = {{bandwidth = ..., latency = ...}} to "
                    f"[links]",
                    ("nodes", index),
                )
        host_memory = _host_memory(entry.host_memory, file.host_memory)
        hosts: Sequence[str | None] = entry.hosts or [None] * entry.count
        region = regions.get(entry.region or "")
        if len(hosts) != entry.count or (entry.hosts is None) != (file.nodes[0].hosts is None):
            raise document.error(
                f"count is {entry.count}, with {len(entry.hosts or ())} hosts; name one for each node of the file, or "
                "none",
                ("nodes", index),
            )
        for copy in range(entry.count):
            name = f"node{len(nodes)}" if entry.name is None else entry.name + (str(copy) if entry.count > 1 else "")
            if name in names:
                raise document.error(f"two nodes are named {name!r}; give each its own name", ("nodes", index))
            names.add(name)
            ranks = tuple(range(len(devices), len(devices) + entry.devices))
            devices += [Device(rank=rank, name=f"{type_.name}:{rank}", type=type_, node=name) for rank in ranks]
            nodes.append(
                Node(
                    name=name,
                    ranks=ranks,
                    intra=intra,
                    inter=inter,
                    host=hosts[copy],
                    host_memory=host_memory,
                    region=region,
                )
            )
    named = [node.host for node in nodes if node.host is not None]
    if len(set(named)) < len(named):
        twice = next(host for host in named if named.count(host) > 1)
        raise document.error(f"two nodes are on host {twice!r}; a host is one node", ("nodes",))
    return Cluster(nodes=tuple(nodes), devices=tuple(devices))


def _regions(document: Document, file: _File) -> dict[str, Region]:
    """The regions of a file by name, each with its link to the others."""
    links: dict[str, Link | None] = {}
    for index, entry in enumerate(file.nodes):
        if (entry.region is None) != (file.nodes[0].region is None):
            raise document.error("some nodes are in a region and some in none; give all nodes one", ("nodes", index))
        if entry.region is not None:
            link = _link(entry.links.inter_region or file.links.inter_region)
            if links.setdefault(entry.region, link) != link:
                raise document.error(
                    f"the nodes of region {entry.region!r} have other inter_region links than those before; a region "
                    "has one, of all its nodes together",
                    ("nodes", index),
                )
    if len(links) > 1 and None in links.values():
        nodes = [entry.region for entry in file.nodes]
        name = next(name for name, link in links.items() if link is None)
        raise document.error(
            f"no inter_region link of region {name!r} is given; add inter_region = {{bandwidth = ..., latency = ...}} "
            "to [links]",
            ("nodes", nodes.index(name)),
        )
    return {name: Region(name=name, link=link) for name, link in links.items() if link is not None}


def _link(given: _Link | None) -> Link | None:
    return None if given is None else Link(**given.model_dump())


def _host_memory(own: _HostMemory, general: _HostMemory) -> HostMemory:
    """The memory of a node, as its entry says it, else as the file does of all."""
    given = general.model_dump() | own.model_dump(exclude_none=True)
    size = given.pop("size")
    return HostMemory(size_bytes=None if size is None else round(size), **given)


def _written_node(node: Node, types: set[str]) -> dict[str, Any]:
    """A node as a file has it."""
    if len(types) > 1:
        names = ", ".join(sorted(types))
        raise UsageError(f"node {node.name} has devices of several types ({names}), which no cluster file says")
    region = node.region
    given = (
        ("intra_node", node.intra),
        ("inter_node", node.inter),
        ("inter_region", None if region is None else region.link),
    )
    links = {name: _written_link(link) for name, link in given if link is not None}
    memory = node.host_memory
    figures = {"size": memory.size_bytes, "bandwidth": memory.bandwidth, "device_link": memory.device_link}
    host = {
        name: f"{value!r} B" + ("" if name == "size" else "/s") for name, value in figures.items() if value is not None
    }
    written: dict[str, Any] = {"name": node.name, "devices": len(node.ranks), "device": types.pop()}
    hosts = None if node.host is None else [node.host]
    named = None if region is None else region.name
    further = (("hosts", hosts), ("region", named), ("links", links), ("host_memory", host))
    return written | {k: v for k, v in further if v}


def _written_link(link: Link) -> dict[str, Any]:
    further = {"adapters": link.adapters, "network": link.network}
    written: dict[str, Any] = {"bandwidth": f"{link.bandwidth!r} B/s", "latency": f"{link.latency!r} s"}
    return written | {name: value for name, value in further.items() if value is not None}


def _written_type(type_: DeviceType) -> dict[str, Any]:
    return {
        "speed": {dtype: f"{rate!r} FLOP/s" for dtype, rate in type_.rates},
        "memory": f"{type_.memory_bytes} B",
        "memory_bandwidth": f"{type_.memory_bandwidth!r} B/s",
    }


def _no_type(name: str, named: Sequence[str], types: Mapping[str, DeviceType]) -> str:
    """Why a name is not that of one device type."""
    if named:
        return f"{name!r} is {', '.join(named[:-1])} or {named[-1]}; say which"
    near = near_types(name, types)
    hint = f"did you mean {' or '.join(map(repr, near))}? Otherwise define" if near else "define"
    return f"unknown device type {name!r}; {hint} it under [device_types]"


def _first_error(document: Document, error: ValidationError) -> InputFileError:
    """The first error in file order, in the user's words; a misspelt key precedes the missing key that it causes."""
    findings = error.errors(include_url=False, include_context=True)
    findings.sort(key=lambda finding: (finding["type"] != "extra_forbidden", document.line_of(_place(finding)) or 0))
    first = findings[0]
    place = _place(first)
    where = ".".join(str(part) for part in place)
    match first["type"]:
        case "extra_forbidden":
            known = _known_keys(place[:-1])
            near = difflib.get_close_matches(str(place[-1]), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(known)}"
            message = f"unknown key {str(place[-1])!r}; {hint}"
        case "missing":
            message = f"the key {str(place[-1])!r} is missing"
        case "value_error":
            message = f"{where}: {str(first['msg']).removeprefix('Value error, ')}"
        case "literal_error" if first["loc"][-1] == "[key]":
            message = f"{where}: unknown number type; use one of {', '.join(DTYPES)}"
        case "list_type" if isinstance(first["input"], dict):
            message = f"{where}: must be a list of tables; write [[{where}]] for each"
        case _:
            message = f"{where}: {in_words(first['msg'])}, not {repr(first['input'])[:80]}"
    if len(findings) > 1:
        message += f" (and {len(findings) - 1} more)"
    return document.error(message, place)


def _place(finding: ErrorDetails) -> tuple[int | str, ...]:
    """Path of a finding; pydantic puts ``[key]`` after a key that is itself wrong (a user's key may be called so
    too)."""
    loc = finding["loc"]
    wrong_key = len(loc) > 1 and loc[-1] == "[key]" and finding["type"] != "extra_forbidden"
    return loc[:-1] if wrong_key else loc


def _known_keys(place: tuple[int | str, ...]) -> list[str]:
    """The keys of the table at *place*."""
    table: type[_Table] = _File
    match place:
        case ("nodes", _):
            table = _Node
        case ("links",) | ("nodes", _, "links"):
            table = _Links
        case (*_, "intra_node"):
            table = _Link
        case (*_, "inter_node"):
            table = _InterNodeLink
        case ("device_types", _):
            table = _Type
        case ("host_memory",) | ("nodes", _, "host_memory"):
            table = _HostMemory
    return list(table.model_fields)
