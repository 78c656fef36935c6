"""Chat completions of a running server on a tiny random model: shapes, settings, constraints, and speculation."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from server_fakes import Running, running

from esp_edge.config import DraftConfig, ModelConfig
from esp_edge.engine import Engine
from esp_edge.server.settings import ServerSettings
from esp_edge.session import load

OFF = {"speculative": {"enabled": False}}
GREETING = [{"role": "user", "content": "the rain"}]


@pytest.fixture(scope="module")
def server(tiny: Callable[..., Path]) -> Iterator[Running]:
    draft = DraftConfig("auto", cost="flat")
    with (
        load(tiny()) as model,
        Engine(model, draft=draft, n_slots=4) as engine,
        running(engine, ServerSettings(draft=draft)) as server,
    ):
        yield server


def tokens_of(reply: dict[str, Any]) -> list[list[int]]:
    """The bytes of each token: token ids by another name."""
    return [entry["bytes"] for entry in reply["choices"][0]["logprobs"]["content"]]


# -- shapes ----------------------------------------------------------------------------------------------------------


def test_a_reply_has_openais_shape(server: Running) -> None:
    reply = server.chat()
    assert reply["id"].startswith("chatcmpl-")
    assert reply["object"] == "chat.completion"
    assert isinstance(reply["created"], int)
    assert reply["model"] == "llama"
    (choice,) = reply["choices"]
    assert choice["message"] == {"role": "assistant", "content": choice["message"]["content"], "refusal": None}
    assert choice["logprobs"] is None
    assert choice["finish_reason"] in ("stop", "length")
    usage = reply["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= 0
    assert usage["completion_tokens_details"] == {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}


def test_statistics_are_always_there_and_agree(server: Running) -> None:
    for extra in ({}, OFF):
        reply = server.chat(max_tokens=20, ignore_eos=True, **extra)
        timings, stats = reply["timings"], reply["speculative_decoding_stats"]
        assert timings["predicted_n"] == reply["usage"]["completion_tokens"] == 20
        assert timings["prompt_n"] + timings["cache_n"] == reply["usage"]["prompt_tokens"]
        assert sum(stats["acceptance_histogram"]) == stats["num_spec_steps"]
        accepted = sum(n * passes for n, passes in enumerate(stats["acceptance_histogram"]))
        assert accepted == stats["num_accepted_draft_tokens"] == timings["draft_n_accepted"]
        assert stats["num_draft_tokens"] == timings["draft_n"]
    assert stats["num_draft_tokens"] == 0
    assert stats["mean_acceptance_length"] == 1.0


def test_a_stream_is_the_reply_in_pieces(server: Running) -> None:
    whole = server.chat(max_tokens=24, logprobs=True)
    first, *middle, last = server.stream(max_tokens=24, logprobs=True)
    chunks = [first, *middle, last]
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert last["choices"][0]["delta"] == {}
    assert last["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert all(c["choices"][0]["finish_reason"] is None for c in chunks[:-1])
    assert all("usage" not in c for c in chunks)
    assert "timings" in last
    assert "speculative_decoding_stats" in last
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
    assert text == whole["choices"][0]["message"]["content"]
    parts = [entry for c in chunks if c["choices"][0]["logprobs"] for entry in c["choices"][0]["logprobs"]["content"]]
    assert [part["bytes"] for part in parts] == tokens_of(whole)


def test_pieces_spell_the_text_and_name_sources(server: Running) -> None:
    chunks = [c for c in server.stream(max_tokens=60, ignore_eos=True) if c["choices"][0]["delta"].get("content")]
    for chunk in chunks:
        spelled = "".join(piece["text"] for piece in chunk["esp_edge"]["pieces"])
        assert spelled == chunk["choices"][0]["delta"]["content"]
        assert set(chunk["choices"][0]["delta"]) == {"content"}
        assert chunk["esp_edge"]["tau"] >= 0


def test_usage_comes_when_asked_for_and_only_then(server: Running) -> None:
    *_, last = server.stream(stream_options={"include_usage": True})
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] > 0
    assert server.stream(stream_options={"include_usage": False})[-1]["choices"]


def test_logprobs_have_bytes_and_rivals(server: Running) -> None:
    reply = server.chat(logprobs=True, top_logprobs=3)
    content = reply["choices"][0]["logprobs"]["content"]
    for entry in content:
        assert entry["logprob"] <= 0
        assert entry["token"] == bytes(entry["bytes"]).decode("utf-8", "replace")
        assert len(entry["top_logprobs"]) == 3
        assert entry["top_logprobs"][0]["logprob"] == pytest.approx(entry["logprob"], abs=1e-4)  # greedy
    assert server.chat(logprobs=True)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_the_route_is_there_without_v1(server: Running) -> None:
    body = {"messages": GREETING, "max_tokens": 1}
    assert server.http.post("/chat/completions", json=body).status_code == 200


# -- the same with and without drafting ------------------------------------------------------------------------------


@pytest.mark.parametrize("extra", [{}, {"temperature": 0.8, "seed": 5}])
def test_logprobs_are_those_without_drafting(server: Running, extra: dict[str, Any]) -> None:
    wanted = {"max_tokens": 40, "logprobs": True, "top_logprobs": 2, "ignore_eos": True, **extra}
    drafted, plain = server.chat(**wanted), server.chat(**wanted, **OFF)
    assert drafted["speculative_decoding_stats"]["num_draft_tokens"] > 0
    assert tokens_of(drafted) == tokens_of(plain)
    pairs = zip(*(r["choices"][0]["logprobs"]["content"] for r in (drafted, plain)), strict=True)
    for mine, theirs in pairs:
        assert mine["logprob"] == pytest.approx(theirs["logprob"], abs=2e-3)


@pytest.mark.parametrize("limit", range(1, 9))
def test_max_tokens_is_exact(server: Running, limit: int) -> None:
    wanted = {"max_tokens": limit, "ignore_eos": True, "logprobs": True}
    drafted, plain = server.chat(**wanted), server.chat(**wanted, **OFF)
    assert drafted["usage"]["completion_tokens"] == plain["usage"]["completion_tokens"] == limit
    assert drafted["choices"][0]["finish_reason"] == "length"
    assert tokens_of(drafted) == tokens_of(plain)


def test_max_completion_tokens_wins(server: Running) -> None:
    reply = server.chat(max_tokens=9, max_completion_tokens=2, ignore_eos=True)
    assert reply["usage"]["completion_tokens"] == 2
    assert server.chat(max_tokens=0)["usage"]["completion_tokens"] == 0


def test_stop_texts_cut_the_earliest_and_do_not_leak(server: Running) -> None:
    whole = server.text(max_tokens=40, ignore_eos=True)
    middle = whole[len(whole) // 2 :][:3]
    cut = whole.index(middle)
    for stop in (middle, [middle], ["nowhere at all", middle, *(f"never{i}" for i in range(6))]):
        for extra in ({}, OFF):
            reply = server.chat(max_tokens=40, ignore_eos=True, stop=stop, **extra)
            assert reply["choices"][0]["message"]["content"] == whole[:cut]
            assert reply["choices"][0]["finish_reason"] == "stop"
    chunks = server.stream(max_tokens=40, ignore_eos=True, stop=middle, logprobs=True)
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == whole[:cut]
    told = [e["bytes"] for c in chunks if c["choices"][0]["logprobs"] for e in c["choices"][0]["logprobs"]["content"]]
    assert b"".join(map(bytes, told)).decode("utf-8", "replace") == whole[:cut]


@pytest.mark.parametrize("limit", range(1, 16))
def test_text_is_the_same_streamed_or_not(server: Running, limit: int) -> None:
    wanted = {"text": "\U0001f469\u200d\U0001f680 \U0001f1e9\U0001f1ea \u4e2d\u6587", "temperature": 2.0, "seed": limit}
    whole = server.text(max_tokens=limit, **wanted)
    chunks = server.stream(max_tokens=limit, **wanted)
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks) == whole


def test_the_same_seed_gives_the_same_text(server: Running) -> None:
    wanted = {"text": "seeds", "temperature": 0.8, "seed": 7, "max_tokens": 30}
    cold, warm, plain = server.chat(**wanted), server.chat(**wanted), server.text(**wanted, **OFF)
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert cold["choices"][0]["message"] == warm["choices"][0]["message"]
    assert cold["choices"][0]["message"]["content"] == plain
    assert cold["speculative_decoding_stats"]["seed"] == 7


@pytest.fixture
def exact(tiny: Callable[..., Path]) -> Iterator[Running]:
    """Answers made together are those made alone."""
    draft = DraftConfig("auto", cost="flat")
    with (
        load(tiny(), ModelConfig(exact=True)) as model,
        Engine(model, draft=draft) as engine,
        running(engine, ServerSettings(draft=draft)) as server,
    ):
        yield server


def test_several_answers_have_seeds_of_their_own(exact: Running) -> None:
    server = exact
    wanted = {"temperature": 1.5, "max_tokens": 16}
    reply = server.chat(**wanted, seed=3, n=3)
    texts = [choice["message"]["content"] for choice in reply["choices"]]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert texts == [server.text(**wanted, seed=seed) for seed in (3, 4, 5)]
    assert reply["usage"]["prompt_tokens"] == server.chat(**wanted)["usage"]["prompt_tokens"]
    chunks = server.stream(**wanted, seed=3, n=3)
    found = ["", "", ""]
    for chunk in chunks:
        found[chunk["choices"][0]["index"]] += chunk["choices"][0]["delta"].get("content", "")
    assert found == texts


# -- constraints -----------------------------------------------------------------------------------------------------

DIGITS = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


def test_a_json_schema_is_kept_with_and_without_drafting(server: Running) -> None:
    chosen = {"type": "json_schema", "json_schema": {"name": "digits", "schema": DIGITS, "strict": True}}
    wanted = {"text": "only words please", "response_format": chosen, "max_tokens": 60}
    bias = {str(ord("0") - 33 + i): -2.0 for i in range(2)}  # unlikely digits: the answer ends some day
    drafted, plain = server.chat(**wanted, logit_bias=bias), server.chat(**wanted, **OFF, logit_bias=bias)
    text = drafted["choices"][0]["message"]["content"]
    assert text == plain["choices"][0]["message"]["content"]
    assert text.lstrip().startswith('{"n"') or text.lstrip()[:1] == "{"
    if drafted["choices"][0]["finish_reason"] == "stop":
        assert isinstance(json.loads(text)["n"], int)


def test_a_json_object_is_one(server: Running) -> None:
    text = server.text(response_format={"type": "json_object"}, max_tokens=12)
    assert text.lstrip().startswith("{")
    assert server.text(response_format={"type": "text"}) == server.text()


def test_a_grammar_is_kept(server: Running) -> None:
    for extra in ({}, OFF):
        assert server.text(grammar='root ::= "yes" | "no"', **extra) in ("yes", "no")


def test_logit_bias_holds_together_with_a_constraint(server: Running) -> None:
    ids = server.http.post("/tokenize", json={"content": "yn"}).json()["tokens"]
    wanted = {"grammar": 'root ::= "y" | "n"'}
    assert server.text(**wanted, logit_bias={str(ids[0]): 100, str(ids[1]): -100}) == "y"
    assert server.text(**wanted, logit_bias={str(ids[0]): -100, str(ids[1]): 100}) == "n"
    chosen = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["y", "n"]}}}
    for extra in ({}, OFF):
        for wanted_text, bias in (("y", (100, -100)), ("n", (-100, 100))):
            biased = {str(token_id): value for token_id, value in zip(ids, bias, strict=True)}
            text = server.text(response_format=chosen, logit_bias=biased, max_tokens=30, **extra)
            assert json.loads(text) == wanted_text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"grammar": "root ::= ("}, "grammar"),
        ({"grammar": ""}, "grammar"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}},
            "response_format",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"json_schema": {"not": {}}}, "json_schema"),
        ({"json_schema": {}, "grammar": 'root ::= "a"'}, "json_schema"),
    ],
)
def test_a_constraint_that_cannot_be_kept_is_refused(server: Running, fields: dict[str, Any], param: str) -> None:
    error = server.error("/v1/chat/completions", json={"messages": GREETING, "max_tokens": 4, **fields})
    assert error["param"] == param


# -- speculation by request ------------------------------------------------------------------------------------------


def test_a_request_chooses_its_drafter(server: Running) -> None:
    reply = server.chat(max_tokens=20, ignore_eos=True, speculative={"drafter": "pld", "block_complexity": 8})
    assert reply["speculative_decoding_stats"]["drafter"] == "pld"
    assert reply["speculative_decoding_stats"]["block_complexity"] == 8
    assert reply["speculative_decoding_stats"]["rows_per_pass"] <= 8
    reply = server.chat(max_tokens=20, speculative={"enabled": True, "drafter": "esp", "masks": 2})
    assert reply["speculative_decoding_stats"]["masks"] == 2


@pytest.mark.parametrize(
    ("speculative", "param"),
    [
        ({"drafter": "nonsense"}, "speculative"),
        ({"drafter": "draft-model"}, "speculative"),
        ({"masks": 9}, "speculative"),
        ({"block_complexity": 0}, "speculative"),
        ({"draft_model": "/etc/passwd"}, "speculative.draft_model"),
        ({"masks": "two"}, "speculative.masks"),
        ("on", "speculative"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(server: Running, speculative: Any, param: str) -> None:
    error = server.error("/v1/chat/completions", json={"messages": GREETING, "speculative": speculative})
    assert error["param"] == param


def test_a_prediction_is_counted(server: Running) -> None:
    text = server.text(max_tokens=40, ignore_eos=True)
    reply = server.chat(max_tokens=40, ignore_eos=True, prediction={"type": "content", "content": text})
    assert reply["choices"][0]["message"]["content"] == text
    details = reply["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 0
    assert details["rejected_prediction_tokens"] >= 0
    parts = [{"type": "text", "text": text}]
    server.chat(prediction={"type": "content", "content": parts})


# -- context ---------------------------------------------------------------------------------------------------------


def test_the_context_ends_with_length(server: Running) -> None:
    n_ctx = server.service.model.n_ctx
    ids = server.http.post("/tokenize", json={"content": "ab" * n_ctx}).json()["tokens"]
    for n in (n_ctx - 12, n_ctx - 1):
        body = {"prompt": ids[:n], "max_tokens": 100, "ignore_eos": True}
        reply = server.http.post("/v1/completions", json=body).json()
        assert reply["choices"][0]["finish_reason"] == "length"
        assert reply["usage"]["completion_tokens"] == n_ctx - n


def test_a_prompt_that_is_too_long_names_both_numbers(server: Running) -> None:
    n_ctx = server.service.model.n_ctx
    for body in ({"messages": [{"role": "user", "content": "ab " * n_ctx}]}, {"messages": GREETING * n_ctx}):
        error = server.error("/v1/chat/completions", json=body)
        assert error["code"] == "context_length_exceeded"
        assert error["param"] == "messages"
        assert error["n_ctx"] == n_ctx
        assert str(error["n_prompt_tokens"]) in error["message"]
    error = server.error("/v1/completions", json={"prompt": [1] * n_ctx})
    assert (error["n_prompt_tokens"], error["param"]) == (n_ctx, "prompt")
