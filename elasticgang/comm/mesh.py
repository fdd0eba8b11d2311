"""A DeviceMesh with a reconfigurable process group as an additional dimension.

A mesh has fixed sizes, but the size of such a group changes. As in torchft, the dimension has size 1 in the mesh, and
only the group knows the true size. FSDP2 reads it from the group; other code that scales by the mesh must do so too.
For a mesh with true sizes use gangs (`gangs.device_mesh`) or the backend "elasticgang".
"""

from __future__ import annotations

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh


def extend_device_mesh(mesh: DeviceMesh, pg: ProcessGroup, name: str = "dp", dim: int = 0) -> DeviceMesh:
    """`mesh` with `pg` as an additional dimension `name` before its dimension `dim`; `dim = mesh.ndim` appends it. The
    mesh must have dimension names, and `pg` must be registered (`pg.register`).

    Raises:
        ValueError: `mesh` has no names or has a dimension `name`; or `dim` is outside `[0, mesh.ndim]`.
        InvalidOperationError: `pg` is not registered.

    Source: torchft's `extend_device_mesh`.
    """
    names = list(mesh.mesh_dim_names or ())
    if len(names) != mesh.ndim:
        raise ValueError(f"the dimensions of `mesh` must have names, but are {mesh.mesh_dim_names} instead.")
    if name in names:
        raise ValueError(f"`name` must be another one than the mesh's {names}, but is {name!r} instead.")
    if not 0 <= dim <= mesh.ndim:
        raise ValueError(f"`dim` must be at least 0 and at most {mesh.ndim}, but is {dim} instead.")
    groups = mesh.get_all_groups()
    groups.insert(dim, pg)
    names.insert(dim, name)
    return DeviceMesh.from_group(groups, mesh.device_type, mesh.mesh.unsqueeze(dim), mesh_dim_names=tuple(names))
