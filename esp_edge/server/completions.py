"""``/v1/completions``: raw prompts, several at once, with ``echo`` and log-probabilities in the legacy shape."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from esp_edge import __version__
from esp_edge.config import DraftConfig
from esp_edge.errors import ConfigError, GrammarError, PromptError
from esp_edge.models.tokenizer import TextDecoder
from esp_edge.server.batch import Ask, Batch
from esp_edge.server.errors import ApiError, shown
from esp_edge.server.feed import Token, TokenFeed
from esp_edge.server.params import constrained, draft_of, params_of, seeded
from esp_edge.server.report import speculation, timings, total, usage
from esp_edge.server.schemas import CompletionRequest
from esp_edge.server.scoring import Scorer
from esp_edge.server.service import FieldsAtFault, Service, in_thread
from esp_edge.server.stream import reply, stream
from esp_edge.session import TokenLogprob

__all__ = ["Scorer", "prompts_of", "routes"]

DEFAULT_TOKENS = 16  # OpenAI's for this route


def routes(service: Service, scorer: Scorer) -> APIRouter:
    """The route, with and without ``/v1``."""
    router = APIRouter(tags=["completions"])

    @router.post("/completions", include_in_schema=False)
    @router.post("/v1/completions")
    async def completions(request: Request, body: CompletionRequest) -> Response:
        """Continue one text or several."""
        start = time.perf_counter()
        plan = await in_thread(_plan, service, body)
        batch = Batch(service, plan.asks, plan.draft, plan.fields, start)
        answer = _Completion(service, plan, batch, scorer)
        if body.stream:
            return await stream(request, service, batch, answer.chunks())
        return await reply(request, batch, answer.document())

    return router


# -- before ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Plan:
    prompts: list[list[int]]
    echoes: list[str] | None
    asks: list[Ask]
    per_prompt: int
    draft: DraftConfig | None
    fields: FieldsAtFault
    logprobs: int | None
    predicted: bool
    include_usage: bool
    reply_id: str = field(default_factory=lambda: f"cmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in value)


def prompts_of(value: Any, field_name: str) -> list[str | list[int]]:
    """A text, token ids, or a list of either, as a list of prompts.

    Raises:
        ApiError: 400, it is something else or empty.
    """
    if isinstance(value, str):
        return [value]
    wanted = f"{field_name} must be a text, a list of token ids, or a list of either"
    if not isinstance(value, list):
        raise ApiError(400, f"{wanted}, but {shown(value)} was given", param=field_name)
    if not value:
        raise ApiError(400, f"{field_name} is empty: give a text or token ids", param=field_name)
    if _is_ids(value):
        return [value]
    for item in value:
        if not isinstance(item, str) and not (_is_ids(item) and item):
            raise ApiError(400, f"{wanted}, but {shown(item)} is in the list", param=field_name)
    return value


def _plan(service: Service, body: CompletionRequest) -> _Plan:
    _refuse_unsupported(body)
    settings, tokenizer = service.settings, service.model.tokenizer
    usual = DEFAULT_TOKENS if settings.defaults.max_tokens is None else settings.defaults.max_tokens
    limit = usual if body.max_tokens is None else body.max_tokens
    params = params_of(body, settings.defaults, max_tokens=limit, max_field="max_tokens", n_vocab=tokenizer.n_vocab)
    params = replace(params, logprobs=body.logprobs)
    at_fault = "grammar" if body.json_schema is None else "json_schema"
    if body.grammar is not None or body.json_schema is not None:
        params = constrained(params, at_fault, grammar=body.grammar, json_schema=body.json_schema)
    given = prompts_of(body.prompt, "prompt")
    per_prompt = body.n or 1
    if len(given) * per_prompt > settings.max_choices:
        asked = f"{len(given)} prompts times n = {per_prompt} were given"
        raise ApiError(400, f"a request may have {settings.max_choices} answers, but {asked}", param="prompt")
    try:
        prompts = [service.encode_prompt(prompt) for prompt in given]
    except PromptError as error:
        raise ApiError(400, str(error), param="prompt") from None
    texts = [prompt if isinstance(prompt, str) else tokenizer.decode(prompt) for prompt in given] if body.echo else None
    asks = [Ask(ids, seeded(params, i)) for ids in prompts for i in range(per_prompt)]
    at_config = "speculative" if body.speculative is not None else None
    fields: FieldsAtFault = {PromptError: "prompt", GrammarError: at_fault, ConfigError: at_config}
    wants_usage = body.stream_options is not None and body.stream_options.include_usage
    draft = draft_of(body.speculative, settings.draft)
    predicted = body.prediction is not None
    return _Plan(prompts, texts, asks, per_prompt, draft, fields, body.logprobs, predicted, wants_usage)


def _refuse_unsupported(body: CompletionRequest) -> None:
    if body.suffix:
        raise ApiError(400, "suffix is not supported: write the whole prompt yourself", param="suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        message = f"best_of must be n, which is {body.n or 1}, but {body.best_of} was given; use n"
        raise ApiError(400, message, param="best_of")


# -- after -----------------------------------------------------------------------------------------------------------


class _Completion:
    """The reply to one request."""

    def __init__(self, service: Service, plan: _Plan, batch: Batch, scorer: Scorer) -> None:
        self._service, self._plan, self._batch, self._scorer = service, plan, batch, scorer
        self._tokenizer = service.model.tokenizer
        self._feeds = [TokenFeed(self._tokenizer) for _ in plan.asks]
        self._head = {
            "id": plan.reply_id,
            "object": "text_completion",
            "created": plan.created,
            "model": service.model_id,
            "system_fingerprint": f"esp_edge-{__version__}",
        }

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        """Documents of a stream."""
        begun: dict[int, int] = {}  # characters of the echo
        async for index, item in self._batch.chunks():
            if index not in begun:
                text, logprobs = await self._echo(index)
                begun[index] = len(text)
                if self._plan.echoes is not None:
                    yield self._chunk(index, text, logprobs)
            delta = self._feeds[index].push(item)
            found = None if self._plan.logprobs is None else _legacy(self._entries(delta.tokens), begun[index])
            document = self._chunk(index, delta.text, found, item.finish_reason)
            if item.finish_reason is not None:
                yield document | {"timings": timings(item.stats), "speculative_decoding_stats": speculation(item.stats)}
            elif delta.text or delta.tokens:
                yield document
        if self._plan.include_usage:
            yield {**self._head, "choices": [], "usage": self._usage()}

    async def document(self) -> dict[str, Any]:
        """The whole reply."""
        texts = [""] * len(self._plan.asks)
        tokens: list[list[Token]] = [[] for _ in texts]
        reasons: list[str | None] = [None] * len(texts)
        async for index, item in self._batch.chunks():
            delta = self._feeds[index].push(item)
            texts[index] += delta.text
            tokens[index] += delta.tokens
            reasons[index] = item.finish_reason
        choices = [await self._choice(i, texts[i], tokens[i], reasons[i]) for i in range(len(texts))]
        whole = total(list(self._batch.stats.values()))
        blocks = {"timings": timings(whole), "speculative_decoding_stats": speculation(whole)}
        return {**self._head, "choices": choices, "usage": self._usage(), **blocks}

    def _chunk(self, index: int, text: str, logprobs: Any, reason: str | None = None) -> dict[str, Any]:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return {**self._head, "choices": [choice]}

    async def _choice(self, index: int, text: str, tokens: Sequence[Token], reason: str | None) -> dict[str, Any]:
        echo, logprobs = await self._echo(index)
        if self._plan.logprobs is not None:
            mine = _legacy(self._entries(tokens), len(echo))
            logprobs = mine if logprobs is None else {name: logprobs[name] + mine[name] for name in mine}
        return {"index": index, "text": echo + text, "logprobs": logprobs, "finish_reason": reason or "stop"}

    def _usage(self) -> dict[str, Any]:
        n_prompt = sum(len(ids) for ids in self._plan.prompts)
        return usage(n_prompt, list(self._batch.stats.values()), predicted=self._plan.predicted)

    async def _echo(self, index: int) -> tuple[str, dict[str, list[Any]] | None]:
        """The prompt's text and log-probabilities, as far as they were asked for."""
        plan = self._plan
        if plan.echoes is None:
            return "", None
        which = index // plan.per_prompt
        if plan.logprobs is None:
            return plan.echoes[which], None
        ids = plan.prompts[which]
        service, is_wanted = self._service, lambda: not self._batch.closed
        scores = await in_thread(
            self._scorer.score, service.model, ids, plan.logprobs, is_wanted, limiter=service.one_by_one
        )
        return plan.echoes[which], _legacy(self._prompt_entries(ids, scores), 0)

    def _prompt_entries(self, ids: Sequence[int], scores: Sequence[TokenLogprob | None]) -> list[_Entry]:
        decoder, offset, found = TextDecoder(), 0, []
        for token_id, score in zip(ids, scores, strict=False):
            found.append(_Entry(self._text(token_id), offset, score, self._top(score)))
            offset += len(decoder.push(self._tokenizer.piece(token_id)))
        return found

    def _entries(self, tokens: Sequence[Token]) -> list[_Entry]:
        return [_Entry(_shown(token.data), token.offset, token.logprob, self._top(token.logprob)) for token in tokens]

    def _text(self, token_id: int) -> str:
        return _shown(self._tokenizer.raw_piece(token_id))

    def _top(self, score: TokenLogprob | None) -> dict[str, float] | None:
        """The likeliest tokens and the chosen one; of tokens that look the same the likeliest counts."""
        if score is None:
            return None
        found: dict[str, float] = {}
        for token_id, value in (*score.top, (score.token_id, score.logprob)):
            found.setdefault(self._text(token_id), _finite(value))
        return found


@dataclass(frozen=True, slots=True)
class _Entry:
    text: str
    offset: int
    score: TokenLogprob | None
    top: dict[str, float] | None


def _legacy(entries: Sequence[_Entry], offset: int) -> dict[str, list[Any]]:
    """The ``logprobs`` object of text completions; offsets count characters of the choice's text."""
    return {
        "tokens": [entry.text for entry in entries],
        "token_logprobs": [None if entry.score is None else _finite(entry.score.logprob) for entry in entries],
        "top_logprobs": [entry.top for entry in entries],
        "text_offset": [offset + entry.offset for entry in entries],
    }


def _finite(logprob: float) -> float:
    return max(logprob, -9999.0)


def _shown(data: bytes) -> str:
    r"""Text of a token; a part of a character as OpenAI writes it, ``bytes:\xe2\x82``."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
