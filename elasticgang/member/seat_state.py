"""Training state that is built for a seat, and rebuilt when the rank gets other model coordinates.

SEATSTATE-1  State is built only once the rank has coordinates: a spare has none, and builds when it is promoted.
SEATSTATE-2  State belongs to one part of the model, in one layout. It is kept while only `rdp` and the rank's number
    change.
SEATSTATE-3  The state of a former seat is dropped before the next one is built.
SEATSTATE-4  No module is sharded over the replica groups, as `fully_shard` does without a mesh or with one of `dp`: its
    parts would change with the number of groups, and each group would heal its own from another group's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor, Placement

from elasticgang.errors import InvalidOperationError
from elasticgang.gang import Gangs
from elasticgang.gang.gangs import replica_gangs
from elasticgang.layout import ModelCoordinates

BuildFunction = Callable[[ModelCoordinates], Mapping[str, object]]
NameFunction = Callable[[ModelCoordinates, str], str]


class SeatState:
    """The objects that `manager.build` made for this rank's present seat, as attributes. At other model coordinates the
    attributes are other objects: read them in each step, and keep no other references."""

    def __init__(self, build: BuildFunction, names: NameFunction | None = None) -> None:
        self._build, self._names = build, names
        self._part: ModelCoordinates | None = None
        self._layout = 0  # the number of the layout that the part is of
        self._objects: dict[str, object] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # `copy` and `pickle` look for special methods
        if name in self._objects:
            return self._objects[name]
        if self._part is None:
            raise InvalidOperationError(f"`{name}` is not built yet: a rank has its seat inside `with step:`")
        raise AttributeError(f"there is no {name!r} here, only {', '.join(self._objects)}")

    def __repr__(self) -> str:
        return f"SeatState({', '.join(self._objects)} for {self._part})"

    def is_for(self, part: ModelCoordinates, layout: int) -> bool:
        """SEATSTATE-2. `layout`: the number of the layout that the part is of."""
        return (self._part, self._layout) == (part, layout)

    @property
    def name_of(self) -> Callable[[str], str] | None:
        """The whole model's name of a tensor of the present seat, from the one in its module; None: it is the same."""
        return None if self._names is None or self._part is None else functools.partial(self._names, self._part)

    def clear(self) -> tuple[str, ...]:
        """SEATSTATE-3. Returns the names of the dropped objects."""
        names = tuple(self._objects)
        self._part, self._objects = None, {}
        return names

    def make(self, part: ModelCoordinates, layout: int) -> Mapping[str, object]:
        """Build the state for a seat (SEATSTATE-1). Raises TypeError: the function did not return named objects."""
        objects: object = self._build(part)
        if not (isinstance(objects, Mapping) and objects and all(map(_is_name, objects))):
            raise TypeError(f"the function given to `build` must return named training state, but returned {objects!r}")
        self._part, self._layout, self._objects = part, layout, dict(objects)
        return self._objects


def _is_name(key: object) -> bool:
    return isinstance(key, str) and key.isidentifier() and not key.startswith("_")


def along_replica_groups(module: nn.Module, gangs: Gangs) -> Iterator[tuple[str, str, Placement]]:
    """Each parameter on a mesh that lies along the replica groups: its name, the gang, and its placement over that."""
    for name, parameter in module.named_parameters():
        if isinstance(parameter, DTensor):
            for gang, dim in replica_gangs(parameter.device_mesh, gangs).items():
                yield name, gang, parameter.placements[dim]


def check_is_of_seat(objects: Mapping[str, object], gangs: Gangs) -> None:
    """SEATSTATE-4. Raises ValueError."""
    modules = {name: item for name, item in objects.items() if isinstance(item, nn.Module)}
    for owner, module in modules.items():
        for name, gang, placement in along_replica_groups(module, gangs):
            if not placement.is_replicate():
                raise ValueError(
                    f"{name} of {owner!r} must not be sharded over the replica groups, but is over the gang "
                    f'`{gang}`: give `fully_shard` the mesh `manager.gangs.device_mesh("sdp")`.'
                )
