"""Peers fetch the form of this rank's training state (`protocol/form.py`), beside its steps.

FORMEXCHANGE-1  A rank answers with the form of its state for the part of the model that the peer names, and for no
    other. While it has yet to build that, the peer waits, no longer than its generation lasts.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from elasticgang.errors import WireError
from elasticgang.protocol.form import Form, form_from_json
from elasticgang.state import transport
from elasticgang.state.authentication import Authenticator
from elasticgang.state.transport import Channel

log = logging.getLogger("elasticgang")

KIND = "form"
BUILT_S = 10.0  # less than a peer waits for an answer, `HEAL_TIMEOUT_S`
_FAILURES = (OSError, WireError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


class FormExchange:
    """The form of one rank, for its peers, and the forms of these."""

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator
        self._changed = threading.Condition()
        self._part: list[int] | None = None  # of which `_form` is
        self._form: Form = ()

    def announce(self, part: Sequence[int], form: Form) -> None:
        """This rank's state is of `part`, and has `form`."""
        with self._changed:
            self._part, self._form = list(part), form
            self._changed.notify_all()

    def forget(self) -> None:
        """This rank's state is of no part."""
        with self._changed:
            self._part, self._form = None, ()

    def serve(self, channel: Channel, request: dict[str, Any]) -> None:
        """Answer `fetch` of a peer."""
        part = request["part"]
        with self._changed:  # FORMEXCHANGE-1
            is_built = self._changed.wait_for(lambda: self._part == part, BUILT_S)
            form = self._form if is_built else None
        channel.send({"form": form})

    def fetch(self, addresses: Sequence[str], part: Sequence[int], cancelled: Callable[[], bool]) -> Form | None:
        """The form that a rank has for `part`, once it has that; `addresses`: of this rank, to try in turn. None: it
        does not answer, or `cancelled`."""
        for address in addresses:
            try:
                while not cancelled():
                    with self._authenticator.connect(address) as channel:
                        channel.send({"kind": KIND, "part": list(part)})
                        transport.await_answer(channel.sock, cancelled)
                        form = channel.receive(transport.MAX_MANIFEST_BYTES)["form"]
                    if form is not None:
                        return form_from_json(form)
            except _FAILURES as exc:
                log.debug("no form of the state from %s: %r", address, exc)
        return None
