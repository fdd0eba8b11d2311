"""Which slots are fetched next, and what has been fetched: the state behind `DataLoader`.

Pure. A key is `(step index, slot number)`. The caller holds a lock.

PREFETCH-1  A slot that was fetched and is still wanted is never fetched again, whatever else changes.
PREFETCH-2  The slot that is needed first is fetched first.
PREFETCH-3  A slot whose fetch was interrupted is wanted again. After `MAX_ATTEMPTS` it has failed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, TypeVar

Key = tuple[int, int]
T = TypeVar("T")

MAX_ATTEMPTS = 3


class Prefetch(Generic[T]):
    def __init__(self) -> None:
        self._wanted: dict[Key, None] = {}  # in the order of need
        self._assigned: set[Key] = set()
        self._found: dict[Key, T] = {}
        self._interrupted: dict[Key, int] = {}

    def want(self, keys: Iterable[Key]) -> None:
        """From now on want exactly `keys`, the one that is needed first at the beginning. What was fetched of them
        stays (PREFETCH-1), and that of others is dropped."""
        self._wanted = dict.fromkeys(keys)
        self._found = {key: found for key, found in self._found.items() if key in self._wanted}
        self._interrupted = {key: count for key, count in self._interrupted.items() if key in self._wanted}

    def has_next(self) -> bool:
        return self.first() is not None

    def assign(self) -> Key | None:
        """The next key to fetch. None: there is none."""
        key = self.first()
        if key is not None:
            self._assigned.add(key)
        return key

    def first(self) -> Key | None:
        """The key that `assign` would give (PREFETCH-2)."""
        return next((key for key in self._wanted if key not in self._found and key not in self._assigned), None)

    def arrived(self, key: Key, found: T) -> None:
        """`key`, which was assigned, has been fetched."""
        self._assigned.discard(key)
        if key in self._wanted:
            self._found.setdefault(key, found)

    def interrupted(self, key: Key) -> bool:
        """The fetch of `key` was interrupted, and `key` was the reason. Whether it may be tried again (PREFETCH-3)."""
        self._assigned.discard(key)
        self._interrupted[key] = self._interrupted.get(key, 0) + 1
        return self._interrupted[key] < MAX_ATTEMPTS

    def returned(self, keys: Iterable[Key]) -> None:
        """`keys` were assigned, and their fetches have not begun."""
        self._assigned.difference_update(keys)

    def get(self, key: Key) -> T | None:
        return self._found.get(key)

    def drop(self, key: Key) -> None:
        """Forget what was fetched: it cannot be used a second time."""
        self._found.pop(key, None)
