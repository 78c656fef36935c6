"""The only importer of llama_cpp and of the compiled extension.

Order matters: importing ``llama_cpp`` first maps libllama, and the extension, which is linked without a run path,
then binds to that one copy. Versions and struct sizes are compared before anything else runs.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from llama_cpp import llama as llama_cpp_python
from llama_cpp import llama_cpp
from llama_cpp.llama_grammar import json_schema_to_gbnf as _json_schema_to_gbnf

__all__ = ["captured_log", "json_schema_to_gbnf", "llama_cpp", "llama_cpp_python", "native"]

REBUILD = "pip install --force-reinstall --no-deps esp-edge (from a checkout: pip install --no-build-isolation -e .)"
_STRUCTS = ("llama_batch", "llama_context_params", "llama_model_params", "llama_token_data")


def _load_native() -> Any:
    try:
        module = importlib.import_module("esp_edge._native")
    except ImportError as error:
        raise ImportError(f"esp_edge's compiled extension does not load ({error}); rebuild it: {REBUILD}") from error
    check_abi(module, importlib.metadata.version("llama-cpp-python"), llama_cpp)
    return module


def check_abi(module: Any, installed: str, bindings: ModuleType) -> None:
    """Raise ImportError unless the extension was built for the installed llama-cpp-python."""
    built = module.LLAMA_CPP_PYTHON_VERSION
    if built != installed:
        raise ImportError(
            f"esp_edge was built for llama-cpp-python {built}, but {installed} is installed; rebuild it: {REBUILD}"
        )
    sizes = module.struct_sizes()
    for name in _STRUCTS:
        found = ctypes.sizeof(getattr(bindings, name))
        if sizes[name] != found:
            raise ImportError(
                f"{name} has {sizes[name]} bytes in esp_edge's extension but {found} in llama-cpp-python; "
                f"rebuild it: {REBUILD}"
            )


native: Any = _load_native()

_log_lock = threading.RLock()  # a signal handler may log, too
_log_sinks: list[list[str]] = []
_interrupted = threading.Event()


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator, unused-ignore]
def _on_log(_level: int, text: bytes, _user: Any) -> None:
    try:
        with _log_lock:
            for sink in _log_sinks:
                sink.append(text.decode("utf-8", "replace").rstrip("\n"))
    except KeyboardInterrupt:  # ctypes would print and swallow it
        _interrupted.set()


llama_cpp.llama_log_set(_on_log, ctypes.c_void_p(0))
llama_cpp.llama_backend_init()


@contextmanager
def captured_log() -> Iterator[list[str]]:
    """Collect llama.cpp's log lines; outside of this the log is silent."""
    sink: list[str] = []
    with _log_lock:
        _log_sinks.append(sink)
    try:
        yield sink
    finally:
        with _log_lock:
            # by identity: two empty sinks are equal
            _log_sinks[:] = [other for other in _log_sinks if other is not sink]
    if _interrupted.is_set():
        _interrupted.clear()
        raise KeyboardInterrupt


def json_schema_to_gbnf(schema: str) -> str:
    """GBNF grammar of a JSON schema given as JSON text; raises whatever the converter raises."""
    return str(_json_schema_to_gbnf(schema))
