"""Tools: offering them, holding a model to them, and telling calls from text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from server_fakes import Running, ScriptedEngine, running

from esp_edge.server.errors import ApiError
from esp_edge.server.schemas import NamedChoice, Tool
from esp_edge.server.tools import Call, Offer, Piece, for_template, make_offer, parse_calls
from esp_edge.session import Model, load

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"place": {"$ref": "#/$defs/Place"}},
            "required": ["place"],
            "$defs": {"Place": {"type": "string", "enum": ["Rome", "Oslo"]}},
        },
    },
}
CALL = '{"name": "add", "arguments": {"a": 1, "b": 2}}'


def offer(choice: str | dict[str, Any] | None = None, *tools: dict[str, Any]) -> Offer:
    chosen = NamedChoice.model_validate(choice) if isinstance(choice, dict) else choice
    return make_offer([Tool.model_validate(tool) for tool in tools or (ADD, WEATHER)], chosen)


def read(an_offer: Offer, parts: Sequence[str]) -> tuple[str, dict[int, tuple[str | None, str]]]:
    """Text and calls that a reader makes of an answer that comes in parts."""
    reader, text, calls = an_offer.reader(), "", {}
    pieces: list[Piece] = [piece for part in parts for piece in reader.push(part)]
    for piece in [*pieces, *reader.finish()]:
        if isinstance(piece, str):
            text += piece
        else:
            name, arguments = calls.get(piece.index, (None, ""))
            calls[piece.index] = (name or piece.name, arguments + piece.arguments)
    return text, calls


def cuts(text: str) -> list[list[str]]:
    """The text in one part, letter by letter, and cut once at every place."""
    return [[text], list(text), *([text[:i], text[i:]] for i in range(1, len(text)))]


# -- telling calls from text -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        CALL,
        f"  {CALL}\n",
        f"[{CALL}]",
        f"```json\n{CALL}\n```",
        f"<tool_call>\n{CALL}\n</tool_call>",
        '{"name": "add", "parameters": {"a": 1, "b": 2}}',
        '{"type": "function", "name": "add", "parameters": {"a": 1, "b": 2}}',
    ],
)
def test_a_call_is_one_however_it_comes(text: str) -> None:
    for parts in cuts(text):
        assert read(offer(), parts) == ("", {0: ("add", '{"a": 1, "b": 2}')})


@pytest.mark.parametrize(
    "text",
    [
        "just words",
        '{"name": "subtract", "arguments": {}}',
        '{"name": "add", "arguments": [1, 2]}',
        '{"name": "add", "arguments": {"a": 1',
        '{"answer": 42}',
        "```python\nprint(1)\n```",
        "[1, 2, 3]",
        "a <tool_ tag and <tool_call> without a call",
        "[" * 5000,
    ],
)
def test_anything_else_stays_text(text: str) -> None:
    for parts in cuts(text)[:80]:
        assert read(offer(), parts) == (text, {})


def test_text_may_stand_before_a_call_and_calls_may_be_many() -> None:
    other = '{"name": "weather", "arguments": {"place": "Oslo"}}'
    text = f"Let me see.\n<tool_call>{CALL}</tool_call>\n<tool_call>{other}</tool_call>"
    for parts in cuts(text):
        found, calls = read(offer(), parts)
        assert found == "Let me see.\n"
        assert [calls[i][0] for i in sorted(calls)] == ["add", "weather"]
    assert [call.index for call in parse_calls(f"[{CALL}, {other}]", ["add", "weather"])] == [0, 1]


def test_ordinary_text_is_not_held_back() -> None:
    reader = offer().reader()
    assert reader.push("Hello") == ["Hello"]
    assert reader.push(" there <") == [" there "]
    assert reader.push("b>") == ["<b>"]


def test_arguments_of_a_required_call_are_handed_on_as_they_come() -> None:
    for parts in cuts('{ "name": "add", "arguments": {"a": "}\\"{", "b": [{}]} }'):
        assert read(offer("required"), parts) == ("", {0: ("add", '{"a": "}\\"{", "b": [{}]}')})
    reader = offer("required").reader()
    assert reader.push('{"name": "add", "arguments": {"a"') == [Call(0, "add", '{"a"')]
    assert reader.push(": 1}") == [Call(0, None, ": 1}")]
    assert reader.push("}") == []


def test_a_named_function_makes_the_whole_answer_its_arguments() -> None:
    named = offer({"type": "function", "function": {"name": "add"}})
    assert named.schema() == ADD["function"]["parameters"]
    for parts in cuts('{"a": 1}'):
        assert read(named, parts) == ("", {0: ("add", '{"a": 1}')})


def test_definitions_move_to_the_root() -> None:
    schema = offer("required").schema()
    assert schema["anyOf"][1]["properties"]["arguments"]["properties"]["place"] == {"$ref": "#/$defs/tool1_Place"}
    assert schema["$defs"] == {"tool1_Place": {"type": "string", "enum": ["Rome", "Oslo"]}}


def test_choices_that_cannot_be_are_refused() -> None:
    with pytest.raises(ApiError, match="none of them"):
        offer({"type": "function", "function": {"name": "nothing"}})
    with pytest.raises(ApiError, match="there are none"):
        make_offer([], "required")
    with pytest.raises(ApiError, match="there twice"):
        offer(None, ADD, ADD)
    assert offer("none").names == ()


def test_earlier_calls_reach_the_template() -> None:
    function = {"name": "add", "arguments": '{"a": 1}'}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ]
    call, result = for_template(messages, True)
    assert call["tool_calls"][0]["function"]["arguments"] == {"a": 1}
    assert result is messages[1]
    call, result = for_template(messages, False)
    assert call == {"role": "assistant", "content": '{"name": "add", "arguments": {"a": 1}}'}
    assert result == {"role": "user", "content": "Result of the call: 3"}
    for odd in (5, None, {"role": "assistant", "tool_calls": 5}, {"role": "assistant", "tool_calls": [None, {}]}):
        for knows in (True, False):
            list(for_template([odd], knows))


# -- through a server ------------------------------------------------------------------------------------------------

KNOWS_TOOLS = (
    "{% if tools %}{{ '<|im_start|>tools\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{{ '<|im_start|>assistant\n' }}"
)


@pytest.fixture(scope="module")
def model(tiny: Callable[..., Path]) -> Iterator[Model]:
    with load(tiny()) as model:
        yield model


@pytest.fixture
def server(model: Model) -> Iterator[Running]:
    with running(
        ScriptedEngine(model, lambda _prompt: ['{"name": "add", ', '"arguments": {"a": 1, "b": 2}}'])
    ) as server:
        yield server


def test_a_call_in_a_reply(server: Running) -> None:
    (choice,) = server.chat(tools=[ADD, WEATHER])["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    (call,) = choice["message"]["tool_calls"]
    assert call["id"]
    assert (call["type"], call["function"]["name"]) == ("function", "add")
    assert json.loads(call["function"]["arguments"]) == {"a": 1, "b": 2}
    assert "add" in server.engine.prompts[-1]
    (choice,) = server.chat(tools=[ADD], tool_choice="none")["choices"]
    assert choice["message"]["content"].startswith('{"name"')
    assert "Add two numbers" not in server.engine.prompts[-1]


def test_a_call_in_a_stream(server: Running) -> None:
    with server.openai().chat.completions.stream(
        model="x", messages=[{"role": "user", "content": "1 + 2?"}], tools=[ADD, WEATHER], tool_choice="required"
    ) as stream:
        completion = stream.get_final_completion()
    (call,) = completion.choices[0].message.tool_calls or []
    assert completion.choices[0].finish_reason == "tool_calls"
    assert json.loads(call.function.arguments) == {"a": 1, "b": 2}
    deltas = [c["choices"][0]["delta"] for c in server.stream(tools=[ADD, WEATHER], tool_choice="required")]
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert {call["index"] for call in calls} == {0}
    assert [bool(call.get("id")) for call in calls] == [True] + [False] * (len(calls) - 1)
    assert calls[0]["function"]["name"] == "add"
    schema = server.engine.tickets[-1].params.json_schema
    assert len(schema["anyOf"]) == 2


def test_a_template_that_knows_tools_writes_them(tiny: Callable[..., Path]) -> None:
    with load(tiny(chat_template=KNOWS_TOOLS)) as model, running(ScriptedEngine(model, lambda _: ["no"])) as server:
        server.chat(tools=[ADD])
        assert "<|im_start|>tools" in server.engine.prompts[-1]
        assert "You can call" not in server.engine.prompts[-1]


def test_an_answer_format_leaves_calls_possible(server: Running) -> None:
    chosen = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "integer"}}}
    server.chat(tools=[ADD], response_format=chosen)
    assert server.engine.tickets[-1].params.json_schema["anyOf"][-1] == {"type": "integer"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": "all"}, "tools"),
        ({"tools": [{}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools[0].function.name"),
        ({"tools": [ADD], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "gone"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"functions": [{"name": "old"}]}, "functions"),
        ({"tools": [ADD], "tool_choice": "required", "grammar": 'root ::= "a"'}, "grammar"),
    ],
)
def test_what_cannot_be_offered_is_refused(server: Running, fields: dict[str, Any], param: str) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    assert server.error("/v1/chat/completions", json=body)["param"] == param
