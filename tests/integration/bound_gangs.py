"""Elastic gangs bound to the comm processes of a `World`, as a generation binds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from elasticgang.comm.comm_process import CommProcess, GroupSpec
from elasticgang.comm.error_swallowing import SwallowingProcessGroup
from elasticgang.comm.group_set import Configuration
from elasticgang.comm.isolated import SharedProcessGroup
from elasticgang.errors import GangError, StaleGenerationError
from elasticgang.gang import ElasticGang
from elasticgang.gang.elastic import Binding
from tests.integration.conftest import World

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Owner:
    """What a rank's groups belong to, as `member.generation.Generation` is."""

    comm: CommProcess

    @property
    def error(self) -> GangError | None:
        return StaleGenerationError("the comm process has ended") if self.comm.ended else None

    def fail(self, error: GangError) -> None:
        self.comm.abort(error)

    def check(self) -> None: ...


def group_of(world: World, rank: int, spec: GroupSpec | None = None) -> SwallowingProcessGroup:
    comm = world.comms[rank]
    shared = SharedProcessGroup(Configuration(comm), spec or GroupSpec("all", rank, len(world.comms)))
    return SwallowingProcessGroup(shared, start=shared.start, owner=Owner(comm))


def binding(world: World, rank: int) -> Binding:
    """Of a gang of all ranks."""

    def make(name: str, ranks: Sequence[int]) -> SwallowingProcessGroup:
        spec = GroupSpec(name, list(ranks).index(rank), len(ranks))
        world.comms[rank].add_group(world.prefix, spec)
        return group_of(world, rank, spec)

    return Binding(rank, tuple(range(len(world.comms))), group_of(world, rank), make)


def bound(world: World, name: str = "dp") -> list[ElasticGang]:
    gangs = []
    for rank in range(len(world.comms)):
        gang = ElasticGang(name, CPU)
        gang.bind(binding(world, rank))
        gangs.append(gang)
    return gangs
