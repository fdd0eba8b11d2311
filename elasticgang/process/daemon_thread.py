"""A blocking call beside an asyncio loop, in a thread that the end of the process does not wait for."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any


def in_daemon_thread(function: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
    loop = asyncio.get_running_loop()
    ended = loop.create_future()

    def resolve(result: Any, error: Exception | None) -> None:
        if not ended.done():
            ended.set_result(result) if error is None else ended.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = function(*args)
        except Exception as exc:
            error = exc
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(resolve, result, error)

    threading.Thread(target=run, name="aside", daemon=True).start()
    return ended
