"""Routes that generate nothing: models, tokens, health, properties, metrics."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.responses import Response

from esp_edge import __version__
from esp_edge.config import DRAFTERS
from esp_edge.errors import PromptError
from esp_edge.server.embeddings import pooling_of
from esp_edge.server.errors import ApiError, Json
from esp_edge.server.schemas import DetokenizeRequest, TokenizeRequest
from esp_edge.server.service import Service, check_ids, in_thread

__all__ = ["routes"]

PER_REQUEST = ("enabled", "drafter", "block_complexity", "masks")


def routes(service: Service) -> APIRouter:
    """All of them."""
    router = APIRouter(tags=["server"])
    _add_models(router, service)
    _add_tokens(router, service)
    _add_state(router, service)
    return router


def _add_models(router: APIRouter, service: Service) -> None:
    def card() -> dict[str, Any]:
        model = service.model
        meta = {"n_ctx": model.n_ctx, "n_vocab": model.tokenizer.n_vocab, "architecture": model.header.architecture}
        return {
            "id": service.model_id,
            "object": "model",
            "created": service.created,
            "owned_by": "esp_edge",
            "meta": meta,
        }

    @router.get("/models", include_in_schema=False)
    @router.get("/v1/models")
    async def list_models() -> Response:
        """The one model."""
        return Json({"object": "list", "data": [card()]})

    @router.get("/models/{name:path}", include_in_schema=False)
    @router.get("/v1/models/{name:path}")
    async def show_model(name: str) -> Response:
        """The model, if that is its name."""
        if name != service.model_id:
            message = f"there is one model, {service.model_id}; /v1/models lists it"
            raise ApiError(404, message, param="model", code="model_not_found")
        return Json(card())


def _add_tokens(router: APIRouter, service: Service) -> None:
    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        """Token ids of a text."""
        tokenizer = service.model.tokenizer
        special = {"add_special": body.add_special, "parse_special": body.parse_special}
        try:
            ids = await in_thread(lambda: tokenizer.encode(body.content, **special))
        except PromptError as error:
            raise ApiError(400, str(error), param="content") from None
        if not body.with_pieces:
            return Json({"tokens": ids})
        return Json({"tokens": [{"id": i, "piece": _piece(tokenizer.raw_piece(i))} for i in ids]})

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        """Text of token ids."""
        tokenizer = service.model.tokenizer

        def text() -> str:
            ids = check_ids(body.tokens, tokenizer.n_vocab)
            return b"".join(map(tokenizer.raw_piece, ids)).decode("utf-8", "replace")

        try:
            return Json({"content": await in_thread(text)})
        except PromptError as error:
            raise ApiError(400, str(error), param="tokens") from None


def _piece(data: bytes) -> str | list[int]:
    """Text, or the bytes of a part of a character (as llama.cpp does)."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return list(data)


def _add_state(router: APIRouter, service: Service) -> None:
    @router.get("/health")
    @router.get("/v1/health", include_in_schema=False)
    async def health() -> Response:
        """``ok``, or 503 while the model loads."""
        if service.is_ready:
            return Json({"status": "ok"})
        try:
            _ = service.engine
        except ApiError as error:
            return Json({"status": error.code} | error.body(), status_code=503, headers=error.headers)
        return Json({"status": "ok"})

    if service.settings.metrics:

        @router.get("/metrics")
        async def metrics() -> Response:
            """Counters in Prometheus' text format."""
            return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @router.get("/props")
    async def props(request: Request) -> Response:
        """What the model and the server are and can do."""
        del request
        return Json(_props(service))


def _props(service: Service) -> dict[str, Any]:
    model, settings = service.model, service.settings
    drafting = asdict(settings.draft)
    drafting.pop("draft_model")  # a path of this machine
    return {
        "build_info": f"esp_edge {__version__}",
        "model_id": service.model_id,
        "n_ctx": model.n_ctx,
        "n_vocab": model.tokenizer.n_vocab,
        "architecture": model.header.architecture,
        "chat_template": model.template.source,
        "template_warning": model.template_warning,
        "exact": model.config.exact,
        "capability": asdict(model.capability),
        "kernels": str(model.kernels),
        "embeddings": pooling_of(model, settings.pooling) is not None,
        "draft": drafting,
        "drafters": [name for name in DRAFTERS if name != "draft-model" or settings.draft.draft_model],
        "speculative_fields": list(PER_REQUEST),
        "default_generation_settings": _defaults(service),
        "engine": dict(service.status()),
    }


def _defaults(service: Service) -> dict[str, Any]:
    values = asdict(service.settings.defaults)
    values["logit_bias"] = {str(key): str(value) for key, value in values["logit_bias"].items()}
    return values
