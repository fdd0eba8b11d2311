"""What the tests of jobs share."""

from __future__ import annotations

import pytest

from tests.chaos.several import run_alone


@pytest.fixture(scope="session")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the state that an undisturbed run of one process ends with."""
    return run_alone(tmp_path_factory.mktemp("alone"))
