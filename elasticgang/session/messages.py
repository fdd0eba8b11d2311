"""The messages of a session as JSON, with strict types: a message with one invalid field is refused as a whole.

Pure. A message is `[kind, field, ...]`, with the fields in the order of its class.

MESSAGE-PACKED  Only a coordinator may compress a message: one process decompresses what one peer sends. It has at most
                `MAX_PAYLOAD_BYTES` then, as others have. The coordinator refuses to compress a larger one: no agent
                would take it, in no session.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from typing import Any

from elasticgang.errors import ElasticGangError, WireError
from elasticgang.protocol import coordinator_messages as m
from elasticgang.protocol.end_cause import EndCause
from elasticgang.protocol.job_facts import MAX_FAILURES, MAX_WAITS, AgentFacts, JobFacts, ScriptFailure, Wait
from elasticgang.protocol.record import Record, Report, report_from_json, report_to_json
from elasticgang.protocol.record_delta import apply_delta, delta_of
from elasticgang.protocol.rendezvous_keys import MAX_NAME_CHARS, MAX_VALUE_CHARS, Asked, Key, RendezvousKeys
from elasticgang.session.frames import MAX_PAYLOAD_BYTES

Message = m.AgentMessage | m.CoordinatorMessage | m.GrantOffice | m.Granted | RendezvousKeys

_PACKED = b"z"  # JSON begins with no such byte
_MIN_PACKED_BYTES = 4 << 10

_INVALID = (
    ArithmeticError,
    ValueError,
    KeyError,
    TypeError,
    IndexError,
    RecursionError,
    AttributeError,
    ElasticGangError,
)


def pack(payload: bytes) -> bytes:
    """`payload`, compressed if it is large. Raises WireError: it is over the limit (MESSAGE-PACKED)."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise WireError(f"a message of {len(payload)} bytes is over the limit of {MAX_PAYLOAD_BYTES}")
    return payload if len(payload) < _MIN_PACKED_BYTES else _PACKED + zlib.compress(payload, 1)


def _unpack(payload: bytes) -> bytes:
    """Raises WireError: what is compressed is damaged, or too large."""
    if not payload.startswith(_PACKED):
        return payload
    stream = zlib.decompressobj()
    try:
        data = stream.decompress(payload[len(_PACKED) :], MAX_PAYLOAD_BYTES)
    except zlib.error as exc:
        raise WireError(f"invalid message: {exc}") from exc
    if not stream.eof or stream.unused_data:
        raise WireError(f"invalid message: it is not whole, or has over {MAX_PAYLOAD_BYTES} bytes")
    return data


def encode(message: Message) -> bytes:
    return _JSON_ENCODER.encode([type(message).__name__, *_ENCODERS[type(message)](message)]).encode()


def decode_from_agent(payload: bytes) -> m.AgentMessage | RendezvousKeys:
    """Raises WireError: `payload` is not a valid message of an agent."""
    message: m.AgentMessage | RendezvousKeys = _decode(payload, _FROM_AGENT)
    return message


def decode_from_operator(payload: bytes) -> m.GrantOffice:
    """Raises WireError: `payload` is not a valid message of an operator."""
    message: m.GrantOffice = _decode(payload, {"GrantOffice": lambda: m.GrantOffice()})
    return message


def decode_for_operator(payload: bytes) -> m.Granted | m.Refused:
    """Raises WireError: `payload` is not a valid answer of a coordinator to an operator."""
    answers: dict[str, Callable[..., Any]] = {
        "Granted": lambda reason: m.Granted(_text(reason)),
        "Refused": _FROM_COORDINATOR["Refused"],
    }
    answer: m.Granted | m.Refused = _decode(payload, answers)
    return answer


def decode_from_coordinator(payload: bytes, known: Record | None = None) -> m.CoordinatorMessage | RendezvousKeys:
    """`known`: the record to which a delta applies. Raises WireError: `payload` is not a valid message of a
    coordinator, or a delta of another record."""

    def push_delta(parent: Any, term: Any, delta: Any, durable: Any, over: Any, joining: Any) -> m.Push:
        if known is None or known.digest != parent:
            raise ValueError("the delta is of an unknown record")
        decision = m.Decision(_term(term), apply_delta(known, delta), _flag(durable))
        return m.Push(decision, _number(over), _number(joining))

    decoders = {**_FROM_COORDINATOR, "PushDelta": push_delta}
    message: m.CoordinatorMessage | RendezvousKeys = _decode(_unpack(payload), decoders)
    return message


def _decode(payload: bytes, decoders: dict[str, Callable[..., Any]]) -> Any:
    try:
        kind, *fields = _JSON_DECODER.decode(payload.decode())
        return decoders[kind](*fields)
    except _INVALID as exc:
        raise WireError(f"invalid message: {type(exc).__name__}") from exc


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not a number")


_JSON_ENCODER = json.JSONEncoder(separators=(",", ":"))  # `json.dumps` and `json.loads` would make one for each message
_JSON_DECODER = json.JSONDecoder(parse_constant=_refuse)


# -- fields


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("a string is expected")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise TypeError("a list is expected")
    return tuple(map(_text, value))


def _name(value: Any) -> str:
    if not 0 < len(_text(value)) <= MAX_NAME_CHARS:
        raise ValueError("a name has a wrong length")
    return str(value)


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise TypeError("an integer of at least 0 is expected")
    return value


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise TypeError("true or false is expected")
    return value


def _term(value: Any) -> m.Term:
    number, name = value
    return m.Term(_number(number), _text(name))


def _ref(value: Any) -> m.DecisionRef | None:
    if value is None:
        return None
    term, generation, digest, durable = value
    return m.DecisionRef(_term(term), _number(generation), _name(digest), _flag(durable))


def decision_to_json(decision: m.Decision) -> list[Any]:
    return [decision.term, decision.record.text, decision.durable]


def decision_from_json(value: Any, is_checked: bool = False) -> m.Decision:
    """Raises ValueError, TypeError or KeyError: `value` is not a decision. `is_checked`: parse its seats now, not on
    first use."""
    term, text, durable = value
    record = Record.from_text(_text(text))
    if is_checked and not (record.plan.ranks and record.seats):
        raise ValueError("a record has no seats")
    return m.Decision(_term(term), record, _flag(durable))


def _report(value: Any) -> Report:
    report = report_from_json(value)
    for name in ("agent", "host", "job", "address"):
        (_name if name in ("agent", "host", "job") else _text)(getattr(report, name))
    for name in ("num_ranks", "min_agents", "max_agents", "protocol"):
        _number(getattr(report, name))
    if report.num_seats is not None:
        _number(report.num_seats)
    for name in report.exited:
        _name(name)
    for setting in report.settings:
        for text in setting:
            _name(text)
    if len({_name(member.id) for member in report.members}) != len(report.members):
        raise ValueError("a member is reported twice")
    return report


def encode_delta(parent: Record, push: m.Push) -> bytes | None:
    """`push` as a delta, for an agent that has `parent`; None if the whole record is not larger."""
    decision = push.decision
    delta = delta_of(parent, decision.record)
    if delta is None:
        return None
    fields = ["PushDelta", parent.digest, decision.term, delta, decision.durable, push.over, push.joining]
    return _JSON_ENCODER.encode(fields).encode()


# -- messages

_ENCODERS: dict[type, Callable[[Any], list[Any]]] = {
    m.Hello: lambda x: [
        *(x.agent, x.incarnation, x.session, x.term, x.decision, x.over, x.finished, x.former, x.former_decision)
    ],
    m.Promise: lambda x: [x.term],
    m.KnownDecision: lambda x: [decision_to_json(x.decision)],
    m.Ready: lambda x: [report_to_json(x.report)],
    m.EndGeneration: lambda x: [x.generation, *_cause_to_json(x.cause)],
    m.JoinRequest: lambda x: [x.generation],
    m.Accepted: lambda x: [x.generation, x.digest],
    m.Finished: lambda x: [x.generation],
    m.Goodbye: lambda x: [x.reason],
    m.Heartbeat: lambda x: [x.number],
    m.JobFailed: lambda x: [x.step, x.generation, x.text],
    m.Welcome: lambda x: [x.term, x.in_office, x.over, x.joining, x.finished, x.everywhere],
    m.Push: lambda x: [decision_to_json(x.decision), x.over, x.joining],
    m.RequestDecision: lambda x: [x.digest],
    m.HeartbeatAnswer: lambda x: [x.number, x.in_office],
    m.JoinNotice: lambda x: [x.generation],
    m.Notice: lambda x: [x.topic, x.reason, x.agents],
    m.Evicted: lambda x: [x.reason],
    m.Refused: lambda x: [x.reason],
    m.GrantOffice: lambda x: [],
    m.Granted: lambda x: [x.reason],
    m.JobUnrecoverable: lambda x: [x.reason],
    RendezvousKeys: lambda x: [x.prefix, x.groups, x.keys, x.asked],
    AgentFacts: lambda x: _agent_facts_to_json(x),
    JobFacts: lambda x: _job_facts_to_json(x),
}


def _agent_facts_to_json(facts: AgentFacts) -> list[Any]:
    waits = [[wait.generation, wait.group, wait.reached] for wait in facts.waits]
    failures = [[each.member, each.local_rank, each.step] for each in facts.failures]
    return [facts.has_successors, waits, failures, facts.unreached, facts.is_stopping]


def _job_facts_to_json(facts: JobFacts) -> list[Any]:
    waits = [[wait.generation, wait.group, wait.reached, wait.agent] for wait in facts.waits]
    failures = [[each.member, each.local_rank, each.step, each.agent] for each in facts.failures]
    return [facts.have_successors, waits, failures]


def _wait(generation: Any, group: Any, reached: Any, agent: str = "") -> Wait:
    if group is not None and (type(group) is not int or not 0 < group < 1 << 64):
        raise TypeError("the key of a group is expected")
    return Wait(_number(generation), group, reached if reached is None else _number(reached), agent)


def _failure(member: Any, local_rank: Any, step: Any, agent: str = "") -> ScriptFailure:
    return ScriptFailure(_name(member), _number(local_rank), _number(step), agent)


def _agent_facts(has_successors: Any, waits: Any, failures: Any, unreached: Any, is_stopping: Any) -> AgentFacts:
    if len(waits) > MAX_WAITS or len(failures) > MAX_FAILURES:
        raise ValueError("an agent has too many facts")
    return AgentFacts(
        _flag(has_successors),
        tuple(_wait(generation, group, reached) for generation, group, reached in waits),
        tuple(_failure(member, local_rank, step) for member, local_rank, step in failures),
        tuple(map(_name, _texts(unreached))),
        _flag(is_stopping),
    )


def _job_facts(have_successors: Any, waits: Any, failures: Any) -> JobFacts:
    return JobFacts(
        _flag(have_successors),
        tuple(_wait(generation, group, reached, _text(agent)) for generation, group, reached, agent in waits),
        tuple(_failure(member, local_rank, step, _text(agent)) for member, local_rank, step, agent in failures),
    )


def _job_failed(step: Any, generation: Any, text: Any) -> m.JobFailed:
    return m.JobFailed(_number(step), _number(generation), _text(text))


def _rendezvous_keys(prefix: Any, groups: Any, keys: Any, asked: Any) -> RendezvousKeys:
    found = []
    for group, name, value in keys:
        if len(_text(value)) > MAX_VALUE_CHARS:
            raise ValueError("the value of a rendezvous key is too long")
        found.append(Key(_name(group), _name(name), value))
    wanted = tuple(Asked(_name(group), tuple(_name(name) for name in names)) for group, names in asked)
    return RendezvousKeys(_name(prefix), tuple(_name(group) for group in groups), tuple(found), wanted)


def _cause_to_json(cause: EndCause) -> list[Any]:
    return [cause.what, cause.agents, cause.ranks, cause.is_effect, cause.timed_out]


def _end_generation(
    generation: Any, what: Any, agents: Any, ranks: Any, is_effect: Any, timed_out: Any
) -> m.EndGeneration:
    found = tuple(_number(rank) for rank in ranks)
    if found and len(agents) != 1:
        raise ValueError("ranks are those of one agent")
    cause = EndCause(_text(what), _texts(agents), found, _flag(is_effect), _flag(timed_out))
    return m.EndGeneration(_number(generation), cause)


_FROM_AGENT: dict[str, Callable[..., Any]] = {
    "Hello": lambda agent, incarnation, session, term, ref, over, finished, former, former_ref: m.Hello(
        _name(agent),
        _name(incarnation),
        _number(session),
        _term(term),
        _ref(ref),
        _number(over),
        _number(finished),
        _text(former),
        _ref(former_ref),
    ),
    "Promise": lambda term: m.Promise(_term(term)),
    "KnownDecision": lambda decision: m.KnownDecision(decision_from_json(decision, is_checked=True)),
    "Ready": lambda report: m.Ready(_report(report)),
    "EndGeneration": _end_generation,
    "JoinRequest": lambda generation: m.JoinRequest(_number(generation)),
    "Accepted": lambda generation, digest: m.Accepted(_number(generation), _name(digest)),
    "Finished": lambda generation: m.Finished(_number(generation)),
    "Goodbye": lambda reason: m.Goodbye(_text(reason)),
    "Heartbeat": lambda number: m.Heartbeat(_number(number)),
    "JobFailed": _job_failed,
    "AgentFacts": _agent_facts,
    "RendezvousKeys": _rendezvous_keys,
}

_FROM_COORDINATOR: dict[str, Callable[..., Any]] = {
    "Welcome": lambda term, in_office, over, joining, finished, everywhere: m.Welcome(
        _term(term), _flag(in_office), _number(over), _number(joining), _flag(finished), _flag(everywhere)
    ),
    "Push": lambda decision, over, joining: m.Push(decision_from_json(decision), _number(over), _number(joining)),
    "RequestDecision": lambda digest: m.RequestDecision(_name(digest)),
    "HeartbeatAnswer": lambda number, in_office: m.HeartbeatAnswer(_number(number), _flag(in_office)),
    "EndGeneration": _end_generation,
    "JoinNotice": lambda generation: m.JoinNotice(_number(generation)),
    "Finished": lambda generation: m.Finished(_number(generation)),
    "JobFailed": _job_failed,
    "JobFacts": _job_facts,
    "Notice": lambda topic, reason, agents: m.Notice(_name(topic), _text(reason), _texts(agents)),
    "Evicted": lambda reason: m.Evicted(_text(reason)),
    "Refused": lambda reason: m.Refused(_text(reason)),
    "JobUnrecoverable": lambda reason: m.JobUnrecoverable(_text(reason)),
    "RendezvousKeys": _rendezvous_keys,
}
