"""What crosses a session's wire: frames, the handshake, messages, the secret; and what an attacker may send instead."""

from __future__ import annotations

import os
import pickle
import random
import struct
import tracemalloc
import zlib
from contextlib import nullcontext
from pathlib import Path

import pytest

from elasticgang.errors import OperationalError, WireError
from elasticgang.layout import ParallelLayout
from elasticgang.process import framing
from elasticgang.protocol import coordinator_messages as m
from elasticgang.protocol.commit import Attempt
from elasticgang.protocol.end_cause import EndCause
from elasticgang.protocol.job_facts import AgentFacts, JobFacts, ScriptFailure, Wait
from elasticgang.protocol.next_record import next_record
from elasticgang.protocol.record import MAX_RECORD_BYTES, NO_RECORD, MemberReport, Record, Report
from elasticgang.protocol.rendezvous_keys import MAX_VALUE_CHARS, Asked, Key, RendezvousKeys
from elasticgang.session.frames import MAX_PAYLOAD_BYTES, FrameBuffer, FrameReader, FrameWriter, Payload
from elasticgang.session.handshake import AGENT, RANK, ClientHandshake, Identity, ServerHandshake
from elasticgang.session.messages import decode_from_agent, decode_from_coordinator, encode, encode_delta, pack
from elasticgang.session.secret import Secret, find_secret, read_secret

SECRET, OTHER = b"s" * 32, b"o" * 32
KEY = b"k" * 32


def report(agent: str, num_ranks: int = 2, record: Record | None = None, **fields: object) -> Report:
    members = tuple(
        MemberReport(f"{agent}/{rank}", rank, "127.0.0.1:1")
        if record is None
        else MemberReport(
            f"{agent}/{rank}", rank, "127.0.0.1:1", Attempt(3, record.generation), None, (0, 0, 0), 1, True
        )
        for rank in range(num_ranks)
    )
    seen = NO_RECORD if record is None else record.ref
    return Report(agent, agent, "job", ParallelLayout(), seen, members, **fields)  # type: ignore[arg-type]


def first_record(*agents: str) -> Record:
    record = next_record(None, [report(agent) for agent in agents])
    assert isinstance(record, Record)
    return record


# -- frames


def bodies(data: bytes, limit: int = 1 << 20) -> list[bytes]:
    buffer = FrameBuffer(limit)
    buffer.feed(data)
    return list(iter(buffer.next, None))


def test_frames_arrive_as_they_were_sent() -> None:
    writer, reader = FrameWriter(KEY), FrameReader(KEY)
    stream = b"".join(map(writer.frame, [b"one", b"", b"three" * 1000]))
    buffer, found = FrameBuffer(1 << 20), []
    for at in range(0, len(stream), 7):
        buffer.feed(stream[at : at + 7])
        found += [reader.payload(body) for body in iter(buffer.next, None)]
    assert found == [b"one", b"", b"three" * 1000]
    assert buffer.num_bytes == 0


def test_a_frame_of_two_gigabytes_is_refused_by_its_length() -> None:
    buffer = FrameBuffer(1 << 20)
    buffer.feed(struct.pack("!I", 2 << 30) + b"x" * 100)
    with pytest.raises(WireError, match="2147483648 bytes is over the limit of 1048576"):
        buffer.next()
    assert buffer.num_bytes < 200


def test_a_message_over_the_limit_is_not_sent() -> None:
    with pytest.raises(WireError, match="over the limit of 10"):
        FrameWriter(KEY, 10).frame(b"x" * 11)


@pytest.mark.parametrize("fault", ["replayed", "left out", "swapped", "flipped", "other direction", "truncated"])
def test_frames_that_were_tampered_with_are_refused(fault: str) -> None:
    writer, reader = FrameWriter(KEY), FrameReader(KEY)
    one, two = (bodies(writer.frame(payload))[0] for payload in (b"one", b"two"))
    if fault == "replayed":
        assert reader.payload(one) == b"one"
        bad = one
    elif fault in ("left out", "swapped"):
        bad = two
    elif fault == "flipped":
        bad = one[:9] + bytes([one[9] ^ 1]) + one[10:]
    elif fault == "other direction":
        bad = bodies(FrameWriter(b"j" * 32).frame(b"one"))[0]
    else:
        bad = one[:20]
    with pytest.raises(WireError):
        reader.payload(bad)


# FRAME-SHARED
def test_a_message_for_many_sessions_is_hashed_once() -> None:
    payload = Payload(b"one")
    payload.data = b"two"  # its digest is not made again
    with pytest.raises(WireError, match="MAC"):
        FrameReader(KEY).payload(bodies(FrameWriter(KEY).frame(payload))[0])


# FRAME-MAC, FRAME-ORDER
def test_a_shared_message_has_a_frame_of_its_own_in_each_session() -> None:
    keys = [bytes([number]) * 32 for number in range(3)]
    writers, readers = [FrameWriter(key) for key in keys], [FrameReader(key) for key in keys]
    shared = Payload(b"shared" * 100)
    for writer, reader in zip(writers[1:], readers[1:], strict=True):  # so that these two are one frame ahead
        assert reader.payload(bodies(writer.frame(b"first"))[0]) == b"first"
    frames = [bodies(writer.frame(shared))[0] for writer in writers]
    for number, frame in enumerate(frames):
        for reader in readers[:number] + readers[number + 1 :]:
            with pytest.raises(WireError, match="MAC"):
                reader.payload(frame)
        for at in (0, 7, 8, 300, len(frame) - 32, len(frame) - 1):  # of the sequence number, the payload and the MAC
            with pytest.raises(WireError, match="MAC"):
                readers[number].payload(frame[:at] + bytes([frame[at] ^ 1]) + frame[at + 1 :])
        for wrong in (frame[:-1], frame[:8] + frame[9:], frame[:-33] + frame[-32:]):
            with pytest.raises(WireError, match="MAC"):
                readers[number].payload(wrong)
        assert readers[number].payload(frame) == shared.data
        with pytest.raises(WireError, match=f"frame {min(number, 1)} came in place of frame {min(number, 1) + 1}"):
            readers[number].payload(frame)


def test_random_bytes_are_refused_and_bounded() -> None:
    source = random.Random(0)
    for _ in range(2000):
        buffer, reader = FrameBuffer(4096), FrameReader(KEY)
        with pytest.raises(WireError):  # noqa: PT012
            for _ in range(50):
                buffer.feed(source.randbytes(source.randint(1, 400)))
                assert buffer.num_bytes <= 4096 + 4 + 400
                for body in iter(buffer.next, None):
                    reader.payload(body)


# -- the handshake


def shake(
    client: Identity, client_secret: bytes, secrets: dict[str, bytes], roles: tuple[str, ...] = (AGENT,)
) -> tuple[object, object]:
    one = ClientHandshake(client, client_secret, os.urandom(32))
    other = ServerHandshake(secrets.get, os.urandom(32), os.urandom(32), roles)
    proof, server_keys = other.finish(one.answer(other.challenge(one.hello())))
    return one.finish(proof), server_keys


def test_both_ends_have_the_same_fresh_keys() -> None:
    identity = Identity("job", AGENT, 8)
    (a, b), (c, d) = (shake(identity, SECRET, {"job": SECRET}) for _ in range(2))
    assert a == b
    assert c == d
    assert a != c


@pytest.mark.parametrize(
    ("identity", "secret"),
    [
        (Identity("job", AGENT, 8), OTHER),  # a wrong secret
        (Identity("other", AGENT, 8), SECRET),  # a right secret for another job
        (Identity("unknown", AGENT, 8), SECRET),
    ],
)
def test_who_does_not_hold_the_jobs_secret_is_refused_alike(identity: Identity, secret: bytes) -> None:
    with pytest.raises(WireError, match=r"^a client does not hold the secret of the job that it names$"):
        shake(identity, secret, {"job": SECRET, "other": OTHER})


def test_a_role_without_sessions_is_refused() -> None:
    with pytest.raises(WireError, match="role rank"):
        shake(Identity("job", RANK, 8), SECRET, {"job": SECRET})


@pytest.mark.parametrize("change", ["job", "role", "protocol", "client nonce", "server nonce"])
def test_a_proof_is_bound_to_all_that_was_said(change: str) -> None:
    """A proof that was made for one handshake does not pass in another."""
    said = {"job": "job", "role": AGENT, "protocol": 8, "client nonce": b"c" * 32, "server nonce": b"n" * 32}
    others = {"job": "gob", "role": RANK, "protocol": 9, "client nonce": b"d" * 32, "server nonce": b"m" * 32}
    heard = {**said, change: others[change]}

    def identity(of: dict[str, object]) -> Identity:
        return Identity(str(of["job"]), str(of["role"]), int(str(of["protocol"])))

    victim = ClientHandshake(identity(said), SECRET, b"c" * 32)
    stolen = victim.answer(b"n" * 32)
    server = ServerHandshake(lambda _: SECRET, heard["server nonce"], b"", (AGENT, RANK))  # type: ignore[arg-type]
    server.challenge(ClientHandshake(identity(heard), b"?", heard["client nonce"]).hello())  # type: ignore[arg-type]
    with pytest.raises(WireError, match="does not hold the secret"):
        server.finish(stolen)


def test_a_coordinator_without_the_secret_is_refused() -> None:
    client = ClientHandshake(Identity("job", AGENT, 8), SECRET, b"c" * 32)
    client.answer(b"n" * 32)
    for proof in (b"", b"x" * 32, client.answer(b"n" * 32)):  # also the client's own, sent back
        with pytest.raises(WireError, match="the coordinator does not hold the secret"):
            client.finish(proof)


@pytest.mark.parametrize(
    "hello",
    [
        b"",
        b"[]",
        b"{}",
        b"[" * 900,
        b'{"wire":3,"protocol":8,"job":"j","role":"agent","nonce":"zz"}',
        b'{"wire":3,"protocol":8,"job":"j","role":"agent","nonce":"00"}',
        b'{"wire":4,"protocol":8,"job":"j","role":"agent","nonce":"' + b"00" * 32 + b'"}',
        b'{"wire":3,"protocol":-1,"job":"j","role":"agent","nonce":"' + b"00" * 32 + b'"}',
        b'{"wire":3,"protocol":8,"job":["j"],"role":"agent","nonce":"' + b"00" * 32 + b'"}',
        b'{"wire":3,"protocol":8,"job":"","role":"agent","nonce":"' + b"00" * 32 + b'"}',
        b'{"wire":3,"protocol":8,"job":"\\ud800","role":"agent","nonce":"' + b"00" * 32 + b'"}',
        b'{"wire":3,"protocol":8,"job":"j","role":"root","nonce":"' + b"00" * 32 + b'"}',
        pickle.dumps({"wire": 3}),
    ],
)
def test_what_is_no_hello_is_refused(hello: bytes) -> None:
    with pytest.raises(WireError):
        ServerHandshake(lambda _: SECRET, b"n" * 32, b"", (AGENT,)).challenge(hello)


# -- messages


KEYS = RendezvousKeys("job/1/digest", ("0-1",), (Key("0-1", "0/1", "dmFsdWU="),), (Asked("0-2", ("0/1", "0/2")),))


def agent_messages(record: Record) -> list[m.AgentMessage | RendezvousKeys]:
    decision = m.Decision(m.Term(2, "c"), record, True)
    return [
        m.Hello("a", "i", 3, m.Term(1, "c"), decision.ref, 4, 3),
        m.Hello("a", "i", 1),
        m.Promise(m.Term(1, "c")),
        m.KnownDecision(decision),
        m.Ready(report("a", newest_commit=Attempt(1, 1), exited=("a/9",), num_seats=1, settings=(("model", "m"),))),
        m.EndGeneration(3, EndCause("lost a peer", ("a",), (0, 2), is_effect=True)),
        m.JoinRequest(4),
        m.Accepted(2, record.digest),
        m.Finished(3),
        m.Goodbye("bye"),
        m.Heartbeat(7),
        m.JobFailed(7, 2, "they differ"),
        AgentFacts(),
        AgentFacts(True, (Wait(1, (1 << 64) - 1, 7), Wait(1, 2), Wait(1)), (ScriptFailure("a/1", 1, 5),)),
        KEYS,
    ]


def coordinator_messages(record: Record) -> list[m.CoordinatorMessage | RendezvousKeys]:
    return [
        m.Welcome(m.Term(2, "c"), True, 3, 4, False),
        m.Push(m.Decision(m.Term(2, "c"), record), 1, 2),
        m.RequestDecision(record.digest),
        m.HeartbeatAnswer(7, False),
        m.EndGeneration(3, EndCause("is lost", ("a", "b"), timed_out=True)),
        m.JoinNotice(4),
        m.Finished(3),
        m.JobFailed(7, 2, "they differ"),
        JobFacts(),
        JobFacts(True, (Wait(1, 3, 7, "b"), Wait(1, 2, 7)), (ScriptFailure("a/1", 1, 5, "a"),)),
        m.Notice("refused", "its layout is another", ("b",)),
        m.Evicted("e"),
        m.Refused("r"),
        m.JobUnrecoverable("u"),
        KEYS,
    ]


def test_messages_arrive_as_they_were_sent() -> None:
    record = first_record("a", "b")
    sent = agent_messages(record)
    received = [decode_from_agent(encode(message)) for message in sent]
    assert received[:3] + received[4:] == sent[:3] + sent[4:]
    known = received[3]
    assert isinstance(known, m.KnownDecision)
    assert known.decision.ref == m.Decision(m.Term(2, "c"), record, True).ref
    assert {type(message) for message in sent} == {*m.AgentMessage.__args__, RendezvousKeys}
    for message in coordinator_messages(record):
        found = decode_from_coordinator(encode(message))
        if isinstance(found, m.Push):
            assert isinstance(message, m.Push)
            assert (found.decision.ref, found.over, found.joining) == (message.decision.ref, 1, 2)
            assert found.decision.record.text == record.text
        else:
            assert found == message
    assert {type(message) for message in coordinator_messages(record)} == {
        *m.CoordinatorMessage.__args__,
        RendezvousKeys,
    }


def test_an_agent_cannot_send_what_only_a_coordinator_says() -> None:
    for message in coordinator_messages(first_record("a")):
        if not isinstance(message, (*m.AgentMessage.__args__, RendezvousKeys)):
            with pytest.raises(WireError):
                decode_from_agent(encode(message))


@pytest.mark.parametrize(
    "message",
    [
        RendezvousKeys("p", ("",), ()),
        RendezvousKeys("p", ("g" * 257,), ()),
        RendezvousKeys("p" * 257, (), ()),
        RendezvousKeys("p", (), (Key("g", "k" * 257, "v"),)),
        RendezvousKeys("p", (), (), (Asked("g" * 257, ("k",)),)),
        RendezvousKeys("p", (), (), (Asked("g", ("k" * 257,)),)),
        RendezvousKeys("p", (), (Key("g", "k", "v" * (MAX_VALUE_CHARS + 1)),)),
    ],
)
def test_rendezvous_keys_are_bounded(message: RendezvousKeys) -> None:
    with pytest.raises(WireError):
        decode_from_agent(encode(message))


def test_mutilated_messages_are_refused_or_valid_but_never_raise_anything_else() -> None:
    source = random.Random(1)
    payloads = [encode(message) for message in agent_messages(first_record("a", "b"))]
    num_refused = 0
    for _ in range(5_000):
        payload = bytearray(source.choice(payloads))
        for _ in range(source.randint(1, 3)):
            at = source.randrange(len(payload) or 1)
            match source.randrange(3):
                case 0:
                    payload[at : at + 1] = bytes([source.randrange(256)])
                case 1:
                    del payload[at : at + source.randint(1, 20)]
                case _:
                    payload[at:at] = source.choice([b"null", b"[]", b"-1", b'""', b"1e999", b"NaN", b"{}"])
        try:
            decode_from_agent(bytes(payload))
        except WireError:
            num_refused += 1
    assert num_refused > 2_500


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"null",
        b"{}",
        b'"Hello"',
        b'["Nothing"]',
        b'["Finished"]',
        b'["Heartbeat",true]',
        b'["Heartbeat",-1]',
        b'["Heartbeat",NaN]',
        b'["Hello","","i",1,[0,""],null,0,false]',
        b'["Hello","a","i",1,[0],null,0,false]',
        b'["JoinRequest",1.5]',
        b"[" * 100_000,
        pickle.dumps(["Finished"]),
    ],
)
def test_what_is_no_message_is_refused(payload: bytes) -> None:
    with pytest.raises(WireError):
        decode_from_agent(payload)


# DELTA-EXACT
def test_a_delta_makes_the_record_or_is_refused() -> None:
    parent = first_record("a", "b", "c")
    child = next_record(parent, [report("a", record=parent), report("c", record=parent)], "b")
    assert isinstance(child, Record)
    payload = encode_delta(parent, m.Push(m.Decision(m.Term(2, "c"), child), 1, 0))
    assert payload is not None
    push = decode_from_coordinator(payload, parent)
    assert isinstance(push, m.Push)
    assert push.decision.record.text == child.text
    for other in (None, child):
        with pytest.raises(WireError):
            decode_from_coordinator(payload, other)
    with pytest.raises(WireError):
        decode_from_coordinator(payload.replace(child.digest.encode(), b"0" * 16), parent)


# -- the secret


def write(path: Path, value: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(value)
    path.chmod(mode)
    return path


def test_a_secret_is_read_and_not_shown(tmp_path: Path) -> None:
    path = write(tmp_path / "secret", b"  0123456789abcdef\n")
    secret = read_secret(path)
    assert secret.reveal() == b"0123456789abcdef"
    assert "0123" not in f"{secret} {secret!r}"
    with pytest.raises(TypeError):
        pickle.dumps(secret)
    found = find_secret(None, {"ELASTICGANG_SECRET_FILE": str(path)})
    assert found is not None
    assert found.reveal() == secret.reveal()
    assert find_secret(None, {}) is None


@pytest.mark.parametrize(
    ("value", "mode", "complaint"),
    [
        (b"0123456789abcdef", 0o660, "mode is 0660: run `chmod 600"),
        (b"0123456789abcdef", 0o604, "mode is 0604"),
        (b"0123456789abcde\n", 0o600, "at least 16 bytes, but has 15"),
        (b"x" * 5000, 0o600, "over 4096 bytes"),
    ],
)
def test_a_secret_that_is_none_is_refused(tmp_path: Path, value: bytes, mode: int, complaint: str) -> None:
    with pytest.raises(OperationalError, match=complaint) as refused:
        read_secret(write(tmp_path / "secret", value, mode))
    assert "0123" not in str(refused.value)


# SECRET-FILE
@pytest.mark.skipif(os.geteuid() != 0, reason="it gives files to other users")
@pytest.mark.parametrize(
    ("owner", "is_own_group", "mode", "is_read"),
    [
        (0, True, 0o440, True),
        (0, True, 0o640, True),
        (0, True, 0o660, False),
        (0, True, 0o450, False),
        (0, True, 0o444, False),
        (0, False, 0o440, False),
        (12345, True, 0o440, False),
    ],
)
def test_a_group_of_this_process_may_read_a_secret_of_root(
    tmp_path: Path, owner: int, is_own_group: bool, mode: int, is_read: bool
) -> None:
    path = write(tmp_path / "secret", b"0123456789abcdef", mode)
    os.chown(path, owner, os.getegid() if is_own_group else 1 + max([os.getegid(), *os.getgroups()]))
    with nullcontext() if is_read else pytest.raises(OperationalError, match=f"mode is {mode:04o}"):
        read_secret(path)


def test_a_secret_file_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(OperationalError, match="cannot be read: No such file"):
        read_secret(tmp_path / "none")
    with pytest.raises(OperationalError, match="is not a regular file"):
        read_secret(Path("/dev/null"))


def test_the_limits_fit_each_other() -> None:
    assert MAX_PAYLOAD_BYTES == framing.MAX_BYTES == 16 << 20
    assert MAX_RECORD_BYTES + (32 << 10) < MAX_PAYLOAD_BYTES
    assert repr(Secret(SECRET)) == "Secret(...)"


# -- compressed messages


# MESSAGE-PACKED
def test_a_large_message_of_a_coordinator_is_compressed() -> None:
    notice = m.Notice("undecided", "it waits " * 1000)
    packed = pack(encode(notice))
    assert len(packed) < len(encode(notice)) / 10
    assert decode_from_coordinator(packed) == notice
    small = encode(m.Finished(3))
    assert pack(small) == small
    with pytest.raises(WireError, match="16777217 bytes is over the limit of 16777216"):
        pack(b" " * (MAX_PAYLOAD_BYTES + 1))
    with pytest.raises(WireError, match="UnicodeDecodeError"):
        decode_from_agent(pack(encode(m.Goodbye("1" * 10_000))))


# MESSAGE-PACKED
@pytest.mark.parametrize(
    "payload",
    [
        b"z",
        b"z" + os.urandom(100),
        pack(b"[" * 10_000)[:-1],
        pack(b"[" * 10_000) + b"x",
        b"z" + zlib.compress(b" " * (MAX_PAYLOAD_BYTES + 1), 1),
    ],
)
def test_what_is_not_one_compressed_message_is_refused(payload: bytes) -> None:
    with pytest.raises(WireError, match="invalid message"):
        decode_from_coordinator(payload)


# MESSAGE-PACKED
def test_a_compressed_message_takes_no_more_memory_than_another() -> None:
    bomb = b"z" + zlib.compress(bytes(20 * MAX_PAYLOAD_BYTES), 9)
    tracemalloc.start()
    try:
        with pytest.raises(WireError, match="over 16777216 bytes"):
            decode_from_coordinator(bomb)
        assert tracemalloc.get_traced_memory()[1] < 3 * MAX_PAYLOAD_BYTES
    finally:
        tracemalloc.stop()


def test_a_setting_of_any_length_is_refused() -> None:
    sent = encode(m.Ready(report("a", settings=(("model", "x" * (1 << 20)),))))
    with pytest.raises(WireError):
        decode_from_agent(sent)
