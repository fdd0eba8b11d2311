"""Prints what is to be known of the programs without running them, as JSON."""

from __future__ import annotations

import json

from tests.integration.programs.catalog import programs

if __name__ == "__main__":
    facts = [dict(vars(program)) for program in programs().values()]
    for each in facts:
        del each["function"]
    print(json.dumps(facts))
