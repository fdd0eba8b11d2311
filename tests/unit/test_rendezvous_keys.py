"""The exchange of rendezvous keys among parties."""

from __future__ import annotations

import pytest

from elasticgang.errors import WireError
from elasticgang.protocol import rendezvous_keys
from elasticgang.protocol.rendezvous_keys import (
    MAX_ASKED,
    MAX_SENT_CHARS,
    MAX_VALUE_CHARS,
    Asked,
    Key,
    KeyExchange,
    RendezvousKeys,
    batches,
)
from elasticgang.session.frames import MAX_PAYLOAD_BYTES
from elasticgang.session.messages import encode


def key(group: str, name: str, value: str = "v") -> Key:
    return Key(group, name, value)


# KEYS-GROUP
def test_a_party_gets_the_keys_of_its_groups_alone() -> None:
    exchange: KeyExchange[str] = KeyExchange("p")
    assert exchange.take("a", ["g"], [key("g", "0")]) == {}
    assert exchange.take("b", ["h"], [key("h", "0"), key("g", "1")]) == {"a": [key("g", "1")]}
    assert exchange.take("c", ["g"], []) == {"c": [key("g", "0"), key("g", "1")]}
    assert exchange.take("a", ["g"], [key("g", "2")]) == {"c": [key("g", "2")]}
    exchange.take("c", ["h"], [])
    exchange.take("d", [], [key("h", "1")])
    assert exchange.parties() == ["a", "c", "b"]


def test_a_party_that_comes_back_gets_what_the_others_have_put() -> None:
    exchange: KeyExchange[str] = KeyExchange("p")
    exchange.take("a", ["g"], [key("g", "0")])
    exchange.leave("a")
    assert exchange.take("b", ["g"], [key("g", "1")]) == {"b": [key("g", "0")]}
    assert exchange.take("a", ["g"], [key("g", "0")]) == {"a": [key("g", "1")]}
    assert exchange.take("a", ["g"], [key("g", "0")]) == {}


# KEYS-ASKED
def test_a_party_gets_the_keys_that_it_has_asked_for_alone() -> None:
    exchange: KeyExchange[str] = KeyExchange("p")
    exchange.take("a", [], [key("g", "0"), key("g", "1")])
    assert exchange.take("b", asked=[Asked("g", ("0", "2", "3"))]) == {"b": [key("g", "0")]}
    assert exchange.take("c", asked=[Asked("g", ("2",)), Asked("h", ("0",))]) == {}
    assert exchange.unasked([Asked("g", ("0", "2", "3", "4")), Asked("h", ("0",))]) == (Asked("g", ("4",)),)
    assert exchange.awaited() == (Asked("g", ("2", "3")), Asked("h", ("0",)))
    assert exchange.take("a", [], [key("g", "2"), key("h", "1")]) == {"b": [key("g", "2")], "c": [key("g", "2")]}
    assert exchange.take("b", [], [key("g", "3")]) == {}
    assert exchange.awaited() == (Asked("h", ("0",)),)
    assert exchange.parties() == ["b", "c"]


# KEYS-ASKED
def test_a_party_that_leaves_waits_for_no_key() -> None:
    exchange: KeyExchange[str] = KeyExchange("p")
    exchange.take("a", asked=[Asked("g", ("0", "1"))])
    exchange.take("b", asked=[Asked("g", ("0",))])
    exchange.leave("a")
    assert exchange.awaited() == (Asked("g", ("0",)),)
    assert exchange.take("c", [], [key("g", "0"), key("g", "1")]) == {"b": [key("g", "0")]}
    assert exchange.take("a", asked=[Asked("g", ("0",))]) == {"a": [key("g", "0")]}


# KEYS-ASKED
def test_a_party_gets_a_key_once_that_it_has_asked_for_before_it_joined() -> None:
    exchange: KeyExchange[str] = KeyExchange("p")
    exchange.take("a", asked=[Asked("g", ("0",))])
    exchange.take("a", ["g"], asked=[Asked("g", ("1",))])
    assert exchange.take("b", [], [key("g", "0"), key("g", "1")]) == {"a": [key("g", "0"), key("g", "1")]}


# KEYS-FIRST
def test_the_first_value_stays() -> None:
    exchange: KeyExchange[str] = KeyExchange("p")
    exchange.take("a", ["g"], [key("g", "0", "true")])
    with pytest.raises(WireError, match="'0' of group g has another value already"):
        exchange.take("b", ["g"], [key("g", "0", "forged")])
    assert exchange.take("c", ["g"], []) == {"c": [key("g", "0", "true")]}


# KEYS-BOUND
def test_what_an_exchange_holds_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    exchange: KeyExchange[str] = KeyExchange("p")
    with pytest.raises(WireError, match="over the limit"):
        exchange.take("a", [], [key("g", "0", "v" * (MAX_VALUE_CHARS + 1))])
    with pytest.raises(WireError, match="over the limit"):
        exchange.take("a", [], [key("g" * 257, "0")])
    monkeypatch.setattr(rendezvous_keys, "MAX_CHARS", 1000)
    exchange.take("a", [], [key("g", "0", "v" * 990)])
    with pytest.raises(WireError, match="the rendezvous keys of a generation exceed 1000 characters"):
        exchange.take("b", [], [key("g", "1", "v" * 990)])
    assert exchange.take("c", ["g"], []) == {"c": [key("g", "0", "v" * 990)]}
    exchange.take("a", asked=[Asked("h", tuple(map(str, range(MAX_ASKED))))])
    exchange.take("a", asked=[Asked("g", ("0",)), Asked("h", ("0", "1"))])  # it waits for no further one
    with pytest.raises(WireError, match=f"more than {MAX_ASKED} rendezvous keys are waited for"):
        exchange.take("a", asked=[Asked("h", ("-1",))])
    with pytest.raises(WireError, match="over the limit"):
        exchange.take("b", asked=[Asked("g", ("n" * 257,))])


# KEYS-BOUND
def test_a_key_is_sent_once_for_each_message_that_asks_for_it() -> None:
    exchange: KeyExchange[str] = KeyExchange("p")
    exchange.take("a", [], [key("g", "0")])
    asked = [Asked("g", ("0", "0", "1", "1")), Asked("g", ("0",))]
    assert exchange.take("b", asked=asked) == {"b": [key("g", "0")]}
    assert exchange.take("b", asked=asked) == {"b": [key("g", "0")]}
    assert exchange.take("a", [], [key("g", "1")]) == {"b": [key("g", "1")]}


def test_keys_are_sent_in_messages_of_a_bounded_size() -> None:
    named = [key("g" * 256, str(number), "") for number in range(MAX_SENT_CHARS // 256)]
    assert [len(batch) < len(named) for batch in batches(named)] == [True, True]
    long = "v" * (MAX_SENT_CHARS // 2 - 2)
    keys = [key("g", str(number), value) for number, value in enumerate([long, long, "v", 3 * long, "v", long])]
    assert list(batches(keys)) == [tuple(keys[:2]), (keys[2],), (keys[3],), tuple(keys[4:])]
    assert list(batches([])) == []
    widest = "\N{GRINNING FACE}" * (MAX_VALUE_CHARS // 4)
    for batch in batches([key("g", str(number), widest) for number in range(8)]):
        assert len(encode(RendezvousKeys("p", (), batch))) <= MAX_PAYLOAD_BYTES
