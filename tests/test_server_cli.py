"""``esp-edge serve``: settings, the line with the address, loading, signals."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from cli_fakes import Program, make_program, one_error

COMMAND = (sys.executable, "-m", "esp_edge", "serve", "--port", "0")


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Program:
    return make_program(monkeypatch, capfd)


@contextmanager
def serving(*arguments: object, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """The program in a process of its own."""
    process = subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("listening on http://127.0.0.1:"), line
    return line.split()[-1]


def chat(url: str, **fields: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    return httpx.post(f"{url}/v1/chat/completions", json=body, timeout=30)


def test_it_serves_until_a_signal_comes(tiny: Callable[..., Path]) -> None:
    with serving(
        "-m", tiny(), "-np", 2, "--alias", "mine", "--temp", "0.5", "--api-key", "k", "--drafter", "pld"
    ) as process:
        url = address(process)
        assert chat(url).status_code == 401
        headers = {"Authorization": "Bearer k"}
        props = httpx.get(f"{url}/props", headers=headers).json()
        assert props["model_id"] == "mine"
        assert props["draft"]["drafter"] == "pld"
        assert props["default_generation_settings"]["temperature"] == 0.5
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, headers=headers, timeout=30) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            process.send_signal(signal.SIGTERM)
            *_, last = (line for line in lines if line.startswith("data: "))
        assert last == "data: [DONE]"  # it may end in its own time
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")
        out, err = process.communicate(timeout=20)
        assert process.returncode == 0, err
        assert out == ""
        assert "Traceback" not in err


def test_a_model_that_does_not_load_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF nothing")
    with serving("-m", tmp_path / "broken.gguf") as process:
        out, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert out == ""
    assert one_line_error(err).startswith("esp-edge: error: ")
    assert "broken.gguf" in err


def one_line_error(err: str) -> str:
    (line,) = [line for line in err.splitlines() if "error:" in line]
    return line


def test_print_config_is_a_configuration_file(program: Program, tmp_path: Path) -> None:
    code, out, _ = program("serve", "--print-config", "--port", "1234", "--api-key", "secret", "--cors-origin", "*")
    assert code == 0
    assert "port = 1234" in out
    assert 'drafter = "auto"' in out
    assert 'cors_origin = ["*"]' in out
    assert "secret" not in out
    file = tmp_path / "config.toml"
    file.write_text("[serve]\n" + out, "utf-8")
    code, again, err = program("--config", str(file), "serve", "--print-config")
    assert (code, err) == (0, "")
    assert again == out.replace("# api_key: 1 set", "# api_key: 0 set")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--host", "no.such.host.invalid"], "--host"),
        (["--log-level", "loud"], "log-level"),
        (["--pooling", "max"], "pooling"),
        (["--max-body-size", "0"], "max-body-size"),
        (["--api-key", ""], "API key"),
    ],
)
def test_a_setting_that_cannot_be_is_an_error(program: Program, flags: list[str], words: str) -> None:
    code, _, err = program("serve", *flags)
    assert code == 1
    assert words in one_error(err)


@pytest.mark.parametrize(
    ("flags", "warned"),
    [
        (["--host", "0.0.0.0"], True),
        (["--host", "0.0.0.0", "--api-key", "k"], False),
        (["--host", "localhost"], False),
        ([], False),
    ],
)
def test_an_open_server_that_others_reach_is_warned_about(
    program: Program, monkeypatch: pytest.MonkeyPatch, flags: list[str], warned: bool
) -> None:
    from esp_edge.cli import serve  # noqa: PLC0415

    monkeypatch.setattr(serve._Run, "run", lambda self: self._listener.close())
    code, _, err = program("serve", "--port", "0", *flags)
    assert code == 0
    assert ("warning: everybody who reaches 0.0.0.0 can use this server; set --api-key" in err) is warned


def test_a_port_that_is_taken_is_an_error(program: Program) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        code, _, err = program("serve", "--port", str(other.getsockname()[1]))
    assert code == 1
    assert "--port" in one_error(err)


def test_health_answers_while_the_model_loads(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from esp_edge.cli import serve  # noqa: PLC0415

    seen: list[int] = []
    listener = serve._listen("127.0.0.1", 0)
    url = serve._url("127.0.0.1", listener)
    monkeypatch.setattr(signal, "signal", lambda *_: None)

    def make() -> Any:
        for _ in range(100):
            try:
                seen.append(httpx.get(f"{url}/health").status_code)
                break
            except httpx.HTTPError:
                time.sleep(0.02)
        raise RuntimeError("no model after all")

    from esp_edge.server.settings import ServerSettings  # noqa: PLC0415

    with pytest.raises(RuntimeError, match="after all"):
        serve._Run(ServerSettings(), listener, make, 1, url).run()
    assert seen == [503]
    assert "listening on" not in capfd.readouterr().out
    del tiny
