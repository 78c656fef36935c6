"""Requests, as pydantic models. Unknown keys are ignored, as OpenAI's clients expect; wrong values are not.

Ranges of sampling settings are not repeated here: :class:`esp_edge.config.GenerationParams` knows them.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, field_validator
from pydantic_core import PydanticCustomError

from esp_edge.server.errors import shown

__all__ = [
    "ChatRequest",
    "CompletionRequest",
    "DetokenizeRequest",
    "EmbeddingRequest",
    "ErrorReply",
    "NamedChoice",
    "ResponseFormat",
    "SamplingRequest",
    "Speculative",
    "TokenizeRequest",
    "Tool",
]

MAX_BREAKERS = 32  # llama.cpp looks through the whole vocabulary for each, 10 ms or more
_TEXTS = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}, {"type": "null"}]}
_IDS = {"type": "array", "items": {"type": "integer"}}
_PROMPT = {"anyOf": [*_TEXTS["anyOf"][:2], _IDS, {"type": "array", "items": _IDS}]}
StopTexts = Annotated[Any, WithJsonSchema(_TEXTS)]
Prompts = Annotated[Any, WithJsonSchema(_PROMPT)]


class Strict(BaseModel):
    """No text where a number is wanted."""

    model_config = ConfigDict(strict=True, extra="ignore", populate_by_name=True)


class ErrorObject(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(BaseModel):
    """The body of every answer with a status of 400 or more."""

    error: ErrorObject


class Speculative(Strict):
    """How this request drafts; what is not given is as the server was started."""

    model_config = ConfigDict(strict=True, extra="forbid")

    enabled: bool | None = Field(None, description="false = plain decoding")
    drafter: str | None = None
    block_complexity: int | None = Field(None, description="rows of one pass")
    masks: int | None = Field(None, description="mask rows behind every node")


class StreamOptions(Strict):
    """What a stream carries besides text."""

    include_usage: bool = False


class Prediction(Strict):
    """Text that the answer may repeat (OpenAI's predicted outputs)."""

    type: Literal["content"] = "content"
    content: Annotated[Any, WithJsonSchema(_TEXTS)]

    @field_validator("content", mode="before")
    @classmethod
    def _to_text(cls, value: Any) -> str:
        parts = [{"text": value}] if isinstance(value, str) else value
        if isinstance(parts, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in parts):
            return "".join(part["text"] for part in parts)
        raise _wrong("must be a text or a list of text parts", value)


def _wrong(wanted: str, found: Any) -> PydanticCustomError:
    return PydanticCustomError("esp_edge", "{text}", {"text": f"it {wanted}, but {shown(found)} was given"})


class SamplingRequest(Strict):
    """What chat and text completions have in common."""

    model: str | None = Field(None, description="any name: the server has one model")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, description="-1 = until the model stops")
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: StopTexts = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: Annotated[list[str], Field(max_length=MAX_BREAKERS)] | None = None
    logit_bias: dict[str, float] | None = None
    ignore_eos: bool | None = None
    grammar: str | None = Field(None, description="GBNF text with a root rule")
    json_schema: dict[str, Any] | None = None
    prediction: Prediction | None = None
    speculative: Speculative | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _to_texts(cls, value: Any) -> tuple[str, ...] | None:
        texts = [value] if isinstance(value, str) else value
        if texts is None or texts == []:
            return None
        if isinstance(texts, list) and all(isinstance(text, str) for text in texts):
            return tuple(texts)
        raise _wrong("must be a text or a list of texts", value)


class SchemaOf(Strict):
    """A named JSON schema."""

    name: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Strict):
    """Which texts may be answered."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaOf | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema", description="of json_object, as llama.cpp takes it")


class FunctionSpec(Strict):
    """A function that the model may call."""

    name: str = Field(description="1 to 64 letters, digits, '_', '-' or '.'")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @field_validator("name", mode="before")
    @classmethod
    def _check_name(cls, value: Any) -> Any:
        if isinstance(value, str) and not re.fullmatch("[a-zA-Z0-9_.-]{1,64}", value):
            raise _wrong("must be 1 to 64 letters, digits, '_', '-' or '.'", value)
        return value


class Tool(Strict):
    """One entry of ``tools``."""

    type: Literal["function"]
    function: FunctionSpec


class _FunctionName(Strict):
    name: str


class NamedChoice(Strict):
    """``tool_choice`` that names a function."""

    type: Literal["function"] = "function"
    function: _FunctionName


class ChatRequest(SamplingRequest):
    """Body of ``/v1/chat/completions``."""

    messages: list[Any] = Field(description="role and content each; content is a text, null or text parts")
    max_completion_tokens: int | None = Field(None, description="wins over max_tokens")
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Annotated[
        Any,
        WithJsonSchema(
            {"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}, {"type": "null"}], "default": "auto"}
        ),
    ] = None
    chat_template_kwargs: dict[str, Any] | None = Field(None, description="variables of the template")
    functions: Any = Field(None, description="refused: use tools")
    function_call: Any = Field(None, description="refused: use tool_choice")

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _to_choice(cls, value: Any) -> str | NamedChoice | None:
        if value is None or value in ("none", "auto", "required"):
            return value  # type: ignore[no-any-return]
        function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            return NamedChoice(function=_FunctionName(name=function["name"]))
        raise _wrong('must be none, auto, required or {"type": "function", "function": {"name": ...}}', value)

    @field_validator("functions", "function_call")
    @classmethod
    def _refuse(cls, value: Any) -> None:
        if value not in (None, [], "none"):
            raise _wrong("is not supported any more: use tools and tool_choice", value)


class CompletionRequest(SamplingRequest):
    """Body of ``/v1/completions``."""

    prompt: Prompts = Field(description="a text, token ids, or a list of either")
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=100)] | None = Field(None, description="likeliest tokens told a position")
    best_of: int | None = None
    suffix: str | None = Field(None, description="refused")


class EmbeddingRequest(Strict):
    """Body of ``/v1/embeddings``."""

    model: str | None = None
    input: Prompts = Field(description="a text, token ids, or a list of either")
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None


class TokenizeRequest(Strict):
    """Body of ``/tokenize``; names are llama.cpp's."""

    content: str
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False


class DetokenizeRequest(Strict):
    """Body of ``/detokenize``."""

    tokens: list[int]
