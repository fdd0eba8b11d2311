"""Parameters that several stages of a pipeline have. `test_pipeline.py` trains with them."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import elasticgang as eg
from tests.unit.test_gradients import manager

META = torch.empty(1, 2, device="meta")


def pipeline(**tied: tuple[int, ...]) -> eg.PipelineParallel:
    module = nn.Linear(2, 2)
    return eg.PipelineParallel(
        manager(), module, inputs=META, outputs=META, loss_sum=lambda out, _: out.sum(), tied=tied
    )


@pytest.mark.parametrize(
    ("tied", "message"),
    [
        ({"weight": (0, 1)}, "`tied` must name stages from 0 to 0, but names [0, 1] for `weight` instead."),
        ({"head": (0,)}, "`tied` must name parameters of `module`, but stage 0 has no `head`."),
    ],
)
def test_what_a_stage_does_not_have_is_refused(tied: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        pipeline(**tied)


def test_one_stage_adds_nothing() -> None:
    """As in a fallback layout without `pp`, for which the script names the first and the last stage too."""
    model = pipeline(weight=(0, 0))
    assert model.stages_of(model.module.get_parameter("weight")) == ()


def test_one_stage_may_name_a_parameter_twice() -> None:
    """As in such a layout, where the first stage names the embedding, and the last one the output."""
    module = nn.ModuleDict({"embedding": nn.Linear(2, 2), "output": nn.Linear(2, 2)})
    module["output"].weight = module["embedding"].weight
    tied = {"embedding.weight": (0, 0), "output.weight": (0, 0)}
    eg.PipelineParallel(manager(), module, inputs=META, outputs=META, loss_sum=lambda out, _: out.sum(), tied=tied)
