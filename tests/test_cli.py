"""The command line: usage, documents, exit codes; first on a fake model, then on the bundled one."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from cli_fakes import FakeModel, FakeSession, Program, make_program, one_error

import esp_edge.cli
from esp_edge.cli.config_file import default_path
from esp_edge.cli.model import hit_table
from esp_edge.cli.options import DraftOptions, LoadOptions, SamplingOptions, parse_logit_bias, stops_from
from esp_edge.config import DraftConfig, GenerationParams, ModelConfig
from esp_edge.errors import ConfigError, GrammarError, PromptError

DOCUMENT_KEYS = ["id", "text", "token_ids", "finish_reason", "prompt_tokens", "stats"]


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Program:
    return make_program(monkeypatch, capsys)


def message(prompt: Any) -> str:
    """The text of a chat with one user message and no system prompt."""
    assert [item["role"] for item in prompt] == ["user"]
    return str(prompt[0]["content"])


# -- options ---------------------------------------------------------------------------------------------------------


def test_defaults_are_those_of_the_settings() -> None:
    assert LoadOptions().config() == ModelConfig()
    assert DraftOptions().config() == DraftConfig()
    assert SamplingOptions().params() == GenerationParams()


def test_a_tree_brings_its_masks() -> None:
    assert DraftOptions(tree="15,4").config() == DraftConfig("esp", tree=(15, 4), masks=2)
    assert DraftOptions(tree="[15]", masks=3).config() == DraftConfig("esp", tree=(15,), masks=3)
    with pytest.raises(ConfigError, match="use --masks 2"):
        DraftOptions(tree="15,4", masks=1).config()


def test_a_prediction_is_read_from_its_file(program: Program, tmp_path: Path) -> None:
    file = tmp_path / "old.py"
    file.write_text("x = 1\n", "utf-8")
    program("generate", "hi", "--prediction-file", str(file))
    assert program.session.asked[0][1].prediction == "x = 1\n"
    assert "no.py" in one_error(program("generate", "hi", "--prediction-file", str(tmp_path / "no.py"))[2])


def test_options_of_the_rival_drafters(program: Program) -> None:
    program("generate", "hi", "--drafter", "suffix", "--keep", "--block-complexity", "30")
    assert program.session.draft == DraftConfig("suffix", block_complexity=30, keep=True)
    program("generate", "hi", "--drafter", "draft-model", "-md", "small.gguf")
    assert program.session.draft == DraftConfig("draft-model", draft_model="small.gguf")
    assert "--draft-model" in one_error(program("generate", "hi", "--drafter", "draft-model")[2])
    program("generate", "hi", "--drafter", "suffix", "--occurrence", "first", "--draft-seed", "7", "--no-keep")
    assert program.session.draft == DraftConfig("suffix", occurrence="first", seed=7)
    wrong = program("generate", "hi", "--drafter", "suffix", "--occurrence", "last")
    assert "occurrence must be newest or first" in one_error(wrong[2])


def test_no_keep_is_nearer_than_the_environment(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESP_EDGE_KEEP", "1")
    monkeypatch.setenv("ESP_EDGE_DRAFT_SEED", "9")
    program("generate", "hi", "--drafter", "recycling")
    assert program.session.draft == DraftConfig("recycling", keep=True, seed=9)
    program("generate", "hi", "--drafter", "recycling", "--no-keep")
    assert program.session.draft == DraftConfig("recycling", seed=9)


def test_minus_one_means_no_limit_and_a_fresh_seed() -> None:
    params = SamplingOptions(max_tokens=-1, seed=-1).params()
    assert (params.max_tokens, params.seed) == (None, None)
    assert SamplingOptions(max_tokens=0, seed=0).params().seed == 0
    with pytest.raises(ConfigError, match="seed must be"):
        SamplingOptions(seed=-2).params()


@pytest.mark.parametrize("text", ["", "5", "x+1", "5+", "5+x", "-5+1", "5+nan2"])
def test_a_wrong_logit_bias_is_a_usage_error(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="ID"):
        parse_logit_bias(text)


def test_stop_texts_of_the_environment() -> None:
    assert stops_from("") == []
    assert stops_from("a b") == ["a b"]
    assert stops_from('["a b", "c"]') == ["a b", "c"]
    assert stops_from("[x") == ["[x"]


def test_schema_as_text_and_as_file(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"type": "integer"}', "utf-8")
    wanted = {"type": "integer"}
    assert SamplingOptions(json_schema='{"type": "integer"}').params().json_schema == wanted
    assert SamplingOptions(json_schema=str(file)).params().json_schema == wanted
    assert SamplingOptions(json_schema_file=file).params().json_schema == wanted
    for bad in ("{", "true", "no/such/file", "[" * 100_000, "a" * 5000):
        with pytest.raises(GrammarError, match="--json-schema needs"):
            SamplingOptions(json_schema=bad).params()
    with pytest.raises(ConfigError, match="either"):
        SamplingOptions(json_schema="{}", json_schema_file=file).params()


def test_grammar_file(tmp_path: Path) -> None:
    file = tmp_path / "g.gbnf"
    file.write_bytes(b'\xef\xbb\xbfroot ::= "a"\n')
    assert SamplingOptions(grammar_file=file).params().grammar == 'root ::= "a"\n'
    with pytest.raises(PromptError, match="No such file"):
        SamplingOptions(grammar_file=tmp_path / "none").params()


def test_spellings_of_llama_cpp(program: Program) -> None:
    program(
        "generate",
        "hi",
        "-hf",
        "a/b:Q8_0",
        "-c",
        "64",
        "-t",
        "2",
        "-ngl",
        "0",
        "-fa",
        "on",
        "-ctk",
        "q8_0",
        "-ctv",
        "q8_0",
        "-n",
        "1",
        "--temp",
        "0.5",
        "-s",
        "3",
        "--logit-bias",
        "5-inf",
        "--logit-bias",
        "6+1",
    )
    assert program.loads == [("a/b:Q8_0", ModelConfig(n_ctx=64, n_threads=2, type_k="q8_0", type_v="q8_0"))]
    params = program.session.asked[0][1]
    assert params == GenerationParams(max_tokens=1, temperature=0.5, seed=3, logit_bias={5: float("-inf"), 6: 1.0})


def test_every_flag_reads_the_environment(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "MODEL": "env-model",
        "CTX_SIZE": "77",
        "FLASH_ATTN": "off",
        "MAX_TOKENS": "1",
        "STOP": "a b",
        "PRUNE": "0",
        "LOGIT_BIAS": "1+1 2+2",
        "TREE": "4,2",
        "NO_FLASH_ATTN": "",
    }.items():
        monkeypatch.setenv(f"ESP_EDGE_{name}", value)
    program("generate", "hi", "-n", "2")
    assert program.loads == [("env-model", ModelConfig(n_ctx=77, flash_attn=False))]
    assert program.session.draft == DraftConfig("esp", tree=(4, 2), masks=2, prune=False)
    params = program.session.asked[0][1]
    assert (params.max_tokens, params.stop, dict(params.logit_bias)) == (2, ("a b",), {1: 1.0, 2: 2.0})


def test_the_command_line_beats_the_environment(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NO_FLASH_ATTN": "1", "GRAMMAR": "root ::= [0-9]", "FILE": "none", "SYSTEM": "s"}.items():
        monkeypatch.setenv(f"ESP_EDGE_{name}", value)
    assert program("generate", "hi", "--raw", "-fa", "on", "--json-schema", "{}")[0] == 0
    assert program.loads[-1][1].flash_attn
    assert program.session.asked[0] == ("hi", GenerationParams(json_schema={}))
    monkeypatch.setenv("ESP_EDGE_MODEL", "no/such.gguf")
    assert "no/such.gguf" in one_error(program("model", "show")[2])


def test_a_count_too_large_names_its_bounds(program: Program) -> None:
    err = one_error(program("generate", "hi", "-n", "99999999999")[2])
    assert err == "max-tokens must be between 0 and 2147483648, or -1 for no limit, but 99999999999 was given"


# -- the configuration file ------------------------------------------------------------------------------------------


def test_a_file_is_below_the_environment_and_the_command_line(
    program: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "esp_edge" / "config.toml"
    file.parent.mkdir()
    file.write_text(
        'model = "m"\nctx-size = 50\nmax_tokens = 1\nseed = -1\nstop = "of file"\nprune = false\ntree = [4, 2]\n'
        '[generate]\nctx_size = 60\ntop_k = 7\nraw = true\nsystem = "s"\n[bench.specbench]\nmax_tokens = 5\n',
        "utf-8",
    )
    monkeypatch.setenv("ESP_EDGE_SEED", "2")
    monkeypatch.setenv("ESP_EDGE_TOP_K", "8")
    argv = ("--config", str(file), "generate", "hi", "--top-k", "9", "--system", "mine")
    assert program(*argv)[0] == 0
    assert program.loads[-1] == ("m", ModelConfig(n_ctx=60))
    assert program.session.draft == DraftConfig("esp", tree=(4, 2), masks=2, prune=False)
    prompt, params = program.session.asked[0]
    assert params == GenerationParams(max_tokens=1, seed=2, top_k=9, stop=("of file",))
    assert prompt[0]["content"] == "mine"
    monkeypatch.setenv("ESP_EDGE_STOP", "of environment")
    monkeypatch.setenv("ESP_EDGE_CONFIG", str(file))
    program("chat", stdin=b"hi\n")
    assert program.loads[-1] == ("m", ModelConfig(n_ctx=50))
    assert program.session.asked[0][1].stop == ("of environment",)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("ctx_size = ", ".toml is no TOML: "),
        ("ctx_sise = 5", ".toml: there is no setting ctx_sise; did you mean ctx_size?"),
        ("[generate]\nrows = 5", ".toml: [generate]: there is no setting rows"),
        ("[bench.specbensh]\nturns = 'all'", ".toml: [bench]: there is no command specbensh; did you mean specbench?"),
        ("ctx_size = 5.5", ".toml: ctx_size = 5.5: "),
        ("prune = 'maybe'", ".toml: prune must be true or false"),
        ("system = {a = 1}", ".toml: system must be a text"),
        ("config = 'x'", ".toml: there is no setting config"),
    ],
)
def test_a_wrong_file_is_one_line(program: Program, tmp_path: Path, text: str, why: str) -> None:
    file = tmp_path / "wrong.toml"
    file.write_text(text, "utf-8")
    code, out, err = program("--config", str(file), "generate", "hi")
    assert (code, out) == (1, "")
    assert why in one_error(err)
    assert program.loads == []


def test_where_the_file_is_looked_for(program: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home, name = Path("/home/me"), Path("esp_edge", "config.toml")
    assert default_path("linux", {}, home) == home / ".config" / name
    assert default_path("linux", {"XDG_CONFIG_HOME": "/etc/me"}, home) == Path("/etc/me") / name
    assert default_path("darwin", {}, home) == home / "Library" / "Application Support" / name
    assert default_path("win32", {"APPDATA": "/roaming"}, home) == Path("/roaming") / name
    assert "cannot be read" in one_error(program("--config", "no/such.toml", "generate", "hi")[2])
    for variable in ("XDG_CONFIG_HOME", "HOME", "APPDATA", "USERPROFILE"):
        monkeypatch.setenv(variable, str(tmp_path))
    monkeypatch.delenv("ESP_EDGE_CONFIG")
    assert program("generate", "hi")[:2] == (0, "You said hi\n"), "it need not be there"
    file = default_path(sys.platform, os.environ, tmp_path)
    file.parent.mkdir(parents=True)
    file.write_text("max_tokens = 1", "utf-8")
    assert program("generate", "hi")[1] == "You \n"


# -- generate --------------------------------------------------------------------------------------------------------


def test_text_goes_to_stdout_and_nothing_else(program: Program) -> None:
    assert program("generate", "hi") == (0, "You said hi\n", "measuring this model (once)\n")
    assert message(program.session.asked[0][0]) == "hi"
    assert program.model.closed


def test_prompt_sources(program: Program, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_bytes("\ufeffäh\r\n\r\n".encode())
    assert program("generate", "-f", str(file))[1] == "You said äh\r\n"
    assert program("generate", stdin=b"from stdin\n")[1] == "You said from stdin\n"
    assert program("generate", "-", stdin=b"dash")[1] == "You said dash\n"
    assert program("generate", "given", stdin=b"ignored")[1] == "You said given\n"


def test_raw_and_system(program: Program) -> None:
    program("generate", "--raw", "hi")
    assert program.session.asked[0][0] == "hi"
    program("generate", "--system", "Be brief.", "hi")
    assert program.session.asked[0][0] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
    ]


def test_json_prints_one_document(program: Program) -> None:
    code, out, _ = program("generate", "hi", "--json")
    document = json.loads(out)
    assert code == 0
    assert list(document) == DOCUMENT_KEYS
    assert (document["text"], document["token_ids"], document["finish_reason"]) == ("You said hi", [4, 5, 2], "stop")
    assert document["stats"]["drafter"] == "auto"
    assert document["prompt_tokens"] == 2


def test_logprobs_in_the_document(program: Program) -> None:
    document = json.loads(program("generate", "hi", "--json", "--logprobs", "1", "-n", "1")[1])
    assert list(document) == [*DOCUMENT_KEYS, "logprobs"]
    assert document["logprobs"] == [
        {"token_id": 4, "token": "<4>", "logprob": -0.5, "top": [{"token_id": 1, "token": "<1>", "logprob": None}]}
    ]
    assert document["finish_reason"] == "length"


def test_statistics_line_on_request(program: Program) -> None:
    _, out, err = program("generate", "hi", "--stats")
    assert out == "You said hi\n"
    assert "3 tokens" in err
    assert "tau 1.00, 4.0 rows/pass" in err


def test_warnings_appear_once_on_stderr(program: Program) -> None:
    def prepare(model: FakeModel) -> None:
        model.template_warning, model.note = "no template", "masks are off"

    program.prepare = prepare
    _, out, err = program("generate", "hi")
    assert out == "You said hi\n"
    assert err.splitlines()[1:] == ["no template", "masks are off"]
    assert "no template" not in program("generate", "hi", "--raw")[2]


@pytest.mark.parametrize(
    ("argv", "why"),
    [
        (("generate", "a", "--file", "b"), "PROMPT and --file"),
        (("generate", "--jsonl", "a", "b"), "PROMPT and --jsonl"),
        (("generate", "a", "--out", "b"), "--jsonl"),
        (("generate", "a", "--raw", "--system", "b"), "drop --raw"),
        (("generate", "a", "--logprobs", "2"), "add --json"),
        (("generate", "a", "--nonsense"), "--nonsense"),
        (("generate", "a", "-ngl", "many"), "-ngl"),
        (("generate", "a", "-fa", "maybe"), "on or off"),
        (("generate", "a", "b"), "b"),
        (("generated",), "generated"),
        (("model", "shows"), "shows"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_code_2(program: Program, argv: tuple[str, ...], why: str) -> None:
    code, out, err = program(*argv)
    assert (code, out) == (2, "")
    assert why in one_error(err)
    assert program.loads == []


@pytest.mark.parametrize(
    ("argv", "stdin", "why"),
    [
        (("generate", "a", "--block-complexity", "9999"), b"", "block-complexity must be"),
        (("generate", "a", "--drafter", "magic"), b"", "drafter must be one of "),
        (("generate", "a", "--tree", "x"), b"", "tree must be"),
        (("generate", "a", "--temp", "nan"), b"", "temp must be"),
        (("generate", "a", "--exact", "-ngl", "3"), b"", "exact mode"),
        (("generate", "a", "--no-flash-attn", "-ctv", "q8_0"), b"", "flash attention"),
        (("generate", "a", "--stop", ""), b"", "stop texts"),
        (("generate",), b"", "the prompt is empty"),
        (("generate",), b"\xff\xfe", "stdin must be UTF-8, but byte 0 is 0xff"),
        (("generate", "--file", "no/such.txt"), b"", "no/such.txt cannot be read: No such file"),
        (("generate", "--jsonl", "-"), b"", "stdin holds no request"),
    ],
)
def test_a_refused_setting_is_one_line_and_code_1(
    program: Program, argv: tuple[str, ...], stdin: bytes, why: str
) -> None:
    code, out, err = program(*argv, stdin=stdin)
    assert (code, out) == (1, "")
    assert why in one_error(err)
    assert program.loads == []


def test_a_failing_model_is_one_line(program: Program) -> None:
    code, out, err = program("generate", "x" * 300)
    assert (code, out) == (1, "")
    assert "300 tokens but the context holds 200" in err.splitlines()[-1]
    assert program.model.closed


@pytest.mark.parametrize(
    ("failure", "code", "why"),
    [
        (MemoryError(), 1, "not enough free memory"),
        (KeyboardInterrupt(), 130, None),
        (BrokenPipeError(), 141, None),
        (OSError(28, "No space left on device", "out.txt"), 1, "out.txt: No space left on device"),
        (ImportError("the extension\ndoes not load"), 1, "the extension does not load"),
    ],
)
def test_what_the_system_does_to_us(program: Program, failure: BaseException, code: int, why: str | None) -> None:
    def prepare(_: FakeModel) -> None:
        raise failure

    program.prepare = prepare
    found, out, err = program("generate", "hi")
    assert (found, out) == (code, "")
    assert (err == "") if why is None else (one_error(err) == why or why in one_error(err))


def test_ctrl_c_keeps_the_text_so_far(program: Program) -> None:
    def prepare(model: FakeModel) -> None:
        model.script = lambda _: ["one ", "two ", "three ", "four "]
        model.on_chunk = lambda n: signal.raise_signal(signal.SIGINT) if n == 2 else None

    program.prepare = prepare
    code, out, _ = program("generate", "hi")
    assert (code, out) == (130, "one two \n")
    assert program.session.closed_early == 1
    assert program.model.closed
    assert program("generate", "hi", "--json")[:2] == (130, ""), "half an answer is no document"


def test_ctrl_c_before_the_first_chunk(program: Program) -> None:
    before = signal.getsignal(signal.SIGINT)
    program.prepare = lambda model: setattr(model, "on_chunk", lambda _: signal.raise_signal(signal.SIGINT))
    code, out, err = program("generate", "hi", "--no-stats")
    assert (code, out) == (130, "")
    assert "Traceback" not in err
    assert signal.getsignal(signal.SIGINT) is before


# -- generate --jsonl ------------------------------------------------------------------------------------------------


def jsonl(path: Path, *lines: object) -> str:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines), "utf-8")
    return str(path)


def test_jsonl_answers_all_with_one_load(program: Program, tmp_path: Path) -> None:
    file = jsonl(
        tmp_path / "in.jsonl",
        {"id": "a", "prompt": "first", "max_tokens": 2, "temperature": 0.5, "seed": 7, "stop": "x", "extra": 1},
        "",
        {"id": 2, "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "second"}]},
        {"id": "c", "prompt": [5, 6], "stop": ["y", "z"]},
        {"id": "ä\ud800", "prompt": "fourth"},
    )
    code, out, _ = program("generate", "--jsonl", file, "--temp", "0.1")
    documents = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [document["id"] for document in documents] == ["a", 2, "c", "ä\ud800"]
    texts = [document["text"] for document in documents]
    assert texts == ["You said ", "You said second", "You said 6", "You said fourth"]
    assert all(list(document) == DOCUMENT_KEYS for document in documents)
    asked = program.session.asked
    assert asked[0][1] == GenerationParams(max_tokens=2, temperature=0.5, seed=7, stop=("x",))
    assert asked[1][1] == GenerationParams(temperature=0.1)
    assert len(asked[1][0]) == 2
    assert asked[2] == ([5, 6], GenerationParams(temperature=0.1, stop=("y", "z")))
    assert message(asked[3][0]) == "fourth"


def test_jsonl_explains_every_answer_when_told(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was ignored."""
    lines = b'{"id": 1, "prompt": "one"}\n{"id": 2, "prompt": "%s"}\n' % (b"x" * 300)
    code, out, _ = program("generate", "--jsonl", "-", "--explain", stdin=lines)
    answered, failed = (json.loads(line) for line in out.splitlines())
    assert code == 1
    assert list(answered) == [*DOCUMENT_KEYS, "explanation"]
    assert answered["explanation"] is None  # this drafter has none
    assert "explanation" not in failed
    monkeypatch.setattr(FakeSession, "explain", lambda _self, stats: {"passes": stats.passes})
    _, out, _ = program("generate", "--jsonl", "-", "--explain", stdin=lines)
    assert json.loads(out.splitlines()[0])["explanation"] == {"passes": 2}  # the first belongs to the prompt


def test_jsonl_raw_and_system(program: Program) -> None:
    line = b'{"id": 1, "prompt": "p"}\n{"id": 2, "messages": [{"role": "user", "content": "m"}]}'
    program("generate", "--jsonl", "-", "--raw", stdin=line)
    assert [prompt for prompt, _ in program.session.asked] == ["p", [{"role": "user", "content": "m"}]]
    program("generate", "--jsonl", "-", "--system", "s", stdin=line)
    assert [len(prompt) for prompt, _ in program.session.asked] == [2, 1]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "no JSON"),
        ("[" * 100_000, "nests too deep"),
        ("[]", "a list was found"),
        ("{}", "id must be"),
        ('{"id": true, "prompt": "a"}', "id must be"),
        ('{"id": 1}', "either prompt or messages"),
        ('{"id": 1, "prompt": "a", "messages": []}', "either prompt or messages"),
        ('{"id": 1, "prompt": 5}', "prompt must be"),
        ('{"id": 1, "prompt": []}', "prompt must be"),
        ('{"id": 1, "prompt": [true]}', "prompt must be"),
        ('{"id": 1, "messages": "hi"}', "messages must be"),
        ('{"id": 1, "messages": []}', "messages must be"),
        ('{"id": 1, "prompt": "a", "max_tokens": 1e99}', "max-tokens must be"),
        ('{"id": 1, "prompt": "a", "temperature": "hot"}', "temp must be"),
        ('{"id": 1, "prompt": "a", "temperature": NaN}', "temp must be"),
        ('{"id": 1, "prompt": "a", "stop": 5}', "stop must be"),
        ('{"id": 1, "prompt": "a", "stop": [5]}', "stop texts must be"),
        (f'{{"id": 1, "prompt": "a", "temperature": {"9" * 401}}}', "3: "),
        (f'{{"id": 1, "prompt": "a", "logit_bias": {{"5": {"9" * 401}}}}}', "3: "),
        ('{"id": 1, "prompt": "a", "top_k": -1}', "top-k must be"),
        ('{"id": 1, "prompt": "a", "logit_bias": {"x": 1}}', "logit_bias must be"),
        ('{"id": 1, "prompt": "a", "json_schema": "{}"}', "json_schema must be"),
        ('{"id": 1, "prompt": "a", "grammar": 5}', "grammar must be"),
        ('{"id": 1, "prompt": "a", "temp": 1}', "temp must be written temperature"),
        ('{"id": 1, "prompt": "a", "top-k": 1}', "top-k must be written top_k"),
        ('{"id": 0, "prompt": "a"}', "id 0 was used in line 1"),
        (b'{"id": "\xff", "prompt": "a"}', "UTF-8"),
    ],
)
def test_a_bad_line_is_named_before_anything_runs(
    program: Program, tmp_path: Path, line: str | bytes, why: str
) -> None:
    file = tmp_path / "in.jsonl"
    line = line if isinstance(line, bytes) else line.encode()
    file.write_bytes(b'{"id": 0, "prompt": "good"}\n\n' + line + b"\n")
    code, out, err = program("generate", "--jsonl", str(file))
    assert (code, out) == (1, "")
    assert one_error(err).startswith(f"{file}:3: ")
    assert why in err
    assert program.loads == []


def test_a_failing_request_does_not_stop_the_others(program: Program) -> None:
    lines = [{"id": 1, "prompt": "x" * 300}, {"id": 2, "prompt": "ok"}]
    code, out, err = program("generate", "--jsonl", "-", stdin="\n".join(map(json.dumps, lines)).encode())
    failed, answered = map(json.loads, out.splitlines())
    assert code == 1
    assert (failed["id"], failed["error"]["type"]) == (1, "ContextLengthError")
    assert list(failed) == ["id", "error"]
    assert answered["text"] == "You said ok"
    assert "1 of 2 requests failed" in err


def test_results_file_is_resumed(program: Program, tmp_path: Path) -> None:
    file = jsonl(tmp_path / "in.jsonl", *({"id": i, "prompt": f"p{i}"} for i in range(4)))
    out = tmp_path / "out.jsonl"
    old = '{"id": 0, "text": "old", "token_ids": []}\n{"id": 2, "error": {}}\n'
    out.write_text(old + '{"id": 1, "te', "utf-8")  # a crash cut it off
    code, printed, err = program("generate", "--jsonl", file, "--out", str(out))
    documents = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert [document["id"] for document in documents] == [0, 2, 1, 2, 3], "request 2 failed in the first run"
    assert [document.get("text") for document in documents] == [
        "old",
        None,
        "You said p1",
        "You said p2",
        "You said p3",
    ]
    assert (code, printed) == (0, "")
    assert "1 of 4 requests are answered" in err
    assert program("generate", "--jsonl", file, "--out", str(out))[0] == 0
    assert len(program.loads) == 1, "nothing was left to do"


def test_results_are_not_appended_to_another_file(program: Program, tmp_path: Path) -> None:
    file = jsonl(tmp_path / "in.jsonl", {"id": 1, "prompt": "p"})
    foreign = ("# Notes", '{"a": 1}', '{"id": []}', '{"id": 1, "prompt": "p"}', '{"id": true, "error": {}}')
    for content in [text + end for text in foreign for end in ("", "\n")]:
        other = tmp_path / "notes.md"
        other.write_text(content, "utf-8")
        code, _, err = program("generate", "--jsonl", file, "--out", str(other))
        assert code == 1
        assert "notes.md:1 is not a result" in one_error(err)
        assert other.read_text("utf-8") == content
    assert program.loads == []


def test_a_whole_result_without_its_line_end_is_kept(program: Program, tmp_path: Path) -> None:
    file = jsonl(tmp_path / "in.jsonl", {"id": 1, "prompt": "p"}, {"id": 2, "prompt": "q"})
    out = tmp_path / "out.jsonl"
    out.write_text('{"id": 1, "token_ids": []}', "utf-8")
    assert program("generate", "--jsonl", file, "--out", str(out))[0] == 0
    assert [json.loads(line)["id"] for line in out.read_text("utf-8").splitlines()] == [1, 2]


def test_requests_are_not_their_results(program: Program, tmp_path: Path) -> None:
    file = jsonl(tmp_path / "in.jsonl", {"id": 1, "prompt": "p"})
    code, _, err = program("generate", "--jsonl", file, "--out", f"{tmp_path}/./in.jsonl")
    assert code == 2
    assert "file of the requests" in one_error(err)
    assert Path(file).read_text("utf-8") == '{"id": 1, "prompt": "p"}\n'


def test_a_request_has_every_setting_of_an_answer(program: Program) -> None:
    own = {"top_k": 3, "logprobs": 1, "logit_bias": {"5": 1.5}, "dry_sequence_breakers": ["."], "ignore_eos": True}
    line = json.dumps({"id": 1, "prompt": "p", "json_schema": {"type": "integer"}, "grammar": None, **own})
    code, out, _ = program("generate", "--jsonl", "-", "--grammar", "root ::= [0-9]", stdin=line.encode())
    wanted = GenerationParams(
        top_k=3,
        logprobs=1,
        logit_bias={5: 1.5},
        dry_sequence_breakers=(".",),
        ignore_eos=True,
        json_schema={"type": "integer"},
    )
    assert (code, program.session.asked[0][1]) == (0, wanted)
    assert "logprobs" in json.loads(out)


def test_ctrl_c_in_a_batch_leaves_whole_documents(program: Program, tmp_path: Path) -> None:
    file = jsonl(tmp_path / "in.jsonl", *({"id": i, "prompt": f"p{i}"} for i in range(3)))
    out = tmp_path / "out.jsonl"
    n_seen = 0

    def on_chunk(_: int) -> None:
        nonlocal n_seen
        n_seen += 1
        if n_seen == 5:
            signal.raise_signal(signal.SIGINT)

    program.prepare = lambda model: setattr(model, "on_chunk", on_chunk)
    assert program("generate", "--jsonl", file, "--out", str(out))[0] == 130
    assert [json.loads(line)["id"] for line in out.read_text("utf-8").splitlines()] == [0]
    program.prepare = lambda _: None
    assert program("generate", "--jsonl", file, "--out", str(out))[0] == 0
    assert [json.loads(line)["id"] for line in out.read_text("utf-8").splitlines()] == [0, 1, 2]


# -- the program -----------------------------------------------------------------------------------------------------


def test_help_and_version(program: Program) -> None:
    for argv in ((), ("--help",), ("model",), ("generate", "-h"), ("chat", "--help"), ("model", "show", "--help")):
        code, out, err = program(*argv)
        assert (code, err) == (0, "")
        assert "Usage: esp-edge" in out
    assert program("--version") == (0, f"esp-edge {esp_edge.__version__}\n", "")


@pytest.mark.parametrize("argv", [("--version",), ("generate", "hi")])
def test_closed_outputs_are_no_reason_to_fail(
    program: Program, monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...]
) -> None:
    monkeypatch.setattr("sys.stdout", None)
    monkeypatch.setattr("sys.stderr", None)
    assert program(*argv)[0] == 0


def test_help_names_every_setting(program: Program) -> None:
    shown = program("generate", "--help")[1]
    for name in (
        "--block-complexity",
        "--mask-init",
        "--dry-allowed-length",
        "-ngl",
        "-ctk",
        "--json-schema",
        "smollm2",
    ):
        assert name in shown


def test_commands_import_the_model_code_late() -> None:
    """``--help`` must not wait for llama.cpp, so nothing that leads to it is imported at the top of a file."""
    light = ("esp_edge.cli", "esp_edge.config", "esp_edge.errors", "esp_edge.metrics")
    for path in Path(esp_edge.cli.__file__).parent.glob("*.py"):
        for node in ast.parse(path.read_text("utf-8")).body:
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            heavy = [n for n in names if n.split(".")[0] in ("esp_edge", "rich", "numpy") and not n.startswith(light)]
            assert not heavy, f"{path.name} imports {heavy}"


def test_hit_table() -> None:
    lines = hit_table({"vocab-mean": {"1": 0.25, "15": 0.5}, "sample": {"1": 0.0, "15": 1.0}})
    assert lines == [
        "               K=1    K=15",
        "vocab-mean   25.0%   50.0%",
        "sample        0.0%  100.0%",
    ]
    assert "too short" in hit_table({})[0]


# -- on the bundled model --------------------------------------------------------------------------------------------

STATS_KEYS = (
    "drafter block_complexity masks mask_init passes draft_tokens accepted_tokens tau rows_per_pass prefill_ms "
    "decode_ms host_ms_per_pass model_ms_per_pass tokens_per_second"
)
FAST = ("--mask-init", "vocab-mean", "-c", "256", "-t", "1")  # no measuring, a small cache, no waiting for a core


def command(*argv: str) -> list[str]:
    return [sys.executable, "-m", "esp_edge", *argv]


ENVIRONMENT = {"COLUMNS": "200", "TERM": "dumb", "ESP_EDGE_CONFIG": os.devnull}


def environment() -> dict[str, str]:
    kept = ("ESP_EDGE_CACHE", "ESP_EDGE_KERNELS_ISA")
    own = {name: value for name, value in os.environ.items() if not name.startswith("ESP_EDGE_") or name in kept}
    return {**own, **ENVIRONMENT}


def run(*argv: str, stdin: bytes = b"") -> tuple[int, str, str]:
    """Run the program as a user does: (exit code, stdout, stderr)."""
    done = subprocess.run(command(*argv), input=stdin, capture_output=True, env=environment(), timeout=300, check=False)
    assert b"Traceback" not in done.stderr, done.stderr.decode()
    return done.returncode, done.stdout.decode(), done.stderr.decode()


def document(*argv: str) -> dict[str, Any]:
    code, out, err = run("generate", *argv, "--json")
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.mark.model
def test_document_of_a_real_answer_is_the_same_with_and_without_drafts() -> None:
    wanted = ("--exact", "-n", "12", *FAST, "What is the capital of France?")
    plain, drafted = document("--drafter", "none", *wanted), document("--drafter", "esp", "--logprobs", "2", *wanted)
    assert drafted["token_ids"] == plain["token_ids"]
    assert set(STATS_KEYS.split()) <= set(drafted["stats"])
    assert drafted["stats"]["draft_tokens"] > 0 == plain["stats"]["draft_tokens"]
    assert len(drafted["logprobs"]) == len(drafted["token_ids"])
    assert all(len(entry["top"]) == 2 for entry in drafted["logprobs"])


@pytest.mark.model
def test_raw_prompt_under_the_names_of_llama_cpp() -> None:
    code, out, err = run(
        "generate",
        "-hf",
        "smollm2",
        "-ngl",
        "0",
        "-fa",
        "on",
        "-ctk",
        "f16",
        "-ctv",
        "f16",
        "-n",
        "2",
        "--stats",
        "--drafter",
        "esp",
        "--raw",
        *FAST,
        stdin=b"The capital of France is\n",
    )
    assert (code, out) == (0, " Paris.\n")
    assert err.startswith("2 tokens, ")


@pytest.mark.model
def test_batch_of_real_requests(tmp_path: Path) -> None:
    file = jsonl(
        tmp_path / "in.jsonl",
        {"id": "short", "prompt": "The capital of France is", "max_tokens": 1},
        {"id": "long", "prompt": "word " * 300},
        {"id": "ids", "prompt": [504, 3575, 282, 4649, 314]},
        {"id": "again", "prompt": "The capital of France is", "max_tokens": 1},
        {"id": "chat", "messages": [{"role": "user", "content": "Hi"}], "temperature": 0.8, "seed": 3},
        {"id": "same", "messages": [{"role": "user", "content": "Hi"}], "temperature": 0.8, "seed": 3},
        {"id": "broken", "messages": [{"content": "Hi"}]},
    )
    code, out, err = run("generate", "--jsonl", file, "--raw", "-n", "3", "--drafter", "esp", *FAST)
    found = {entry["id"]: entry for entry in map(json.loads, out.splitlines())}
    assert list(found) == ["short", "long", "ids", "again", "chat", "same", "broken"]
    assert code == 1
    assert found["long"]["error"]["type"] == "ContextLengthError"
    assert found["broken"]["error"]["type"] == "PromptError"
    assert found["short"]["text"] == found["again"]["text"] == " Paris"
    assert found["ids"]["prompt_tokens"] == 5
    assert found["chat"]["stats"]["seed"] == 3
    assert found["chat"]["text"] == found["same"]["text"]
    assert err == "answering\n2 of 7 requests failed; their documents say why\n"


@pytest.mark.model
def test_a_schema_shapes_the_answer() -> None:
    found = document("-j", '{"type": "integer"}', "-n", "8", *FAST, "How many legs has a dog?")
    assert isinstance(json.loads(found["text"]), int)


@pytest.mark.model
def test_ctrl_c_ends_with_130_and_keeps_the_text() -> None:
    argv = command("generate", "--raw", "--ignore-eos", "--drafter", "esp", *FAST, "-c", "4096", "Once upon a time")
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()) as process:
        assert process.stdout is not None
        first = os.read(process.stdout.fileno(), 1)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert first
    assert out.endswith(b"\n")
    assert err == b""


@pytest.mark.model
def test_a_reader_that_leaves_is_no_error() -> None:
    argv = command("generate", "--raw", "--ignore-eos", "--drafter", "esp", *FAST, "-c", "4096", "Once upon a time")
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()) as process:
        assert process.stdout is not None
        os.read(process.stdout.fileno(), 1)
        process.stdout.close()
        _, err = process.communicate(timeout=120)
    assert process.returncode == 141
    assert err == b""


@pytest.mark.model
@pytest.mark.parametrize("kind", ["empty", "html", "cut", "directory", "absent"])
def test_a_broken_file_is_one_line(tmp_path: Path, model_path: Path, kind: str) -> None:
    file = tmp_path / "broken.gguf"
    if kind == "directory":
        file.mkdir()
    elif kind != "absent":
        content = {"empty": b"", "html": b"<!DOCTYPE html><html>", "cut": model_path.read_bytes()[:3_000_000]}
        file.write_bytes(content[kind])
    code, out, err = run("generate", "hi", "-m", str(file))
    assert (code, out) == (1, "")
    assert str(file) in one_error(err)


@pytest.mark.model
def test_show_tells_what_the_model_is(model_path: Path) -> None:
    code, out, _ = run("model", "show", "--json", "-c", "8192")
    found = json.loads(out)
    assert code == 0
    assert (found["architecture"], found["quant"], found["n_layer"]) == ("llama", "Q4_1", 30)
    assert (found["n_embd"], found["n_head"], found["n_head_kv"], found["n_vocab"]) == (576, 9, 3, 49152)
    assert found["file"] == str(model_path)
    assert found["file_size"] == model_path.stat().st_size
    assert found["capability"]["masks"] is True
    assert 2 in [token["id"] for token in found["eog"]]
    assert found["memory"]["n_ctx"] == 8192
    text = run("model", "show")[1]
    for part in ("llama", "Q4_1", "134.5 million", "8192 tokens", "49,152", "<|im_end|>", "mask probing", "KV cache"):
        assert part in text


def test_show_and_calibrate_a_tiny_model(tiny: Callable[..., Path]) -> None:
    path = str(tiny("llama"))
    code, out, err = run("model", "show", path)
    assert (code, err) == (0, "")
    assert "mask probing" in out
    code, out, err = run("model", "calibrate", "-t", "1", path)
    assert code == 0, err
    assert "chosen: --mask-init " in out


def test_show_tells_why_a_template_is_of_no_use(tiny: Callable[..., Path]) -> None:
    code, out, err = run("model", "show", str(tiny("llama", chat_template="{% if x %}oh")))
    assert (code, err) == (0, "")
    assert "chat template" in out
    assert "does not compile" in out


def test_a_model_that_cannot_be_probed_says_so_once(tiny: Callable[..., Path]) -> None:
    path = str(tiny("mamba"))
    requests = b'{"id": 1, "prompt": "a"}\n{"id": 2, "prompt": "b"}\n'
    code, out, err = run("generate", "--jsonl", "-", "--raw", "-n", "2", "-t", "1", "-m", path, stdin=requests)
    assert (code, len(out.splitlines())) == (0, 2)
    assert sum("speculation off" in line for line in err.splitlines()) == 1
    code, _, err = run("model", "calibrate", "-t", "1", path)
    assert code == 1
    assert "speculation off" in one_error(err)


def test_quantize_writes_files_and_prints_their_names(tiny: Callable[..., Path], tmp_path: Path) -> None:
    path = tiny("llama")
    code, out, err = run("model", "quantize", str(path), "--to", "q8_0,BF16", "--out", str(tmp_path / "made"))
    files = [Path(line) for line in out.splitlines()]
    assert code == 0, err
    assert [file.name for file in files] == ["llama-Q8_0.gguf", "llama-BF16.gguf"]
    assert all(file.parent == tmp_path / "made" and file.exists() for file in files)
    code, out, err = run("model", "quantize", str(files[0]), "--to", "Q4_0")
    assert (code, out) == (0, f"{tmp_path / 'made' / 'llama-Q4_0.gguf'}\n")
    assert any("quality" in line for line in err.splitlines())
    assert "warn" not in err.lower()
    code, out, err = run("model", "quantize", str(path), "--to", "Q9")
    assert (code, out) == (1, "")
    assert "'Q9'" in one_error(err)
