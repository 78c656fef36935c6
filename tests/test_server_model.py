"""OpenAI's client and the bundled model: what a user of the server does first."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from server_fakes import Running, running

from esp_edge.config import DraftConfig, ModelConfig
from esp_edge.engine import Engine
from esp_edge.server.settings import ServerSettings
from esp_edge.session import load

pytestmark = pytest.mark.model
QUESTION: Any = [{"role": "user", "content": "Why is the sky blue? Answer in one sentence."}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}, "unit": {"enum": ["celsius", "fahrenheit"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def server(model_path: Path) -> Iterator[Running]:
    draft = DraftConfig("auto", block_complexity=12)
    settings = ServerSettings(draft=draft, pooling="mean")
    with (
        load(str(model_path), ModelConfig(n_ctx=1024)) as model,
        Engine(model, draft=draft, n_slots=2) as engine,
        running(engine, settings) as server,
    ):
        yield server


@pytest.fixture(scope="module")
def client(server: Running) -> openai.OpenAI:
    return server.openai()


def test_chat_and_stream_agree(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="x", messages=QUESTION, max_tokens=24)
    text = reply.choices[0].message.content
    assert text
    assert "sky" in text.lower()
    stream = client.chat.completions.create(model="x", messages=QUESTION, max_tokens=24, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text


def test_a_named_tool_gets_arguments_that_fit(client: openai.OpenAI) -> None:
    asked: Any = [{"role": "user", "content": "What is the weather in Rome, in celsius?"}]
    chosen: Any = {"type": "function", "function": {"name": "weather"}}
    reply = client.chat.completions.create(
        model="x", messages=asked, tools=[WEATHER], tool_choice=chosen, max_tokens=60
    )
    (call,) = reply.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "weather"
    assert set(json.loads(call.function.arguments)) == {"city", "unit"}
    assert reply.choices[0].finish_reason == "tool_calls"
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"}
    asked += [reply.choices[0].message.model_dump(exclude_none=True), result]
    assert client.chat.completions.create(model="x", messages=asked, tools=[WEATHER], max_tokens=4).choices


def test_a_schema_makes_numbers_of_words(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    chosen: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    asked: Any = [{"role": "user", "content": "Write the word seven."}]
    texts = []
    for speculative in ({}, {"speculative": {"enabled": False}}):
        reply = client.chat.completions.create(
            model="x", messages=asked, response_format=chosen, max_tokens=24, extra_body=speculative
        )
        texts.append(reply.choices[0].message.content)
    assert texts[0] == texts[1]
    assert isinstance(json.loads(texts[0] or "")["n"], int)


def test_logprobs_are_those_of_plain_decoding(client: openai.OpenAI) -> None:
    found = []
    for speculative in ({}, {"speculative": {"enabled": False}}):
        reply = client.chat.completions.create(
            model="x", messages=QUESTION, max_tokens=16, logprobs=True, top_logprobs=2, extra_body=speculative
        )
        content = reply.choices[0].logprobs and reply.choices[0].logprobs.content
        assert content
        found.append([(entry.token, entry.logprob) for entry in content])
    assert [token for token, _ in found[0]] == [token for token, _ in found[1]]
    assert [value for _, value in found[0]] == pytest.approx([value for _, value in found[1]], abs=0.05)


def test_stop_texts_and_errors(client: openai.OpenAI) -> None:
    asked: Any = [{"role": "user", "content": "Repeat exactly: alpha END beta END gamma END"}]
    for stop in ("END", ["gamma", "beta"], ["a E"]):
        reply = client.chat.completions.create(model="x", messages=asked, max_tokens=20, stop=stop)
        content = reply.choices[0].message.content or ""
        assert not any(text in content for text in ([stop] if isinstance(stop, str) else stop))
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="x", messages=[{"role": "user", "content": "word " * 2000}])
    assert refused.value.code == "context_length_exceeded"
    assert refused.value.param == "messages"


def test_embeddings_tell_texts_apart(client: openai.OpenAI) -> None:
    data = client.embeddings.create(model="x", input=["a cat sat", "a cat sat down", "quarterly revenue"]).data
    cat, same, other = (entry.embedding for entry in data)
    near, far = (sum(a * b for a, b in zip(cat, text, strict=True)) for text in (same, other))
    assert near > far


def test_scores_of_a_text_are_lower_for_nonsense(client: openai.OpenAI) -> None:
    texts = ["The capital of France is Paris.", "The capital of France is pencil."]
    reply = client.completions.create(model="x", prompt=texts, echo=True, logprobs=1, max_tokens=0)
    sums = [sum(choice.logprobs.token_logprobs[1:]) for choice in reply.choices if choice.logprobs]  # type: ignore[index, arg-type]
    assert sums[0] > sums[1]
