"""How our own server and llama-server are started with the same settings, and what they weigh."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from esp_edge.bench.peers import Peer, peer_environment
from esp_edge.bench.server_process import HOST, llama_server_command
from esp_edge.config import ModelConfig

__all__ = ["Memory", "environment", "our_command", "peer_command", "read_memory"]

# -- command lines ---------------------------------------------------------------------------------------------------


def our_command(file: Path, config: ModelConfig, *, n_slots: int, drafter: str) -> list[str]:
    """``esp-edge serve`` in this interpreter. Context and threads of ``config`` must not be 0."""
    return [
        *[sys.executable, "-m", "esp_edge", "serve", "-m", str(file), "--drafter", drafter, "-np", str(n_slots)],
        *["-c", str(config.n_ctx), "-t", str(config.n_threads), "-ngl", str(config.n_gpu_layers)],
        *["-fa", "on" if config.flash_attn else "off", "-ctk", config.type_k, "-ctv", config.type_v, "--host", HOST],
        *["--kernels", config.kernels, *(["--exact"] if config.exact else [])],
        *(["--rpc", config.rpc] if config.rpc else []),
    ]


def peer_command(peer: Peer, file: Path, config: ModelConfig, *, n_slots: int) -> list[str]:
    """llama-server with the same model, threads, cells shared by as many slots, and no speculation."""
    command = [*llama_server_command(peer, file, config, n_slots=n_slots), "--spec-type", "none"]
    return [*command, "--kv-unified"] if peer.has("--kv-unified") else command


def environment() -> dict[str, str]:
    """Without variables that are flags of either program: both get theirs on the command line."""
    kept = ("ESP_EDGE_CACHE", "ESP_EDGE_KERNELS_ISA")
    found = {name: value for name, value in peer_environment().items() if not name.startswith("ESP_EDGE_")}
    found |= {name: os.environ[name] for name in kept if name in os.environ}
    return found | {"ESP_EDGE_CONFIG": os.devnull}


# -- memory ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a process that lie in memory.

    Attributes:
        rss: all of them, the pages of the mapped model file that were touched included.
        pss: the same, pages of several processes divided among them.
        anonymous: those that are of no file.
    """

    rss: int
    pss: int
    anonymous: int


def read_memory(pid: int) -> Memory | None:
    """From Linux's ``smaps_rollup``; None where there is none."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text("ascii", "replace")
    except OSError:
        return None
    return _memory(dict(_fields(text)))


def _fields(text: str) -> list[tuple[str, int]]:
    """``Rss:    1234 kB`` -> ("Rss", 1263616)."""
    words = (line.split() for line in text.splitlines())
    return [(line[0].rstrip(":"), 1024 * int(line[1])) for line in words if len(line) == 3 and line[2] == "kB"]


def _memory(fields: Mapping[str, int]) -> Memory | None:
    if not {"Rss", "Pss", "Anonymous"} <= fields.keys():
        return None
    return Memory(fields["Rss"], fields["Pss"], fields["Anonymous"])
