"""The keys by which the process groups of one generation connect, exchanged among parties. Pure.

The coordinator runs one exchange for each job, with the sessions of its agents as parties. An agent runs one too: its
parties are the comm processes of its ranks, and the coordinator if the generation has several agents.

KEYS-FIRST  The first value of a key stays. Another value is refused: nobody can redirect a group that has its keys.
KEYS-GROUP  A party gets the keys of the groups that it has joined, and those that it has asked for (KEYS-ASKED), and no
            other. It gets those that were put before too.
KEYS-ASKED  Of a large group, in which each rank connects to a few others, a party asks for the keys of these: all keys
            of all ranks would be a number that grows with the square of the number of hosts.
KEYS-BOUND  A value has at most `MAX_VALUE_CHARS`, and an exchange at most `MAX_CHARS`. A party waits for at most
            `MAX_ASKED` keys, and is sent a key once for each message in which it asks for it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from elasticgang.errors import WireError

MAX_NAME_CHARS = 256
MAX_VALUE_CHARS = 1 << 20
MAX_CHARS = 64 << 20
MAX_SENT_CHARS = 1 << 20  # in one message: JSON has up to 12 bytes for each, and a message at most 16 MiB
MAX_ASKED = 1 << 16

_P = TypeVar("_P", bound=Hashable)


class Key(NamedTuple):
    """`value`: base64."""

    group: str
    name: str
    value: str


class Asked(NamedTuple):
    """The keys of a group that a party asks for."""

    group: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class RendezvousKeys:
    """A message, in both directions. `prefix`: of the generation (`Record.prefix`). `groups`: that the sender joins."""

    prefix: str
    groups: tuple[str, ...]
    keys: tuple[Key, ...]
    asked: tuple[Asked, ...] = ()


def batches(keys: Sequence[Key]) -> Iterator[tuple[Key, ...]]:
    """`keys` in as many messages as needed: `MAX_SENT_CHARS` in each, or one key."""
    begin, size = 0, 0
    for number, key in enumerate(keys):
        num_chars = sum(map(len, key))
        if number > begin and size + num_chars > MAX_SENT_CHARS:
            yield tuple(keys[begin:number])
            begin, size = number, 0
        size += num_chars
    if keys:
        yield tuple(keys[begin:])


class KeyExchange(Generic[_P]):
    """Of one generation. `prefix`: as of its record."""

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self._keys: dict[str, dict[str, tuple[Key, _P]]] = {}
        self._parties: dict[str, dict[_P, None]] = {}
        self._asking: dict[tuple[str, str], dict[_P, None]] = {}  # by group and name: who waits for that key
        self._asked: dict[_P, dict[tuple[str, str], None]] = {}  # the same by party
        self._num_chars = 0

    @property
    def groups(self) -> tuple[str, ...]:
        """Those that a party has joined."""
        return tuple(self._parties)

    def parties(self) -> list[_P]:
        """Those that have joined a group, or wait for a key."""
        joined = (party for parties in self._parties.values() for party in parties)
        return list(dict.fromkeys([*joined, *self._asked]))

    def take(
        self, party: _P, groups: Iterable[str] = (), keys: Iterable[Key] = (), asked: Iterable[Asked] = ()
    ) -> dict[_P, list[Key]]:
        """`party` joins `groups`, puts `keys` and asks for `asked`. Returns what each party is to be sent.

        Raises:
            WireError: a key has another value already, or is too long, or there are too many. What came before that
                key was taken, and is sent to nobody: end the session of `party`.
        """
        sends: dict[_P, list[Key]] = defaultdict(list)
        for key in keys:
            if self._put(key, party):
                for other in dict.fromkeys([*self._parties.get(key.group, ()), *self._answer(key)]):
                    if other != party:
                        sends[other].append(key)
        for group in groups:
            joined = self._parties.setdefault(group, {})
            if party not in joined:
                joined[party] = None
                sends[party] += [key for key, source in self._keys.get(group, {}).values() if source != party]
        for group, name in dict.fromkeys((group, name) for group, names in asked for name in names):
            if not self.has_joined(party, group):
                sends[party] += self._ask(party, group, name)
        return {other: found for other, found in sends.items() if found}

    def unasked(self, asked: Iterable[Asked]) -> tuple[Asked, ...]:
        """Those of these keys that nobody has put, and nobody waits for."""
        return tuple(
            Asked(group, new)
            for group, names in asked
            if (
                new := tuple(name for name in names if not self._has(group, name) and (group, name) not in self._asking)
            )
        )

    def awaited(self) -> tuple[Asked, ...]:
        """All keys that a party waits for."""
        names: dict[str, list[str]] = defaultdict(list)
        for group, name in self._asking:
            names[group].append(name)
        return tuple(Asked(group, tuple(found)) for group, found in names.items())

    def has_joined(self, party: _P, group: str) -> bool:
        return party in self._parties.get(group, ())

    def leave(self, party: _P) -> None:
        """Its keys stay."""
        for joined in self._parties.values():
            joined.pop(party, None)
        for key in self._asked.pop(party, ()):
            self._stop_asking(key, party)

    def _has(self, group: str, name: str) -> bool:
        return name in self._keys.get(group, {})

    def _ask(self, party: _P, group: str, name: str) -> list[Key]:
        """KEYS-ASKED. Returns the key if it is there; otherwise `party` waits for it."""
        if (there := self._keys.get(group, {}).get(name)) is not None:
            return [] if there[1] == party else [there[0]]
        waiting = self._asked.setdefault(party, {})
        if len(waiting) >= MAX_ASKED and (group, name) not in waiting:
            raise WireError(f"more than {MAX_ASKED} rendezvous keys are waited for")
        if max(len(group), len(name)) > MAX_NAME_CHARS:
            raise WireError("the name of a rendezvous key is over the limit")
        waiting[group, name] = None
        self._asking.setdefault((group, name), {})[party] = None
        return []

    def _answer(self, key: Key) -> Iterable[_P]:
        """Those that have waited for it."""
        waiting = self._asking.pop((key.group, key.name), {})
        for party in waiting:
            del self._asked[party][key.group, key.name]
        return waiting

    def _stop_asking(self, key: tuple[str, str], party: _P) -> None:
        waiting = self._asking[key]
        del waiting[party]
        if not waiting:
            del self._asking[key]

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
