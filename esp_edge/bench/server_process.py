"""A server as a process of its own: started, waited for, heard, and never left behind."""

from __future__ import annotations

import http.client
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from esp_edge.bench.peers import Peer, last_lines
from esp_edge.config import ModelConfig
from esp_edge.errors import ConfigError
from esp_edge.models.model import BATCH_ROWS

__all__ = ["HOST", "ServerProcess", "llama_server_command"]

HOST = "127.0.0.1"
START_SECONDS = 900.0  # a large model from a slow disk
STOP_SECONDS = 15.0
LOOK_SECONDS = 0.02  # between two looks at /health: the error of the time to get ready
# Linux: the kernel ends the server with the thread that started it. prctl outlives exec, and unlike preexec_fn this is
# safe with llama.cpp's threads around.
_LAUNCH = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execv(sys.argv[1], sys.argv[1:])"
_LAUNCHER = [sys.executable, "-I", "-S", "-c", _LAUNCH] if sys.platform.startswith("linux") else []
_QUIET = (  # (flag, its value): what costs time or memory and is not measured, where the build knows it
    ("--cache-ram", "0"),
    ("--ctx-checkpoints", "0"),
    ("--fit", "off"),
    ("--no-ui", None),
    ("--offline", None),
)
_Self = TypeVar("_Self", bound="ServerProcess")


def llama_server_command(peer: Peer, file: Path, config: ModelConfig, *, n_slots: int) -> list[str]:
    """The settings of our own sessions in llama-server's words. Context and threads of ``config`` must not be 0."""
    threads, layers = str(config.n_threads), "999" if config.n_gpu_layers < 0 else str(config.n_gpu_layers)
    command = [
        *[str(peer.path), "--model", str(file), "--host", HOST, "--ctx-size", str(config.n_ctx)],
        *["--parallel", str(n_slots), "--threads", threads, "--threads-batch", threads, "--n-gpu-layers", layers],
        *["--batch-size", str(BATCH_ROWS), "--ubatch-size", str(BATCH_ROWS)],
        *["--flash-attn", "on" if config.flash_attn else "off"],
        *["--cache-type-k", config.type_k, "--cache-type-v", config.type_v],
        *(["--rpc", config.rpc] if config.rpc else []),
    ]
    for flag, value in _QUIET:
        if peer.has(flag):
            command += [flag] if value is None else [flag, value]
    return command


class ServerProcess:
    """A running server. Close it, or use it as a context manager.

    On Linux it ends with the thread that started it, even when this process is killed.

    Attributes:
        label: of the lane.
        port: where it listens.
        pid: of the process.
        ready_s: seconds from its start until ``/health`` said 200.
    """

    def __init__(self, label: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start it and wait until the model is there.

        Args:
            command: without ``--port``.

        Raises:
            ConfigError: it ended or did not become ready; the message ends with its last lines.
        """
        self.label = label
        self.port = _free_port()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        begin = time.perf_counter()
        try:
            self._process = subprocess.Popen(
                [*_LAUNCHER, *command, "--port", str(self.port)],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=environment,
                start_new_session=True,  # Ctrl-C is ours to handle: it is stopped by close()
            )
        except OSError as error:
            self._log.close()
            raise ConfigError(f"{command[0]} cannot be run: {error.strerror or error}") from None
        self.pid = self._process.pid
        try:
            self._wait(begin + START_SECONDS)
        except BaseException:
            self.close()
            raise
        self.ready_s = time.perf_counter() - begin

    def _wait(self, deadline: float) -> None:
        while time.perf_counter() < deadline:
            if self._process.poll() is not None:
                raise ConfigError(f"{self.label} did not start ({self.end()}): {self.said()}")
            if self._is_ready():
                return
            time.sleep(LOOK_SECONDS)
        raise ConfigError(f"{self.label} was not ready after {START_SECONDS:.0f} seconds: {self.said()}")

    def _is_ready(self) -> bool:
        connection = http.client.HTTPConnection(HOST, self.port, timeout=5.0)
        with suppress(OSError, http.client.HTTPException):
            connection.request("GET", "/health")
            return connection.getresponse().status == http.client.OK
        connection.close()
        return False

    def end(self) -> str:
        """How it ended."""
        code = self._process.poll()
        return "still running" if code is None else f"exit code {code}"

    def said(self) -> str:
        """Its last lines."""
        self._log.seek(0)
        return last_lines(self._log.read())

    def close(self) -> None:
        """Stop the process; calling it twice is harmless."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if not self._log.closed:
            self._log.close()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
