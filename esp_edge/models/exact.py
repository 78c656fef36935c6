"""Exact mode's own proof: on this model, CPU and library a row's bits do not depend on the width of its pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from esp_edge._runtime import native
from esp_edge.errors import DecodeError, UnsupportedModelError
from esp_edge.tree import FloatArray, Int32Array

if TYPE_CHECKING:
    from esp_edge.models.model import Context, TargetModel

__all__ = ["lone_rows_differ", "require_width_invariance"]

_CHAIN = 12
_WIDTHS = ((2,) * 6, (7, 5), (3, 9))
_WIDEST = 60
_LONG = 300  # cells; llama.cpp's attention takes another kernel for one row over more than 256
_NONE: npt.NDArray[np.int32] = np.empty(0, np.int32)


def require_width_invariance(model: TargetModel) -> None:
    """Run one chain of tokens in passes of several widths and compare all logits bit by bit.

    Raises:
        UnsupportedModelError: they differ, so exact mode cannot hold.
    """
    if not model.capability.speculation:
        raise UnsupportedModelError(
            f"{model.path}: exact mode compares drafting with plain decoding, but here {model.capability.reason}; "
            f"drop --exact"
        )
    ids = np.linspace(0, model.tokenizer.n_vocab - 1, _CHAIN + 2).astype(np.int32)[1:-1]
    wanted = _widest_pass(model, ids)
    for widths in _WIDTHS:
        found = _chain(model, ids, widths)
        if not np.array_equal(wanted, found):
            raise UnsupportedModelError(
                f"{model.path}: exact mode needs logits that do not depend on the rows of a pass, but here passes of "
                f"{widths[0]} and {_WIDEST} rows differ; use another quantisation (Q4_0, Q8_0) or drop --exact"
            )


def lone_rows_differ(model: TargetModel) -> bool:
    """Whether a pass of one row gives other bits than one of two, over few cells or many."""
    room = min(model.n_ctx, 512)
    ids = np.linspace(0, model.tokenizer.n_vocab - 1, min(_LONG, room - 2)).astype(np.int32)
    context = model.new_context(2, n_ctx=room)
    try:
        for n in (min(_CHAIN, len(ids)), len(ids)):
            context.native.clear()
            _require(context.native.prefill(ids[:n], n))
            alone, beside = (_root_logits(model, context, ids[:1], pads) for pads in (0, 1))
            if not np.array_equal(alone, beside):
                return True
        return False
    finally:
        context.close()


def _root_logits(model: TargetModel, context: Context, token: Int32Array, pad_rows: int) -> FloatArray:
    _require(context.native.run(_layout([-1]), token, _NONE, None, None, pad_rows, model.embeddings is None))
    logits: FloatArray = context.native.logits(0)
    context.native.rollback()
    return logits


def _layout(parents: list[int]) -> object:
    return native.TreeLayout.build(np.array(parents, np.int32), np.zeros(len(parents), np.int32))


def _widest_pass(model: TargetModel, ids: Int32Array) -> FloatArray:
    """The chain with leaves below its last node, 60 rows together: float32[len(ids), n_vocab]."""
    n = len(ids)
    parents = [*range(-1, n - 1), *[n - 1] * (_WIDEST - n)]
    tokens = np.concatenate([ids, np.arange(_WIDEST - n, dtype=np.int32) % model.tokenizer.n_vocab])
    context = model.new_context(_WIDEST, n_ctx=256)
    try:
        _require(context.native.run(_layout(parents), tokens, _NONE, None, None, 0, model.embeddings is None))
        return np.stack([context.native.logits(row) for row in range(n)])
    finally:
        context.close()


def _chain(model: TargetModel, ids: Int32Array, widths: tuple[int, ...]) -> FloatArray:
    """The chain in passes of these widths: float32[len(ids), n_vocab]."""
    context = model.new_context(1, n_ctx=256)
    logits: list[FloatArray] = []
    try:
        first = 0
        for width in widths:
            tokens = np.ascontiguousarray(ids[first : first + width])
            layout = _layout(list(range(-1, width - 1)))
            _require(context.native.run(layout, tokens, _NONE, None, None, 0, model.embeddings is None))
            logits += [context.native.logits(row) for row in range(width)]
            context.native.commit(np.arange(1, width, dtype=np.int32), True)
            first += width
        return np.stack(logits)
    finally:
        context.close()


def _require(status: int) -> None:
    if status != 0:
        raise DecodeError(f"llama.cpp could not run the exactness check (status {status})")
