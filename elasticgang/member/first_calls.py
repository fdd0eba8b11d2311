"""Calls that fill a cache, made by the import of this module: in a fork server, before it forks.

A process that makes such a call first has the memory of the cache to itself, and of all that the call reads: a
reference count is in the object. `record_function` of torch 2.13 imports a module, which costs each rank a megabyte.
The question whether an object is a `Mapping` goes to all of its subclasses, once for each type: `Counter` and
`os.environ.update` ask it.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from types import GeneratorType

import torch

with torch.profiler.record_function("first call"):
    hmac.digest(b"key", b"message", "sha256")
_types: tuple[type, ...] = (dict, list, tuple, set, GeneratorType, type({}.values()))
for _type in _types:
    issubclass(_type, Mapping)
