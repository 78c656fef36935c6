"""How the two native libraries meet: one libllama, no run path, matching versions, a captured log."""

from __future__ import annotations

import ctypes
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from esp_edge._runtime import captured_log, check_abi, llama_cpp, native

DYNAMIC_SECTION, RPATH, RUNPATH = 6, 15, 29  # elf.h: SHT_DYNAMIC, DT_RPATH, DT_RUNPATH

SHOW_MAPS = """
from pathlib import Path
paths = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libllama" in line}
print("\\n".join(sorted(paths)))
"""

LOAD_QUIETLY = """
from esp_edge._runtime import captured_log, llama_cpp
params = llama_cpp.llama_model_default_params()
llama_cpp.llama_model_load_from_file(b"/nowhere/model.gguf", params)
with captured_log() as lines:
    llama_cpp.llama_model_load_from_file(b"/nowhere/model.gguf", params)
print(len(lines))
"""


def run_fresh(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)


def dynamic_tags(path: Path) -> set[int]:
    """Tags of the dynamic section of a 64-bit ELF file."""
    data = path.read_bytes()
    (sections,) = struct.unpack_from("<Q", data, 40)
    size, count = struct.unpack_from("<HH", data, 58)
    tags: set[int] = set()
    for header in range(sections, sections + size * count, size):
        kind, _, _, offset, length = struct.unpack_from("<IQQQQ", data, header + 4)
        if kind == DYNAMIC_SECTION:
            tags |= {tag for tag, _ in struct.iter_unpack("<qQ", data[offset : offset + length])}
    return tags


if sys.platform == "linux":

    @pytest.mark.parametrize("first", ["esp_edge", "llama_cpp"])
    def test_one_libllama_is_mapped(first: str) -> None:
        mapped = run_fresh(f"import {first}, llama_cpp, esp_edge{SHOW_MAPS}").stdout.split()
        assert [Path(path).name.split(".")[0] for path in mapped] == ["libllama"]
        assert "llama_cpp" in Path(mapped[0]).parts

    def test_the_extension_has_no_run_path() -> None:
        tags = dynamic_tags(Path(native.__file__))
        assert tags  # it does have a dynamic section
        assert not tags & {RPATH, RUNPATH}


def fake_extension(version: str, **sizes: int) -> Any:
    return SimpleNamespace(LLAMA_CPP_PYTHON_VERSION=version, struct_sizes=lambda: native.struct_sizes() | sizes)


def test_abi_of_the_installed_pair_agrees() -> None:
    assert native.struct_sizes()["llama_batch"] == ctypes.sizeof(llama_cpp.llama_batch)
    check_abi(native, native.LLAMA_CPP_PYTHON_VERSION, llama_cpp)


def test_another_version_names_both_and_the_rebuild() -> None:
    message = r"built for llama-cpp-python 0\.3\.1, but 0\.3\.36 is installed.*pip install"
    with pytest.raises(ImportError, match=message):
        check_abi(fake_extension("0.3.1"), "0.3.36", llama_cpp)


def test_another_struct_size_names_the_struct_and_the_rebuild() -> None:
    with pytest.raises(ImportError, match=r"llama_context_params has 8 bytes.*pip install"):
        check_abi(fake_extension("0.3.36", llama_context_params=8), "0.3.36", llama_cpp)


def load_nothing(path: Path) -> None:
    params = llama_cpp.llama_model_default_params()
    assert not llama_cpp.llama_model_load_from_file(str(path).encode(), params)


def test_captured_log_collects(tmp_path: Path) -> None:
    with captured_log() as lines:
        load_nothing(tmp_path / "missing.gguf")
    assert any("missing.gguf" in line for line in lines)


def test_captured_logs_nest(tmp_path: Path) -> None:
    with captured_log() as outer:
        with captured_log() as inner:
            load_nothing(tmp_path / "first.gguf")
        load_nothing(tmp_path / "second.gguf")
    assert any("first.gguf" in line for line in outer)
    assert any("second.gguf" in line for line in outer)
    assert not any("second.gguf" in line for line in inner)


def test_the_log_is_silent_outside() -> None:
    result = run_fresh(LOAD_QUIETLY)
    assert result.stderr == ""
    assert int(result.stdout) > 0
