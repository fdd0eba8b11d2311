"""One rank of a static gang, started from a fork server by `test_contract.py`; and, run as a script under
`elasticgang run`, of an elastic one."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from elasticgang.gang import ProcessGroupGang, create_fsdp_gangs, create_parallel_gangs
from tests.gang import contract


def static(args: dict[str, Any], fds: list[int]) -> int:
    os.environ.update(RANK=str(args["rank"]), WORLD_SIZE=str(args["size"]), MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = str(args["port"])
    root = ProcessGroupGang.create_default_process_group(torch.device("cpu"))
    contract.same_on_every_rank(root)
    contract.one_to_another(root)
    contract.refusals(root)
    contract.sub_gangs(root)
    gangs = create_parallel_gangs(root, tp_size=2)
    for gang in (gangs.tp, gangs.dp):
        assert gang.size == root.size // 2
        contract.one_to_another(gang)
    assert (gangs.tp.rank, gangs.dp.rank) == (root.rank % 2, root.rank // 2)
    piped = create_parallel_gangs(root, pp_size=2)
    assert (piped.pp.rank, piped.dp.rank) == (root.rank // 2, root.rank % 2)
    contract.one_to_another(piped.pp)
    hybrid = create_fsdp_gangs(create_parallel_gangs(root), 2)
    assert (hybrid.sdp.rank, hybrid.rdp.rank) == (root.rank % 2, root.rank // 2)
    contract.one_to_another(hybrid.sdp)
    contract.one_to_another(hybrid.rdp)
    root.close()
    return 0


def elastic() -> None:
    import elasticgang as eg

    manager = eg.join()
    for step in manager.steps(1):
        with step:
            root = manager.gangs.root
            contract.same_on_every_rank(root)
            contract.one_to_another(root)
            contract.refusals(root)
            contract.same_on_every_rank(manager.gangs.tp)
            manager.commit(1.0, lambda total: None)
    print("contract kept")


if __name__ == "__main__":
    elastic()
