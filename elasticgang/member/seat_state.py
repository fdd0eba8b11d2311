"""Training state that is built for a seat, and anew when the rank takes another one.

SEATSTATE-1  Nothing is built before the rank has coordinates: a spare has none, and builds when it is promoted.
SEATSTATE-2  What is built is of one part of the model; it stays while `rdp` and the rank's number change.
SEATSTATE-3  What was built for a seat that the rank has left is let go of before the next is built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from elasticgang.errors import InvalidOperationError
from elasticgang.layout import ModelCoordinates

BuildFunction = Callable[[ModelCoordinates], Mapping[str, object]]


class SeatState:
    """What `manager.build` made for this rank's present seat, by attribute. An attribute is another object once the
    rank has another seat: read it anew in each step, and keep it nowhere else."""

    def __init__(self, build: BuildFunction) -> None:
        self._build = build
        self._part: ModelCoordinates | None = None
        self._objects: dict[str, object] = {}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # what `copy` and `pickle` look for
        if name in self._objects:
            return self._objects[name]
        if self._part is None:
            raise InvalidOperationError(f"`{name}` is not built yet: a rank has its seat inside `with step:`")
        raise AttributeError(f"there is no {name!r} here, only {', '.join(self._objects)}")

    def __repr__(self) -> str:
        return f"Built({', '.join(self._objects)} for {self._part})"

    def is_for(self, part: ModelCoordinates) -> bool:
        return self._part == part

    def clear(self) -> tuple[str, ...]:
        """SEATSTATE-3. The names of what is let go."""
        names = tuple(self._objects)
        self._part, self._objects = None, {}
        return names

    def make(self, part: ModelCoordinates) -> Mapping[str, object]:
        """Raises TypeError when the function returns no named objects."""
        objects: object = self._build(part)
        if not (isinstance(objects, Mapping) and objects and all(map(_is_name, objects))):
            raise TypeError(f"the function given to `build` must return named training state, but returned {objects!r}")
        self._part, self._objects = part, dict(objects)
        return self._objects


def _is_name(key: object) -> bool:
    return isinstance(key, str) and key.isidentifier() and not key.startswith("_")
