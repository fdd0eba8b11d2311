"""A gang whose rank, size and process group change from generation to generation beneath its users.

E1  The object keeps its identity; `bind` is called between generations only, by the manager's thread.
E2  The first error poisons every gang of the rank (the binding's owner does that); from then on until the next `bind`
    tensor collectives return at once, and object and barrier calls raise `StepAborted`.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from elasticgang.errors import GangError, InvalidOperationError, NotSupportedError, StepAborted
from elasticgang.gang.base import Collective, EndedWork, Gang, Work
from elasticgang.gang.fake import simulate


class GroupWork(Protocol):
    """A collective under way in a group; `comm.client.CommWork` is one."""

    @property
    def future(self) -> torch.futures.Future[list[Tensor]]: ...

    def wait(self, timeout: float) -> None: ...


class Group(Protocol):
    """The process group of a gang in one generation. `poison` ends the generation for this rank."""

    @property
    def timeout(self) -> float: ...

    def submit(
        self, call: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor], **options: object
    ) -> GroupWork: ...

    def poison(self, error: GangError) -> None: ...


# A gang's collective as the group's call, and the options that it takes.
_CALLS = {
    "all_reduce": ("allreduce", ("op",)),
    "all_gather": ("allgather", ()),
    "all_to_all": ("alltoall", ()),
    "broadcast": ("broadcast", ("root",)),
    "gather": ("gather", ("root",)),
    "recv": ("recv", ("peer", "tag")),
    "reduce": ("reduce", ("op", "root")),
    "reduce_scatter": ("reduce_scatter", ("op",)),
    "scatter": ("scatter", ("root",)),
    "send": ("send", ("peer", "tag")),
}


# What Gloo can add, and so on.
_REDUCED = frozenset(
    {
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
        torch.int8,
        torch.uint8,
        torch.int32,
        torch.int64,
        torch.bool,
    }
)
_REDUCING = ("all_reduce", "reduce", "reduce_scatter")


@dataclass(frozen=True)
class Binding:
    """`group` is None for a gang of one."""

    rank: int
    size: int
    group: Group | None


class ElasticGang(Gang):
    """A gang of the current generation, made by the manager."""

    def __init__(self, name: str, device: torch.device) -> None:
        self._name = name
        self._device = device
        self._binding: Binding | None = None
        self._closed = False

    def bind(self, binding: Binding | None) -> None:
        self._binding = binding

    def __repr__(self) -> str:
        return f"ElasticGang({self._name!r}, {self._binding})"

    def _bound(self) -> Binding:
        if self._closed:
            raise InvalidOperationError(f"The gang {self._name} is closed.")
        if self._binding is None:
            raise InvalidOperationError(f"The gang {self._name} is in no generation; use it inside `with step:`.")
        return self._binding

    @property
    def rank(self) -> int:
        return self._bound().rank

    @property
    def size(self) -> int:
        return self._bound().size

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def supports_process_group(self) -> bool:
        return False

    def close(self) -> None:
        self._closed = True

    def create_gang(self, ranks: Sequence[int]) -> Gang | None:
        raise NotSupportedError("The gangs of a generation are made with it; declare the axes in the layout.")

    def as_process_group(self) -> ProcessGroup:
        raise NotSupportedError("An elastic gang has no process group yet.")

    def all_reduce_future(self, tensor: Tensor) -> torch.futures.Future[Tensor]:
        """SUM of `tensor` over all ranks, in place, as DDP's communication hooks want it: the future never fails.

        Of a poisoned gang it resolves at once to `tensor` as it is.
        """
        binding = self._bound()
        ended: torch.futures.Future[Tensor] = torch.futures.Future()
        if binding.group is None:
            ended.set_result(tensor)
            return ended
        work = binding.group.submit("allreduce", [tensor], [tensor], op="sum")
        work.future.add_done_callback(lambda _: ended.set_result(tensor))
        return ended

    def _start(self, collective: Collective) -> Work:
        binding = self._bound()
        if binding.group is None:
            with torch.no_grad():
                simulate(collective, 0, 1)
            return EndedWork()
        if collective.call in _REDUCING and collective.inputs[0].dtype not in _REDUCED:
            names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in _REDUCED))
            raise ValueError(
                f"`{collective.call}` needs a dtype that is reduced between processes ({names}), but the tensor's is "
                f"{collective.inputs[0].dtype} instead."
            )
        call, options = _CALLS[collective.call]
        values: dict[str, object] = {
            "op": collective.op.name.lower(),
            "root": collective.peer,
            "peer": collective.peer,
            "tag": collective.tag,
        }
        work = binding.group.submit(
            call, collective.outputs, collective.inputs, **{option: values[option] for option in options}
        )
        return _SwallowingWork(work, collective, binding.group)

    def barrier(self) -> None:
        token = torch.zeros(1)
        self._perform(Collective("all_reduce", (token,), (token,)))

    def broadcast_objects(self, objects: list[object], source_rank: int = 0) -> None:
        binding = self._bound()
        self._check_rank("source_rank", source_rank)
        if binding.group is None:
            return
        data = pickle.dumps(objects) if binding.rank == source_rank else b""
        size = torch.tensor([len(data)])
        self._perform(Collective("broadcast", (size,), (size,), peer=source_rank))
        payload = torch.frombuffer(bytearray(data or bytes(int(size))), dtype=torch.uint8)
        self._perform(Collective("broadcast", (payload,), (payload,), peer=source_rank))
        received = pickle.loads(payload.numpy().tobytes())
        if len(received) != len(objects):
            raise ValueError(
                f"`objects` must have as many items as on rank {source_rank} ({len(received)}), but has "
                f"{len(objects)} instead."
            )
        objects[:] = received

    def _perform(self, collective: Collective) -> None:
        """Run one collective; `StepAborted` when it cannot complete."""
        if not self._start(collective).wait():
            raise StepAborted(f"the generation ended before the gang {self._name} could {collective.call}")


class _SwallowingWork:
    """E2: an error poisons the gangs and shows as a result that is finite and the same every time."""

    def __init__(self, work: GroupWork, collective: Collective, group: Group) -> None:
        self._work, self._collective, self._group = work, collective, group

    def wait(self) -> bool:
        try:
            self._work.wait(self._group.timeout)
        except GangError as error:
            self._group.poison(error)
            if not self._collective.is_in_place:
                with torch.no_grad():
                    for output in self._collective.outputs:
                        output.zero_()
            return False
        return True
