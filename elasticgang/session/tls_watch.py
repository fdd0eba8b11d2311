"""Looks at a process's TLS files, on a thread of its own, and takes new ones into use. `tls_rotation.py` has the rules.

TLSWATCH-1  No event loop, and no connection, waits for the disk: a handshake takes what the newest look has found. A
            disk that blocks leaves the files in use that are.
TLSWATCH-2  A look reads the files. It compares neither times nor links: a file may be rewritten within the resolution
            of its time, and links may come to lead elsewhere.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from elasticgang.errors import OperationalError
from elasticgang.session.tls import Tls, TlsContents, check_contents, read_contents
from elasticgang.session.tls_rotation import Life, News, Problem, Rotation

LOOK_S = 1.0
RECHECK_S = 10.0  # files that were refused may become valid: for a certificate that has not begun


class TlsWatch:
    """Keeps `tls` at the newest files that can be used. `tell` is called with the news, on the thread of the look."""

    def __init__(self, tls: Tls, tell: Callable[[News], None]) -> None:
        self._tls, self._tell = tls, tell
        self._rotation = Rotation(tls.life)
        self._refused: tuple[TlsContents, Problem, float] | None = None  # the newest ones, and until when
        self._is_stopped = threading.Event()

    def start(self) -> None:
        """On a thread that the end of the process does not wait for."""
        threading.Thread(target=self._watch, name="tls-files", daemon=True).start()

    def stop(self) -> None:
        """Begin no further look."""
        self._is_stopped.set()

    def look(self) -> None:
        """Take new files into use if there are any, and tell the news."""
        for news in self._rotation.looked(self._find(), time.time()):
            self._tell(news)

    def _watch(self) -> None:
        """TLSWATCH-1"""
        while not self._is_stopped.is_set():
            self.look()
            self._is_stopped.wait(LOOK_S)

    def _find(self) -> Life | Problem | None:
        """TLSWATCH-2"""
        tls = self._tls
        try:
            contents = read_contents(tls.files)
        except OperationalError as exc:  # TLS-WHOLE
            return Problem(str(exc))
        if contents == tls.contents:
            self._refused = None
            return None
        if self._refused is not None and self._refused[0] == contents and time.monotonic() < self._refused[2]:
            return self._refused[1]
        try:
            life = check_contents(tls.files, contents, is_client=tls.is_client)
            tls.use(contents, life)
        except (OperationalError, OSError) as exc:  # TLS-WHOLE; an OSError: no descriptor is left
            problem = Problem(str(exc))
            self._refused = contents, problem, time.monotonic() + RECHECK_S
            return problem
        self._refused = None
        return life


def watch_tls(tls: Tls | None, tell: Callable[[News], None]) -> TlsWatch | None:
    """Start a watch. None without TLS."""
    if tls is None:
        return None
    watch = TlsWatch(tls, tell)
    watch.start()
    return watch
