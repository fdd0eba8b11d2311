"""The digest of a model is that of its parts together, and of no other model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from scripts.demo_job.row_digest import digest_of_rows, sum_of

Named = list[tuple[str, Tensor]]


def meshes(size: int) -> Iterator[DeviceMesh]:
    """Of so many ranks, as each of them sees it."""
    for rank in range(size):
        dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
        yield init_device_mesh("cpu", (size,), mesh_dim_names=("sdp",))
        dist.destroy_process_group()


def model() -> Named:
    generator = torch.Generator().manual_seed(0)
    shapes = {"weight": (5, 3), "bias": (5,), "gain": (2,), "cube": (4, 2, 2)}
    return [(name, torch.randn(shape, generator=generator)) for name, shape in shapes.items()]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_digests_of_all_parts_sum_to_that_of_the_whole_model(size: int) -> None:
    """Five rows are not divided equally, and two are fewer than the ranks."""
    parts = []
    for mesh in meshes(size):
        own = []
        for name, tensor in model():
            chunks = [*tensor.chunk(size), *[tensor[:0]] * size]
            shard = chunks[mesh.get_local_rank()]
            divided = DTensor.from_local(
                shard, mesh, [Shard(0)], run_check=False, shape=tensor.shape, stride=tensor.stride()
            )
            own.append((name, divided))
        parts.append(digest_of_rows(own))
    assert sum_of(parts) == digest_of_rows(model())


def test_another_bit_or_row_or_name_or_dtype_is_another_digest() -> None:
    others: list[Named] = [model() for _ in range(6)]
    others[1][0][1][0, 0] = torch.nextafter(others[1][0][1][0, 0], torch.tensor(9.0))
    others[2][0] = ("weight", others[2][0][1].flip(0))
    others[3][0] = ("other", others[3][0][1])
    others[4][0] = ("weight", others[4][0][1].view(torch.int32))
    others[5].pop()
    assert len({digest_of_rows(other) for other in others}) == len(others)


def test_columns_are_refused() -> None:
    for mesh in meshes(2):
        columns = DTensor.from_local(torch.zeros(4, 2), mesh, [Shard(1)], run_check=False)
        with pytest.raises(ValueError, match="divided along their first dimension alone, but weight is not"):
            digest_of_rows([("weight", columns)])
