"""``/v1/embeddings``, for models whose file says how the vectors of a text's tokens become one vector."""

from __future__ import annotations

import base64
import ctypes
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from fastapi import APIRouter, Request
from starlette.responses import Response

from esp_edge._runtime import captured_log, llama_cpp
from esp_edge.errors import DecodeError, ModelLoadError, PromptError
from esp_edge.server.completions import prompts_of
from esp_edge.server.errors import ApiError
from esp_edge.server.schemas import EmbeddingRequest
from esp_edge.server.service import Service, check_ids, in_thread
from esp_edge.server.stream import reply
from esp_edge.tree import FloatArray

if TYPE_CHECKING:
    from esp_edge.session import Model

__all__ = ["Embedder", "pooling_of", "routes"]

MAX_TOKENS = 2048  # of one text: pooling needs all its rows in one pass
MAX_TEXTS = 2048
POOLINGS = {
    "mean": llama_cpp.LLAMA_POOLING_TYPE_MEAN,
    "cls": llama_cpp.LLAMA_POOLING_TYPE_CLS,
    "last": llama_cpp.LLAMA_POOLING_TYPE_LAST,
}


def pooling_of(model: Model, wanted: str) -> str | None:
    """How a model's embeddings are pooled; None where it has none.

    Args:
        wanted: ``auto`` = as the model file says.
    """
    if wanted != "auto":
        return None if wanted == "none" else wanted
    stored = model.header.hyperparameter("pooling_type")
    return next((name for name, number in POOLINGS.items() if number == stored), None)


class Embedder:
    """A llama_context that gives one vector a text, made when the first text comes. Texts go one after the other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pointer: Any = None
        self._n_tokens = 0

    def embed(self, model: Model, pooling: str, ids: Sequence[int]) -> FloatArray:
        """float32[n_embd], of length 1.

        Raises:
            PromptError: more tokens than one pass holds.
            DecodeError: llama.cpp failed.
        """
        with self._lock:
            if self._pointer is None:
                self._open(model, pooling)
            if len(ids) > self._n_tokens:
                raise PromptError(f"a text may have {self._n_tokens} tokens, but one has {len(ids)}; split it")
            vector = self._run(ids, int(llama_cpp.llama_model_n_embd(model.pointer)))
        length = float(np.linalg.norm(vector))
        return np.asarray(vector / length if length else vector, np.float32)

    def _open(self, model: Model, pooling: str) -> None:
        _ = model.address  # raises when closed
        self._n_tokens = min(model.n_ctx, MAX_TOKENS)
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = self._n_tokens
        params.n_threads = params.n_threads_batch = model.threads
        params.embeddings = True
        params.pooling_type = POOLINGS[pooling]
        with captured_log():
            self._pointer = llama_cpp.llama_init_from_model(model.pointer, params)
        if not self._pointer:
            self._pointer = None
            raise ModelLoadError("llama.cpp could not make a context for embeddings")

    def _run(self, ids: Sequence[int], n_embd: int) -> FloatArray:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._pointer), True)
        batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
        try:
            batch.n_tokens = len(ids)
            for i, token_id in enumerate(ids):
                batch.token[i], batch.pos[i], batch.logits[i] = token_id, i, 1
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
            with captured_log():
                status = llama_cpp.llama_decode(self._pointer, batch)
        finally:
            llama_cpp.llama_batch_free(batch)
        found = llama_cpp.llama_get_embeddings_seq(self._pointer, 0)
        if status != 0 or not found:
            raise DecodeError(f"llama.cpp could not embed a text (status {status})")
        return np.ctypeslib.as_array(ctypes.cast(found, ctypes.POINTER(ctypes.c_float)), (n_embd,)).copy()

    def close(self) -> None:
        """Free the context; before its model is closed."""
        with self._lock:
            if self._pointer is not None:
                llama_cpp.llama_free(self._pointer)
                self._pointer = None


def routes(service: Service, embedder: Embedder) -> APIRouter:
    """The route, with and without ``/v1``."""
    router = APIRouter(tags=["embeddings"])

    @router.post("/embeddings", include_in_schema=False)
    @router.post("/v1/embeddings")
    async def embeddings(request: Request, body: EmbeddingRequest) -> Response:
        """A vector for each text."""
        return await reply(request, None, _document(service, embedder, body))

    return router


async def _document(service: Service, embedder: Embedder, body: EmbeddingRequest) -> dict[str, Any]:
    model = service.model
    pooling = pooling_of(model, service.settings.pooling)
    if pooling is None:
        message = (
            "this model has no embeddings: its file names no pooling type; load a model for embeddings, or start the "
            "server with --pooling mean or --pooling last"
        )
        raise ApiError(400, message, param="model", code="embeddings_not_supported")
    texts = await in_thread(_encode, model, prompts_of(body.input, "input"))
    data = []
    for index, ids in enumerate(texts):
        try:
            vector = await in_thread(embedder.embed, model, pooling, ids, limiter=service.one_by_one)
        except PromptError as error:
            raise ApiError(400, str(error), param="input") from None
        data.append({"object": "embedding", "index": index, "embedding": _shaped(vector, body)})
    n = sum(map(len, texts))
    usage = {"prompt_tokens": n, "total_tokens": n}
    return {"object": "list", "model": service.model_id, "data": data, "usage": usage}


def _encode(model: Model, texts: Sequence[str | list[int]]) -> list[list[int]]:
    if len(texts) > MAX_TEXTS:
        raise ApiError(400, f"a request may have {MAX_TEXTS} texts, but {len(texts)} were given", param="input")
    found = []
    for text in texts:
        try:
            ids = model.tokenizer.encode(text, add_special=True) if isinstance(text, str) else text
            found.append(check_ids(ids, model.tokenizer.n_vocab))
        except PromptError as error:
            raise ApiError(400, str(error), param="input") from None
        if not found[-1]:
            raise ApiError(400, "a text of input is empty: give at least one character", param="input")
    return found


def _shaped(vector: FloatArray, body: EmbeddingRequest) -> str | list[float]:
    if body.dimensions is not None:
        if body.dimensions > len(vector):
            message = f"dimensions may be {len(vector)} at most, but {body.dimensions} was given"
            raise ApiError(400, message, param="dimensions")
        vector = vector[: body.dimensions]
        vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
    if body.encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
    values: list[float] = vector.astype(np.float32).tolist()
    return values
