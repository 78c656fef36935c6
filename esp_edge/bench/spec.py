"""What is compared: ``--drafters esp[mask-init=prompt-mean],pld`` at several block complexities, as lanes.

A lane is one drafter with its options at one block complexity. Names and options are those of
:class:`esp_edge.config.DraftConfig`, so a new drafter or setting needs no change here.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from esp_edge import config
from esp_edge.config import DraftConfig, ModelConfig, parse_tree
from esp_edge.errors import ConfigError

if TYPE_CHECKING:
    from esp_edge.bench.peers import PeerMode

__all__ = [
    "PEER",
    "PEER_PLAIN",
    "PLAIN",
    "STOCK",
    "DrafterSpec",
    "Lane",
    "is_peer",
    "make_lanes",
    "parse_drafters",
    "parse_numbers",
    "parse_threads",
    "split_list",
    "with_stock",
]

PLAIN = "none"
STOCK = "none[stock]"  # plain decoding of the default mode with llama.cpp's own kernels
PEER = "llama-server"  # another program, measured beside ours
PEER_PLAIN = f"{PEER}:none"
KEEP = "keep"  # the setting that carries tables from one request to the next
MAX_NUMBERS = 4096
_SPEC = re.compile(r"(?P<name>[^\[\]]+)(?:\[(?P<options>.*)\])?", re.DOTALL)
_SWITCH = {"on": True, "true": True, "yes": True, "off": False, "false": False, "no": False}


@dataclass(frozen=True, slots=True)
class DrafterSpec:
    """One entry of ``--drafters``.

    Attributes:
        label: as given, without spaces; it names the drafter in all results.
        options: fields of :class:`DraftConfig`, the drafter's name included.
    """

    label: str
    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Lane:
    """One compared configuration.

    Attributes:
        label: of the drafter, options included.
        draft: its settings.
        stock: whether it runs in the default mode with llama.cpp's own kernels, whatever the run does.
        peer: how another program makes the drafts; ``draft`` has no meaning then.
    """

    label: str
    draft: DraftConfig
    stock: bool = False
    peer: PeerMode | None = None

    @property
    def block_complexity(self) -> int:
        """Rows a pass may have; 1 for plain decoding."""
        return self.draft.rows if self.peer is None else self.peer.rows

    @property
    def settings(self) -> dict[str, Any]:
        """Everything that makes the lane, JSON-ready."""
        if self.peer is not None:
            return {"label": self.label, "block_complexity": self.peer.rows, "arguments": self.peer.arguments}
        return {"label": self.label, **dataclasses.asdict(self.draft)}

    @property
    def keep(self) -> bool:
        """Whether tables live on from prompt to prompt."""
        return bool(getattr(self.draft, KEEP, False)) if self.peer is None else self.peer.keeps

    @property
    def key(self) -> tuple[str, int]:
        """Identifies the lane in records."""
        return self.label, self.block_complexity


def is_peer(label: str) -> bool:
    """Whether a lane's label is of another program."""
    return label.startswith(f"{PEER}:")


# -- parsing ---------------------------------------------------------------------------------------------------------


def parse_drafters(text: str) -> list[DrafterSpec]:
    """Parse ``--drafters``.

    >>> [spec.label for spec in parse_drafters("esp[mask-init=prompt-mean,mask-update=0.1], none")]
    ['esp[mask-init=prompt-mean,mask-update=0.1]', 'none']

    Raises:
        ConfigError: an unknown drafter or option, or a value that does not fit; it names what is possible.
    """
    specs = [_drafter(part) for part in split_list(text, text)]
    if not specs:
        raise ConfigError(f"--drafters needs names such as esp, but {text!r} was given; known are {_names()}")
    return specs


def _names() -> str:
    return ", ".join(config.DRAFTERS)


def split_list(text: str, whole: str) -> list[str]:
    """Parts between commas outside of brackets, stripped, empty ones left out.

    Raises:
        ConfigError: brackets that do not match; it shows ``whole``.
    """
    parts, depth = [""], 0
    for char in text:
        depth += (char == "[") - (char == "]")
        if depth < 0:
            break
        if char == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += char
    if depth != 0:
        raise ConfigError(f"the brackets of {whole!r} do not match; write esp[mask-init=prompt-mean],pld")
    return [part.strip() for part in parts if part.strip()]


def _drafter(text: str) -> DrafterSpec:
    match = _SPEC.fullmatch(text)
    if match is None:
        raise ConfigError(f"a drafter is NAME or NAME[OPTION=VALUE,...], but {text!r} was given")
    name = match["name"].strip()
    if name not in config.DRAFTERS:
        raise ConfigError(f"{name!r} is no drafter; known are {_names()}")
    items = split_list(match["options"] or "", text)
    options: dict[str, Any] = {"drafter": name}
    for item in items:
        field, value = _option(item, name)
        options[field] = value
    if options.get("tree") and "masks" not in options:
        options["masks"] = len(options["tree"])
    label = f"{name}[{','.join(items)}]" if items else name
    return DrafterSpec(label, options)


def _option(item: str, drafter: str) -> tuple[str, Any]:
    name, has_value, value = (part.strip() for part in item.partition("="))
    hints = typing.get_type_hints(DraftConfig)
    del hints["drafter"]
    field = name.replace("-", "_")
    if field not in hints:
        known = ", ".join(hint.replace("_", "-") for hint in hints)
        raise ConfigError(f"{name!r} is no option of drafter {drafter}; known are {known}")
    if not has_value and hints[field] is not bool:
        raise ConfigError(f"option {name} of drafter {drafter} needs a value: {name}=VALUE")
    return field, _value(name, value if has_value else "on", hints[field])


def _value(name: str, text: str, hint: Any) -> Any:
    """A text as the type of a field; for a union the first member that fits, None for ``none`` where it is one."""
    if name == "tree":  # commas and plus signs both separate widths
        return parse_tree(text.replace("+", ","))
    members = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if type(None) in members and text == "none":
        return None
    for member in members:
        try:
            if member is bool:
                return _SWITCH[text.lower()]
            if member in (int, float, str):
                return member(text)
        except (KeyError, ValueError):
            continue
    kinds = " or ".join(getattr(m, "__name__", str(m)) for m in members if m is not type(None))
    wanted = "on or off" if kinds == "bool" else f"a value of type {kinds}"
    raise ConfigError(f"option {name} needs {wanted}, but {text!r} was given")


def parse_numbers(text: str, name: str, *, least: int = 1) -> list[int]:
    """``10,30,60`` and ranges such as ``1-8,16``: distinct numbers of at least ``least``, in the order given.

    Raises:
        ConfigError: anything else; ``name`` is the flag it came from.
    """
    numbers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,7})(?:\s*-\s*(\d{1,7}))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not least <= first <= last or last - first >= MAX_NUMBERS:
            wanted = f"whole numbers from {least} on such as 10,30 or 1-8"
            raise ConfigError(f"{name} must be {wanted}, but {text!r} was given")
        numbers += range(first, last + 1)
    return list(dict.fromkeys(numbers))


def parse_threads(text: str, *, least: int = 1) -> list[int]:
    """``--threads 1,2`` as :func:`parse_numbers` reads it, each as many as a model may be loaded with.

    Raises:
        ConfigError: anything else.
    """
    counts = parse_numbers(text, "--threads", least=least)
    ModelConfig(n_threads=max(counts))  # llama.cpp crashes on more
    return counts


# -- lanes -----------------------------------------------------------------------------------------------------------


def make_lanes(specs: Sequence[DrafterSpec], block_complexities: Sequence[int]) -> list[Lane]:
    """Plain decoding, then every drafter at every block complexity; one lane where the drafter fixes its own rows.

    Raises:
        ConfigError: a combination of settings that cannot be.
    """
    lanes: dict[tuple[str, int], Lane] = {}
    for spec in (DrafterSpec(PLAIN, {"drafter": PLAIN, "block_complexity": 1}), *specs):
        for rows in block_complexities:
            settings = {"block_complexity": rows, **spec.options}
            lane = Lane(spec.label, DraftConfig(**settings))
            lanes.setdefault(lane.key, lane)
    return list(lanes.values())


def with_stock(lanes: Sequence[Lane]) -> list[Lane]:
    """The lanes of a run and, last, plain decoding as llama.cpp does it: in the default mode, with its own kernels.

    Exact mode can slow plain decoding itself down (padded rows), and our kernels speed it up: a speedup over the run's
    own plain decoding alone would flatter or understate.
    """
    return [*lanes, Lane(STOCK, DraftConfig(PLAIN), stock=True)]
