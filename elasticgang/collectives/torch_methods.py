"""The collective methods of torch's `ProcessGroup`, implemented over one method, `_submit`."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import BroadcastOptions
from torch._C._distributed_c10d import Work as TorchWorkBase
from torch.futures import Future

from elasticgang.collectives import torch_calls
from elasticgang.collectives.collective import Collective
from elasticgang.collectives.group_backend import BackendQueries
from elasticgang.collectives.table import check_reduction
from elasticgang.collectives.torch_calls import Call
from elasticgang.collectives.untraced import leave_untraced
from elasticgang.collectives.work import Work
from elasticgang.errors import InvalidOperationError, StepAborted


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
        return torch_calls.source_of(self._call)

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
        reason = next((f": {work.reason}" for work in works if work.reason), "")
        raise StepAborted(
            f"the generation ended before the call was complete, and nothing else than its result will do{reason}"
        )


def _collective(name: str, form: Callable[..., Call]) -> Callable[..., Any]:
    parameters = list(inspect.signature(form).parameters)[1:]  # without the size

    def method(self: CollectiveMethods, *args: Any, **kwargs: Any) -> Any:
        named = torch_calls.named(form, kwargs) if kwargs else kwargs
        torch_calls.check_timeout({**dict(zip(parameters, args, strict=False)), **named}.get("timeout"))
        call = torch_calls.with_timeout(form(self._num_members(), *args, **named), (*args, *named.values()))
        call = torch_calls.check_place(call, self._place_among_members())
        for part in call.parts:  # all of them before any is sent
            self._check_dtype(part)
        return self._perform(name, call, args, kwargs)

    method.__name__ = name
    method.__doc__ = f"As `torch.distributed.ProcessGroup.{form.__name__}`. Raises ValueError before anything is sent."
    return method


class CollectiveMethods(BackendQueries):
    """A mixin with all collectives of a torch process group (`torch_calls.FORMS`), over `_submit`. Also keeps the
    group's name, which torch's own class keeps in a C++ backend."""

    _name = ""
    _desc = ""
    broadcast: Callable[..., Any]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        leave_untraced(cls)

    @property
    def group_name(self) -> str:
        """The group's name in torch's registry.

        Raises:
            InvalidOperationError: the group is not registered.
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
        """The number of ranks that take part in a collective. `size`, by which users divide, may be smaller."""
        return self.size()

    def _place_among_members(self) -> int:
        return self.rank()

    def _check_dtype(self, part: Collective) -> None:
        """Raises ValueError: the backend cannot reduce the dtype of `part`. On other devices than the CPU, the backend
        itself checks."""
        if part.outputs and part.outputs[0].device.type == "cpu":
            check_reduction(part)

    def _submit(self, call: Call) -> TorchWork:
        raise NotImplementedError

    def _perform(self, name: str, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Perform `call`, into which the method `name` has translated `args` and `kwargs`."""
        return self._submit(call)

    def broadcast_one(self, tensor: torch.Tensor, root: int) -> Any:
        """`broadcast` of one tensor."""
        options = BroadcastOptions()
        options.rootRank = root
        return self.broadcast([tensor], options)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """As `torch.distributed.monitored_barrier` over Gloo: block until all ranks have reached the barrier. If a rank
        does not within `timeout` (None: the group's), rank 0 raises an error that names it; with `wait_all_ranks` it
        names all absent ranks. Otherwise the error has the effect of any error of the group."""
        torch_calls.check_timeout(timeout)
        call = torch_calls.with_timeout(torch_calls.monitored_barrier(wait_all_ranks), [timeout])
        work = self._perform("monitored_barrier", call, (timeout, wait_all_ranks), {})
        if work is not None:  # torch's own group has waited already
            work.wait()


for _name, _form in torch_calls.FORMS.items():
    setattr(CollectiveMethods, _name, _collective(_name, _form))
leave_untraced(TorchWork)
leave_untraced(CollectiveMethods)
