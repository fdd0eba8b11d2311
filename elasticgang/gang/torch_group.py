"""torch's `ProcessGroup` over whatever runs collectives: what DDP, FSDP2, DTensor and functional collectives take.

T1  Every collective is written once: its form in `calls.py`, its policy in `_submit`. It takes what torch's own method
    takes, by position or by keyword, with the same meaning.
T2  `rank()` and `size()` are asked for at every call, by C++ too, so that a group may change both beneath its users.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import BroadcastOptions
from torch._C._distributed_c10d import Work as TorchWorkBase
from torch.futures import Future

from elasticgang.comm import torch_backend
from elasticgang.errors import InvalidOperationError, StepAborted
from elasticgang.gang import calls
from elasticgang.gang.base import Gang, Work
from elasticgang.gang.calls import Call
from elasticgang.gang.group_backend import BackendQueries

BACKEND_NAME = torch_backend.NAME


torch_backend.register()  # torch looks a group's devices up by its backend's name


class TorchWork(TorchWorkBase):
    """One call of a group. Its future resolves to the call's result, when all its parts have completed."""

    def __init__(self, works: Sequence[Work], call: Call, owner: object = None) -> None:
        """`owner`: kept as long as the work is. Its future keeps neither."""
        super().__init__()
        self._owner = owner
        self._works = works
        self._call = call
        self._parts: list[Future[bool]] | None = None  # the works' futures, once somebody wants them

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Raises StepAborted when the call's result had to be exact and the group was poisoned."""
        seconds = timeout.total_seconds() if timeout else None  # C++ callers give 0 for none
        completed = [work.wait(seconds) for work in self._works]  # all of them, also after one that did not complete
        _check(self._call, all(completed), self._works)
        return True

    def get_future(self) -> Future[Any]:
        """An error in it is an error to C++ too; to Python it is a RuntimeError that names the error."""
        parts, call = self._futures(), self._call

        def finish(_: Future[Any]) -> list[Any]:
            try:  # not of the future's own list, which has no errors
                completed = all(part.value() for part in parts)
            except Exception as error:
                failure = copy.copy(error.with_traceback(None))  # as `follow` says: what is raised has this frame
            else:
                _check(call, completed)
                return call.result
            raise failure

        return torch.futures.collect_all(parts).then(finish)

    def result(self) -> list[Any]:
        self.wait()
        return self._call.result

    def _source_rank(self) -> int:
        """Which rank of the group sent what was received. Only of a `recv` that has completed.

        Raises:
            RuntimeError: it is no `recv`.
        """
        return calls.source_of(self._call)

    source_rank = _source_rank

    def is_completed(self) -> bool:
        return all(future.done() for future in self._futures())

    def is_success(self) -> bool:
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        for work, future in zip(self._works, self._futures(), strict=True):
            if future.done():
                try:
                    work.wait()
                except Exception as exc:
                    return exc
        return None

    def synchronize(self) -> None:
        self.wait()

    def _futures(self) -> list[Future[bool]]:
        if self._parts is None:
            self._parts = [work.get_future() for work in self._works]
        return self._parts


def _check(call: Call, completed: bool, works: Sequence[Work] = ()) -> None:
    if call.is_exact and not completed:
        reasons = (getattr(work, "reason", None) for work in works)
        reason = next((f": {reason}" for reason in reasons if reason), "")
        raise StepAborted(
            f"the generation ended before the call was complete, and nothing else than its result will do{reason}"
        )


def _collective(name: str, form: Callable[..., Call]) -> Callable[..., Any]:
    parameters = list(inspect.signature(form).parameters)[1:]  # without the size

    def method(self: CollectiveMethods, *args: Any, **kwargs: Any) -> Any:
        named = calls.named(form, kwargs) if kwargs else kwargs
        calls.check_timeout({**dict(zip(parameters, args, strict=False)), **named}.get("timeout"))
        call = calls.with_timeout(form(self._num_members(), *args, **named), (*args, *named.values()))
        call = calls.check_place(call, self._place_among_members())
        return self._perform(name, call, args, kwargs)

    method.__name__ = name
    method.__doc__ = f"As `torch.distributed.ProcessGroup.{form.__name__}`. Raises ValueError before anything is sent."
    return method


class CollectiveMethods(BackendQueries):
    """All collectives of a torch process group, over `_submit`; and its name, which torch's own class keeps in a
    backend that there is none of here."""

    _name = ""
    _desc = ""

    @property
    def group_name(self) -> str:
        """Under which torch's registry knows the group.

        Raises:
            InvalidOperationError: it is in no registry.
        """
        return self.getGroupName()

    @property
    def group_desc(self) -> str:
        return self._desc

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    def getGroupName(self) -> str:
        if not self._name:
            raise InvalidOperationError("The process group has no name; register it first.")
        return self._name

    def getGroupDesc(self) -> str:
        return self._desc

    def rank(self) -> int:
        raise NotImplementedError

    def size(self) -> int:
        raise NotImplementedError

    def _num_members(self) -> int:
        """How many ranks take part in a collective. `size` is what its users divide by."""
        return self.size()

    def _place_among_members(self) -> int:
        return self.rank()

    def _submit(self, call: Call) -> TorchWork:
        raise NotImplementedError

    def _perform(self, name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """`call` is what the method `name` was asked for by `args` and `kwargs`."""
        return self._submit(call)

    allreduce = _collective("allreduce", calls.allreduce)
    allreduce_coalesced = _collective("allreduce_coalesced", calls.allreduce)
    allgather = _collective("allgather", calls.allgather)
    allgather_coalesced = _collective("allgather_coalesced", calls.allgather_coalesced)
    all_gather_single = _collective("all_gather_single", calls.all_gather_single)
    _allgather_base = _collective("_allgather_base", calls.all_gather_single)
    all_gather_single_coalesced = _collective("all_gather_single_coalesced", calls.all_gather_single_coalesced)
    allgather_into_tensor_coalesced = _collective("allgather_into_tensor_coalesced", calls.all_gather_single_coalesced)
    reduce_scatter = _collective("reduce_scatter", calls.reduce_scatter)
    reduce_scatter_single = _collective("reduce_scatter_single", calls.reduce_scatter_single)
    _reduce_scatter_base = _collective("_reduce_scatter_base", calls.reduce_scatter_single)
    reduce_scatter_single_coalesced = _collective(
        "reduce_scatter_single_coalesced", calls.reduce_scatter_single_coalesced
    )
    reduce_scatter_tensor_coalesced = _collective(
        "reduce_scatter_tensor_coalesced", calls.reduce_scatter_single_coalesced
    )
    alltoall = _collective("alltoall", calls.alltoall)
    all_to_all_single = _collective("all_to_all_single", calls.all_to_all_single)
    alltoall_base = _collective("alltoall_base", calls.all_to_all_single)
    broadcast = _collective("broadcast", calls.broadcast)
    reduce = _collective("reduce", calls.reduce)
    gather = _collective("gather", calls.gather)
    scatter = _collective("scatter", calls.scatter)
    send = _collective("send", calls.send)
    recv = _collective("recv", calls.recv)
    recv_anysource = _collective("recv_anysource", calls.recv_anysource)
    barrier = _collective("barrier", calls.barrier)

    def broadcast_one(self, tensor: torch.Tensor, root: int) -> Any:
        """`broadcast` of one tensor."""
        options = BroadcastOptions()
        options.rootRank = root
        return self.broadcast([tensor], options)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """As `torch.distributed.monitored_barrier` over Gloo: blocks until all ranks have come; rank 0 raises an error
        that names the first rank that did not come within `timeout` (None: the group's), or with `wait_all_ranks` all
        of them. What else happens then is what happens after any error of the group."""
        calls.check_timeout(timeout)
        call = calls.with_timeout(calls.monitored_barrier(wait_all_ranks), [timeout])
        work = self._perform("monitored_barrier", call, (timeout, wait_all_ranks), {})
        if work is not None:  # of torch's own, which has waited
            work.wait()


class GangProcessGroup(CollectiveMethods, dist.ProcessGroup):  # type: ignore[misc]  # names that torch fixes
    """A gang as a process group. It stays the gang's own through all generations: rank and size are the gang's.

    Of a poisoned gang, collectives complete with outputs as the gang's do, except that barriers, and integers that are
    moved and not reduced (torch's object collectives), raise `StepAborted`.
    """

    def __init__(self, gang: Gang) -> None:
        super().__init__(gang.rank, gang.size)  # type: ignore[call-arg]  # torch's stub lacks this form
        self._gang = gang
        self._timeout_s: float | None = None  # the gang's

    @property
    def gang(self) -> Gang:
        return self._gang

    def rank(self) -> int:
        return self._gang.rank

    def size(self) -> int:
        return self._gang.size

    getRank = rank  # what C++ callers, such as DDP's reducer, look for
    getSize = size

    def getBackendName(self) -> str:
        return BACKEND_NAME

    def _served(self) -> Sequence[str]:
        return (self._gang.device.type,)

    def set_timeout(self, timeout: timedelta) -> None:
        """For collectives that are started by this group from now on, and have no timeout of their own."""
        self._timeout_s = calls.seconds(timeout)

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> dist.ProcessGroup | None:
        """See `new_group`, which this is."""
        pg = self.new_group(ranks, group_name=group_name or "", group_desc=group_desc)
        if pg is not None and timeout is not None:
            pg.set_timeout(timeout)
        return pg

    def new_group(self, ranks: Sequence[int], **options: Any) -> dist.ProcessGroup | None:
        """What `torch.distributed.new_group` calls on a default group; other options than `group_name` are the
        gang's."""
        gang = self._gang.create_gang(ranks)
        if gang is None:
            return None
        pg = GangProcessGroup(gang)  # which torch registers itself
        pg._set_group_name(options["group_name"])
        pg._set_group_desc(options.get("group_desc") or BACKEND_NAME)
        return pg

    def shutdown(self) -> None:
        """Does nothing: the gang lives as long as its owner wants."""

    def abort(self) -> None:
        """Does nothing: see `shutdown`."""

    def __repr__(self) -> str:
        return f"GangProcessGroup({self._gang!r})"

    def _submit(self, call: Call) -> TorchWork:
        call = calls.with_default_timeout(call, self._timeout_s)
        return TorchWork([self._gang.start(part) for part in call.parts], call)
