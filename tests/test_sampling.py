"""Filters, penalties and grammars: against slow twins, the same with and without drafting, wrong ones refused."""

from __future__ import annotations

import ast
import itertools
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from adversarial import Answer, Mixed, Oracle, RandomTree, answer

from esp_edge._runtime import native
from esp_edge.config import DraftConfig, GenerationParams, ModelConfig
from esp_edge.errors import ConfigError, GrammarError
from esp_edge.models.model import TargetModel
from esp_edge.models.sampler import Sampler, schema_to_grammar
from esp_edge.session import Model, Session, load

PROMPT = [5, 17, 42, 8, 61, 3]
N_VOCAB = 300
FORBIDDEN = float("-inf")

Logits = npt.NDArray[np.float32]
Ids = npt.NDArray[np.intp]


@pytest.fixture(scope="module")
def model(tiny: Callable[..., Path]) -> Iterator[Model]:
    """300 tokens, every byte among them; exact mode."""
    with load(tiny("llama"), ModelConfig(n_ctx=256, exact=True)) as loaded:
        yield loaded


# -------------------------------------------------------------------------------------------- the twin of a choice


@dataclass(frozen=True)
class Filters:
    """The sampler's settings, and the choice written plainly: filters in llama.cpp's order, then the keyed draw."""

    temperature: float = 1.0
    top_k: int = 0
    typical_p: float = 1.0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 11
    logit_bias: dict[int, float] = field(default_factory=dict)

    def choose(self, logits: Logits, position: int) -> int:
        values = logits.astype(np.float64)
        for token, bias in self.logit_bias.items():
            values[token] += bias
        ids = np.argsort(-values, kind="stable")
        if self.temperature == 0:
            return int(self._typical(ids, values)[0])
        ids = ids[: self.top_k or None]
        ids = self._typical(ids, values)
        ids = self._top_p(ids, values)
        ids = ids[values[ids] >= values[ids].max() + np.log(self.min_p)] if self.min_p else ids
        noise = [native.keyed_gumbel(self.seed, position, int(token)) for token in ids]
        return int(ids[np.argmax(values[ids] / self.temperature + noise)])

    def _typical(self, ids: Ids, values: npt.NDArray[np.float64]) -> Ids:
        if self.typical_p == 1:
            return ids
        p = softmax(values[ids])
        entropy = -(p * np.log(p)).sum()
        order = np.argsort(np.abs(-np.log(p) - entropy), kind="stable")
        n = int(np.argmax(np.cumsum(p[order]) > self.typical_p)) + 1
        kept = np.isin(np.arange(len(ids)), order[:n])
        return ids[kept]

    def _top_p(self, ids: Ids, values: npt.NDArray[np.float64]) -> Ids:
        if self.top_p == 1:
            return ids
        total = np.cumsum(softmax(values[ids]))
        return ids[: int(np.argmax(total >= self.top_p)) + 1]

    def native(self, model: TargetModel) -> Any:
        settings = native.SamplerParams()
        for name in ("temperature", "top_k", "typical_p", "top_p", "min_p", "seed"):
            setattr(settings, name, getattr(self, name))
        settings.logit_bias = list(self.logit_bias.items())
        return native.Sampler(model.address, settings)


def softmax(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    p: npt.NDArray[np.float64] = np.exp(values - values.max())
    p /= p.sum()
    return p


FILTERS = (
    Filters(temperature=0),
    Filters(temperature=0, typical_p=0.4),
    Filters(),
    Filters(temperature=0.3),
    Filters(temperature=2.5),
    Filters(top_k=1),
    Filters(top_k=5),
    Filters(top_k=N_VOCAB),
    Filters(top_k=1000),
    Filters(top_p=0.5),
    Filters(top_p=0.0),
    Filters(min_p=0.2),
    Filters(min_p=1.0),
    Filters(typical_p=0.3),
    Filters(temperature=0.7, top_k=40, top_p=0.95, min_p=0.05),
    Filters(temperature=1.3, top_k=20, typical_p=0.7, top_p=0.8, min_p=0.02, seed=2**64 - 1),
    Filters(top_k=5, logit_bias={7: 8.0, 9: FORBIDDEN, 20: -3.0}),
    Filters(temperature=0, logit_bias={7: 100.0}),
)


@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_choices_are_those_of_the_twin(model: Model, filters: Filters) -> None:
    rng = np.random.default_rng(4)
    sampler = filters.native(model)
    rows = (3 * rng.standard_normal((150, N_VOCAB))).astype(np.float32)
    wanted = [filters.choose(row, position) for position, row in enumerate(rows)]
    found = [sampler.pick_logits(row, position) for position, row in enumerate(rows)]
    assert found == wanted
    # pure: in any order, any number of times
    again = {position: sampler.pick_logits(rows[position], position) for position in rng.permutation(150).tolist()}
    assert [again[position] for position in range(150)] == wanted


def test_equal_logits_go_to_the_lowest_id(model: Model) -> None:
    flat = np.zeros(N_VOCAB, np.float32)
    assert Filters(temperature=0).native(model).pick_logits(flat, 0) == 0
    assert Filters(temperature=0, logit_bias={0: FORBIDDEN}).native(model).pick_logits(flat, 0) == 1
    assert Filters(temperature=1.0, top_k=1).native(model).pick_logits(flat, 0) == 0


def test_pick_logits_needs_the_whole_vocabulary(model: Model) -> None:
    with pytest.raises(ValueError, match="vocabulary"):
        Filters().native(model).pick_logits(np.zeros(N_VOCAB - 1, np.float32), 0)


def penalised(logits: Logits, last: Sequence[int], repeat: float, presence: float, frequency: float) -> Logits:
    values = logits.astype(np.float32).copy()
    for token in set(last):
        values[token] = values[token] * repeat if values[token] <= 0 else values[token] / np.float32(repeat)
        values[token] -= list(last).count(token) * frequency + presence
    return values


@pytest.mark.parametrize(("repeat", "presence", "frequency"), [(1.3, 0, 0), (1, 2.0, 0), (1, 0, 1.5), (1.1, 0.5, -0.4)])
@pytest.mark.parametrize("last_n", [0, 1, 6, 64, -1])
def test_penalties_are_those_of_the_twin(
    model: Model, last_n: int, repeat: float, presence: float, frequency: float
) -> None:
    rng = np.random.default_rng(5)
    params = GenerationParams(
        repeat_penalty=repeat, presence_penalty=presence, frequency_penalty=frequency, repeat_last_n=last_n
    )
    sampler = Sampler(model, params, 0, n_ctx=50)
    seen: list[int] = []
    for position in range(80):
        logits = rng.standard_normal(N_VOCAB).astype(np.float32)
        window = 50 if last_n < 0 else min(last_n, 50)
        wanted = penalised(logits, seen[max(0, len(seen) - window) :] if window else [], repeat, presence, frequency)
        assert sampler._native.pick_logits(logits, position) == int(wanted.argmax())
        seen.append(int(rng.integers(0, 12)) if position % 3 else int(wanted.argmax()))
        sampler.accept(seen[-1], generated=position > 20)  # prompt tokens count as well


def test_dry_forbids_repeating_a_passage(model: Model) -> None:
    """After ``1 2 3 4 ... 1 2 3`` the 4 costs multiplier * base^(3 - allowed length)."""
    logits = np.zeros(N_VOCAB, np.float32)
    logits[[4, 5]] = 10.0, 10.0 - 1.0 * 2.0 + 0.1  # 5 wins once 4 costs 2 or more
    for multiplier, allowed, wanted in ((0.0, 2, 4), (1.0, 2, 5), (1.0, 3, 4), (0.9, 2, 4)):
        params = GenerationParams(
            dry_multiplier=multiplier, dry_base=2.0, dry_allowed_length=allowed, dry_sequence_breakers=()
        )
        sampler = Sampler(model, params, 0, n_ctx=256)
        for token in (1, 2, 3, 4, 9, 8, 1, 2, 3):
            sampler.accept(token, generated=True)
        assert sampler._native.pick_logits(logits, 9) == wanted


# ------------------------------------------------------------------------------------- with and without drafting

LONG = GenerationParams(max_tokens=40, ignore_eos=True, seed=3)
COMMON: dict[str, dict[str, Any]] = {
    "greedy": {},
    "top-k": {"temperature": 1.0, "top_k": 3},
    "top-p": {"temperature": 1.0, "top_p": 0.6, "top_k": 0},
    "min-p": {"temperature": 1.5, "min_p": 0.1},
    "typical": {"temperature": 1.0, "typical_p": 0.5},
    "greedy typical": {"typical_p": 0.3},
    "repeat penalty": {"repeat_penalty": 1.4, "repeat_last_n": -1},
    "presence, frequency": {"presence_penalty": 1.0, "frequency_penalty": 0.7, "temperature": 0.9},
    "dry": {"dry_multiplier": 2.0, "dry_allowed_length": 1},
    "dry and penalties": {"dry_multiplier": 1.0, "repeat_penalty": 1.2, "temperature": 0.8},
    "logit bias": {"logit_bias": {10: 6.0, 11: 5.0, 12: FORBIDDEN}, "temperature": 0.8},
    "everything": {
        "temperature": 0.9,
        "top_k": 20,
        "top_p": 0.9,
        "min_p": 0.02,
        "typical_p": 0.95,
        "repeat_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.1,
        "dry_multiplier": 0.8,
        "logit_bias": {3: 1.5},
        "logprobs": 2,
    },
    "letters": {"grammar": "root ::= [a-z ]+"},
    "letters at T 1": {"grammar": "root ::= [a-z ]+", "temperature": 1.0},
    "words": {"grammar": 'root ::= ("the " | "an " | "on ")+ "."', "temperature": 1.2, "repeat_penalty": 1.1},
    "characters": {"grammar": 'root ::= ("é" | "日本" | "😀")+', "temperature": 1.0, "top_k": 5},
    "any JSON": {"json_schema": {}, "temperature": 0.8},
}


def every_way(model: Model, params: GenerationParams, prompt: Sequence[int] = PROMPT) -> Answer:
    """Plain decoding, which every way of drafting must reproduce."""
    ids = list(prompt)
    plain = answer(model, ids, params)
    truth = ids + plain.token_ids
    found = [
        answer(model, ids, params, drafter=Oracle(truth)),
        answer(model, ids, params, drafter=Mixed(N_VOCAB, 64, truth=truth, most=20)),
        answer(model, ids, params, drafter=RandomTree(N_VOCAB, 64)),
        answer(model, ids, params, DraftConfig("esp", mask_init="vocab-mean", block_complexity=20)),
    ]
    for other in found:
        assert other.token_ids == plain.token_ids
        assert (other.text, other.finish_reason) == (plain.text, plain.finish_reason)
        assert other.logprobs == plain.logprobs
    if len(plain.token_ids) > 4:
        assert found[0].accepted > 0
    return plain


@pytest.mark.parametrize("name", COMMON)
def test_drafting_changes_nothing(model: Model, name: str) -> None:
    constrained = "grammar" in COMMON[name] or "json_schema" in COMMON[name]
    params = replace(LONG, ignore_eos=not constrained, **COMMON[name])  # a text that is complete must end
    for prompt in (PROMPT, [7, 7, 9, 7, 7], [30]):
        plain = every_way(model, params, prompt)
        assert len(plain.token_ids) > 1
        if constrained or "logit_bias" in COMMON[name]:
            assert plain.token_ids != answer(model, prompt, LONG).token_ids


def test_ignore_eos_forbids_every_end(model: Model) -> None:
    pull = dict.fromkeys(model.tokenizer.eog_ids, 50.0)
    ends = every_way(model, GenerationParams(max_tokens=30, logit_bias=pull))
    assert (len(ends.token_ids), ends.finish_reason) == (1, "stop")
    goes_on = every_way(model, GenerationParams(max_tokens=30, logit_bias=pull, ignore_eos=True))
    assert (len(goes_on.token_ids), goes_on.finish_reason) == (30, "length")
    assert not set(goes_on.token_ids) & model.tokenizer.eog_ids


# ------------------------------------------------------------------------------------------- grammar and schema


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("grammar", "allowed"),
    [
        ('root ::= "yes" | "no"', {"yes", "no"}),
        ('root ::= "a" b "c"\nb ::= "x"? "y"?', {"ac", "axc", "ayc", "axyc"}),
        ('root ::= "12" "34"', {"1234"}),
        ('root ::= "é" | "😀"', {"é", "😀"}),
    ],
)
def test_a_grammar_decides_the_text(model: Model, grammar: str, allowed: set[str], temperature: float) -> None:
    plain = every_way(model, GenerationParams(max_tokens=40, grammar=grammar, temperature=temperature, seed=1))
    assert plain.text in allowed
    assert plain.finish_reason == "stop"
    assert plain.token_ids[-1] in model.tokenizer.eog_ids  # nothing else may follow


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("schema", "check"),
    [
        ({"type": "integer"}, lambda v: isinstance(v, int)),
        ({"type": "boolean"}, lambda v: isinstance(v, bool)),
        ({"enum": ["red", 5, None]}, lambda v: v in ("red", 5, None)),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3}, lambda v: 2 <= len(v) <= 3),
        (
            {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}},
                "required": ["a", "b"],
            },
            lambda v: set(v) == {"a", "b"},
        ),
    ],
    ids=["integer", "boolean", "enum", "array", "object"],
)
def test_a_schema_decides_the_document(
    model: Model, schema: dict[str, Any], check: Callable[[Any], bool], temperature: float
) -> None:
    params = GenerationParams(max_tokens=120, json_schema=schema, temperature=temperature, seed=1)
    plain = every_way(model, params, model.encode_prompt("the words and on"))  # a prompt that pulls to words
    assert plain.finish_reason == "stop"
    assert check(json.loads(plain.text))


def test_logit_bias_and_schema_hold_together(model: Model) -> None:
    """llama-cpp-python drops one of the two."""
    schema = {"enum": ["left", "right"]}
    seen = set()
    for letter in "lr":
        token = model.tokenizer.encode(letter)[0]
        plain = every_way(model, GenerationParams(max_tokens=20, json_schema=schema, logit_bias={token: 30.0}))
        seen.add(json.loads(plain.text))
        plain = every_way(model, GenerationParams(max_tokens=20, json_schema=schema, logit_bias={token: FORBIDDEN}))
        assert json.loads(plain.text) == ("right" if letter == "l" else "left")
    assert seen == {"left", "right"}
    token = model.tokenizer.encode("r")[0]
    plain = every_way(model, GenerationParams(max_tokens=9, grammar="root ::= [a-z]", logit_bias={token: 30.0}))
    assert plain.text == "r"


def test_a_whole_vocabulary_forbidden_is_an_error(model: Model) -> None:
    nothing = dict.fromkeys(range(N_VOCAB), FORBIDDEN)
    for extra in (
        {},
        {"temperature": 1.0},
        {"grammar": "root ::= [a-z]+"},
        {"temperature": 1.0, "repeat_penalty": 1.5},
    ):
        params = GenerationParams(max_tokens=4, logit_bias=nothing, seed=1, **extra)
        with Session(model, DraftConfig("none")) as session:
            kind = GrammarError if "grammar" in extra else ConfigError
            with pytest.raises(kind, match=r"forbidden|admits no token") as caught:
                list(session.generate(PROMPT, params))
            assert "\n" not in str(caught.value)
            assert [chunk.token_ids for chunk in session.generate(PROMPT, GenerationParams(max_tokens=2))] == [
                (token,) for token in answer(model, PROMPT, GenerationParams(max_tokens=2)).token_ids
            ]


def test_a_grammar_that_runs_dry_is_an_error(model: Model) -> None:
    """The text is complete, but its end is forbidden; the tokens before were already given out."""
    params = GenerationParams(max_tokens=9, grammar='root ::= "ab"', ignore_eos=True)
    with Session(model, DraftConfig("none")) as session:
        generation = session.generate(PROMPT, params)
        text = "".join(chunk.text for chunk in itertools.islice(generation, len(model.tokenizer.encode("ab"))))
        assert text in ("a", "ab")
        with pytest.raises(GrammarError, match="admits no token"):
            list(generation)
        assert len(list(session.generate(PROMPT, GenerationParams(max_tokens=3, ignore_eos=True)))) == 3


def test_a_bias_outside_the_vocabulary_is_refused(model: Model) -> None:
    with Session(model, DraftConfig("none")) as session:
        for schema in (None, {"type": "integer"}):
            with pytest.raises(ConfigError, match="token id 300 is outside the vocabulary of 300"):
                session.generate(PROMPT, GenerationParams(logit_bias={300: 1.0}, json_schema=schema))


# ---------------------------------------------------------------------------- grammars and schemas that are wrong

CHAIN = "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1}\n" for i in range(50_000)) + 'r50000 ::= "a"\n'
BAD_GRAMMARS = {
    "empty": "",
    "blank": " \n ",
    "left recursion": 'root ::= root "a" | "b"',
    "left recursion in a ring": 'root ::= a\na ::= b\nb ::= a "x"',
    "left recursion behind nothing": 'root ::= e root | "b"\ne ::= ""',
    "no root": 'start ::= "x"',
    "undefined rule": "root ::= word",
    "10,000 brackets": "root ::= " + "(" * 10_000 + '"a"' + ")" * 10_000,
    "50,000 rules in a row": CHAIN,
    "unclosed bracket": 'root ::= ("a"',
    "unclosed text": 'root ::= "a',
    "unclosed class": "root ::= [a",
    "stray bracket": 'root ::= "a" )',
    "bad escape": r'root ::= "\xZZ"',
    "million repetitions": 'root ::= "a"{1000000}',
    "repetitions backwards": 'root ::= "a"{5,2}',
    "negative repetitions": 'root ::= "a"{-1}',
    "not a grammar": "}}}{{{",
    "NUL": 'root ::= "a\0"',
    "half a character": 'root ::= "\ud800"',
    "2 MB": 'root ::= "' + "a" * (1 << 21) + '"',
}


def arrays(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


BAD_SCHEMAS = {
    "unknown type": {"type": "frobnicate"},
    "unknown type in a list": {"type": ["integer", "frobnicate"]},
    "reference to nothing": {"$ref": "#/definitions/nope"},
    "reference to a name": {"$ref": "nope"},
    "reference to the network": {"$ref": "https://example.invalid/schema.json"},
    "reference to itself": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
    "300 levels": arrays(300),
    "a list": [1, 2],
    "a number": 5,
    "properties that are none": {"properties": 5},
    "a pattern that is none": {"type": "string", "pattern": "(["},
    "a billion items": {"type": "array", "items": {"type": "integer"}, "minItems": 10**9},
    "digits without end": {"type": "string", "minLength": 10**400},
    "not JSON": {"const": {1, 2}},
    "a pattern of eight billion": {"type": "string", "pattern": "^((a{2000}){2000}){2000}$"},
}
RISKY = """
import pickle, sys
from esp_edge import ConfigError, DraftConfig, GenerationParams, GrammarError, ModelConfig, Session, load
if sys.platform != "win32":
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))  # rather an error than a machine without memory
cases, results = pickle.load(sys.stdin.buffer), {}
with load(sys.argv[1], ModelConfig(n_ctx=256)) as model, Session(model, DraftConfig("none")) as session:
    for name, (kind, value) in cases.items():
        try:
            text = "".join(c.text for c in session.generate([1], GenerationParams(max_tokens=3, **{kind: value})))
            results[name] = ("no error", text)
        except Exception as error:
            results[name] = (type(error).__name__, str(error))
print(ascii(results))
"""


@pytest.fixture(scope="module")
def refusals(tiny: Callable[..., Path]) -> dict[str, tuple[str, str]]:
    """What a process of its own says to each bad grammar and schema: (error, message). It must live to tell."""
    cases: dict[str, tuple[str, object]] = {name: ("grammar", value) for name, value in BAD_GRAMMARS.items()}
    cases |= {name: ("json_schema", value) for name, value in BAD_SCHEMAS.items()}
    run = subprocess.run(
        [sys.executable, "-c", RISKY, str(tiny("llama"))],
        input=pickle.dumps(cases),
        capture_output=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr.decode("utf-8", "replace")[-2000:]
    found: dict[str, tuple[str, str]] = ast.literal_eval(run.stdout.decode())
    return found


@pytest.mark.parametrize("name", [*BAD_GRAMMARS, *BAD_SCHEMAS])
def test_refused_in_one_line(refusals: dict[str, tuple[str, str]], name: str) -> None:
    kind, message = refusals[name]
    assert kind == "GrammarError", message
    assert message
    assert "\n" not in message
    assert len(message) < 400
    assert message.rstrip(": ") == message.rstrip()  # a reason is given


def test_the_parsers_own_reason_is_told(refusals: dict[str, tuple[str, str]]) -> None:
    assert "Undefined rule identifier 'word'" in refusals["undefined rule"][1]
    assert "unexpected end of input" in refusals["unclosed text"][1]


def test_the_schema_true_is_any_json() -> None:
    assert schema_to_grammar(True) == schema_to_grammar({})


def test_a_long_text_in_a_schema_is_allowed(model: Model) -> None:
    every_way(model, GenerationParams(max_tokens=6, json_schema={"type": "string", "maxLength": 850}))


def test_a_schema_deeper_than_the_python_stack_is_refused() -> None:
    with pytest.raises(GrammarError, match="nests too deep"):
        schema_to_grammar(arrays(50_000))


def test_ranges_inside_texts_are_texts(model: Model) -> None:
    plain = every_way(model, GenerationParams(max_tokens=20, grammar=r'root ::= "x{5,2}" [{5,2}] # {5,2}'))
    assert plain.text.startswith("x{5,2}")


def test_a_schema_of_a_hundred_repetitions_is_converted() -> None:
    for schema in (
        {"type": "string", "maxLength": 100},
        {"type": "array", "items": {"type": "integer"}, "maxItems": 100},
        {"type": "object", "properties": {f"k{i}": {"type": "integer"} for i in range(100)}},
    ):
        assert schema_to_grammar(schema).count("::=") > 1
