"""Text completions, token routes and embeddings of a running server."""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from server_fakes import Running, running

from esp_edge.config import DraftConfig, ModelConfig
from esp_edge.engine import Engine
from esp_edge.server.settings import ServerSettings
from esp_edge.session import load


@pytest.fixture(scope="module")
def server(tiny: Callable[..., Path]) -> Iterator[Running]:
    draft = DraftConfig("auto", cost="flat")
    with (
        load(tiny(), ModelConfig(exact=True)) as model,  # answers made together are those made alone
        Engine(model, draft=draft) as engine,
        running(engine, ServerSettings(draft=draft, max_choices=20)) as server,
    ):
        yield server


def complete(server: Running, **fields: Any) -> dict[str, Any]:
    response = server.http.post("/v1/completions", json={"prompt": "the rain", **fields})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


# -- text completions ------------------------------------------------------------------------------------------------


def test_a_reply_has_openais_shape(server: Running) -> None:
    reply = complete(server)
    assert reply["id"].startswith("cmpl-")
    assert reply["object"] == "text_completion"
    assert set(reply["choices"][0]) == {"index", "text", "logprobs", "finish_reason"}
    assert reply["usage"]["completion_tokens"] <= 16
    assert "timings" in reply
    assert "speculative_decoding_stats" in reply


def test_prompts_may_be_texts_or_ids_and_many(server: Running) -> None:
    one, two = (complete(server, prompt=text)["choices"][0]["text"] for text in ("alpha", "beta"))
    ids = [server.http.post("/tokenize", json={"content": text}).json()["tokens"] for text in ("alpha", "beta")]
    assert complete(server, prompt=ids[0])["choices"][0]["text"] == one
    for prompts in (["alpha", "beta"], ids, ["alpha", ids[1]]):
        reply = complete(server, prompt=prompts)
        assert [choice["text"] for choice in reply["choices"]] == [one, two]
        assert reply["usage"]["prompt_tokens"] == sum(map(len, ids))
    many = complete(server, prompt=[f"number {i}" for i in range(10)], n=2, max_tokens=2)
    assert [choice["index"] for choice in many["choices"]] == list(range(20))


def test_a_stream_is_the_reply_in_pieces(server: Running) -> None:
    whole = complete(server, prompt=["alpha", "beta"], echo=True, logprobs=1)
    client = server.openai()
    texts, tokens, reasons = ["", ""], [[], []], [None, None]
    for chunk in client.completions.create(model="x", prompt=["alpha", "beta"], echo=True, logprobs=1, stream=True):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        tokens[choice.index] += choice.logprobs.tokens if choice.logprobs else []
        reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    for i, choice in enumerate(whole["choices"]):
        assert texts[i] == choice["text"]
        assert tokens[i] == choice["logprobs"]["tokens"]
        assert reasons[i] == choice["finish_reason"]


def test_echo_with_logprobs_is_what_evaluations_read(server: Running) -> None:
    prompt = "the rain and the sea"
    ids = server.http.post("/tokenize", json={"content": prompt}).json()["tokens"]
    for given in (prompt, ids):
        (choice,) = complete(server, prompt=given, echo=True, logprobs=2, max_tokens=0)["choices"]
        assert choice["text"] == prompt
        assert choice["finish_reason"] == "length"
        found = choice["logprobs"]
        assert "".join(found["tokens"]) == prompt
        assert len(found["tokens"]) == len(found["top_logprobs"]) == len(ids)
        assert found["token_logprobs"][0] is None
        assert found["top_logprobs"][0] is None
        assert all(value < 0 for value in found["token_logprobs"][1:])
        for token, value, top in list(
            zip(*(found[k] for k in ("tokens", "token_logprobs", "top_logprobs")), strict=True)
        )[1:]:
            assert top[token] == value or max(top.values()) >= value
            assert 2 <= len(top) <= 3
        assert [prompt[at:][: len(t)] for at, t in zip(found["text_offset"], found["tokens"], strict=True)] == found[
            "tokens"
        ]


def test_a_generated_tokens_logprob_is_its_score_as_a_prompt(server: Running) -> None:
    (choice,) = complete(server, echo=True, logprobs=1, max_tokens=6, ignore_eos=True)["choices"]
    found = choice["logprobs"]
    n = len(found["tokens"]) - 6
    assert found["text_offset"][n] == len("the rain")
    for top, value in zip(found["top_logprobs"][n:], found["token_logprobs"][n:], strict=True):
        assert max(top.values()) == pytest.approx(value, abs=1e-4)  # greedy
    ids = server.http.post("/tokenize", json={"content": choice["text"]}).json()["tokens"]
    if len(ids) == len(found["tokens"]):  # the same cut into tokens
        (again,) = complete(server, prompt=ids, echo=True, logprobs=1, max_tokens=0)["choices"]
        assert again["logprobs"]["token_logprobs"][1:] == pytest.approx(found["token_logprobs"][1:], abs=2e-3)


def test_echo_alone_repeats_the_prompt(server: Running) -> None:
    plain = complete(server)["choices"][0]["text"]
    assert complete(server, echo=True)["choices"][0]["text"] == "the rain" + plain


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": {"text": "x"}}, "prompt"),
        ({"prompt": [["a"]]}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [1 << 40]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["x"] * 30}, "prompt"),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"best_of": 3}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"max_tokens": -2}, "max_tokens"),
    ],
)
def test_what_cannot_be_answered_is_refused(server: Running, fields: dict[str, Any], param: str) -> None:
    assert server.error("/v1/completions", json={"prompt": "x", **fields})["param"] == param


# -- tokens ----------------------------------------------------------------------------------------------------------


def test_tokens_and_back(server: Running) -> None:
    text = "the rain <|im_end|> \u4e2d\u6587"
    ids = server.http.post("/tokenize", json={"content": text}).json()["tokens"]
    assert server.http.post("/detokenize", json={"tokens": ids}).json() == {"content": text}
    plain = server.http.post("/tokenize", json={"content": text, "parse_special": False}).json()["tokens"]
    assert len(plain) > len(ids)
    pieces = server.http.post("/tokenize", json={"content": text, "with_pieces": True}).json()["tokens"]
    assert [piece["id"] for piece in pieces] == ids
    assert isinstance(pieces[-1]["piece"], list)  # a part of a character
    assert server.http.post("/tokenize", json={"content": ""}).json() == {"tokens": []}
    assert server.error("/detokenize", json={"tokens": [10**9]})["param"] == "tokens"
    assert server.error("/tokenize", json={"content": 5})["param"] == "content"


# -- embeddings ------------------------------------------------------------------------------------------------------


def test_a_model_without_pooling_has_no_embeddings(server: Running) -> None:
    error = server.error("/v1/embeddings", json={"input": "x"})
    assert error["code"] == "embeddings_not_supported"
    assert "--pooling" in error["message"]


@pytest.fixture(scope="module")
def embedding(tiny: Callable[..., Path]) -> Iterator[Running]:
    path = tiny("qwen3", seed=3)
    with load(path) as model, Engine(model) as engine, running(engine, ServerSettings(pooling="last")) as server:
        yield server


def test_embeddings_are_vectors_of_length_one(embedding: Running) -> None:
    client = embedding.openai()
    found = client.embeddings.create(model="x", input=["the rain", "the sea", "the rain"])
    one, two, three = (np.array(entry.embedding) for entry in found.data)
    assert [entry.index for entry in found.data] == [0, 1, 2]
    assert np.linalg.norm(one) == pytest.approx(1, abs=1e-5)
    assert one @ three == pytest.approx(1, abs=1e-5)
    assert one @ two < 0.9999
    assert found.usage.prompt_tokens > 0
    ids = embedding.http.post("/tokenize", json={"content": "the rain"}).json()["tokens"]
    for given in ("the rain", ids, [ids], ["the rain"]):
        reply = embedding.http.post("/v1/embeddings", json={"input": given}).json()
        assert reply["data"][0]["embedding"] == pytest.approx(one.tolist(), abs=1e-5)


def test_embeddings_in_base64_and_short(embedding: Running) -> None:
    body = {"input": "the rain", "encoding_format": "base64"}
    data = base64.b64decode(embedding.http.post("/v1/embeddings", json=body).json()["data"][0]["embedding"])
    plain = embedding.http.post("/v1/embeddings", json={"input": "the rain"}).json()["data"][0]["embedding"]
    assert list(struct.unpack(f"<{len(data) // 4}f", data)) == pytest.approx(plain)
    short = embedding.http.post("/v1/embeddings", json={"input": "the rain", "dimensions": 8}).json()
    assert len(short["data"][0]["embedding"]) == 8


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [""]}, "input"),
        ({"input": 5}, "input"),
        ({}, "input"),
        ({"input": [10**7]}, "input"),
        ({"input": "ab " * 4000}, "input"),
        ({"input": "x", "dimensions": 10**6}, "dimensions"),
        ({"input": "x", "encoding_format": "hex"}, "encoding_format"),
    ],
)
def test_what_cannot_be_embedded_is_refused(embedding: Running, fields: dict[str, Any], param: str) -> None:
    assert embedding.error("/v1/embeddings", json=fields)["param"] == param


def test_a_file_says_how_it_is_pooled(tiny: Callable[..., Path]) -> None:
    from esp_edge.server.embeddings import pooling_of  # noqa: PLC0415

    with load(tiny()) as model:
        assert pooling_of(model, "auto") is None
        assert pooling_of(model, "mean") == "mean"
        assert pooling_of(model, "none") is None
        model.header.metadata["llama.pooling_type"] = 3
        assert pooling_of(model, "auto") == "last"
