"""Peers fetch forms of this rank (`protocol/form.py`) beside its steps.

FORMEXCHANGE-1  A rank answers with the form that it has for what the peer names: a part of the model, or an attempt at
    a step. While it has yet to come to that, the peer waits, no longer than its generation lasts.
FORMEXCHANGE-2  A form is made when a peer asks for it, and while it counts: `withdraw` waits for that.
FORMEXCHANGE-3  A form like the peer's own is not sent: of a model of thousands of parameters it has megabytes, and many
    ranks may ask one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from elasticgang.errors import WireError
from elasticgang.protocol.form import Form, FormOf, digest_of, form_from_json
from elasticgang.state import heal_addresses, transport
from elasticgang.state.authentication import Authenticator
from elasticgang.state.transport import Channel

log = logging.getLogger("elasticgang")

KIND = "form"
BUILT_S = 10.0  # less than a peer waits for an answer, `HEAL_TIMEOUT_S`
_FAILURES = (OSError, WireError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


class FormExchange:
    """The forms of one rank, for its peers, and the forms of these. `of`: the numbers that name the part of the model,
    for `FormOf.STATE`, or the attempt."""

    def __init__(self, authenticator: Authenticator) -> None:
        self._authenticator = authenticator
        self._changed = threading.Condition()
        self._known: dict[str, tuple[list[int], Callable[[], Form]]] = {}

    def announce(self, what: FormOf, of: Sequence[int], form: Callable[[], Form]) -> None:
        """This rank has `form` of `what`. It is called on other threads."""
        with self._changed:
            self._known[what] = list(of), form
            self._changed.notify_all()

    def withdraw(self, what: FormOf) -> None:
        """What was announced counts no longer, and is not called any more."""
        with self._changed:  # FORMEXCHANGE-2
            self._known.pop(what, None)

    def serve(self, channel: Channel, request: dict[str, Any]) -> None:
        """Answer `fetch` of a peer."""
        what, of = request["what"], request["of"]

        def is_known() -> bool:
            return what in self._known and self._known[what][0] == of

        with self._changed:  # FORMEXCHANGE-1
            form = None
            try:
                if self._changed.wait_for(is_known, BUILT_S):
                    form = self._known[what][1]()
            except RuntimeError as exc:  # of a device
                log.debug("no form of the %s: %r", what, exc)
        is_alike = form is not None and digest_of(form) == request["digest"]  # FORMEXCHANGE-3
        channel.send({"is_alike": is_alike, "form": None if is_alike else form})

    def fetch(
        self, source: str, what: FormOf, of: Sequence[int], own: Form, cancelled: Callable[[], bool]
    ) -> Form | None:
        """The form that the rank with the addresses `source` has, or `own` if they are alike. None: it has none within
        `BUILT_S`, does not answer, or `cancelled`. For the form of its state it is asked again."""
        request = {"kind": KIND, "what": what, "of": list(of), "digest": digest_of(own)}
        for address in heal_addresses.main_first(source):
            try:
                while not cancelled():
                    with self._authenticator.connect_unless(cancelled, address) as channel:
                        channel.send(request)
                        transport.await_answer(channel.sock, cancelled)
                        answer = channel.receive(transport.MAX_MANIFEST_BYTES)
                    if answer["is_alike"]:
                        return own
                    if (form := answer["form"]) is not None:
                        return form_from_json(form)
                    if what is not FormOf.STATE:
                        return None
            except _FAILURES as exc:
                log.debug("no form of the %s from %s: %r", what.value, address, exc)
        return None
