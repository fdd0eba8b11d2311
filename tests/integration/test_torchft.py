"""torchft's own cases pass with ours in the places of its classes."""

from __future__ import annotations

import pytest

from elasticgang.comm.in_process import ProcessGroupGloo
from elasticgang.comm.isolated import ProcessGroupIsolatedGloo
from tests.integration import torchft_cases


class TestMultiCases(torchft_cases.MultiCases):
    """Collected by pytest, case by case."""


class TestSkippedCases(torchft_cases.SkippedCases):
    """Likewise."""


@pytest.mark.parametrize("case", ["test_baby_gloo_timeout", "test_baby_gloo_apis"])
def test_a_case_of_the_baby_gloo_group(case: str) -> None:
    torchft_cases.run(case, ProcessGroupBabyGloo=ProcessGroupIsolatedGloo)


def test_the_case_that_looks_at_processes_and_threads() -> None:
    torchft_cases.run("test_reconfigure_baby_process_group", ProcessGroupBabyGloo=torchft_cases.WithInternals)


@pytest.mark.parametrize("ours", [ProcessGroupGloo, ProcessGroupIsolatedGloo])
@pytest.mark.parametrize("case", ["test_gloo_apis_0_cpu", "test_functional_collectives"])
def test_a_case_of_the_gloo_group(case: str, ours: type) -> None:
    torchft_cases.run(case, ProcessGroupGloo=ours)


def test_the_case_of_gloos_timeout() -> None:
    with torchft_cases.time_to_connect():
        torchft_cases.run("test_gloo_timeout", ProcessGroupGloo=ProcessGroupGloo)
