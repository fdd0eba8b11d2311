"""The gangs of one rank, which of them are current, and how static ones are made.

G1  The current gangs are a stack per thread: `with gangs:` in one thread does not show in another.
G2  Sub-gangs are made in the same order on every rank: by axis, then by the lowest rank of the group.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from types import TracebackType
from typing import NoReturn

import torch
from torch.distributed.device_mesh import DeviceMesh

from elasticgang.errors import GangError, InternalError, OperationalError
from elasticgang.gang.base import Gang, ReduceOperation
from elasticgang.gang.fake import FakeGang
from elasticgang.gang.mesh import axes_of_mesh, device_mesh, gang_of_mesh, refuse_foreign_default
from elasticgang.gang.process_group import ProcessGroupGang
from elasticgang.layout import FAMILIES, groups_over


class _Current(threading.local):
    def __init__(self) -> None:  # runs anew in each thread
        self.stack: list[Gangs] = []


_current = _Current()
_defaults: dict[torch.device, Gangs] = {}
_fakes: dict[torch.device, Gangs] = {}
_lock = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class Gangs:
    """All gangs of one rank. As a context manager, makes them the current ones of this thread.

    `manager.gangs` is a snapshot of one generation; the gang objects in it keep their identity from generation to
    generation and are reconfigured beneath.
    """

    root: Gang
    dp: Gang
    rdp: Gang
    sdp: Gang
    tp: Gang
    pp: Gang

    def __post_init__(self) -> None:
        for name in ("dp", "tp", "pp"):
            gang = getattr(self, name)
            if self.root.rank == 0 and gang.rank != 0:
                raise ValueError(f"Rank 0 of `root` must be rank 0 of `{name}`, but is rank {gang.rank} of it instead.")

    @property
    def device(self) -> torch.device:
        return self.root.device

    def __enter__(self) -> Gangs:
        _current.stack.append(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _current.stack.pop()

    def device_mesh(self, *names: str) -> DeviceMesh:
        """A mesh with a dimension for each of the gangs `names` ("rdp", "sdp", …), slowest-varying first, for what
        takes meshes: FSDP2 (`fully_shard`), DTensor, `parallelize_module`. `mesh.get_group(name)` is that gang's group.

        A snapshot: ask anew in each generation; modules that were wrapped with an older one go on, because its groups
        are the gangs' own. Makes `root`'s group torch's default one, if there is none. Sends nothing.

        Raises:
            ValueError: there is no such gang, or the gangs are not the axes of one grid.
            InvalidOperationError: torch's default process group is another one than `root`'s.
        """
        known = [field.name for field in fields(self)]
        for name in names:
            if name not in known:
                raise ValueError(f"`names` must be some of {', '.join(known)}, but one is {name!r} instead.")
        if len(set(names)) != len(names):
            raise ValueError(f"`names` must be distinct, but are {list(names)} instead.")
        return device_mesh(self.root, {name: getattr(self, name) for name in names})

    @classmethod
    def from_device_mesh(cls, mesh: DeviceMesh, *, device: torch.device | None = None, **dims: str) -> Gangs:
        """The gangs along the dimensions of `mesh`. `dims` says which of them is `rdp`, `sdp`, `tp` or `pp`, where it
        is not named so: `Gangs.from_device_mesh(mesh, rdp="replicate", sdp="shard")`. Called on every rank, since
        groups over several dimensions (`root`, `dp`) are made where torch has none.

        Raises:
            ValueError: a dimension of `mesh` stands for none of the gangs, or `dims` names one that it lacks.
            InvalidOperationError: there is no default process group.
        """
        refuse_foreign_default()
        of_axis = axes_of_mesh(mesh, dims)
        device = device or (torch.device("cpu") if mesh.device_type == "cpu" else get_default_device())
        along = {
            family: [of_axis[axis] for axis in axes if axis in of_axis]
            for family, axes in FAMILIES.items()
            if family != "replica"
        }
        return cls(**{family: gang_of_mesh(mesh, names, family, device) for family, names in along.items()})

    def close(self) -> None:
        """Close every gang; one that stands under several names, once."""
        gangs = [getattr(self, field.name) for field in fields(self)]
        for gang in reversed(list(dict.fromkeys(gangs))):
            gang.close()


def create_fake_gangs(device: torch.device) -> Gangs:
    """Gangs of one rank, without processes."""
    return Gangs(**{field.name: FakeGang(device) for field in fields(Gangs)})


def create_parallel_gangs(root: Gang, *, tp_size: int = 1, pp_size: int = 1) -> Gangs:
    """Split `root` for data, tensor and pipeline parallelism: `pp` outermost, then data, `tp` of adjacent ranks.

    With 8 ranks and `tp_size=2`, the tp gangs are [0, 1], [2, 3], [4, 5], [6, 7] and the dp gangs [0, 2, 4, 6],
    [1, 3, 5, 7]. Called on every rank.

    Raises:
        ValueError: a size is below 1, or `root.size` is no multiple of their product.
        GangError: a gang could not be made.
    """
    for name, size in (("tp_size", tp_size), ("pp_size", pp_size)):
        if size < 1:
            raise ValueError(f"`{name}` must be at least 1, but is {size} instead.")
    if root.size % (tp_size * pp_size):
        raise ValueError(
            f"`root.size` must be a multiple of `tp_size` x `pp_size` ({tp_size * pp_size}), but is {root.size}."
        )
    shape = (pp_size, root.size // (tp_size * pp_size), 1, tp_size)
    made = {family: _split(root, shape, family) for family in ("pp", "dp", "tp")}
    return Gangs(root=root, rdp=made["dp"], sdp=FakeGang(root.device), **made)


def create_fsdp_gangs(gangs: Gangs, intra_node_size: int | None = None) -> Gangs:
    """`gangs` with `rdp` and `sdp` for (hybrid) sharded data parallelism.

    Without `intra_node_size` all of `gangs.dp` shards; with it, each run of so many adjacent ranks of `gangs.dp` does
    (`sdp`), and the ranks of the same place in each run replicate (`rdp`). Called on every rank.

    Raises:
        ValueError: `intra_node_size` is below 2, or `gangs.dp.size` is no multiple of it.
        GangError: a gang could not be made.
    """
    if intra_node_size is None:
        return replace(gangs, rdp=FakeGang(gangs.device), sdp=gangs.dp)
    if intra_node_size <= 1:
        raise ValueError(f"`intra_node_size` must be greater than 1, but is {intra_node_size} instead.")
    if gangs.dp.size % intra_node_size:
        raise ValueError(
            f"`gangs.dp.size` must be a multiple of `intra_node_size` ({intra_node_size}), but is {gangs.dp.size}."
        )
    shape = (1, gangs.dp.size // intra_node_size, intra_node_size, 1)
    return replace(gangs, rdp=_split(gangs.dp, shape, "rdp"), sdp=_split(gangs.dp, shape, "sdp"))


def _split(parent: Gang, shape: tuple[int, int, int, int], family: str) -> Gang:
    """This rank's gang of `family` in the grid of `shape` (sizes of `AXES`) over the ranks of `parent`."""
    groups = groups_over(shape, FAMILIES[family])
    size = len(groups[0])
    if size == 1:
        return FakeGang(parent.device)
    if size == parent.size:
        return parent
    if parent.device.type == "cuda" and isinstance(parent, ProcessGroupGang):
        gang: Gang | None = parent.split(groups, family)
    else:
        made = [parent.create_gang(group) for group in groups]
        gang = next((gang for gang in made if gang is not None), None)
    if gang is None:
        raise InternalError(f"rank {parent.rank} is in no gang of {family}")
    return gang


def maybe_get_current_gangs() -> Gangs | None:
    """The gangs of the innermost `with gangs:` of this thread, or None outside."""
    return _current.stack[-1] if _current.stack else None


def get_current_gangs(device: torch.device | None = None) -> Gangs:
    """The gangs of the innermost `with gangs:` of this thread (on `device`, if given), or else the default ones."""
    for gangs in reversed(_current.stack):
        if device is None or gangs.device == device:
            return gangs
    return get_default_gangs(device)


def set_default_gangs(gangs: Gangs) -> None:
    """Make `gangs` those that all threads see outside `with gangs:`, for the device of the gangs."""
    with _lock:
        _defaults[gangs.device] = gangs


def get_default_gangs(device: torch.device | None = None) -> Gangs:
    """The default gangs of `device` (None: of `get_default_device()`); when none are set, the same fake ones always."""
    device = device or get_default_device()
    with _lock:
        if device not in _defaults and device not in _fakes:
            _fakes[device] = create_fake_gangs(torch.device("cpu") if device.type == "meta" else device)
        return _defaults.get(device) or _fakes[device]


@contextlib.contextmanager
def set_gangs(gangs: Gangs) -> Iterator[None]:
    """`with set_gangs(gangs):` is `with gangs:`."""
    with gangs:
        yield


def get_default_device() -> torch.device:
    """`cuda:LOCAL_RANK` where CUDA is available, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def get_world_size() -> int:
    """`WORLD_SIZE` of the environment, as torchrun sets it; 1 without it.

    Raises:
        OperationalError: it is set and no number above 0.
    """
    value = os.environ.get("WORLD_SIZE", "1")
    if not value.isdigit() or int(value) < 1:
        raise OperationalError(
            f"the environment variable WORLD_SIZE must be a number above 0, but is {value!r} instead."
        )
    return int(value)


def all_sum(gang: Gang, value: float | int | torch.Tensor) -> torch.Tensor:
    """The sum of `value` over all ranks of `gang`, as a tensor of shape `[]` (of `value`'s shape, for a tensor)."""
    total = value.detach().clone() if isinstance(value, torch.Tensor) else torch.tensor(value, device=gang.device)
    gang.all_reduce(total, ReduceOperation.SUM)
    return total


def broadcast_flag(gang: Gang, flag: bool, source_rank: int = 0) -> bool:
    """`flag` of rank `source_rank`, on every rank of `gang`."""
    value = torch.tensor(float(flag), device=gang.device)
    gang.broadcast(value, source_rank)
    return bool(value)


def raise_operational_gang_error(cause: GangError) -> NoReturn:
    """Raise an OperationalError that says that a collective failed."""
    raise OperationalError("A collective communication error occurred.") from cause
