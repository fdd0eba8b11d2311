"""One end of a transfer that `scripts/bench state` measures: `end.py source|receiver KIND MIB CHUNKS [ADDRESS]`.

KIND is `ours`, `torchft` (its HTTPTransport, with so many chunks) or `sockets` (plain ones, digest included). A source
prints its address, and its extra memory once its standard input is closed. A receiver prints the seconds and its extra
memory. Memory is resident, with what is shared.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import xxhash
from torchft.checkpointing.http_transport import HTTPTransport

from elasticgang.protocol.commit import Attempt
from elasticgang.state import SnapshotServer
from elasticgang.state.serialization import as_bytes
from scripts.benches.pairs.checkpointed import State

HERE = "127.0.0.1"
AT = Attempt(3, 2)
TIMEOUT = timedelta(seconds=300)
_CHUNK_BYTES = 4 << 20


def chunks_of(state: State) -> Iterator[memoryview]:
    for parameter in state.parameters():
        data = as_bytes(parameter)
        yield from (data[start : start + _CHUNK_BYTES] for start in range(0, len(data), _CHUNK_BYTES))


@contextlib.contextmanager
def serving(kind: str, state: State, num_chunks: int) -> Iterator[str]:
    """The address."""
    if kind == "ours":
        server = SnapshotServer(HERE)
        server.register(model=state)
        server.begin(AT)
        yield server.address
        server.close()
    elif kind == "torchft":
        transport: HTTPTransport[Any] = HTTPTransport(TIMEOUT, num_chunks)
        transport.send_checkpoint([1], AT.step, dict(state.state_dict()), TIMEOUT)
        port = transport.metadata().rpartition(":")[2]
        yield f"http://{HERE}:{port}"  # by its host's name it may not be reachable
        transport.shutdown(wait=False)
    else:
        listener = socket.create_server((HERE, 0))
        yield f"{HERE}:{listener.getsockname()[1]}"
        sock, _ = listener.accept()
        with sock:
            for chunk in chunks_of(state):
                sock.sendall(xxhash.xxh3_128_digest(chunk))
                sock.sendall(chunk)


def receive(kind: str, state: State, num_chunks: int, address: str) -> None:
    if kind == "ours":
        server = SnapshotServer()
        server.register(model=state)
        if not server.heal([address], AT):
            raise SystemExit("the heal has failed")
    elif kind == "torchft":
        transport: HTTPTransport[Any] = HTTPTransport(TIMEOUT, num_chunks)
        found = transport.recv_checkpoint(0, address, AT.step, TIMEOUT)
        state.load_state_dict(found)
    else:
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port))) as sock:
            digest = bytearray(16)
            for chunk in chunks_of(state):
                fill(sock, memoryview(digest))
                fill(sock, chunk)
                if xxhash.xxh3_128_digest(chunk) != digest:
                    raise SystemExit("a digest is wrong")


def fill(sock: socket.socket, data: memoryview) -> None:
    while data:
        data = data[sock.recv_into(data) :]


def with_memory(work: Callable[[], object]) -> float:
    """The peak of the memory that this process takes meanwhile, in MiB."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    work()
    return round(_status("VmHWM") - before, 1)


def _status(name: str) -> float:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1]) / 1024


def main() -> None:
    role, kind, mib, num_chunks, *address = sys.argv[1:]
    torch.set_num_threads(1)
    state = State(int(mib))
    if role == "receiver":
        begun = time.perf_counter()
        extra_mib = with_memory(lambda: receive(kind, state, int(num_chunks), address[0]))
        print(json.dumps({"s": time.perf_counter() - begun, "extra_mib": extra_mib}), flush=True)
        return

    def serve() -> None:
        with serving(kind, state, int(num_chunks)) as own:
            print(own, flush=True)
            if kind != "sockets":
                sys.stdin.read()

    print(json.dumps({"extra_mib": with_memory(serve)}), flush=True)


if __name__ == "__main__":
    main()
