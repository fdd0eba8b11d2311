"""docs/api.md says what the docstrings say. It is made with griffe, which runs git."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import elasticgang
from scripts import api_docs


def test_the_reference_is_what_the_docstrings_say() -> None:
    assert api_docs.main(["--check"]) == 0, "run scripts/api-docs"


def test_a_reference_that_is_out_of_date_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = api_docs.OUTPUT.read_text()
    monkeypatch.setattr(api_docs, "OUTPUT", tmp_path / "api.md")
    api_docs.OUTPUT.write_text(text.replace("def ", "", 1).replace("`", "", 1))
    assert api_docs.main(["--check"]) == 1
    assert "run scripts/api-docs" in capsys.readouterr().err
    assert api_docs.main([]) == 0
    assert api_docs.OUTPUT.read_text() == text


def test_the_reference_has_every_public_name() -> None:
    headings = set(re.findall(r"^### (\w+)$", api_docs.OUTPUT.read_text(), re.MULTILINE))
    assert set(elasticgang.__all__) - headings == set()
