"""Another program on the same questions: llama.cpp's ``llama-server`` and its draft-free modes (algorithms B.8).

``--peer llama-server=PATH`` names the program, ``--peer-modes none,ngram-mod,...`` what is measured of it. Everything
here is checked before the first question; :mod:`esp_edge.bench.peer_server` runs it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from esp_edge.bench.spec import PEER, Lane, split_list
from esp_edge.config import DraftConfig
from esp_edge.errors import ConfigError

__all__ = ["DEFAULT_MODES", "Peer", "PeerMode", "last_lines", "parse_modes", "peer_environment", "peer_lanes"]

DEFAULT_MODES = "none,ngram-simple,ngram-simple[size-n=3,size-m=8],ngram-map-k4v,ngram-mod,ngram-cache"
PROBE_SECONDS = 60.0  # --help on a machine that must first read the program from a slow disk
SHOWN_LINES, SHOWN_CHARS = 3, 400


@dataclass(frozen=True, slots=True)
class _Kind:
    """A ``--spec-type``: its longest draft, the option that sets it, and whether tables outlive a request.

    The n-gram map, the hash pool and the n-gram cache live in the server and are not emptied between requests, whatever
    ``cache_prompt`` says (common/speculative.cpp); ngram-simple searches the text of the request alone.
    """

    longest: int
    option: str | None
    keeps: bool


_KINDS: Mapping[str, _Kind] = {
    "none": _Kind(0, None, False),
    "ngram-simple": _Kind(48, "size-m", False),
    "ngram-map-k": _Kind(48, "size-m", True),
    "ngram-map-k4v": _Kind(48, "size-m", True),
    "ngram-mod": _Kind(64, "n-max", True),
    "ngram-cache": _Kind(8, None, True),
}


@dataclass(frozen=True, slots=True)
class PeerMode:
    """One way to run the peer.

    Attributes:
        name: a draft-free ``--spec-type``.
        options: (end of the flag's name, number): ``size-n`` is ``--spec-ngram-simple-size-n``.
    """

    name: str
    options: tuple[tuple[str, int], ...] = ()

    @property
    def label(self) -> str:
        """``llama-server:ngram-simple[size-n=3]``; it names the lane in all results."""
        options = ",".join(f"{name}={value}" for name, value in self.options)
        return f"{PEER}:{self.name}" + (f"[{options}]" if options else "")

    @property
    def arguments(self) -> list[str]:
        """Of the server's command line."""
        chosen = [word for name, value in self.options for word in (self.flag(name), str(value))]
        return ["--spec-type", self.name, *chosen]

    @property
    def rows(self) -> int:
        """Rows of a pass at most: the last token and the longest draft."""
        kind = _KINDS[self.name]
        return 1 + dict(self.options).get(kind.option or "", kind.longest)

    @property
    def keeps(self) -> bool:
        """Whether its tables live on from request to request."""
        return _KINDS[self.name].keeps

    def flag(self, option: str) -> str:
        """The flag that an option stands for."""
        return f"--spec-{self.name}-{option}"


def parse_modes(text: str) -> list[PeerMode]:
    """Parse ``--peer-modes``; plain decoding of the peer always comes first.

    >>> [mode.label for mode in parse_modes("ngram-mod,ngram-simple[size-n=3,size-m=8]")]
    ['llama-server:none', 'llama-server:ngram-mod', 'llama-server:ngram-simple[size-n=3,size-m=8]']

    Raises:
        ConfigError: an unknown mode, or an option that is no whole number.
    """
    modes = [_mode(part) for part in split_list(text, text)]
    if not modes:
        raise ConfigError(f"--peer-modes needs names such as ngram-mod, but {text!r} was given; known are {_names()}")
    return list(dict.fromkeys([PeerMode("none"), *modes]))


def _names() -> str:
    return ", ".join(_KINDS)


def _mode(text: str) -> PeerMode:
    match = re.fullmatch(r"(?P<name>[^\[\]]+)(?:\[(?P<options>[^\[\]]*)\])?", text)
    name = match["name"].strip() if match else text
    if match is None or name not in _KINDS:
        raise ConfigError(f"{text!r} is no draft-free mode of {PEER}; known are {_names()}")
    return PeerMode(name, tuple(_option(item, name) for item in split_list(match["options"] or "", text)))


def _option(item: str, mode: str) -> tuple[str, int]:
    match = re.fullmatch(r"\s*([a-z][a-z-]*)\s*=\s*(\d{1,7})\s*", item)
    if match is None:
        raise ConfigError(f"an option of peer mode {mode} is NAME=NUMBER such as size-n=3, but {item!r} was given")
    return match[1], int(match[2])


def peer_lanes(modes: Sequence[PeerMode]) -> list[Lane]:
    """What the modes add to a comparison. Their drafts are not made here, so the lane's own setting is none."""
    return [Lane(mode.label, DraftConfig("none"), peer=mode) for mode in modes]


# -- the program -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Peer:
    """A program that was looked at.

    Attributes:
        path: the program.
        version: what it calls itself.
        usage: its ``--help``.
    """

    path: Path
    version: str
    usage: str

    @classmethod
    def check(cls, text: str, modes: Iterable[PeerMode]) -> Peer:
        """The program behind ``llama-server=PATH``, able to do all that is asked.

        Raises:
            ConfigError: no such program, it does not run, or it lacks a mode or an option.
        """
        path = _program(text)
        peer = cls(path, _version(_output(path, "--version")), _output(path, "--help"))
        known = peer._modes()
        for mode in modes:
            if mode.name not in known:
                raise ConfigError(f"{path} has no --spec-type {mode.name}; it has {', '.join(known)}")
            for option, _ in mode.options:
                peer._require_option(mode, option)
        return peer

    def has(self, flag: str) -> bool:
        """Whether its help names a flag."""
        return re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", self.usage) is not None

    def _modes(self) -> list[str]:
        match = re.search(r"--spec-type\s+\[?([\w-]+(?:[,|][\w-]+)*)", self.usage)
        if match is None:
            raise ConfigError(
                f"{self.path} knows no --spec-type: it is no {PEER}, or one too old to speculate by n-grams"
            )
        return re.split(r"[,|]", match[1])

    def _require_option(self, mode: PeerMode, option: str) -> None:
        if not self.has(mode.flag(option)):
            known = re.findall(rf"(?<![\w-])--spec-{mode.name}-([\w-]+)", self.usage)
            listed = ", ".join(dict.fromkeys(known)) or "none"
            raise ConfigError(f"{option!r} is no option of {PEER}'s mode {mode.name}; it has {listed}")


def _program(text: str) -> Path:
    kind, _, name = text.partition("=")
    if kind != PEER or not name:
        raise ConfigError(f"--peer needs {PEER}=PATH, but {text!r} was given")
    path = Path(name).expanduser()
    if not path.exists():
        found = shutil.which(name)
        if found is None:
            raise ConfigError(f"--peer {PEER}: there is no file {name}; build it from llama.cpp's source and name it")
        return Path(found)
    if not path.is_file() or not os.access(path, os.X_OK):
        raise ConfigError(f"--peer {PEER}: {path} is no program that can be run; name the {PEER} binary")
    return path.absolute()


def _output(path: Path, flag: str) -> str:
    """What a program says when it is asked about itself."""
    try:
        done = subprocess.run(
            [path, flag],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PROBE_SECONDS,
            env=peer_environment(),
            check=False,
        )
    except OSError as error:
        raise ConfigError(f"{path} cannot be run: {error.strerror or error}") from None
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{path} {flag} did not end within {PROBE_SECONDS:.0f} seconds: it is no {PEER}") from None
    if done.returncode != 0:
        said = last_lines(done.stderr + done.stdout)
        raise ConfigError(f"{path} {flag} failed with exit code {done.returncode}: {said}")
    return (done.stdout + b"\n" + done.stderr).decode("utf-8", "replace")


def _version(text: str) -> str:
    """``0.5.0-dev (build 1, commit 0c1e570)``."""
    match = re.search(r"^version: *(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else "unknown version"


def peer_environment() -> dict[str, str]:
    """The environment without llama.cpp's own variables: ``LLAMA_ARG_*`` would change what is measured."""
    return {name: value for name, value in os.environ.items() if not name.startswith("LLAMA_")}


def last_lines(data: bytes) -> str:
    """The last lines of a program's output, on one line."""
    lines = [line.strip() for line in data.decode("utf-8", "replace").splitlines() if line.strip()]
    return " / ".join(lines[-SHOWN_LINES:])[-SHOWN_CHARS:] or "it said nothing"
