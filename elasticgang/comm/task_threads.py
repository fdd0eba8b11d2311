"""Threads for tasks that may block."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class TaskThreads:
    """Runs each task at once, on a thread that runs no other. A thread whose task has ended is kept for a later one:
    there are as many as there were tasks at one time. (`ThreadPoolExecutor` of Python 3.12 loses count of its idle
    threads, and starts further ones for as long as it is used.) They do not keep the process from ending."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_idle = 0  # threads without a task
        self._tasks: SimpleQueue[Callable[[], None]] = SimpleQueue()

    def submit(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """The future's callbacks must not block. Raises RuntimeError: no thread can be started. The task does not run
        then."""
        future: Future[R] = Future()

        def run() -> None:
            result, error = None, None
            try:
                result = call(*args, **kwargs)
            except BaseException as exc:
                error = exc
            with self._lock:  # before anyone knows of the end, and submits the next task
                self._num_idle += 1
            if error is None:
                future.set_result(result)  # type: ignore[arg-type]
            else:
                future.set_exception(error)

        with self._lock:
            needs_thread = not self._num_idle
            if not needs_thread:
                self._num_idle -= 1
        if needs_thread:
            threading.Thread(target=self._serve, daemon=True).start()
        self._tasks.put(run)
        return future

    def _serve(self) -> None:
        while True:
            self._tasks.get()()
