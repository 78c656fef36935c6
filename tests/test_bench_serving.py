"""``esp-edge bench serve``: command lines, the client, numbers, tables, and a run beside a stand-in for the peer."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_fakes import Program, make_program, one_error

from esp_edge.bench import server_process
from esp_edge.bench.peers import Peer
from esp_edge.bench.run import ModelFile
from esp_edge.bench.server_process import ServerProcess
from esp_edge.bench.serving import SECOND_TURN, ServingPlan, serving_rows
from esp_edge.bench.serving_client import PromptSize, ask, ask_all, cold_messages
from esp_edge.bench.serving_process import environment, our_command, peer_command, read_memory
from esp_edge.bench.serving_report import overview, plot_serving, report
from esp_edge.config import ModelConfig
from esp_edge.errors import ConfigError, DecodeError

USAGE = """\
--spec-type none,ngram-mod              comma-separated list of types of speculative decoding to use
-kvu,  --kv-unified, -no-kvu            use single unified KV buffer shared across all sequences
-cram, --cache-ram N                    set the maximum cache size in MiB
"""
FAKE = """\
#!{python} -ES
import json, os, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

BEHAVIOUR = json.loads({behaviour!r})
ARGUMENTS = sys.argv[1:]


def value(flag):
    return ARGUMENTS[ARGUMENTS.index(flag) + 1]


def note(**line):
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "log.jsonl"), "a") as file:
        file.write(json.dumps(dict(line, pid=os.getpid())) + "\\n")


class Handler(BaseHTTPRequestHandler):
    n_health = 0

    def do_GET(self):
        Handler.n_health += 1
        self.reply(200 if Handler.n_health > 1 else 503, b"")

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        note(event="ask", path=self.path, **asked)
        if "refuse" in BEHAVIOUR:
            return self.reply(400, BEHAVIOUR["refuse"].encode())
        if BEHAVIOUR.get("die"):
            sys.stderr.write("ggml: out of memory\\n")
            sys.stderr.flush()
            os._exit(42)
        self.send_response(200)
        self.end_headers()
        words = sum(len(message["content"].split()) for message in asked["messages"])
        usage = dict(prompt_tokens=2 * words + 7, completion_tokens=asked["max_tokens"])
        self.event(dict(choices=[dict(delta=dict(role="assistant", content=""))]))
        for n in range(min(asked["max_tokens"], 3)):
            time.sleep(0.01)
            self.event(dict(choices=[dict(delta=dict(content="word "))]))
        self.event(dict(choices=[dict(delta=dict(), finish_reason="length")]))
        if not BEHAVIOUR.get("silent"):
            self.event(dict(choices=[], usage=usage))
        self.wfile.write(b"data: [DONE]\\n\\n")

    def event(self, document):
        self.wfile.write(b"data: " + json.dumps(document).encode() + b"\\n\\n")
        self.wfile.flush()

    def reply(self, status, body):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


if "--version" in ARGUMENTS:
    print("version: 1.2.3 (build 4)")
elif "--help" in ARGUMENTS:
    print({usage!r})
else:
    note(event="start", arguments=ARGUMENTS, environment=list(os.environ))
    if "crash" in BEHAVIOUR:
        sys.exit(BEHAVIOUR["crash"])
    ThreadingHTTPServer((value("--host"), int(value("--port"))), Handler).serve_forever()
"""


class Fake:
    """A program that answers as llama-server would.

    Attributes:
        path: of it.
    """

    def __init__(self, folder: Path, **behaviour: Any) -> None:
        folder.mkdir()
        self.path = folder / "llama-server"
        text = FAKE.format(python=sys.executable, behaviour=json.dumps(behaviour), usage=USAGE)
        self.path.write_text(text, "utf-8")
        self.path.chmod(0o755)

    def server(self) -> ServerProcess:
        """The program as a lane."""
        return ServerProcess("llama-server", [str(self.path), "--host", server_process.HOST], environment())

    def log(self, event: str) -> list[dict[str, Any]]:
        """Starts or requests, in order."""
        lines = map(json.loads, self.path.with_name("log.jsonl").read_text("utf-8").splitlines())
        return [line for line in lines if line["event"] == event]

    def running(self) -> list[int]:
        """Its processes that have not ended."""
        return [line["pid"] for line in self.log("start") if Path(f"/proc/{line['pid']}").exists()]


@pytest.fixture
def fake(tmp_path: Path) -> Callable[..., Fake]:
    return lambda **behaviour: Fake(tmp_path / "peer", **behaviour)


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Program]:
    return make_program(monkeypatch, capsys)


# -- command lines ---------------------------------------------------------------------------------------------------


def test_both_programs_get_the_same_settings() -> None:
    config = ModelConfig(n_ctx=2048, n_threads=3, n_gpu_layers=-1, type_k="q8_0", exact=False)
    ours = our_command(Path("m.gguf"), config, n_slots=8, drafter="auto")
    theirs = peer_command(Peer(Path("llama-server"), "1", USAGE), Path("m.gguf"), config, n_slots=8)
    assert ours[1:4] == ["-m", "esp_edge", "serve"]
    for command, pairs in (
        (ours, {"-c": "2048", "-t": "3", "-ngl": "-1", "-np": "8", "-ctk": "q8_0", "-fa": "on", "--drafter": "auto"}),
        (theirs, {"--ctx-size": "2048", "--threads": "3", "--threads-batch": "3", "--n-gpu-layers": "999"}),
        (theirs, {"--parallel": "8", "--cache-type-k": "q8_0", "--flash-attn": "on", "--cache-ram": "0"}),
    ):
        assert {flag: command[command.index(flag) + 1] for flag in pairs} == pairs
    assert "--kv-unified" in theirs, "the slots share all cells, as ours do"
    assert "--fit" not in theirs, "this build does not know it"
    assert "--exact" in our_command(Path("m"), ModelConfig(n_ctx=8, n_threads=1, exact=True), n_slots=1, drafter="none")


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"drafters": ()}, "at least one name"),
        ({"drafters": ("fast",)}, "'fast' was given"),
        ({"drafters": ("draft-model",)}, "'draft-model' was given"),
        ({"prompts": (50, 5000)}, "a context of 5124 tokens is needed"),
        ({"streams": (1, 64)}, "a context of 7936 tokens is needed for a prompt of 1000 and 64 streams"),
    ],
)
def test_what_cannot_be_measured_is_told_first(changes: dict[str, Any], why: str) -> None:
    file = ModelFile(Path("m.gguf"), "m", "Q4_0")
    ServingPlan(file, ModelConfig(n_ctx=2048, n_threads=1)).check()
    with pytest.raises(ConfigError, match=why):
        ServingPlan(file, ModelConfig(n_ctx=2048, n_threads=1), **changes).check()


# -- the process and the client --------------------------------------------------------------------------------------


def test_a_server_is_timed_weighed_and_stopped(fake: Callable[..., Fake], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_ARG_THREADS", "64")
    monkeypatch.setenv("ESP_EDGE_THREADS", "64")
    one = fake()
    with one.server() as server:
        assert 0 < server.ready_s < 30
        memory = read_memory(server.pid)
        if sys.platform.startswith("linux"):
            assert memory is not None
            assert memory.rss >= memory.pss > 0
            assert memory.rss >= memory.anonymous > 0
        assert one.running() == [server.pid]
    assert one.running() == []
    assert "LLAMA_ARG_THREADS" not in one.log("start")[0]["environment"]
    assert "ESP_EDGE_THREADS" not in one.log("start")[0]["environment"]
    assert read_memory(server.pid) is None


def test_a_server_that_does_not_start(fake: Callable[..., Fake], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"did not start \(exit code 1\): no memory"):
        fake(crash="no memory").server()
    monkeypatch.setattr(server_process, "_LAUNCHER", [])
    with pytest.raises(ConfigError, match="cannot be run"):
        ServerProcess("none", ["/nowhere/at/all"], environment())


def test_a_reply_is_timed_from_its_first_text(fake: Callable[..., Fake]) -> None:
    with fake().server() as server:
        reply = ask(server, cold_messages(3, 5), 7)
        assert (reply.text, reply.completion_tokens, reply.cached_tokens) == ("word word word ", 7, None)
        assert 0.01 <= reply.first_s < reply.total_s - 0.015
        seconds, replies = ask_all(server, [cold_messages(n, 5) for n in range(6)], 3, 3)
        assert [one.prompt_tokens for one in replies] == [reply.prompt_tokens] * 6
        assert seconds >= 2 * 0.03
        size = PromptSize.learn(server, 1)
        assert abs(ask(server, cold_messages(9, size.words(200)), 1).prompt_tokens - 200) <= 2
        assert size.words(1) == 1


def test_cold_prompts_part_at_their_first_word() -> None:
    one, other = cold_messages(1, 30), cold_messages(2, 30)
    assert one == cold_messages(1, 30)
    assert [message["role"] for message in one] == ["system", "user"]
    assert one[0]["content"][0] != other[0]["content"][0]
    assert one[1] != other[1]


@pytest.mark.parametrize(
    ("behaviour", "why"),
    [
        ({"refuse": "no such model"}, "answered with status 400: no such model"),
        ({"die": True}, "broke off an answer"),
        ({"silent": True}, "without its usage"),
    ],
)
def test_a_server_that_fails(fake: Callable[..., Fake], behaviour: dict[str, Any], why: str) -> None:
    with fake(**behaviour).server() as server, pytest.raises(DecodeError, match=why):
        ask(server, cold_messages(1, 2), 2)


# -- numbers and tables ----------------------------------------------------------------------------------------------


def samples() -> list[dict[str, Any]]:
    found = []
    for repeat, (ours, theirs) in enumerate([(60.0, 50.0), (90.0, 100.0), (33.0, 30.0)]):
        for lane, speed in (("esp-edge auto", ours), ("llama-server", theirs)):

            def add(what: str, value: float, lane: str = lane, repeat: int = repeat, **more: Any) -> None:
                found.append({"lane": lane, "what": what, "repeat": repeat, "value": value, **more})

            add("ready_s", 1.5)
            for what in ("rss_idle", "pss_idle", "anonymous_idle", "rss_used", "anonymous_used"):
                add(what, 100 * 2**20)
            add("first_50", 20.0 + repeat, prompt_tokens=51)
            add(SECOND_TURN, 30.0, prompt_tokens=90, cached_tokens=70 if lane == "esp-edge auto" else None)
            texts = ["a", "b"] if lane == "llama-server" or repeat else ["a", "c"]
            add("streams_1", speed, tokens=128, texts=texts)
    return found


def test_rows_are_medians_of_values_and_of_ratios() -> None:
    ours, theirs = serving_rows(samples(), ["esp-edge auto", "llama-server"], "llama-server")
    cell = ours["cells"]["streams_1"]
    assert (cell["median"], cell["min"], cell["max"], cell["n"], cell["tokens"]) == (60.0, 33.0, 90.0, 3, 128)
    assert cell["over"] == pytest.approx(1.1), "of 1.2, 0.9 and 1.1"
    assert theirs["cells"]["streams_1"]["over"] == 1.0
    assert (ours["same"], ours["answers"]) == (5, 6)
    assert ours["cells"][SECOND_TURN]["cached_tokens"] == 70
    assert "cached_tokens" not in theirs["cells"][SECOND_TURN]


def test_tables_and_plot(tmp_path: Path) -> None:
    settings = {"model": "m-Q4_0", "n_threads": 2, "n_ctx": 512, "slots": 1, "repeat": 3, "reference": "llama-server"}
    rows = serving_rows(samples(), ["esp-edge auto", "llama-server"], "llama-server")
    document = {"settings": settings | {"peer": "llama-server 1.2"}, "rows": rows, "machine": {"memory_bytes": 2**31}}
    text = overview(document)
    assert "first token, 51 tokens" in text
    assert "60.0 (1.10x)" in text
    assert "5/6" in text
    figure = plot_serving(document, tmp_path)
    assert (tmp_path / figure).read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / figure).with_suffix(".svg").exists()
    full = report(document | {"command": "esp-edge bench serve"}, figure)
    assert text.strip() in full
    for part in (f"]({figure})", "The other program is llama-server 1.2.", "2.0 GiB", "how many\ntimes the speed"):
        assert part in full
    for row in rows:
        del row["cells"]["rss_idle"]  # a system that does not tell
    assert " - |" in overview(document)


# -- a run -----------------------------------------------------------------------------------------------------------


def arguments(path: Path, *more: str) -> list[str]:
    small = ["--streams", "1,2", "--prompt-tokens", "60,150", "-n", "4", "--repeat", "1"]
    return ["bench", "serve", "-m", str(path), "-c", "512", "-t", "1", *small, *more]


def test_a_run_beside_the_peer(
    program: Program, tiny: Callable[..., Path], fake: Callable[..., Fake], tmp_path: Path
) -> None:
    one, out = fake(), tmp_path / "out"
    peer = ["--peer", f"llama-server={one.path}", "--drafters", "none", "--out", str(out)]
    code, text, err = program(*arguments(tiny("llama"), *peer))
    assert code == 0, err
    assert one.running() == []
    document = json.loads((out / "serving.json").read_text("utf-8"))
    assert [row["lane"] for row in document["rows"]] == ["esp-edge none", "llama-server"]
    assert document["settings"]["peer"] == "llama-server 1.2.3 (build 4)"
    ours, theirs = (row["cells"] for row in document["rows"])
    wanted = {"ready_s", "first_60", "first_150", SECOND_TURN, "streams_1", "streams_2"}
    assert wanted <= ours.keys()
    assert ours.keys() == theirs.keys()
    assert ours["streams_1"]["median"] > 0
    assert ours[SECOND_TURN]["cached_tokens"] > 100, "what the first turn left"
    assert ours["first_150"]["cached_tokens"] < 40, "only the template's first tokens"
    asked = one.log("ask")
    assert {line["path"] for line in asked} == {"/v1/chat/completions"}
    assert len(one.log("start")) == 2, "alone for its memory, then beside ours"
    assert "1 stream" in text
    assert "llama-server" in (out / "report.md").read_text("utf-8")
    assert str(tmp_path) not in (out / "report.md").read_text("utf-8")
    assert len(list(out.glob("serving-*.svg"))) == 1


def test_a_wrong_command_starts_nothing(program: Program, tiny: Callable[..., Path], tmp_path: Path) -> None:
    for more, why in (
        (["--drafters", "fast"], "'fast' was given"),
        (["--peer", "vllm=x"], "--peer needs llama-server=PATH"),
        (["--streams", "0"], "--streams must be whole numbers"),
        (["--prompt-tokens", "600"], "raise --ctx-size"),
    ):
        code, _, err = program(*arguments(tiny("llama"), *more, "--out", str(tmp_path / "out")))
        assert code == 1
        assert why in one_error(err)
    assert not (tmp_path / "out").exists()
