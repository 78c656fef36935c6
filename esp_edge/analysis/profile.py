"""Where the time of a pass goes: every node of llama.cpp's graph, added up by what it does.

``native.OpProfile`` stamps the clock behind each node while the graph runs as always, so the parts add up to nearly the
whole pass: what is left (``rest``) is llama.cpp's and our own work around the graph. The whole pass is timed by itself,
with nothing recorded, in turns with the recorded ones. The bounds come from the same graph: bytes of weights, K and V,
each read once, over the read bandwidth measured here, and the multiply-adds.
"""

from __future__ import annotations

import ctypes
import random
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from esp_edge._runtime import native
from esp_edge.config import MAX_BLOCK, MAX_EXACT_BLOCK
from esp_edge.errors import ConfigError, UnsupportedModelError
from esp_edge.models.model import Context, TargetModel, offloads
from esp_edge.planner.curve import CONTEXT_STEP
from esp_edge.planner.measure import _stretch, dummy_tokens, pass_ms
from esp_edge.step import Step

__all__ = ["JOINT", "ROLES", "SEPARATE", "Node", "Profile", "Timed", "measure", "read_bandwidth", "role", "summarize"]

Progress = Callable[[int, int], None]

JOINT, SEPARATE = "joint", "separate"
ROLES: dict[str, str] = {
    "q": "product with attn_q",
    "k": "product with attn_k",
    "v": "product with attn_v",
    "qkv": "product with a joint attn_qkv",
    "o": "product with attn_output",
    "gate": "product with ffn_gate",
    "up": "product with ffn_up",
    "down": "product with ffn_down",
    "product": "any other product with weights",
    "head": "output head: product with output or the tied token_embd",
    "attention": "flash attention, or its products and softmax where that is off",
    "rope": "rotary positions",
    "norm": "norms, the product with their weights included",
    "elementwise": "additions, gated activations, scales and the like",
    "copy": "copies, among them K and V into the cache",
    "get_rows": "rows looked up: embeddings, and those whose logits are wanted",
    "other": "anything else",
}
"""What a node may do -> in words, in the order of the tables."""

_MATRICES = {
    "attn_q": "q",
    "attn_k": "k",
    "attn_v": "v",
    "attn_qkv": "qkv",
    "attn_output": "o",
    "ffn_gate": "gate",
    "ffn_up": "up",
    "ffn_down": "down",
}
_ROLE_OF_OP = (
    {"FLASH_ATTN_EXT": "attention", "ROPE": "rope", "GET_ROWS": "get_rows"}
    | dict.fromkeys(("NORM", "RMS_NORM", "GROUP_NORM", "L2_NORM"), "norm")
    | dict.fromkeys(("CPY", "CONT", "DUP", "SET_ROWS", "CONCAT", "REPEAT"), "copy")
    | dict.fromkeys(("ADD", "ADD_ID", "ADD1", "SUB", "MUL", "DIV", "SQR", "SCALE"), "elementwise")
    | dict.fromkeys(("GLU", "UNARY", "CLAMP", "SOFT_MAX", "ARGSORT", "SUM_ROWS"), "elementwise")
)
_LAYER_WEIGHTS = re.compile(r"blk\.\d+\.(\w+?)(?:_exps|_shexp)?\.weight")
_HEAD_WEIGHTS = re.compile(r"(?:^|#)(?:output|token_embd)\.weight")
_BANDWIDTH_BYTES = 256 << 20  # more than a cache holds
_BANDWIDTH_ROUNDS = 8


class Node(NamedTuple):
    """A node of the graph that computed something, as ``native.OpProfile`` tells it.

    Attributes:
        op: ggml's name of the operation.
        name, weights: of its result and of its first source.
        type: of the weights, or of the KV cache.
        n_bytes: of weights, or of K and V, each read once; 0 for small operations.
        macs: multiply-adds of a product.
        us: microseconds; 0 where it was fused with the node before.
        scales_norm: whether it multiplies a norm with its weights.
    """

    op: str
    name: str
    weights: str
    type: str
    n_bytes: int
    macs: int
    us: float
    scales_norm: bool


def role(node: Node) -> str:
    """What a node does, one of :data:`ROLES`.

    >>> role(Node("MUL_MAT", "Qcur-0", "blk.0.attn_q.weight", "q4_0", 1, 1, 1.0, False))
    'q'
    """
    if node.scales_norm:
        return "norm"
    found = _product(node.weights) if node.op in ("MUL_MAT", "MUL_MAT_ID") else _ROLE_OF_OP.get(node.op, "other")
    if node.name.startswith("kq") and found not in _MATRICES.values():
        return "attention"  # kq, kq_soft_max, kqv: its parts where it is not one node
    return found


def _product(weights: str) -> str:
    """Role of a product with weights of this name; a copy on another device is named ``CPU#blk.0.attn_q.weight#0``."""
    if _HEAD_WEIGHTS.search(weights):
        return "head"
    match = _LAYER_WEIGHTS.search(weights)
    return _MATRICES.get(match[1], "product") if match else "product"


# -- measuring -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Timed:
    """The passes of one size at one context.

    Attributes:
        rows, context: rows of the pass, cells in the KV cache before it.
        whole: milliseconds of the passes that nothing recorded.
        recorded: milliseconds of each recorded pass, and of its parts by role.
        nodes: of one recorded pass.
    """

    rows: int
    context: int
    whole: list[float] = field(default_factory=list)
    recorded: list[tuple[float, Mapping[str, float]]] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Profile:
    """What was measured.

    Attributes:
        method: ``joint``, the graph computed as always, or ``separate``, node by node.
        passes: by context, then rows.
    """

    method: str
    passes: list[Timed]


def measure(
    model: TargetModel,
    rows: Sequence[int],
    contexts: Sequence[int],
    *,
    repeat: int = 5,
    separate: bool = False,
    progress: Progress | None = None,
) -> Profile:
    """Time passes of dummy tokens, all rows with logits, whole and part by part.

    A round takes every size once, in an order of its own, whole and recorded in turns. A long context costs no
    prefill: its cells are copies of the first ones.

    Args:
        rows: sizes of the passes.
        contexts: cells in the KV cache before the pass.
        repeat: rounds.
        separate: compute every node alone. That is how other backends than the CPU have to be measured (and are, by
            themselves); on the CPU it adds 10 to 20 microseconds a node and tells what joining them saves.
        progress: called with (passes done, passes).

    Raises:
        ConfigError: more rows than a pass may have, nothing to measure, or not enough memory for a context.
        UnsupportedModelError: the model's memory cannot drop the rows of a pass.
    """
    _check(model, rows, contexts, repeat)
    sizes, lengths = sorted(set(rows)), sorted(set(contexts))
    recorder = native.OpProfile()
    recorder.separate = separate or offloads(model.config)
    tokens = dummy_tokens(model, 2 * CONTEXT_STEP + lengths[-1] % CONTEXT_STEP + sizes[-1])
    passes: list[Timed] = []
    total = repeat * len(sizes) * len(lengths)
    for length in lengths:
        with closing(model.new_context(2, n_ctx=length + sizes[-1] + 1, hidden_states=recorder)) as context:
            bench = _Bench(context, recorder, tokens)
            bench.fill(length)
            bench.warm_up(sizes)
            timed = {n: Timed(n, length) for n in sizes}
            for number in range(repeat):
                for n in random.Random(number).sample(sizes, len(sizes)):
                    bench.time(timed[n], recorded_first=number % 2 == 1)
                    if progress is not None:
                        progress(sum(len(one.whole) for one in (*passes, *timed.values())), total)
        passes += timed.values()
    return Profile(SEPARATE if recorder.separate else JOINT, passes)


def _check(model: TargetModel, rows: Sequence[int], contexts: Sequence[int], repeat: int) -> None:
    most = MAX_EXACT_BLOCK + 3 if model.config.exact else MAX_BLOCK
    if not rows or not contexts or min(rows) < 1 or min(contexts) < 0 or repeat < 1:
        raise ConfigError(
            f"a profile needs rows of 1 and more, contexts of 0 and more and a repetition, but rows {list(rows)}, "
            f"contexts {list(contexts)} and {repeat} repetitions were given"
        )
    if max(rows) > most:
        raise ConfigError(f"a pass may have {most} rows here, but --rows asks for {max(rows)}; lower it")
    if not model.capability.speculation:
        raise UnsupportedModelError(
            f"{model.path}: a profile needs a memory that can drop the rows of a pass, but {model.capability.reason}"
        )


class _Bench:
    """Passes over one context, recorded or not."""

    def __init__(self, context: Context, recorder: Any, tokens: Sequence[int]) -> None:
        self._context = context
        self._step = Step(context)
        self._recorder = recorder
        self._tokens = tokens
        self._address = ctypes.cast(context.pointer, ctypes.c_void_p).value

    def fill(self, length: int) -> None:
        """Put so many cells into the empty cache."""
        near = min(length, CONTEXT_STEP)
        left = length - near
        self._prefill(near)
        blocks = length // CONTEXT_STEP
        if blocks > 1 and _stretch(self._context, near, blocks * near):
            left = length - blocks * near
        self._prefill(left)

    def _prefill(self, n: int) -> None:
        if n:
            given = [self._tokens[i % len(self._tokens)] for i in range(self._step.n_past, self._step.n_past + n)]
            self._step.prefill(given)

    def warm_up(self, sizes: Sequence[int]) -> None:
        """First passes allocate; and they show whether this backend tells the end of every node."""
        for n in (sizes[-1], sizes[0]):
            self._record(n)
        if self._recorder.problem and not self._recorder.separate:
            self._recorder.separate = True
            self._record(sizes[0])
        if self._recorder.problem:
            raise UnsupportedModelError(f"{self._context.model.path}: no profile: {self._recorder.problem}")

    def time(self, timed: Timed, *, recorded_first: bool) -> None:
        """One whole pass and one recorded pass."""
        if not recorded_first:
            timed.whole.append(self._pass(timed.rows))
        ms, nodes = self._record(timed.rows)
        if recorded_first:
            timed.whole.append(self._pass(timed.rows))
        parts = dict.fromkeys(ROLES, 0.0)
        for node in nodes:
            parts[role(node)] += node.us / 1000.0
        timed.recorded.append((ms, parts))
        timed.nodes = nodes

    def _pass(self, n: int) -> float:
        return pass_ms(self._step, n, self._tokens)

    def _record(self, n: int) -> tuple[float, list[Node]]:
        self._recorder.start(self._address)
        try:
            ms = self._pass(n)
        finally:
            self._recorder.stop()
        return ms, [Node(*fields) for fields in self._recorder.nodes()]


def read_bandwidth(n_threads: int, n_bytes: int = _BANDWIDTH_BYTES) -> float:
    """Bytes a second that so many threads read from memory, in the best of some rounds.

    Measure it before a model runs: llama.cpp's threads may go on spinning behind a pass.
    """
    parts = np.array_split(np.ones(max(n_threads, n_bytes // 8), np.int64), n_threads)
    size = sum(part.nbytes for part in parts)
    best = float("inf")
    with ThreadPoolExecutor(n_threads) as pool:
        for _ in range(_BANDWIDTH_ROUNDS):
            start = time.perf_counter()
            list(pool.map(np.bitwise_or.reduce, parts))  # numpy releases the interpreter
            best = min(best, time.perf_counter() - start)
    return size / best


# -- arithmetic ------------------------------------------------------------------------------------------------------


def summarize(profile: Profile, bandwidth: float) -> dict[str, Any]:
    """JSON-ready: what the tables and the plot show.

    Args:
        bandwidth: bytes a second, of :func:`read_bandwidth`.

    Returns:
        ``method``, ``read_bytes_per_s`` and ``passes``, by context, then rows: ``rows``, ``context``, ``repeat``;
        ``whole_ms`` (median of the unrecorded passes), ``whole_ms_min`` and ``whole_ms_max``; ``recorded_ms`` (median
        of the recorded ones); ``ops_ms``, the sum of the parts, and ``rest_ms``, what the whole pass took more;
        ``n_bytes`` and ``macs`` of the whole graph; ``memory_ms``, the time to read ``n_bytes`` once; and ``ops``, the
        parts in the order of :data:`ROLES`: ``op``, ``ms`` (median), ``nodes``, ``types``, ``n_bytes``, ``macs``.
    """
    return {
        "method": profile.method,
        "read_bytes_per_s": round(bandwidth),
        "passes": [_summary(timed, bandwidth) for timed in profile.passes],
    }


def _summary(timed: Timed, bandwidth: float) -> dict[str, Any]:
    ops = _parts(timed)
    whole, sum_of_ops = statistics.median(timed.whole), sum(op["ms"] for op in ops)
    n_bytes = sum(op["n_bytes"] for op in ops)
    return {
        "rows": timed.rows,
        "context": timed.context,
        "repeat": len(timed.whole),
        "whole_ms": whole,
        "whole_ms_min": min(timed.whole),
        "whole_ms_max": max(timed.whole),
        "recorded_ms": statistics.median(ms for ms, _ in timed.recorded),
        "ops_ms": sum_of_ops,
        "rest_ms": whole - sum_of_ops,
        "n_bytes": n_bytes,
        "macs": sum(op["macs"] for op in ops),
        "memory_ms": 1000.0 * n_bytes / bandwidth,
        "ops": ops,
    }


def _parts(timed: Timed) -> list[dict[str, Any]]:
    """The roles there are; each one's median, because a disturbance hits one part of one pass."""
    found = []
    for name in ROLES:
        nodes = [node for node in timed.nodes if role(node) == name]
        if nodes:
            found.append(
                {
                    "op": name,
                    "ms": statistics.median(parts[name] for _, parts in timed.recorded),
                    "nodes": len(nodes),
                    "types": sorted({node.type for node in nodes}),
                    "n_bytes": sum(node.n_bytes for node in nodes),
                    "macs": sum(node.macs for node in nodes),
                }
            )
    return found
