"""Other machines that take layers of a model: llama.cpp's RPC backend, where the build has it.

llama.cpp's client ends the process when it cannot connect, or when the other side is no server of its version. So
every server is asked first, with the two messages that the client itself begins with. What cannot be asked for is that
it stays: a server that goes away later ends the process all the same (docs/scale.md).

A device that is found is handed to one model, not registered for all: other models of the process do not see it.
"""

from __future__ import annotations

import collections
import ctypes
import socket
import struct
import threading
from typing import Any

from esp_edge._runtime import llama_cpp
from esp_edge.config import parse_rpc
from esp_edge.errors import ConfigError, ModelLoadError

__all__ = ["BUILD", "RpcServers", "ask", "is_supported"]

BUILD = (
    'CMAKE_ARGS="-DGGML_RPC=on" pip install --no-binary llama-cpp-python --no-cache-dir --force-reinstall --no-deps '
    "llama-cpp-python==0.3.36"
)
PROTOCOL = (7, 0)  # RPC_PROTO_MAJOR_VERSION and the newest minor one, of the pinned llama.cpp's ggml-rpc.h
SECONDS = 5.0  # that a server may take to answer
_HELLO, _DEVICE_COUNT = 14, 15
_CAPS = bytes(24)  # of the transport: plain TCP
_HELLO_BYTES = 4 + len(_CAPS)
_GPU, _IGPU = 1, 2  # ggml_backend_dev_type

_lock = threading.Lock()
_in_use: collections.Counter[str] = collections.Counter()  # models of this process on a server


class RpcServers:
    """The devices of a model that is spread over several machines. Close it after the model.

    Args:
        text: servers as in :class:`esp_edge.config.ModelConfig`; "" = none.

    Attributes:
        devices: for ``llama_model_params.devices``: None without servers, else the address of a NULL-terminated array
            of the servers' devices and those of this machine, which llama.cpp reads while it loads the model.

    Raises:
        ConfigError: the build has no RPC backend.
        ModelLoadError: a server cannot be used.
    """

    def __init__(self, text: str) -> None:
        self._servers = parse_rpc(text)
        self.devices: int | None = None
        if not self._servers:
            return
        if not is_supported():
            raise ConfigError(
                f"--rpc needs llama.cpp's RPC backend, which the installed llama-cpp-python was built without; "
                f"build it with {BUILD}"
            )
        with _lock:  # a server talks to one connection at a time, which this process has while a model uses it
            for server in self._servers:
                if not _in_use[server]:
                    ask(server)
            found = [device for server in self._servers for device in _devices_of(server)] + _local_devices()
            _in_use.update(self._servers)
        self._array = (ctypes.c_void_p * (len(found) + 1))(*found, None)
        self.devices = ctypes.addressof(self._array)

    def close(self) -> None:
        """The model is gone; calling it twice is harmless."""
        with _lock:
            _in_use.subtract(self._servers)
        self._servers = ()


def is_supported() -> bool:
    """Whether the installed llama.cpp has the RPC backend."""
    return bool(llama_cpp.llama_supports_rpc())


def ask(server: str, seconds: float = SECONDS) -> int:
    """Number of devices of an RPC server that speaks our version.

    Args:
        server: ``HOST:PORT``.

    Raises:
        ModelLoadError: it cannot be reached, does not answer, or is something else.
    """
    host, _, port = server.rpartition(":")
    start = f"start it there with: ggml-rpc-server --host ADDRESS --port {port}"
    try:
        address = (socket.gethostbyname(host), int(port))  # IPv4, as llama.cpp does
        with socket.create_connection(address, seconds) as line:
            # A server that serves somebody else would answer a question when we are gone, and die of it (SIGPIPE). One
            # that is free closes a connection on which nothing will come.
            line.shutdown(socket.SHUT_WR)
            line.recv(1)
        with socket.create_connection(address, seconds) as line:
            return _interview(server, line)
    except TimeoutError:
        raise ModelLoadError(
            f"rpc server {server} did not answer within {seconds:g} seconds: it serves one program at a time, so stop "
            f"the other one, or {start}"
        ) from None
    except (OSError, UnicodeError) as error:
        raise ModelLoadError(f"rpc server {server} cannot be reached ({error}); {start}") from None


def _interview(server: str, line: socket.socket) -> int:
    hello = _request(line, _HELLO, _CAPS)
    if hello is None or len(hello) != _HELLO_BYTES:
        raise ModelLoadError(
            f"{server} is no rpc server of version {PROTOCOL[0]}.{PROTOCOL[1]}: run the ggml-rpc-server of the same "
            f"llama.cpp there"
        )
    major, minor, patch = hello[:3]
    if major != PROTOCOL[0] or minor > PROTOCOL[1]:
        raise ModelLoadError(
            f"rpc server {server} speaks version {major}.{minor}.{patch}, but {PROTOCOL[0]}.{PROTOCOL[1]} is needed: "
            f"run the ggml-rpc-server of the same llama.cpp there"
        )
    counted = _request(line, _DEVICE_COUNT, b"")
    n_devices = int.from_bytes(counted[:4], "little") if counted else 0
    if n_devices < 1:
        raise ModelLoadError(f"rpc server {server} has no device: start it with --device CPU, or on another machine")
    return n_devices


_MOST_BYTES = 256  # of an answer to one of our two questions


def _request(line: socket.socket, command: int, payload: bytes) -> bytes | None:
    """An answer; None when the other side does not keep to the protocol. Both ways a size goes before the bytes."""
    try:
        line.sendall(struct.pack("<BQ", command, len(payload)) + payload)
        size = int.from_bytes(_receive(line, 8), "little")
        return _receive(line, size) if size <= _MOST_BYTES else None
    except (ConnectionError, EOFError):
        return None


def _receive(line: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        part = line.recv(size - len(found))
        if not part:
            raise EOFError
        found += part
    return found


# -- ggml's registry -------------------------------------------------------------------------------------------------


def _function(name: str, result: Any, *arguments: Any) -> Any:
    """A function of ggml, which the handle of libllama finds as well: it links to it."""
    found = getattr(llama_cpp._lib, name)
    found.restype, found.argtypes = result, arguments
    return found


def _devices_of(server: str) -> list[int]:
    """Addresses of a server's devices; connects."""
    by_name = _function("ggml_backend_reg_by_name", ctypes.c_void_p, ctypes.c_char_p)
    address_of = _function("ggml_backend_reg_get_proc_address", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
    found = address_of(by_name(b"RPC"), b"ggml_backend_rpc_add_server")
    added = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)(found)(server.encode("ascii"))
    if not added:
        raise ModelLoadError(f"rpc server {server} has no device: start it with --device CPU, or on another machine")
    count = _function("ggml_backend_reg_dev_count", ctypes.c_size_t, ctypes.c_void_p)
    device = _function("ggml_backend_reg_dev_get", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    return [device(added, number) for number in range(count(added))]


def _local_devices() -> list[int]:
    """GPUs of this machine, else its integrated ones: what llama.cpp itself would take besides the servers."""
    count = _function("ggml_backend_dev_count", ctypes.c_size_t)
    device = _function("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
    kind = _function("ggml_backend_dev_type", ctypes.c_int, ctypes.c_void_p)
    found = [device(number) for number in range(count())]
    gpus = [one for one in found if kind(one) == _GPU]
    return gpus or [one for one in found if kind(one) == _IGPU]
