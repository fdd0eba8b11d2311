"""The gangs of one rank, the current and default gangs, and the functions that make static ones.

GANGS-1  Each thread has its own stack of current gangs: `with gangs:` has no effect in other threads.
GANGS-2  Sub-gangs are made in the same order on every rank: by axis, then by the lowest rank of the group.
"""

from __future__ import annotations

import contextlib
import operator
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType, TracebackType
from typing import Any, NoReturn

import torch
from torch.distributed.device_mesh import DeviceMesh

from elasticgang.collectives.collective import ReduceOperation
from elasticgang.environment import DEVICE, JOIN, device_index, elastic_job
from elasticgang.errors import GangError, InternalError, InvalidOperationError, OperationalError, StepAborted
from elasticgang.gang.base import Gang, create_one_of
from elasticgang.gang.fake import FakeGang
from elasticgang.gang.mesh import axes_of_mesh, device_mesh, gang_of_mesh, refuse_foreign_default
from elasticgang.gang.process_group import ProcessGroupGang
from elasticgang.integers import integer_from
from elasticgang.layout import AXES, FAMILIES, groups_over

_CPU, _META = torch.device("cpu"), torch.device("meta")
_NAMES = ("root", "dp", "rdp", "sdp", "tp", "pp")


class _Current(threading.local):
    def __init__(self) -> None:  # runs in each thread (GANGS-1)
        self.stack: list[tuple[Gangs, tuple[torch.device, ...]]] = []  # with the devices for which they are current


_current = _Current()
_defaults: dict[torch.device, Gangs] = {}
_fakes: dict[torch.device, Gangs] = {}
_lock = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class Gangs:
    """All gangs of one rank. As a context manager, it makes them the current ones of this thread.

    `further`: gangs along other axes (`cp`, `ep`), by name. `gangs["cp"]` is one of them, and `gangs["tp"]` is
    `gangs.tp`; `in` and iteration use all names. `dataclasses.replace(gangs, further={...})` changes them.

    `manager.gangs` is a snapshot of one generation. Its gang objects stay the same in all generations, and are
    reconfigured between them.

    Raises:
        ValueError: rank 0 of the root is not rank 0 of `dp`, `tp`, `pp` or a further gang, or a further gang has a
            reserved name.
    """

    root: Gang
    dp: Gang
    rdp: Gang
    sdp: Gang
    tp: Gang
    pp: Gang
    further: Mapping[str, Gang] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "further", MappingProxyType(dict(self.further)))
        for name in self.further:
            if name in _NAMES:
                raise ValueError(f"`further` must name other gangs than {', '.join(_NAMES)}, but names {name!r}.")
        for name in self:
            if not isinstance(self[name], Gang):
                raise ValueError(f"`{name}` must be a gang, but is {self[name]!r} instead.")
        for name in ("dp", "tp", "pp", *self.further):
            gang = self[name]
            if self.root.rank == 0 and gang.rank != 0:
                raise ValueError(f"Rank 0 of `root` must be rank 0 of `{name}`, but is rank {gang.rank} of it instead.")

    def __getitem__(self, name: str) -> Gang:
        """The gang with this name. Raises KeyError, which lists the names."""
        if name in _NAMES:
            gang: Gang = getattr(self, name)
            return gang
        if name not in self.further:
            raise KeyError(f"there is no gang {name!r} here, only {', '.join(self)}")
        return self.further[name]

    def __contains__(self, name: object) -> bool:
        return name in _NAMES or name in self.further

    def __iter__(self) -> Iterator[str]:
        return iter((*_NAMES, *self.further))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy `further` as a dict: a read-only mapping supports neither."""
        return _remade, ({name: getattr(self, name) for name in _NAMES}, dict(self.further))

    @property
    def device(self) -> torch.device:
        return self.root.device

    def __enter__(self) -> Gangs:
        _current.stack.append((self, (self.device,)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not _current.stack or _current.stack[-1][0] is not self:
            raise InvalidOperationError("`with gangs:` ends, but other gangs were entered last in this thread")
        _current.stack.pop()

    def device_mesh(self, *names: str) -> DeviceMesh:
        """A mesh with one dimension for each of the gangs `names` ("rdp", "sdp", …), slowest-varying first, for FSDP2
        (`fully_shard`), DTensor and `parallelize_module`. `mesh.get_group(name)` is the gang's group.

        It is a snapshot: make a new one in each generation. Modules that were wrapped with an older mesh still work,
        because its groups are the gangs' own. If torch has no default process group, `root`'s becomes it. Sends
        nothing.

        Raises:
            ValueError: a name is unknown, or the gangs are not the axes of one grid.
            InvalidOperationError: torch's default process group is not `root`'s.
        """
        for name in names:
            if name not in self:
                raise ValueError(f"`names` must be some of {', '.join(self)}, but one is {name!r} instead.")
        if len(set(names)) != len(names):
            raise ValueError(f"`names` must be distinct, but are {list(names)} instead.")
        return device_mesh(self.root, {name: self[name] for name in names})

    @classmethod
    def from_device_mesh(cls, mesh: DeviceMesh, *, device: torch.device | str | None = None, **dims: str) -> Gangs:
        """The gangs along the dimensions of `mesh`. `dims` maps `rdp`, `sdp`, `tp` and `pp` to dimensions with other
        names: `Gangs.from_device_mesh(mesh, rdp="replicate", sdp="shard")`. The other dimensions are further gangs
        under their names. Call it on every rank: it makes groups over several dimensions (`root`, `dp`) where torch
        has none.

        Raises:
            ValueError: `dims` names a dimension twice or one that `mesh` does not have; or another dimension has the
                name of a different gang, or a usual name of a data-parallel dimension.
            InvalidOperationError: there is no default process group.
        """
        refuse_foreign_default()
        of_axis = axes_of_mesh(mesh, dims)
        further = [name for name in of_axis if name not in AXES]
        device = torch.device(device or ("cpu" if mesh.device_type == "cpu" else get_default_device()))
        along = {
            family: [of_axis[axis] for axis in axes if axis in of_axis]
            for family, axes in FAMILIES.items()
            if family != "replica"
        }
        along["root"] += further
        made: dict[str, Any] = {family: gang_of_mesh(mesh, names, family, device) for family, names in along.items()}
        return cls(**made, further={name: gang_of_mesh(mesh, [name], name, device) for name in further})

    def close(self) -> None:
        """Close every gang once, the root last."""
        for gang in reversed(list(dict.fromkeys(self[name] for name in self))):
            gang.close()


def _remade(gangs: Mapping[str, Gang], further: Mapping[str, Gang]) -> Gangs:
    return Gangs(**gangs, further=further)


def replica_gangs(mesh: DeviceMesh, gangs: Gangs) -> dict[str, int]:
    """The gangs along the replica groups that `mesh` has as a dimension, each with the number of the dimension."""
    along = mesh.get_all_groups()
    groups = {name: gangs[name].as_process_group() for name in ("rdp", "dp", "root")}
    return {name: along.index(group) for name, group in groups.items() if group in along}


def create_fake_gangs(device: torch.device | str) -> Gangs:
    """Gangs of one rank, without processes."""
    fakes: dict[str, Any] = {name: FakeGang(device) for name in _NAMES}
    return Gangs(**fakes)


def create_parallel_gangs(root_gang: Gang, *, tp_size: int = 1, pp_size: int = 1) -> Gangs:
    """Split `root_gang` for data, tensor and pipeline parallelism: `pp` outermost, then data, `tp` of adjacent ranks.

    With 8 ranks and `tp_size=2`, the tp gangs are [0, 1], [2, 3], [4, 5], [6, 7] and the dp gangs [0, 2, 4, 6],
    [1, 3, 5, 7]. Called on every rank.

    Raises:
        ValueError: a size is below 1, or `root_gang.size` is no multiple of their product.
        GangError: a gang could not be made.
    """
    for name, size in (("tp_size", tp_size), ("pp_size", pp_size)):
        if integer_from(1, size) is None:
            raise ValueError(f"`{name}` must be an integer of at least 1, but is {size!r} instead.")
    tp_size, pp_size = operator.index(tp_size), operator.index(pp_size)
    if root_gang.size % (tp_size * pp_size):
        raise ValueError(
            f"`root_gang.size` must be a multiple of `tp_size` x `pp_size` ({tp_size * pp_size}), but is "
            f"{root_gang.size} instead."
        )
    shape = (pp_size, root_gang.size // (tp_size * pp_size), 1, tp_size)
    pp, dp, tp = (_split(root_gang, shape, family) for family in ("pp", "dp", "tp"))
    return Gangs(root=root_gang, dp=dp, rdp=dp, sdp=FakeGang(root_gang.device), tp=tp, pp=pp)


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
    if integer_from(2, intra_node_size) is None:
        raise ValueError(f"`intra_node_size` must be an integer greater than 1, but is {intra_node_size!r} instead.")
    intra_node_size = operator.index(intra_node_size)
    if gangs.dp.size % intra_node_size:
        raise ValueError(
            f"`gangs.dp.size` must be a multiple of `intra_node_size` ({intra_node_size}), but is {gangs.dp.size}."
        )
    shape = (1, gangs.dp.size // intra_node_size, intra_node_size, 1)
    return replace(gangs, rdp=_split(gangs.dp, shape, "rdp"), sdp=_split(gangs.dp, shape, "sdp"))


def _split(parent: Gang, shape: tuple[int, int, int, int], family: str) -> Gang:
    """This rank's gang of `family` in the grid of `shape` (sizes of `AXES`) over the ranks of `parent` (GANGS-2)."""
    groups = groups_over(shape, FAMILIES[family])
    size = len(groups[0])
    if size == 1:
        return FakeGang(parent.device)
    if size == parent.size:
        return parent
    if isinstance(parent, ProcessGroupGang):
        gang: Gang | None = parent.split(groups, family)
    else:
        gang = create_one_of(parent, groups, family)
    if gang is None:
        raise InternalError(f"rank {parent.rank} is in no gang of {family}")
    return gang


def maybe_get_current_gangs() -> Gangs | None:
    """The gangs of the innermost `with gangs:` of this thread, on any device; None outside."""
    return _current.stack[-1][0] if _current.stack else None


def get_current_gangs(device: torch.device | str | None = None) -> Gangs:
    """The gangs of the innermost `with gangs:` of this thread on `device`, otherwise the default ones.

    None means torch's current device (`torch.set_default_device`, `with device:`). While that is the CPU, which is the
    default, and no gangs on the CPU are current, gangs on another device count too. In fairseq2 they do not, so that a
    rank that forgot to set the device would use fake gangs of one rank.
    """
    wanted = torch.device(device or torch.get_default_device())
    for gangs, devices in reversed(_current.stack):
        if wanted in devices:
            return gangs
    if device is None and wanted == _CPU and _current.stack:
        return _current.stack[-1][0]
    return get_default_gangs(device)


def get_default_gangs(device: torch.device | str | None = None) -> Gangs:
    """The default gangs of `device`; if none are set, always the same fake ones.

    None means torch's current device. If that is the CPU and has no default gangs, it means `get_default_device()`.
    """
    wanted = torch.device(device or torch.get_default_device())
    with _lock:
        gangs = _defaults.get(wanted)
        if gangs is None and device is None and wanted == _CPU:
            gangs = _defaults.get(get_default_device())
        if gangs is None:
            real = _CPU if wanted.type == "meta" else wanted
            gangs = _fakes.get(real) or _fakes.setdefault(real, create_fake_gangs(real))
        return gangs


def set_default_gangs(gangs: Gangs, *, meta: bool = False) -> None:
    """Make `gangs` the default of all threads outside `with gangs:`, for their device. `meta`: also for the meta
    device."""
    with _lock:
        _defaults[gangs.device] = gangs
        if meta:
            _defaults[_META] = gangs


@contextlib.contextmanager
def without_default_gangs() -> Iterator[None]:
    """Until the block ends, as if `set_default_gangs` had not been called: for tests, in a process of one thread."""
    before = dict(_defaults)
    _defaults.clear()
    try:
        yield
    finally:
        _defaults.clear()
        _defaults.update(before)


@contextlib.contextmanager
def set_gangs(gangs: Gangs, *, meta: bool = False) -> Iterator[None]:
    """`with set_gangs(gangs):` is `with gangs:`. `meta`: they are also current for the meta device."""
    _current.stack.append((gangs, (gangs.device, _META) if meta else (gangs.device,)))
    try:
        yield
    finally:
        _current.stack.pop()


def get_default_device() -> torch.device:
    """The CPU if CUDA is not available; `cuda:0` if CUDA_VISIBLE_DEVICES leaves one device; in an elastic job the
    device that the agent has chosen for this rank, which differs from `cuda:LOCAL_RANK` after `--devices` or a device
    fault; otherwise `cuda:LOCAL_RANK`.

    Raises:
        OperationalError: its index is not below the number of CUDA devices.
    """
    if not torch.cuda.is_available():
        return _CPU
    index, num_devices = device_index(), torch.cuda.device_count()
    if num_devices == 1 and "CUDA_VISIBLE_DEVICES" in os.environ:
        return torch.device("cuda", 0)
    if index >= num_devices:
        name = DEVICE if os.environ.get(DEVICE) else "LOCAL_RANK"
        raise OperationalError(
            f"the environment variable {name} must be less than the number of CUDA devices here ({num_devices}), "
            f"but is {index} instead."
        )
    return torch.device("cuda", index)


def device_uuid(device: torch.device) -> str:
    """The UUID of a CUDA device, as the driver's tools write it ("GPU-..."). Empty for the CPU, and where torch knows
    none."""
    if device.type != "cuda":
        return ""
    try:
        uuid = torch.cuda.get_device_properties(device).uuid
    except (AssertionError, AttributeError, RuntimeError):
        return ""
    return f"GPU-{uuid}"


def is_own_choice(device: torch.device) -> bool:
    """Whether this rank uses another CUDA device than the agent has chosen for it."""
    if device.type != "cuda":
        return False
    try:
        return device != get_default_device()
    except OperationalError:
        return True


def get_world_size() -> int:
    """The environment variable `WORLD_SIZE`, as torchrun sets it; 1 without it. In an elastic job it is the size of
    `manager.gangs.root`, from the first step on.

    Raises:
        OperationalError: it is not a number above 0; or this is a rank of an elastic job before its first step.
    """
    if "WORLD_SIZE" not in os.environ and (job := elastic_job()) is not None:
        raise OperationalError(
            f"this process is a rank of the elastic job {job}, which has no world size before its first step: {JOIN}."
        )
    value = os.environ.get("WORLD_SIZE", "1")
    if not value.isdigit() or int(value) < 1:
        raise OperationalError(
            f"the environment variable WORLD_SIZE must be a number above 0, but is {value!r} instead."
        )
    return int(value)


def all_sum(gang: Gang, value: float | int | torch.Tensor) -> torch.Tensor:
    """The sum of `value` over all ranks of `gang`, as a tensor of shape `[]` (of `value`'s shape, for a tensor).

    Raises:
        StepAborted: the generation of an elastic gang has ended, so that there is no sum.
    """
    total = value.detach().clone() if isinstance(value, torch.Tensor) else torch.tensor(value, device=gang.device)
    gang.all_reduce(total, ReduceOperation.SUM)
    _refuse_poisoned(gang, "all_sum")
    return total


def broadcast_flag(gang: Gang, flag: bool, source_rank: int = 0) -> bool:
    """`flag` of rank `source_rank`, on every rank of `gang`.

    Raises:
        StepAborted: the generation of an elastic gang has ended, so that the flag may not have arrived.
    """
    value = torch.tensor(float(flag), device=gang.device)
    gang.broadcast(value, source_rank)
    _refuse_poisoned(gang, "broadcast_flag")
    return bool(value)


def _refuse_poisoned(gang: Gang, call: str) -> None:
    """Raise StepAborted for a poisoned gang: the value may differ between ranks, and programs branch on it."""
    if gang.is_poisoned:
        raise StepAborted(f"the generation ended before `{call}` was complete: there is no value that all ranks share")


def raise_operational_gang_error(cause: GangError) -> NoReturn:
    """Raise an OperationalError that says that a collective failed."""
    raise OperationalError("A collective communication error occurred.") from cause
