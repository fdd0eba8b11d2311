"""Which addresses the commands accept with a secret, without one, and with `--insecure`."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from elasticgang.launch import cli, run
from elasticgang.session.secret import SECRET_FILE_VARIABLE


@pytest.fixture(autouse=True)
def no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET_FILE_VARIABLE, raising=False)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(arguments) == cli.EXIT_USAGE
    return capsys.readouterr().err.removeprefix("elasticgang: error: ").strip()


def test_a_coordinator_without_a_secret_listens_on_loopback_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "coordinator", "--host", "0.0.0.0", "--port", "0") == (
        "without a secret or TLS the coordinator listens on loopback only, not on '0.0.0.0': give `--secret-file` or "
        "`--tls-cert`, or `--insecure` in a network that you trust"
    )


def test_an_agent_without_a_secret_uses_a_coordinator_on_loopback_only(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        line = refused(capsys, "run", "--coordinator", f"0.0.0.0:{port}", "--job-id", "job", __file__)
    assert line.startswith("without a secret or TLS the agent uses a coordinator on loopback only, not at '0.0.0.0'")


def test_a_secret_file_that_others_may_read_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef")
    path.chmod(0o644)
    line = refused(capsys, "coordinator", "--secret-file", str(path), "--port", "0")
    assert line.startswith(f"the secret file {path} must be its owner's alone, but its mode is 0644")
    monkeypatch.setenv(SECRET_FILE_VARIABLE, str(path))
    assert refused(capsys, "coordinator", "--port", "0") == line


def test_insecure_is_said_once_and_only_where_it_opens_something(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "run_coordinator", lambda args, credentials: 0)  # in place of a server on all addresses
    path = tmp_path / "secret"
    path.write_text("0123456789abcdef")
    path.chmod(0o600)
    for arguments, said in [
        (["0.0.0.0", "--insecure"], "elasticgang: warning: --insecure: anybody who reaches 0.0.0.0 can take part\n"),
        (["127.0.0.1", "--insecure"], ""),
        (["0.0.0.0", "--secret-file", str(path)], ""),
    ]:
        assert cli.main(["coordinator", "--port", "0", "--host", *arguments]) == 0
        assert capsys.readouterr().err == said


def test_a_host_that_has_no_address_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    assert refused(capsys, "coordinator", "--host", "nowhere", "--port", "0") == "the host 'nowhere' cannot be resolved"
