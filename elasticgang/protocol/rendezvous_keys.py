"""The keys by which the process groups of one generation connect, exchanged among parties. Pure.

The coordinator runs one exchange for each job, with the sessions of its agents as parties. An agent runs one too: its
parties are the comm processes of its ranks, and the coordinator if the generation has several agents.

KEYS-FIRST  The first value of a key stays. Another value is refused: nobody can redirect a group that has its keys.
KEYS-GROUP  A party gets the keys of the groups that it has joined, and no other; those that were put before it joined
            too.
KEYS-BOUND  A value has at most `MAX_VALUE_CHARS`, and an exchange at most `MAX_CHARS`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from elasticgang.errors import WireError

MAX_NAME_CHARS = 256
MAX_VALUE_CHARS = 1 << 20
MAX_CHARS = 64 << 20

_P = TypeVar("_P", bound=Hashable)


class Key(NamedTuple):
    """`value`: base64."""

    group: str
    name: str
    value: str


@dataclass(frozen=True)
class RendezvousKeys:
    """A message, in both directions. `prefix`: of the generation (`Record.prefix`). `groups`: that the sender joins."""

    prefix: str
    groups: tuple[str, ...]
    keys: tuple[Key, ...]


class KeyExchange(Generic[_P]):
    """Of one generation. `prefix`: as of its record."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self._keys: dict[str, dict[str, tuple[Key, _P]]] = {}
        self._parties: dict[str, dict[_P, None]] = {}
        self._num_chars = 0

    @property
    def groups(self) -> tuple[str, ...]:
        return tuple(self._parties)

    def parties(self) -> list[_P]:
        """Those that have joined a group."""
        return list(dict.fromkeys(party for joined in self._parties.values() for party in joined))

    def take(self, party: _P, groups: Iterable[str], keys: Iterable[Key]) -> dict[_P, list[Key]]:
        """`party` joins `groups`, and puts `keys` there. Returns what each party is to be sent.

        Raises:
            WireError: a key has another value already, or is too long, or there are too many. What came before that
                key was taken, and is sent to nobody: end the session of `party`.
        """
        sends: dict[_P, list[Key]] = defaultdict(list)
        for key in keys:
            if self._put(key, party):
                for other in self._parties.get(key.group, ()):
                    if other != party:
                        sends[other].append(key)
        for group in groups:
            joined = self._parties.setdefault(group, {})
            if party not in joined:
                joined[party] = None
                sends[party] += [key for key, source in self._keys.get(group, {}).values() if source != party]
        return {other: found for other, found in sends.items() if found}

    def has_joined(self, party: _P, group: str) -> bool:
        return party in self._parties.get(group, ())

    def leave(self, party: _P) -> None:
        """Its keys stay."""
        for joined in self._parties.values():
            joined.pop(party, None)

    def _put(self, key: Key, party: _P) -> bool:
        """Whether it is new."""
        of_group = self._keys.get(key.group, {})
        if (found := of_group.get(key.name)) is not None:
            if found[0] != key:
                raise WireError(f"the rendezvous key {key.name!r} of group {key.group} has another value already")
            return False
        size = len(key.group) + len(key.name) + len(key.value)
        if len(key.value) > MAX_VALUE_CHARS or max(len(key.group), len(key.name)) > MAX_NAME_CHARS:
            raise WireError(f"a rendezvous key of {size} characters is over the limit")
        if self._num_chars + size > MAX_CHARS:
            raise WireError(f"the rendezvous keys of a generation exceed {MAX_CHARS} characters")
        self._num_chars += size
        self._keys.setdefault(key.group, of_group)[key.name] = key, party
        return True
