"""``/v1/chat/completions``: messages -> plan -> batch of answers -> one document, or a stream of chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from esp_edge import __version__
from esp_edge.config import DraftConfig, GenerationParams
from esp_edge.errors import ConfigError, GrammarError, PromptError
from esp_edge.metrics import GenerationStats
from esp_edge.server.batch import Ask, Batch
from esp_edge.server.errors import ApiError
from esp_edge.server.feed import Delta, Token, TokenFeed
from esp_edge.server.params import constrained, draft_of, params_of, seeded
from esp_edge.server.report import speculation, timings, total, usage
from esp_edge.server.schemas import ChatRequest
from esp_edge.server.service import FieldsAtFault, Service, in_thread
from esp_edge.server.stream import reply, stream
from esp_edge.server.tools import Call, Offer, for_template, make_offer

__all__ = ["routes"]

_RESERVED = ("messages", "tools", "add_generation_prompt", "self")


def routes(service: Service) -> APIRouter:
    """The route, with and without ``/v1``."""
    router = APIRouter(tags=["chat"])

    @router.post("/chat/completions", include_in_schema=False)
    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        """Answer a conversation."""
        start = time.perf_counter()
        plan = await in_thread(_plan, service, body)
        batch = Batch(service, plan.asks, plan.draft, plan.fields, start)
        if body.stream:
            return await stream(request, service, batch, _chunks(service, plan, batch))
        return await reply(request, batch, _document(service, plan, batch))

    return router


# -- before: what is asked of the engine -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Plan:
    asks: list[Ask]
    draft: DraftConfig | None
    fields: FieldsAtFault
    offer: Offer
    top_logprobs: int | None
    predicted: bool
    include_usage: bool
    reply_id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))


def _plan(service: Service, body: ChatRequest) -> _Plan:
    """Everything that can be wrong with a request is found here or when it is submitted: before the first token."""
    settings, tokenizer = service.settings, service.model.tokenizer
    asked = "max_completion_tokens" if body.max_completion_tokens is not None else "max_tokens"
    limit = getattr(body, asked)
    params = params_of(
        body,
        settings.defaults,
        max_tokens=settings.defaults.max_tokens if limit is None else limit,
        max_field=asked,
        n_vocab=tokenizer.n_vocab,
    )
    top = _top_logprobs(body)
    offer = make_offer(body.tools, body.tool_choice)
    params, at_fault = _constrain(replace(params, logprobs=top), body, offer)
    ids = _encode(service, body, offer)
    asks = [Ask(ids, seeded(params, i)) for i in range(body.n or 1)]
    fields: FieldsAtFault = {PromptError: "messages", GrammarError: at_fault, ConfigError: _field_of_config(body)}
    wants_usage = body.stream_options is not None and body.stream_options.include_usage
    draft = draft_of(body.speculative, settings.draft)
    return _Plan(asks, draft, fields, offer, top, body.prediction is not None, wants_usage)


def _field_of_config(body: ChatRequest) -> str | None:
    return "speculative" if body.speculative is not None else None


def _top_logprobs(body: ChatRequest) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true, but that was not given", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _constrain(params: GenerationParams, body: ChatRequest, offer: Offer) -> tuple[GenerationParams, str]:
    """The settings with the one constraint of a request, and the field that it came from."""
    wanted = _formats(body)
    if len(wanted) > 1:
        names = " and ".join(wanted)
        raise ApiError(400, f"one constraint on the answer is possible, but {names} were given", param=list(wanted)[1])
    name = next(iter(wanted), "")
    if offer.required:
        if name == "grammar":
            raise ApiError(400, "a grammar and a required tool call exclude each other: drop one", param="grammar")
        return constrained(params, "tools", json_schema=offer.schema()), "tools"
    if not name:
        return params, "grammar"
    if offer.names and name != "grammar":
        return constrained(params, name, json_schema=offer.schema_or(wanted[name]["json_schema"])), name
    return constrained(params, name, **wanted[name]), name


def _formats(body: ChatRequest) -> dict[str, dict[str, Any]]:
    """Field -> constraint that it asks for."""
    found: dict[str, dict[str, Any]] = {}
    if body.grammar is not None:
        found["grammar"] = {"grammar": body.grammar}
    if body.json_schema is not None:
        found["json_schema"] = {"json_schema": body.json_schema}
    chosen = body.response_format
    if chosen is not None and chosen.type == "json_object":
        found["response_format"] = {"json_schema": chosen.schema_ or {"type": "object"}}
    elif chosen is not None and chosen.type == "json_schema":
        if chosen.json_schema is None:
            message = "response_format of type json_schema needs json_schema.schema, but it is missing"
            raise ApiError(400, message, param="response_format.json_schema")
        found["response_format"] = {"json_schema": chosen.json_schema.schema_}
    return found


def _encode(service: Service, body: ChatRequest, offer: Offer) -> list[int]:
    variables = dict(body.chat_template_kwargs or {})
    reserved = next((name for name in _RESERVED if name in variables), None)
    if reserved is not None:
        message = f"chat_template_kwargs cannot set {reserved}: the server does"
        raise ApiError(400, message, param="chat_template_kwargs")
    knows_tools = "tools" in service.model.template.source
    messages = list(for_template(body.messages, knows_tools))
    if offer.tools and knows_tools:
        variables["tools"] = list(offer.tools)
    elif offer.tools:
        messages = _with_system(messages, offer.system_text())
    try:
        return service.model.encode_chat(messages, **variables)
    except PromptError as error:
        raise ApiError(400, str(error), param="messages") from None


def _with_system(messages: list[Any], text: str) -> list[Any]:
    first = messages[0] if messages and isinstance(messages[0], Mapping) else {}
    if first.get("role") in ("system", "developer") and isinstance(first.get("content"), str):
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages] if messages else []


# -- after: what the client gets -------------------------------------------------------------------------------------


class _Choice:
    """One answer on its way from chunks to deltas of a message."""

    def __init__(self, service: Service, plan: _Plan) -> None:
        self._feed = TokenFeed(service.model.tokenizer)
        self._service, self._plan = service, plan
        self._reader = plan.offer.reader()
        self._plain = not plan.offer.names
        self._ids: dict[int, str] = {}  # of calls

    def push(self, delta: Delta) -> list[dict[str, Any]]:
        """Deltas of the message, in OpenAI's shape."""
        pieces = self._reader.push(delta.text)
        if delta.finish_reason is not None:
            pieces += self._reader.finish()
        return [{"content": p} if isinstance(p, str) else {"tool_calls": [self._call(p)]} for p in pieces]

    def read(self, chunk: Any) -> Delta:
        """Text and tokens of a chunk."""
        return self._feed.push(chunk)

    def _call(self, call: Call) -> dict[str, Any]:
        if call.name is None:
            return {"index": call.index, "function": {"arguments": call.arguments}}
        call_id = self._ids.setdefault(call.index, f"call_{uuid.uuid4().hex[:24]}")
        function = {"name": call.name, "arguments": call.arguments}
        return {"index": call.index, "id": call_id, "type": "function", "function": function}

    def finish_reason(self, reason: str | None) -> str | None:
        """``tool_calls`` where there are some and the answer was not cut."""
        return "tool_calls" if reason == "stop" and self._ids else reason

    def logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        """OpenAI's shape; None unless asked for."""
        if self._plan.top_logprobs is None:
            return None
        piece = self._service.model.tokenizer.raw_piece
        content = []
        for token in tokens:
            top = token.logprob.top if token.logprob is not None else ()
            value = token.logprob.logprob if token.logprob is not None else 0.0
            content.append({**_entry(token.data, value), "top_logprobs": [_entry(piece(i), p) for i, p in top]})
        return {"content": content, "refusal": None}

    def pieces(self, delta: Delta) -> list[dict[str, str]] | None:
        """Text by draft source; None where the text is not handed on as it is."""
        return [{"text": text, "source": source} for text, source in delta.pieces] if self._plain else None


_LOWEST = -9999.0  # OpenAI's own figure for "as good as impossible": JSON has no infinity


def _entry(data: bytes, logprob: float) -> dict[str, Any]:
    return {"token": data.decode("utf-8", "replace"), "logprob": max(logprob, _LOWEST), "bytes": list(data)}


def _head(service: Service, plan: _Plan, kind: str) -> dict[str, Any]:
    return {
        "id": plan.reply_id,
        "object": kind,
        "created": plan.created,
        "model": service.model_id,
        "system_fingerprint": f"esp_edge-{__version__}",
    }


def _blocks(stats: GenerationStats) -> dict[str, Any]:
    return {"timings": timings(stats), "speculative_decoding_stats": speculation(stats)}


def _usage(plan: _Plan, batch: Batch) -> dict[str, Any]:
    return usage(len(plan.asks[0].token_ids), list(batch.stats.values()), predicted=plan.predicted)


async def _chunks(service: Service, plan: _Plan, batch: Batch) -> AsyncIterator[dict[str, Any]]:
    head = _head(service, plan, "chat.completion.chunk")
    choices: dict[int, _Choice] = {}

    def chunk(index: int, delta: dict[str, Any], logprobs: Any = None, reason: str | None = None) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return {**head, "choices": [choice]}

    async for index, item in batch.chunks():
        if index not in choices:
            choices[index] = _Choice(service, plan)
            yield chunk(index, {"role": "assistant", "content": ""})
        choice = choices[index]
        delta = choice.read(item)
        deltas, logprobs = choice.push(delta), choice.logprobs(delta.tokens)
        if not deltas and delta.tokens and logprobs is not None:
            deltas = [{"content": ""}]
        for i, part in enumerate(deltas):
            yield chunk(index, part, logprobs if i == 0 else None) | _live(choice, delta, item.stats)
        if item.finish_reason is not None:
            yield chunk(index, {}, None, choice.finish_reason(item.finish_reason)) | _blocks(item.stats)
    if plan.include_usage:
        yield {**head, "choices": [], "usage": _usage(plan, batch)}


def _live(choice: _Choice, delta: Delta, stats: GenerationStats) -> dict[str, Any]:
    """Beside the delta, never in it: clients add up what they find there."""
    live = {"tokens_per_second": round(stats.tokens_per_second, 2), "tau": round(stats.tau, 3)}
    pieces = choice.pieces(delta)
    return {"esp_edge": live | ({"pieces": pieces} if pieces is not None else {})}


async def _document(service: Service, plan: _Plan, batch: Batch) -> dict[str, Any]:
    choices = [_Choice(service, plan) for _ in plan.asks]
    messages: list[_Message] = [_Message() for _ in plan.asks]
    async for index, item in batch.chunks():
        delta = choices[index].read(item)
        messages[index].add(choices[index].push(delta), delta.tokens)
        messages[index].reason = choices[index].finish_reason(item.finish_reason)
    found = [
        {
            "index": i,
            "message": message.document(),
            "logprobs": choices[i].logprobs(message.tokens),
            "finish_reason": message.reason or "stop",
        }
        for i, message in enumerate(messages)
    ]
    body = _head(service, plan, "chat.completion") | {"choices": found, "usage": _usage(plan, batch)}
    return body | _blocks(total(list(batch.stats.values())))


@dataclass(slots=True)
class _Message:
    """A message made of its deltas."""

    content: str = ""
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    tokens: list[Token] = field(default_factory=list)
    reason: str | None = None

    def add(self, deltas: Sequence[dict[str, Any]], tokens: Sequence[Token]) -> None:
        self.tokens += tokens
        for delta in deltas:
            self.content += delta.get("content", "")
            for call in delta.get("tool_calls", ()):
                self._add_call(call)

    def _add_call(self, call: dict[str, Any]) -> None:
        known = self.calls.get(call["index"])
        if known is not None:
            known["function"]["arguments"] += call["function"]["arguments"]
            return
        self.calls[call["index"]] = {name: value for name, value in call.items() if name != "index"}

    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = {"role": "assistant", "content": self.content, "refusal": None}
        if self.calls:
            found |= {"content": self.content or None, "tool_calls": [self.calls[i] for i in sorted(self.calls)]}
        return found
