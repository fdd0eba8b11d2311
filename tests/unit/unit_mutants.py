"""The mutants of all rules that the simulation does not drive, by name."""

from __future__ import annotations

from tests.unit.agent_mutants import AGENT_MUTANTS
from tests.unit.comparison_mutants import COMPARISON_MUTANTS
from tests.unit.member_mutants import MEMBER_MUTANTS
from tests.unit.record_mutants import RECORD_MUTANTS
from tests.unit.slot_mutants import SLOT_MUTANTS

UNIT_MUTANTS = {**AGENT_MUTANTS, **RECORD_MUTANTS, **MEMBER_MUTANTS, **SLOT_MUTANTS, **COMPARISON_MUTANTS}
