"""One end of a heal in a process of its own: `memory_holder.py ROLE SEED SIZE [ADDRESS ...]`.

`holder` prints its address and serves until its standard input is closed, `elsewhere` as a holder on another host.
`digesting` is a holder that has no digest before it reads a line from its standard input.
`healer` heals from the addresses and prints how many chunks it has read from memory; `victim` is killed at its tenth
chunk; `refused` is a healer to which the kernel refuses `process_vm_readv`.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import logging
import struct
import sys
import threading
from collections.abc import Callable

from elasticgang import testing
from elasticgang.state import peer_memory, snapshot_server, staging, striped_fetch
from elasticgang.state.digests import digest_for
from tests.integration.state_ranks import AT, CREDENTIALS, Rank

CHUNK = 4000
_SYS_PROCESS_VM_READV = 310  # of x86-64
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP = 38, 22
_SECCOMP_MODE_FILTER = 2


def small_chunks() -> None:
    staging.CHUNK_BYTES = CHUNK
    striped_fetch.STRIPE_BYTES = 1
    peer_memory.MIN_BYTES = 0


def after(number: int, act: Callable[[], object]) -> Callable[[], None]:
    """Does `act` in this of its calls."""
    count = itertools.count(1)

    def counted() -> None:
        if next(count) == number:
            act()

    return counted


def refuse_reads() -> None:
    """By a seccomp filter, as container runtimes do."""
    code = [
        (0x20, 0, 0, 0),  # load the number of the system call
        (0x15, 0, 1, _SYS_PROCESS_VM_READV),
        (0x06, 0, 0, 0x00050000 | errno.EPERM),
        (0x06, 0, 0, 0x7FFF0000),  # allow
    ]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in code))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code), ctypes.addressof(program)))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0) == 0


def main() -> None:
    role, seed, size, *sources = sys.argv[1:]
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    small_chunks()
    if role == "elsewhere":
        peer_memory.host_id = lambda: "another host"
    has_begun = threading.Event()
    if role == "digesting":

        def gated(data: memoryview) -> str:
            has_begun.wait()
            return str(digest_for(CREDENTIALS)(data))

        vars(snapshot_server)["digest_for"] = lambda credentials: gated
    rank = Rank(int(seed), size=int(size))
    if role in ("holder", "elsewhere", "digesting"):
        rank.server.begin(AT)
        print(rank.server.address, flush=True)
        sys.stdin.readline()
        has_begun.set()
        sys.stdin.read()
        return
    if role == "refused":
        refuse_reads()
    if role == "victim":
        testing.fail_at("chunk_received", after(10, testing.kill_this_process))
    fetches = []
    run = striped_fetch.StripedFetch.run
    striped_fetch.StripedFetch.run = lambda fetch: (fetches.append(fetch), run(fetch))[1]  # type: ignore[assignment, method-assign, func-returns-value]
    assert rank.server.heal(sources, AT)
    print(fetches[-1].num_from_memory, flush=True)


if __name__ == "__main__":
    main()
