"""The process that writes a rank's shares of checkpoints (`writer.py`), as the rank sees it."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import subprocess
import threading
from collections.abc import Callable
from typing import Any

from elasticgang.checkpoint.writer import Outcome
from elasticgang.process.own_modules import command_of

EXIT_TIMEOUT_S = 5.0
_MADV_POPULATE_WRITE = 23
_POPULATE_BYTES = 1 << 20  # at a time: the call holds the GIL


class WriterProcess:
    """The process that writes. `answer` blocks, on the thread of a save."""

    def __init__(self) -> None:
        """Raises OSError: it cannot be started."""
        self._descriptor = os.memfd_create("eg-checkpoint", os.MFD_CLOEXEC)
        self._mapped: mmap.mmap | None = None
        try:
            self._process = subprocess.Popen(
                command_of("elasticgang.checkpoint.writer", str(self._descriptor), str(os.getpid())),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[self._descriptor],
            )
        except BaseException:
            os.close(self._descriptor)
            raise

    @property
    def is_dead(self) -> bool:
        return self._process.poll() is not None

    def memory(self, num_bytes: int) -> mmap.mmap:
        """Shared memory of at least so many bytes. Raises OSError."""
        if self._mapped is None or len(self._mapped) < num_bytes:
            size = max(num_bytes, mmap.PAGESIZE)
            os.ftruncate(self._descriptor, size)
            self._mapped = mmap.mmap(self._descriptor, size)
        return self._mapped

    def allocate(self, num_bytes: int) -> None:
        """Let the pages of the memory be there before they are copied to: the first copy to a page takes 8 times as
        long as a later one. Raises OSError, or RuntimeError: no thread is left."""
        memory = self.memory(num_bytes)

        def populate() -> None:
            with contextlib.suppress(OSError, ValueError):  # not before Linux 5.14
                for start in range(0, len(memory), _POPULATE_BYTES):
                    memory.madvise(_MADV_POPULATE_WRITE, start, min(_POPULATE_BYTES, len(memory) - start))

        threading.Thread(target=populate, name="checkpoint-memory", daemon=True).start()

    def send(self, message: dict[str, Any]) -> None:
        """A request, or what is new about the one under way. If the writer has died, `answer` says so."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()

    def answer(self, tell_written: Callable[[int], None]) -> Outcome:
        """`tell_written`: called with the number of bytes that are written by now. Raises OSError or ValueError: the
        writer has died."""
        assert self._process.stdout is not None
        tell_written(0)
        while line := self._process.stdout.readline():
            found = json.loads(line)
            if "written" not in found:
                return Outcome(**found)
            tell_written(found["written"])
        raise OSError("the process that writes checkpoints has died")

    def close(self) -> None:
        """End the process, or a save under way."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.send({"end": True})  # what the script has forked, such as a data worker, keeps stdin open
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.close()
        try:
            self._process.wait(EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel: it is reaped with this process
                self._process.wait(EXIT_TIMEOUT_S)
        self._process.stdout.close()
        os.close(self._descriptor)
