"""Other machines that take layers: settings, what is asked of a server before llama.cpp connects, and its devices.

The backend itself is in no build that pip gives; docs/scale.md tells how it was tried.
"""

from __future__ import annotations

import ctypes
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from cli_fakes import Program, make_program, one_error

from esp_edge._runtime import llama_cpp
from esp_edge.config import GenerationParams, ModelConfig, parse_rpc
from esp_edge.errors import ConfigError, ModelLoadError
from esp_edge.models import rpc
from esp_edge.session import load

HELLO, DEVICE_COUNT = 14, 15


def answer(payload: bytes) -> bytes:
    return struct.pack("<Q", len(payload)) + payload


def hello(major: int = 7, minor: int = 0, size: int = 28) -> bytes:
    return answer(bytes((major, minor, 1)).ljust(size, b"\0"))


class FakeServer:
    """Takes one connection after the other, as ggml-rpc-server does.

    Attributes:
        asked: (command, payload) of the questions.
    """

    def __init__(self, answers: dict[int, bytes] | None, raw: bytes = b"") -> None:
        self.asked: list[tuple[int, bytes]] = []
        self._answers, self._raw = answers, raw
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.name = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with suppress(OSError):
            while True:
                line, _ = self._listener.accept()
                with line, suppress(OSError, EOFError):
                    self._serve(line)

    def _serve(self, line: socket.socket) -> None:
        if self._answers is None:
            if line.recv(100):
                line.sendall(self._raw)
            return
        while True:
            command, size = struct.unpack("<BQ", rpc._receive(line, 9))
            self.asked.append((command, rpc._receive(line, size)))
            line.sendall(self._answers[command])

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def fake() -> Iterator[Callable[..., FakeServer]]:
    made: list[FakeServer] = []

    def make(*args: Any, **kwargs: Any) -> FakeServer:
        made.append(FakeServer(*args, **kwargs))
        return made[-1]

    yield make
    for server in made:
        server.close()


# -- settings --------------------------------------------------------------------------------------------------------


def test_servers_are_parsed() -> None:
    assert parse_rpc("") == parse_rpc("  ") == ()
    assert parse_rpc("10.0.0.2:50052, gpu-box.lan:1") == ("10.0.0.2:50052", "gpu-box.lan:1")


@pytest.mark.parametrize(
    "text",
    [
        "host",
        ":1",
        "host:",
        "host:0",
        "host:65536",
        "host:x",
        "a:1,,b:1",
        "a b:1",
        "http://a:1",
        "[::1]:1",
        "a:1:2",
        "ä:1",
    ],
)
def test_a_server_is_a_host_and_a_port(text: str) -> None:
    with pytest.raises(ConfigError, match=r"a name or IPv4 address and a port, such as 10\.0\.0\.2:50052, but"):
        ModelConfig(rpc=text, n_gpu_layers=-1)


def test_settings_that_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="every server once"):
        parse_rpc("a:1,a:1")
    with pytest.raises(ConfigError, match="at most 16 servers, but 17"):
        parse_rpc(",".join(f"a:{port}" for port in range(1, 18)))
    with pytest.raises(ConfigError, match="n-gpu-layers is 0: add -ngl -1"):
        ModelConfig(rpc="a:1")
    with pytest.raises(ConfigError, match="drop --rpc or --exact"):
        ModelConfig(rpc="a:1", n_gpu_layers=-1, exact=True)


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Program:
    return make_program(monkeypatch, capsys)


def test_the_flag_and_the_environment(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    assert program("generate", "hi", "--rpc", "a:1,b:2", "-ngl", "-1")[0] == 0
    assert program.loads[-1][1] == ModelConfig(rpc="a:1,b:2", n_gpu_layers=-1)
    monkeypatch.setenv("ESP_EDGE_RPC", "c:3")
    program("generate", "hi", "-ngl", "9")
    assert program.loads[-1][1] == ModelConfig(rpc="c:3", n_gpu_layers=9)
    assert one_error(program("generate", "hi", "--rpc", "c", "-ngl", "9")[2]).startswith("an rpc server must be a name")


# -- a build without the backend -------------------------------------------------------------------------------------


def test_a_build_without_it_says_how_to_build_it(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_cpp, "llama_supports_rpc", lambda: False)
    with pytest.raises(ConfigError) as caught:
        load(tiny(), ModelConfig(rpc="127.0.0.1:1", n_gpu_layers=-1))
    assert 'CMAKE_ARGS="-DGGML_RPC=on" pip install' in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_named_version_is_the_pinned_one() -> None:
    project = (Path(__file__).parent.parent / "pyproject.toml").read_text("utf-8")
    assert re.findall(r"llama-cpp-python==[\d.]+", rpc.BUILD)[0] in project


def test_the_protocol_is_that_of_the_installed_headers() -> None:
    header = Path(llama_cpp.__file__).parent.parent / "include" / "ggml-rpc.h"
    text = header.read_text("utf-8")
    found = [int(re.findall(rf"RPC_PROTO_{part}_VERSION +(\d+)", text)[0]) for part in ("MAJOR", "MINOR")]
    assert tuple(found) == rpc.PROTOCOL


# -- asking a server -------------------------------------------------------------------------------------------------


def test_a_server_tells_its_devices(fake: Callable[..., FakeServer]) -> None:
    server = fake({HELLO: hello(), DEVICE_COUNT: answer(struct.pack("<I", 3))})
    assert rpc.ask(server.name) == 3
    assert server.asked == [(HELLO, bytes(24)), (DEVICE_COUNT, b"")]


@pytest.mark.parametrize(
    ("answers", "raw", "message"),
    [
        (
            {HELLO: hello(major=8)},
            b"",
            r"speaks version 8\.0\.1, but 7\.0 is needed: run the ggml-rpc-server of the",
        ),
        ({HELLO: hello(minor=1)}, b"", r"speaks version 7\.1\.1, but 7\.0 is needed"),
        ({HELLO: hello(size=3)}, b"", "is no rpc server of version 7.0: run the ggml-rpc-server of the same"),
        ({HELLO: hello(), DEVICE_COUNT: answer(bytes(4))}, b"", "has no device"),
        (None, b"HTTP/1.1 400 Bad Request\r\n\r\n", "is no rpc server of version 7.0"),
        (None, b"", "is no rpc server of version 7.0"),
    ],
)
def test_a_server_that_would_end_the_process(
    fake: Callable[..., FakeServer], answers: dict[int, bytes] | None, raw: bytes, message: str
) -> None:
    server = fake(answers, raw)
    with pytest.raises(ModelLoadError, match=message) as caught:
        rpc.ask(server.name)
    assert server.name in str(caught.value)


def test_a_busy_server_is_not_asked_anything() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        name = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ModelLoadError, match="serves one program at a time"):
            rpc.ask(name, seconds=0.1)
        line, _ = listener.accept()
        with line:
            assert line.recv(100) == b""  # an answer to somebody who is gone would end it


@pytest.mark.parametrize("server", ["127.0.0.1:{port}", "no-such-host.invalid:50052"])
def test_a_server_that_is_not_there(server: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ModelLoadError, match=r"cannot be reached \(.*\); start it there with: ggml-rpc-server"):
        rpc.ask(server.format(port=port))


# -- devices ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Servers that were asked, on a build with the backend whose devices are this machine's CPU."""
    names: list[str] = []
    cpu = rpc._function("ggml_backend_dev_by_type", ctypes.c_void_p, ctypes.c_int)(0)
    monkeypatch.setattr(llama_cpp, "llama_supports_rpc", lambda: True)
    monkeypatch.setattr(rpc, "ask", names.append)
    monkeypatch.setattr(rpc, "_devices_of", lambda _server: [cpu])
    return names


def test_a_model_gets_the_devices(tiny: Callable[..., Path], asked: list[str]) -> None:
    config = ModelConfig(n_ctx=64, n_threads=1, n_gpu_layers=-1, rpc="a:1,b:2")
    with load(tiny(), config) as model, closing(model.session()) as session:
        chunks = list(session.generate("the", GenerationParams(max_tokens=3, ignore_eos=True)))
        assert sum(len(chunk.token_ids) for chunk in chunks) == 3
    assert asked == ["a:1", "b:2"]


def test_a_server_is_not_asked_while_this_process_uses_it(asked: list[str]) -> None:
    first, second = rpc.RpcServers("a:1"), rpc.RpcServers("a:1,b:2")
    assert asked == ["a:1", "b:2"]
    first.close()
    first.close()
    rpc.RpcServers("a:1").close()
    assert asked == ["a:1", "b:2"]
    second.close()
    rpc.RpcServers("a:1").close()
    assert asked == ["a:1", "b:2", "a:1"]


def test_the_array_of_devices_ends_with_null(asked: list[str]) -> None:
    del asked
    servers = rpc.RpcServers("a:1,b:2")
    assert servers.devices is not None
    n_local = len(rpc._local_devices())
    found = (ctypes.c_void_p * (3 + n_local)).from_address(servers.devices)
    assert found[0] is not None
    assert found[0] == found[1]
    assert found[2 + n_local] is None
    servers.close()
    assert rpc.RpcServers("").devices is None
