"""Which hosts accept a connection from this one, for messages about ranks that do not connect. Sends nothing."""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import time
from collections.abc import Sequence
from errno import EINPROGRESS

from elasticgang.process.late_signals import LONGEST_WAIT_S
from elasticgang.session.addresses import family_of, host_and_port

REACH_S = 1.0
_NUM_SHOWN = 4


def describe_reach(addresses: Sequence[str], timeout_s: float) -> str:
    """In words, after at most `timeout_s` seconds. `addresses`: as HOST:PORT, of which each has a listener."""
    unreached = find_unreached(addresses, timeout_s)
    if not unreached:
        return "this host reaches the others"
    shown = [f"{host} ({why})" for host, why in list(unreached.items())[:_NUM_SHOWN]]
    num_more = len(unreached) - len(shown)
    return f"this host does not reach {', '.join(shown)}" + (f" and {num_more} more" if num_more else "")


def find_unreached(addresses: Sequence[str], timeout_s: float) -> dict[str, str]:
    """The hosts to which no connection was opened within `timeout_s` seconds, and why."""
    ends_at, found = time.monotonic() + timeout_s, {}
    with contextlib.ExitStack() as opened:
        selector = opened.enter_context(selectors.DefaultSelector())
        for address in addresses:
            host, port = host_and_port(address)
            try:
                sock = opened.enter_context(socket.socket(family_of(host), socket.SOCK_STREAM))
                sock.setblocking(False)
                number = sock.connect_ex((host, int(port)))
            except OSError as exc:
                number = exc.errno or 0
            if number == EINPROGRESS:
                selector.register(sock, selectors.EVENT_WRITE, (host, sock))
            elif number:
                found[host] = os.strerror(number)
        while selector.get_map() and (left_s := ends_at - time.monotonic()) > 0:
            for key, _ in selector.select(min(left_s, LONGEST_WAIT_S)):  # SIGNAL-LATE
                host, sock = key.data
                selector.unregister(sock)
                if number := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    found[host] = os.strerror(number)
        found |= {key.data[0]: f"no answer within {timeout_s:g} s" for key in selector.get_map().values()}
    return found
