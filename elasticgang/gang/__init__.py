"""Gangs: sets of ranks that act collectively."""

from elasticgang.gang.base import Gang, ReduceOperation
from elasticgang.gang.elastic import ElasticGang
from elasticgang.gang.fake import FakeGang
from elasticgang.gang.gangs import Gangs, create_fake_gangs, maybe_get_current_gangs

__all__ = [
    "ElasticGang",
    "FakeGang",
    "Gang",
    "Gangs",
    "ReduceOperation",
    "create_fake_gangs",
    "maybe_get_current_gangs",
]
