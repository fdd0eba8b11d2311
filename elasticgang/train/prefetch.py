"""Which slots are fetched next, by which worker, and what has been fetched: the state behind the data loaders.

Pure. A key is `(step index, slot number)`. The caller holds a lock.

PREFETCH-1  A slot that was fetched and is still wanted is never fetched again, whatever else changes.
PREFETCH-2  The slot that is needed first is fetched first.
PREFETCH-3  A slot whose fetch was interrupted is wanted again. After `MAX_ATTEMPTS` it has failed.
PREFETCH-4  A slot that continues where another one ends is fetched once that one is there.
PREFETCH-5  Splits are divided among the workers as evenly as possible, and as few as possible change their worker: a
    worker that has a split open need not open it anew.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Generic, TypeVar

Key = tuple[int, int]
T = TypeVar("T")

MAX_ATTEMPTS = 3


class Prefetch(Generic[T]):
    def __init__(self) -> None:
        self._wanted: dict[Key, None] = {}  # in the order of need
        self._follows: Mapping[Key, Key] = {}
        self._workers: Mapping[Key, int] = {}
        self._assigned: set[Key] = set()
        self._found: dict[Key, T] = {}
        self._interrupted: dict[Key, int] = {}

    def want(
        self, keys: Iterable[Key], follows: Mapping[Key, Key] | None = None, workers: Mapping[Key, int] | None = None
    ) -> None:
        """From now on want exactly `keys`, the one that is needed first at the beginning. What was fetched of them
        stays (PREFETCH-1), and that of others is dropped. `follows`: the keys after which others are fetched
        (PREFETCH-4). `workers`: those that only one worker may fetch."""
        self._wanted, self._follows, self._workers = dict.fromkeys(keys), follows or {}, workers or {}
        self._found = {key: found for key, found in self._found.items() if key in self._wanted}
        self._interrupted = {key: count for key, count in self._interrupted.items() if key in self._wanted}

    def has_next(self, worker: int) -> bool:
        return self.first(worker) is not None

    def assign(self, worker: int) -> Key | None:
        """The next key for `worker` to fetch. None: there is none."""
        key = self.first(worker)
        if key is not None:
            self._assigned.add(key)
        return key

    def first(self, worker: int) -> Key | None:
        """The key that `assign` would give (PREFETCH-2)."""
        return next((key for key in self._wanted if self._is_due(key, worker)), None)

    def _is_due(self, key: Key, worker: int) -> bool:
        if key in self._found or key in self._assigned or self._workers.get(key, worker) != worker:
            return False
        return key not in self._follows or self._follows[key] in self._found  # PREFETCH-4

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


def divided(splits: Sequence[int], before: Mapping[int, int], num_workers: int) -> dict[int, int]:
    """The worker of each of `splits`. `before`: the result of the last call (PREFETCH-5)."""
    most = -(-len(splits) // num_workers)
    loads: Counter[int] = Counter()
    found: dict[int, int] = {}
    for split in splits:
        if split in before and loads[before[split]] < most:
            found[split] = before[split]
            loads[before[split]] += 1
    for split in splits:
        if split not in found:
            found[split] = min(range(num_workers), key=lambda worker: (loads[worker], worker))
            loads[found[split]] += 1
    return found
