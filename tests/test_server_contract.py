"""Inputs that broke other servers, through this one: with and without drafting, whole and streamed, token by token."""

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

CHAT = "/v1/chat/completions"
OFF = {"speculative": {"enabled": False}}
DRAFT = DraftConfig("auto", block_complexity=16, cost="flat")  # drafts whatever a row costs here


@pytest.fixture(scope="module")
def server(model_path: Path) -> Iterator[Running]:
    with (
        load(str(model_path), ModelConfig(n_ctx=1024, exact=True)) as model,
        Engine(model, draft=DRAFT, n_slots=2) as engine,
        running(engine, ServerSettings(draft=DRAFT)) as server,
    ):
        yield server


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def bytes_of(entries: list[dict[str, Any]]) -> list[bytes]:
    """Of each token: its id by another name."""
    return [bytes(entry["bytes"]) for entry in entries]


def ask(server: Running, messages: list[dict[str, str]], **fields: Any) -> dict[str, Any]:
    """The reply with drafting; without, and streamed, it must have the same tokens, text, end and counts."""
    body = {"messages": messages, "logprobs": True, **fields}
    drafted, plain = (server.http.post(CHAT, json=body | extra) for extra in ({}, OFF))
    assert drafted.status_code == plain.status_code == 200, (drafted.text, plain.text)
    reply: dict[str, Any] = drafted.json()
    other: dict[str, Any] = plain.json()
    mine, theirs = reply["choices"][0], other["choices"][0]
    assert bytes_of(mine["logprobs"]["content"]) == bytes_of(theirs["logprobs"]["content"])
    assert mine["message"] == theirs["message"]
    assert mine["finish_reason"] == theirs["finish_reason"]
    assert reply["usage"]["completion_tokens"] == other["usage"]["completion_tokens"]
    assert reply["usage"]["completion_tokens"] == reply["timings"]["predicted_n"]
    assert other["timings"]["draft_n"] == 0
    chunks = server.stream("", **body)
    streamed = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["delta"].get("content", "") for choice in streamed) == mine["message"]["content"]
    parts = [entry for choice in streamed if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert bytes_of(parts) == bytes_of(mine["logprobs"]["content"])
    assert streamed[-1]["finish_reason"] == mine["finish_reason"]
    assert chunks[-1]["timings"]["predicted_n"] == reply["timings"]["predicted_n"]
    return reply


@pytest.mark.model
def test_an_answer_ends_inside_a_copied_block(server: Running) -> None:
    """Drafts that copy an earlier answer go on behind its end; nothing of that is told, counted or kept."""
    question = user("Say only the word yes.")
    first = ask(server, [question], max_tokens=60)
    assert first["choices"][0]["finish_reason"] == "stop"
    said = {"role": "assistant", "content": first["choices"][0]["message"]["content"]}
    again = [question, said] * 3
    reply = ask(server, [*again, question], max_tokens=60)
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert reply["timings"]["draft_n_accepted"] > 0
    stats = reply["speculative_decoding_stats"]
    n_committed = reply["usage"]["completion_tokens"] - 1  # the first token is the prompt's
    # each pass adds a token of the model's own, except one whose accepted block holds the end
    n_chosen = n_committed - stats["num_accepted_draft_tokens"]
    assert n_chosen in (stats["num_spec_steps"], stats["num_spec_steps"] - 1)
    then = {"role": "assistant", "content": reply["choices"][0]["message"]["content"]}
    after = ask(server, [*again, question, then, user("And now count to five.")], max_tokens=24)
    assert after["choices"][0]["message"]["content"]


@pytest.mark.model
@pytest.mark.parametrize("stop", ["END", ["gamma", "beta"], ["a E"], ["\n", "END", "a"]])
def test_the_earliest_stop_text_wins_and_does_not_leak(server: Running, stop: Any) -> None:
    messages = [user("Repeat exactly: alpha END beta END gamma END")]
    whole = ask(server, messages, max_tokens=24)["choices"][0]["message"]["content"]
    stops = [stop] if isinstance(stop, str) else stop
    at = min((whole.find(text) for text in stops if text in whole), default=len(whole))
    choice = ask(server, messages, max_tokens=24, stop=stop)["choices"][0]
    assert choice["message"]["content"] == whole[:at]
    if at < len(whole):
        assert choice["finish_reason"] == "stop"


@pytest.mark.model
@pytest.mark.parametrize("limit", range(1, 9))
def test_max_tokens_cut_an_accepted_block(server: Running, limit: int) -> None:
    reply = ask(server, [user("Repeat ten times: one two three")], max_tokens=limit, ignore_eos=True)
    assert reply["usage"]["completion_tokens"] == limit
    assert reply["choices"][0]["finish_reason"] == "length"


@pytest.mark.model
@pytest.mark.parametrize("limit", [*range(1, 16, 2), 15])
def test_half_characters_are_never_shown(server: Running, limit: int) -> None:
    text = "\U0001f469\u200d\U0001f680 \U0001f1e9\U0001f1ea \u4f60\u597d\u4e16\u754c"
    messages = [user(f"Repeat: {text} {text}"), {"role": "assistant", "content": text}, user("Again.")]
    content = ask(server, messages, max_tokens=limit, ignore_eos=True)["choices"][0]["message"]["content"]
    assert "\ufffd" not in content[:-1]


@pytest.mark.model
def test_a_schema_of_integers_beats_a_question_for_words(server: Running) -> None:
    chosen = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}, "strict": True}}
    reply = ask(server, [user("Write the word seven in letters.")], response_format=chosen, max_tokens=6)
    assert reply["choices"][0]["message"]["content"].strip().lstrip("-").isdecimal()


@pytest.mark.model
def test_the_same_seed_gives_the_same_text_cold_and_warm(server: Running) -> None:
    wanted = {"temperature": 0.8, "seed": 11, "max_tokens": 16}
    messages = [user("Tell me about the sea, but briefly.")]
    first, second = (ask(server, messages, **wanted) for _ in range(2))
    assert first["choices"] == second["choices"]


# -- the end of the context ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tiny: Callable[..., Path]) -> Iterator[Running]:
    draft = DraftConfig("auto", block_complexity=30, cost="flat")
    with (
        load(tiny(), ModelConfig(n_ctx=64, exact=True)) as model,
        Engine(model, draft=draft, n_slots=1) as engine,
        running(engine, ServerSettings(draft=draft)) as server,
    ):
        yield server


def test_a_tree_shrinks_at_the_end_of_the_context(small: Running) -> None:
    n_ctx = small.service.model.n_ctx
    ids = [40 + n % 3 for n in range(n_ctx)]  # repeats itself: there is much to draft
    for n in (50, n_ctx - 2, n_ctx - 1):
        body = {"prompt": ids[:n], "max_tokens": 100, "ignore_eos": True, "logprobs": 0}
        found = [small.http.post("/v1/completions", json=body | extra).json() for extra in ({}, OFF)]
        for reply in found:
            assert reply["choices"][0]["finish_reason"] == "length"
            assert reply["usage"]["completion_tokens"] == n_ctx - n
        assert found[0]["choices"][0]["logprobs"]["tokens"] == found[1]["choices"][0]["logprobs"]["tokens"]
    for extra in ({}, OFF):
        error = small.error("/v1/completions", json={"prompt": ids, "max_tokens": 100} | extra)
        assert error["code"] == "context_length_exceeded"
        assert (error["n_prompt_tokens"], error["n_ctx"]) == (n_ctx, n_ctx)
    small.wait_idle()


def test_three_hundred_passes_leave_no_cell_behind(tiny: Callable[..., Path]) -> None:
    """With branches and n_ctx 256: after each answer the cells are those of the tokens that are kept."""
    draft = DraftConfig("auto", block_complexity=16, cost="flat")
    with (
        load(tiny(), ModelConfig(n_ctx=256)) as model,
        Engine(model, draft=draft, n_slots=1) as engine,
        running(engine, ServerSettings(draft=draft)) as server,
    ):
        passes = turn = 0
        while passes < 300:
            turn += 1
            body = {"prompt": f"number {turn}: ", "max_tokens": 150, "ignore_eos": True}
            body |= {"temperature": 1.5, "seed": turn}
            reply = server.http.post("/v1/completions", json=body).json()
            assert reply["usage"]["completion_tokens"] == 150
            assert reply["timings"]["draft_n"] > reply["timings"]["draft_n_accepted"]
            passes += reply["speculative_decoding_stats"]["num_spec_steps"]
            server.wait_idle()
            status = server.http.get("/props").json()["engine"]
            assert status["used_cells"] == sum(slot["tokens"] for slot in status["slots"])
            used = {engine._cache.steps[0].native.stored(0)[1] + 1, engine._cache.steps[0].n_past}
            assert used == {status["used_cells"]}


def test_json_is_what_every_reply_is(small: Running) -> None:
    """Also of tokens that are no text, and of log-probabilities that are no number in JSON."""
    bias = {str(token_id): -1e30 for token_id in range(32, 90)}
    body = {"prompt": [40, 41], "max_tokens": 4, "logprobs": 3, "logit_bias": bias}
    text = small.http.post("/v1/completions", json=body).text

    def refuse(name: str) -> None:
        raise AssertionError(name)

    json.loads(text, parse_constant=refuse)
