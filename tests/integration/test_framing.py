"""Messages between an agent and its ranks: whole ones of ours, or a `WireError`."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticgang.errors import WireError
from elasticgang.process import framing

Pair = tuple[socket.socket, socket.socket]

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@pytest.fixture
def pair() -> Iterator[Pair]:
    ours, theirs = socket.socketpair()
    for sock in (ours, theirs):
        sock.settimeout(10)
    with ours, theirs:
        yield ours, theirs


@given(kind=st.text(), fields=st.dictionaries(st.text().filter(lambda name: name != "kind"), JSON, max_size=4))
def test_what_is_packed_is_unpacked(kind: str, fields: dict[str, object]) -> None:
    data = framing.pack(kind, **fields)
    header, body = data[: framing.HEADER_BYTES], data[framing.HEADER_BYTES :]
    assert framing.body_size(header) == len(body)
    assert framing.unpack(body) == {"kind": kind, **fields}


def test_messages_are_received_one_by_one_and_then_the_end(pair: Pair) -> None:
    ours, theirs = pair
    ours.sendall(framing.pack("ask", n=1) + framing.pack("left"))
    ours.shutdown(socket.SHUT_WR)
    assert framing.receive(theirs) == {"kind": "ask", "n": 1}
    assert framing.receive(theirs) == {"kind": "left"}
    assert framing.receive(theirs) is None


def test_a_message_arrives_in_any_pieces(pair: Pair) -> None:
    ours, theirs = pair
    data = framing.pack("record", text="é" * 1000)

    def send() -> None:
        for start in range(0, len(data), 7):
            ours.sendall(data[start : start + 7])

    sender = threading.Thread(target=send)
    sender.start()
    assert framing.receive(theirs) == {"kind": "record", "text": "é" * 1000}
    sender.join()


@pytest.mark.parametrize("kept", [1, framing.HEADER_BYTES - 1, framing.HEADER_BYTES, framing.HEADER_BYTES + 1])
def test_half_a_message_is_an_error_that_says_how_much_came(pair: Pair, kept: int) -> None:
    ours, theirs = pair
    ours.sendall(framing.pack("ask", n=1)[:kept])
    ours.shutdown(socket.SHUT_WR)
    with pytest.raises(WireError, match=r"closed after \d+ of \d+ bytes"):
        framing.receive(theirs)


@pytest.mark.parametrize("header", [b"GET / HTTP/1.1"[: framing.HEADER_BYTES], b"\x00" * framing.HEADER_BYTES])
def test_a_header_of_something_else_is_refused(header: bytes) -> None:
    with pytest.raises(WireError, match="not an elasticgang message: it starts with"):
        framing.body_size(header)


def test_a_size_over_the_limit_is_refused_before_anything_is_allocated() -> None:
    whole = framing.pack("x")
    for size in (framing.MAX_BYTES + 1, 2**32 - 1):
        with pytest.raises(WireError, match=rf"{size} bytes is over the limit of {framing.MAX_BYTES}"):
            framing.body_size(whole[:4] + struct.pack("!I", size))
    assert framing.body_size(whole[:4] + struct.pack("!I", framing.MAX_BYTES)) == framing.MAX_BYTES


def test_a_message_over_the_limit_is_not_packed() -> None:
    with pytest.raises(WireError, match=r"a record message of .* over the limit"):
        framing.pack("record", text="x" * framing.MAX_BYTES)


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b"nothing", b'{"kind": "ask"'])
def test_what_is_no_json_is_refused(body: bytes) -> None:
    with pytest.raises(WireError, match="not JSON"):
        framing.unpack(body)


@pytest.mark.parametrize("message", [[], "ask", None, 3, {}, {"kind": 3}, {"kind": None}, {"Kind": "ask"}])
def test_what_has_no_kind_is_refused(message: object) -> None:
    with pytest.raises(WireError, match="no kind"):
        framing.unpack(json.dumps(message).encode())


@given(st.binary(max_size=200))
def test_no_bytes_do_anything_but_parse_or_raise_a_wire_error(data: bytes) -> None:
    try:
        message = framing.unpack(data)
    except WireError:
        return
    assert isinstance(message["kind"], str)


def test_deeply_nested_json_is_refused() -> None:
    with pytest.raises(WireError):
        framing.unpack(b"[" * 200_000 + b"]" * 200_000)


@pytest.mark.parametrize("constant", [b"Infinity", b"-Infinity", b"NaN"])
def test_what_is_no_finite_number_is_refused(constant: bytes) -> None:
    with pytest.raises(WireError, match="is not a valid number"):
        framing.unpack(b'{"kind": "over", "generation": ' + constant + b"}")
