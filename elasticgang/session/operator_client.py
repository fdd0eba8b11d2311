"""An operator's session with a coordinator: grants it office over one job (`elasticgang grant`)."""

from __future__ import annotations

import asyncio
import contextlib

from elasticgang.errors import OperationalError
from elasticgang.protocol.coordinator_messages import GrantOffice, Refused
from elasticgang.protocol.record import PROTOCOL
from elasticgang.session.connection import LINGER_S, Connection, client_of, connect
from elasticgang.session.credentials import Credentials
from elasticgang.session.handshake import OPERATOR, Identity
from elasticgang.session.messages import decode_for_operator, encode


class _Operator:
    """`missing`: as of `Credentials`."""

    def __init__(self, missing: str) -> None:
        self._missing = missing
        self._is_open = False
        self.answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.has_ended = asyncio.Event()

    def opened(self, connection: Connection) -> None:
        self._is_open = True
        connection.send(encode(GrantOffice()))

    def received(self, connection: Connection, payload: bytes) -> None:
        answer = decode_for_operator(payload)
        refused = isinstance(answer, Refused)
        self._set(OperationalError(f"it refuses: {answer.reason}") if refused else answer.reason)

    def closed(self, connection: Connection, reason: str) -> None:
        self.has_ended.set()
        why = f"the session ended: {reason or 'the coordinator closed it'}"
        if self._missing and not self._is_open:
            why = f"it takes no operator without a secret: does it need {self._missing}? ({why})"
        self._set(OperationalError(why))

    def _set(self, answer: str | OperationalError) -> None:
        if self.answer.done():
            return
        if isinstance(answer, str):
            self.answer.set_result(answer)
        else:
            self.answer.set_exception(answer)


async def grant(host: str, port: int, job: str, credentials: Credentials, timeout_s: float) -> str:
    """Grant the coordinator office over `job`, and return its answer: what it does now.

    Raises:
        OperationalError: the coordinator did not answer within `timeout_s`, or it refuses.
    """
    operator = _Operator(credentials.missing)
    connection = client_of(operator, Identity(job, OPERATOR, PROTOCOL), credentials, host)
    where, is_connected = f"the coordinator at {host}:{port}", False
    try:
        await asyncio.wait_for(connect(lambda: connection, host, port), timeout_s)
        is_connected = True
        return await asyncio.wait_for(operator.answer, timeout_s)
    except asyncio.TimeoutError as exc:
        raise OperationalError(f"{where} did not answer within {timeout_s:g} s") from exc
    except OSError as exc:
        raise OperationalError(f"{where} cannot be reached: {exc}") from exc
    except OperationalError as exc:
        raise OperationalError(f"{where}: {exc}") from exc
    finally:
        connection.close()
        if is_connected:  # the loop may end after this, which would leave the socket open
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(operator.has_ended.wait(), 2 * LINGER_S)
        if operator.answer.done() and not operator.answer.cancelled():
            operator.answer.exception()  # it is retrieved
