"""A `TCPStore` for the process groups of torchft, which take the address of one and nothing else.

DATA-STORE-1  Rank 0 of a generation serves it until the generation ends, and publishes its address as a rendezvous key.
    The store itself asks nobody for a secret: like the connections of those groups, it is open to whoever reaches it.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from elasticgang.comm.agent_store import AgentStoreClient
from elasticgang.comm.comm_process import translated
from elasticgang.errors import OperationalError
from elasticgang.member.generation import Generation
from elasticgang.session.addresses import family_of

_GROUP, _KEY = "data", "address"


class DataStore:
    """`address`: "host:port"."""

    def __init__(
        self, generation: Generation, host: str, connect: Callable[[], socket.socket], timeout_s: float
    ) -> None:
        """Blocks until rank 0 has published the address. `connect`: makes a connection to the agent.

        Raises:
            GangError: it has not within `timeout_s`, or the generation is over.
        """
        self._server: TCPStore | None = None
        try:
            client = AgentStoreClient(connect())
            try:
                keys = client.store(generation.prefix, _GROUP, timedelta(seconds=timeout_s))
                if generation.rank == 0:
                    keys.set(_KEY, self._serve(host))
                self.address = keys.get(_KEY).decode()
            finally:
                client.close()
        except (OSError, RuntimeError, OperationalError) as error:
            raise translated("could not share the address of the store", str(error)) from None

    def _serve(self, host: str) -> str:
        listener = socket.create_server((host, 0), family=family_of(host))
        port = listener.getsockname()[1]
        self._server = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        return f"{host}:{port}"
