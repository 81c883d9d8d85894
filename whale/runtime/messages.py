"""Messages between stages: how a rank starts them, and into which memory it receives.

`Messages` starts each message at once, as gloo wants it. `CoalescedMessages` are for NCCL, where all that is started on
a communicator runs one after another, and starts when the device has done what the host queued before: the messages
between two tasks start together, those that a rank receives do not wait for the task before them, and their memory is
kept from step to step. Knows tensors, peers and process groups; no programs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["CoalescedMessages", "Messages", "Queue", "ReceiveBuffers", "StagedMessages", "Work", "messages_of"]


class Work(Protocol):
    """A message that was started, or will be before it is waited for."""

    def wait(self, timeout: timedelta = ...) -> bool:
        """Wait for its end, or let the device's queue wait."""
        ...


class Messages:
    """Starts each message at once.

    Args:
        device: of the tensors.
        transport: has ``isend`` and ``irecv``: ``torch.distributed``, except in a dry run.
    """

    def __init__(self, device: torch.device, transport: Any = dist) -> None:
        self.device, self.transport = device, transport

    def blank(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory into which a message can be received."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def send(self, tensor: Tensor, peer: int, group: Any) -> Work | None:
        """Send a contiguous tensor, which must not change before the message has ended; None if this rank is not in
        the group."""
        work: Work | None = self.transport.isend(tensor, peer, group=group)
        return work

    def receive(self, tensor: Tensor, peer: int, group: Any) -> Work | None:
        """Receive into a contiguous tensor of :meth:`blank`."""
        work: Work | None = self.transport.irecv(tensor, peer, group=group)
        return work

    def start(self) -> None:
        """Start what is not started: called before every task, and before sums."""

    def task_ended(self) -> None:
        """Called when a task has been queued on the device."""


class Queue(Protocol):
    """The queues of a device on which tasks and messages run: streams of CUDA."""

    def beside(self) -> AbstractContextManager[Any]:
        """A context in which what is started does not wait for tasks."""
        ...

    def mark(self) -> Any:
        """A mark behind all tasks that are queued now."""
        ...

    def follow(self, mark: Any) -> None:
        """Let what is started beside tasks wait for a mark."""
        ...


class _Streams:
    """Queues of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def beside(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record()
        return event

    def follow(self, mark: torch.cuda.Event) -> None:
        self._stream.wait_event(mark)


class ReceiveBuffers:
    """Memory into which a rank receives, kept from step to step.

    A buffer is free when no tensor uses its memory any more, whatever views of it a task has made. The device may
    still read it then, so a message into it waits for the tasks that were queued when it was found free, and for no
    later ones. Buffers are made where messages are started: their memory was of no task before.
    """

    def __init__(self, device: torch.device, queue: Queue) -> None:
        self._device, self._queue = device, queue
        self._held: dict[tuple[tuple[int, ...], torch.dtype], list[Tensor]] = {}
        self._used: list[Tensor] = []
        self._free: dict[int, Any] = {}  # by identity, with the mark after its last use; the oldest first

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A free buffer, or a new one."""
        held = self._held.setdefault((tuple(shape), dtype), [])
        number = {id(x): x for x in held}
        found = next((key for key in self._free if key in number), None)
        if found is None:
            with self._queue.beside():
                kept = torch.empty(shape, dtype=dtype, device=self._device)
            held.append(kept)
        else:
            kept = number[found]
            self._queue.follow(self._free.pop(found))
        self._used.append(kept)
        return kept.view(kept.shape)

    def task_ended(self) -> None:
        """Find the buffers that no tensor uses."""
        free = [x for x in self._used if _uses(x) == 1]
        if free:
            mark = self._queue.mark()
            self._free |= {id(x): mark for x in free}
            self._used = [x for x in self._used if id(x) not in self._free]

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))


def _uses(x: Tensor) -> int:
    """How many tensors have the memory of one."""
    return torch._C._storage_Use_Count(x.untyped_storage()._cdata) - 1  # less this storage object


@dataclass(eq=False)
class _Message:
    """A message that starts together with others."""

    tensor: Tensor
    peer: int
    group: Any
    sends: bool
    work: Any = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        assert self.work is not None, "a message is waited for before it is started"
        done: bool = self.work.wait() if timeout is None else self.work.wait(timeout)
        return done


class CoalescedMessages(Messages):
    """Starts the messages of a process group that follow each other between two tasks together.

    Messages that were legal one after another are so together, because nothing of their ranks was between them. Those
    of another group start after them, as the programs say, on all ranks.

    Args:
        device: of the tensors.
        queue: of the device.
        start_all: starts messages, as (is sent, tensor, peer), of one process group at a time; returns the work of
            each, or one for all.
    """

    def __init__(
        self,
        device: torch.device,
        queue: Queue,
        start_all: Callable[[Sequence[tuple[bool, Tensor, int]], Any], Sequence[Any]],
    ) -> None:
        super().__init__(device)
        self._queue, self._start_all = queue, start_all
        self.buffers = ReceiveBuffers(device, queue)
        self._waiting: list[_Message] = []

    def blank(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory that is kept from step to step."""
        return self.buffers.take(shape, dtype)

    def send(self, tensor: Tensor, peer: int, group: Any) -> Work:
        """Send when the next task is started, or before."""
        return self._add(_Message(tensor, peer, group, True))

    def receive(self, tensor: Tensor, peer: int, group: Any) -> Work:
        """Receive when the next task is started, or before."""
        return self._add(_Message(tensor, peer, group, False))

    def _add(self, message: _Message) -> _Message:
        if self._waiting and self._waiting[0].group is not message.group:
            self.start()
        self._waiting.append(message)
        return message

    def start(self) -> None:
        """Start messages, without waiting for tasks if all are received."""
        messages, self._waiting = self._waiting, []
        if not messages:
            return
        sends = any(message.sends for message in messages)
        with nullcontext() if sends else self._queue.beside():
            works = self._start_all([(m.sends, m.tensor, m.peer) for m in messages], messages[0].group)
        for number, message in enumerate(messages):
            message.work = works[number if len(works) == len(messages) else 0]

    def task_ended(self) -> None:
        """Find the memory that tasks have left."""
        self.buffers.task_ended()


class StagedMessages(Messages):
    """Sends and receives through the host, where ranks that share a GPU communicate by gloo, as in tests."""

    def send(self, tensor: Tensor, peer: int, group: Any) -> Work | None:
        """Send a copy on the host."""
        return super().send(tensor.cpu(), peer, group)

    def receive(self, tensor: Tensor, peer: int, group: Any) -> Work | None:
        """Receive into the host's memory, from which the tensor is copied when the message is waited for."""
        held = torch.empty(tensor.shape, dtype=tensor.dtype)
        work = super().receive(held, peer, group)
        return None if work is None else _Staged(work, held, tensor)


@dataclass(eq=False)
class _Staged:
    """A message that arrives on the host."""

    work: Work
    held: Tensor
    target: Tensor

    def wait(self, timeout: timedelta | None = None) -> bool:
        done = self.work.wait() if timeout is None else self.work.wait(timeout)
        self.target.copy_(self.held)
        return done


def _start_on_nccl(messages: Sequence[tuple[bool, Tensor, int]], group: Any) -> Sequence[Any]:
    """Start messages in one call of NCCL."""
    operations = [dist.P2POp(dist.isend if sends else dist.irecv, x, peer, group) for sends, x, peer in messages]
    works: Sequence[Any] = dist.batch_isend_irecv(operations)
    return works


def messages_of(device: torch.device, transport: Any = dist) -> Messages:
    """How messages are started on a device."""
    if device.type != "cuda" or transport is not dist:
        return Messages(device, transport)
    if dist.is_initialized() and "cuda:gloo" in str(dist.get_backend_config()):
        return StagedMessages(device)
    return CoalescedMessages(device, _Streams(device), _start_on_nccl)
