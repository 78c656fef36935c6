"""llama-server beside our drafters: what is parsed and refused, the process, its numbers, and a whole run.

There is no llama-server where tests run. A script of the standard library stands in for it: it answers the few routes
that are used, writes down what it was asked, and breaks where a test wants it to.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_fakes import Program, make_program, one_error

from esp_edge.bench import server_process
from esp_edge.bench.identity import converse
from esp_edge.bench.peer_server import PeerServer, PeerServers, peer_stats
from esp_edge.bench.peers import DEFAULT_MODES, Peer, PeerMode, parse_modes, peer_environment, peer_lanes
from esp_edge.bench.questions import Question
from esp_edge.bench.results import Difference, RunDirectory
from esp_edge.bench.run import ModelFile, Plan, run_all
from esp_edge.bench.spec import is_peer, make_lanes, parse_drafters
from esp_edge.config import DraftConfig, GenerationParams, ModelConfig
from esp_edge.errors import ConfigError, ContextLengthError, DecodeError, PromptError
from esp_edge.models.cache import ModelCache
from esp_edge.models.device import remember_threads
from esp_edge.session import Model, load

USAGE = """\
--spec-type none,draft-simple,ngram-simple,ngram-map-k,ngram-map-k4v,ngram-mod,ngram-cache
                                        comma-separated list of types of speculative decoding to use
--spec-ngram-simple-size-n N            ngram size N for ngram-simple speculative decoding
--spec-ngram-simple-size-m N            ngram size M for ngram-simple speculative decoding
-cram, --cache-ram N                    set the maximum cache size in MiB
--ui,  --webui, --no-ui, --no-webui     whether to enable the Web UI
"""

VERSION = "1.2.3 (build 4, commit abc)"

FAKE = """\
#!{python} -ES
import json, os, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer

BEHAVIOUR = json.loads({behaviour!r})
HERE = os.path.dirname(os.path.abspath(__file__))
ARGUMENTS = sys.argv[1:]


def note(**line):
    with open(os.path.join(HERE, "log.jsonl"), "a") as file:
        file.write(json.dumps(dict(line, pid=os.getpid(), mode=value("--spec-type"))) + "\\n")


def value(flag):
    return ARGUMENTS[ARGUMENTS.index(flag) + 1] if flag in ARGUMENTS else None


class Handler(BaseHTTPRequestHandler):
    n_health = n_answers = 0

    def do_GET(self):
        Handler.n_health += 1
        ready = self.path == "/health" and Handler.n_health > 1
        self.reply(200 if ready else 503, dict(status="ok" if ready else "loading"))

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        note(event="ask", path=self.path, **request)
        Handler.n_answers += 1
        if Handler.n_answers > BEHAVIOUR.get("die_after", 1000):
            sys.stderr.write("loading\\nggml: out of memory\\n")
            sys.stderr.flush()
            os._exit(42)
        if "refuse" in BEHAVIOUR:
            return self.reply(400, dict(error=dict(message=BEHAVIOUR["refuse"])))
        self.reply(200, answer(request))

    def reply(self, status, document):
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def answer(request):
    key = " ".join(map(str, request["prompt"]))
    tokens = BEHAVIOUR.get("answers", dict()).get(key, [5, 6, 7, 8, 9, 10, 11, 12])[: request["n_predict"]]
    timings = dict(cache_n=0, prompt_ms=20.0, predicted_n=len(tokens), predicted_ms=8.0)
    if value("--spec-type") != "none" and len(tokens) > 3:
        timings.update(draft_n=4, draft_n_accepted=2)
    return dict(tokens=tokens, content="?", stop_type="limit", truncated=False, timings=timings)


if "--version" in ARGUMENTS:
    sys.stderr.write("version: 1.2.3 (build 4, commit abc)\\nbuilt by hand\\n")
elif "--help" in ARGUMENTS:
    sys.stdout.write(BEHAVIOUR.get("usage", ""))
    sys.exit(BEHAVIOUR.get("help_code", 0))
else:
    note(event="start", arguments=ARGUMENTS, environment=[name for name in os.environ if name.startswith("LLAMA")])
    if "crash" in BEHAVIOUR:
        sys.stderr.write("hello\\n\\nerror: " + BEHAVIOUR["crash"] + "\\n")
        sys.exit(3)
    HTTPServer((value("--host"), int(value("--port"))), Handler).serve_forever()
"""


class Fake:
    """The stand-in.

    Attributes:
        path: the program.
    """

    def __init__(self, folder: Path, **behaviour: Any) -> None:
        folder.mkdir(exist_ok=True)
        self.path = folder / "llama-server"
        text = json.dumps({"usage": USAGE} | behaviour)
        self.path.write_text(FAKE.format(python=sys.executable, behaviour=text), "utf-8")
        self.path.chmod(0o755)

    @property
    def peer(self) -> Peer:
        """As it would have introduced itself, without two more processes."""
        return Peer(self.path, VERSION, USAGE)

    def log(self, event: str) -> list[dict[str, Any]]:
        """Starts or questions, in order."""
        file = self.path.with_name("log.jsonl")
        lines = file.read_text("utf-8").splitlines() if file.exists() else []
        return [line for line in map(json.loads, lines) if line["event"] == event]

    def running(self) -> list[int]:
        """Its processes that have not ended."""
        return [line["pid"] for line in self.log("start") if is_running(line["pid"])]


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.fixture
def fake(tmp_path: Path) -> Callable[..., Fake]:
    """``fake(crash="no memory")`` is a stand-in in a folder of its own."""
    return lambda **behaviour: Fake(tmp_path / "peer", **behaviour)


@pytest.fixture
def model(tiny: Callable[..., Path]) -> Iterator[Model]:
    with load(str(tiny("llama")), ModelConfig(n_ctx=256, n_threads=1)) as loaded:
        yield loaded


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Program:
    return make_program(monkeypatch, capsys)


# -- --peer-modes ----------------------------------------------------------------------------------------------------


def test_modes_begin_with_the_peers_plain_decoding() -> None:
    labels = [mode.label for mode in parse_modes("ngram-mod, ngram-simple[size-n=3,size-m=8],none,ngram-mod")]
    assert labels == ["llama-server:none", "llama-server:ngram-mod", "llama-server:ngram-simple[size-n=3,size-m=8]"]
    assert all(map(is_peer, labels))
    assert not is_peer("none")


def test_a_mode_is_flags_and_the_rows_of_its_longest_draft() -> None:
    simple = parse_modes("ngram-simple[size-n=3,size-m=8]")[1]
    assert simple.arguments == [
        *["--spec-type", "ngram-simple"],
        *["--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "8"],
    ]
    modes = [*parse_modes(DEFAULT_MODES), PeerMode("ngram-mod", (("n-max", 20),))]
    assert [mode.rows for mode in modes] == [1, 49, 9, 49, 65, 9, 21]
    assert [mode.keeps for mode in modes] == [False, False, False, True, True, True, True]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "known are none, ngram-simple"),
        ("draft-simple", "is no draft-free mode"),
        ("ngram-mod[", "brackets"),
        ("ngram-mod[n-max]", "NAME=NUMBER"),
        ("ngram-mod[n-max=many]", "NAME=NUMBER"),
        ("ngram-mod[[n-max=1]]", "is no draft-free mode"),
    ],
)
def test_a_wrong_mode_says_what_is_possible(text: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_modes(text)


def test_a_lane_of_a_peer() -> None:
    lane = peer_lanes([PeerMode("ngram-cache")])[0]
    assert (lane.key, lane.keep) == (("llama-server:ngram-cache", 9), True)
    arguments = ["--spec-type", "ngram-cache"]
    assert lane.settings == {"label": "llama-server:ngram-cache", "block_complexity": 9, "arguments": arguments}


# -- the program -----------------------------------------------------------------------------------------------------


def test_a_program_is_asked_what_it_can(fake: Callable[..., Fake]) -> None:
    one = fake()
    peer = Peer.check(f"llama-server={one.path}", parse_modes(DEFAULT_MODES))
    assert (peer.path, peer.version) == (one.path, VERSION)
    assert [peer.has(flag) for flag in ("--cache-ram", "--no-ui", "--cache", "--fit")] == [True, True, False, False]
    assert one.log("start") == []


def test_a_program_on_the_path(fake: Callable[..., Fake], monkeypatch: pytest.MonkeyPatch) -> None:
    one = fake()
    monkeypatch.setenv("PATH", f"{one.path.parent}{os.pathsep}{os.environ['PATH']}")
    assert Peer.check("llama-server=llama-server", []).path == one.path


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("llama-server", "--peer needs llama-server=PATH"),
        ("llama-server=", "--peer needs llama-server=PATH"),
        ("vllm=/bin/vllm", "--peer needs llama-server=PATH"),
        ("llama-server={}/nowhere", "there is no file"),
        ("llama-server={}", "no program that can be run"),
        ("llama-server={}/text", "no program that can be run"),
        ("llama-server={}/garbage", "cannot be run"),
    ],
)
def test_what_is_no_program_is_refused(tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "text").write_text("hello")
    (tmp_path / "garbage").write_bytes(b"\x00\x01\x02")
    (tmp_path / "garbage").chmod(0o755)
    with pytest.raises(ConfigError, match=why) as refused:
        Peer.check(text.format(tmp_path), [])
    assert "\n" not in str(refused.value)


def test_a_program_that_is_no_llama_server_is_refused(fake: Callable[..., Fake]) -> None:
    with pytest.raises(ConfigError, match="knows no --spec-type"):
        Peer.check(f"llama-server={fake(usage='usage: cat FILE').path}", [])
    with pytest.raises(ConfigError, match="--help failed with exit code 7: it said nothing"):
        Peer.check(f"llama-server={fake(usage='', help_code=7).path}", [])


def test_a_mode_or_option_that_a_build_lacks_is_refused(fake: Callable[..., Fake]) -> None:
    one = f"llama-server={fake().path}"
    with pytest.raises(ConfigError, match="'n-max' is no option of llama-server's mode ngram-mod; it has none"):
        Peer.check(one, parse_modes("ngram-mod[n-max=3]"))
    with pytest.raises(ConfigError, match="it has size-n, size-m"):
        Peer.check(one, parse_modes("ngram-simple[n=3]"))
    old = fake(usage="--spec-type [none|ngram-cache]  kinds\n")
    with pytest.raises(ConfigError, match="has no --spec-type ngram-mod; it has none, ngram-cache"):
        Peer.check(f"llama-server={old.path}", parse_modes("ngram-mod"))


# -- the process -----------------------------------------------------------------------------------------------------


def start(one: Fake, mode: str = "none", **more: Any) -> PeerServer:
    config = ModelConfig(n_gpu_layers=-1, type_k="q8_0", **more)
    return PeerServer(one.peer, parse_modes(mode)[-1], Path("model.gguf"), config, n_ctx=512, n_threads=3)


def test_a_server_gets_our_settings_and_answers_greedily(
    fake: Callable[..., Fake], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_ARG_SPEC_TYPE", "ngram-mod")
    one = fake()
    with start(one, "ngram-simple[size-n=3]") as server:
        document = server.complete([1, 2, 3], 4)
        assert one.running()
    assert document["tokens"] == [5, 6, 7, 8]
    assert one.running() == []
    begun, asked = one.log("start")[0], one.log("ask")[0]
    assert begun["environment"] == []
    given = begun["arguments"]
    for flag, value in (
        *[("--model", "model.gguf"), ("--ctx-size", "512"), ("--parallel", "1"), ("--threads", "3")],
        *[("--n-gpu-layers", "999"), ("--flash-attn", "on"), ("--cache-type-k", "q8_0"), ("--cache-type-v", "f16")],
        *[("--spec-type", "ngram-simple"), ("--spec-ngram-simple-size-n", "3"), ("--cache-ram", "0")],
    ):
        assert given[given.index(flag) + 1] == value
    assert "--no-ui" in given
    assert "--fit" not in given, "this build does not know it"
    assert asked["prompt"] == [1, 2, 3]
    wanted = {"n_predict": 4, "cache_prompt": False, "return_tokens": True, "stream": False, "temperature": 0.0}
    assert wanted.items() <= asked.items()
    assert (asked["top_k"], asked["samplers"]) == (1, ["top_k"])


def test_closing_twice_is_harmless(fake: Callable[..., Fake]) -> None:
    server = start(fake(), flash_attn=True)
    server.close()
    server.close()


def test_a_server_that_does_not_start_shows_its_last_lines(fake: Callable[..., Fake]) -> None:
    one = fake(crash="the file is no model")
    with pytest.raises(ConfigError) as refused:
        start(one, "ngram-mod")
    assert str(refused.value) == (
        "llama-server:ngram-mod did not start (exit code 3): hello / error: the file is no model"
    )
    assert one.running() == []


def test_a_server_that_is_never_ready_is_stopped(fake: Callable[..., Fake], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_process, "START_SECONDS", 1.0)
    monkeypatch.setattr(PeerServer, "_is_ready", lambda _: False)
    one = fake()
    with pytest.raises(ConfigError, match="was not ready after 1 seconds: it said nothing"):
        start(one)
    assert one.running() == []


def test_a_server_that_dies_during_an_answer(fake: Callable[..., Fake]) -> None:
    with start(fake(die_after=1)) as server:
        server.complete([1], 2)
        with pytest.raises(DecodeError) as broken:
            server.complete([1], 2)
    wanted = "llama-server:none broke off an answer (exit code 42): loading / ggml: out of memory"
    assert str(broken.value) == wanted


def test_a_refused_request(fake: Callable[..., Fake]) -> None:
    with (
        start(fake(refuse="no such slot")) as server,
        pytest.raises(DecodeError, match=r"answered with status 400: .*no such slot"),
    ):
        server.complete([1], 2)


def test_a_server_gets_the_threads_of_the_loaded_model(fake: Callable[..., Fake], tiny: Callable[..., Path]) -> None:
    one, cache = fake(), ModelCache(tiny("llama"))
    assert remember_threads(cache, 3)
    try:
        with load(str(tiny("llama")), ModelConfig(n_ctx=256)) as tuned, PeerServers(one.peer, tuned) as servers:
            servers.session(PeerMode("none"))
    finally:
        remember_threads(cache, 0)
    given = one.log("start")[0]["arguments"]
    assert given[given.index("--threads") + 1] == given[given.index("--threads-batch") + 1] == "3"


def test_servers_end_with_whatever_happens_here(fake: Callable[..., Fake], model: Model) -> None:
    one = fake()

    def interrupted() -> None:
        with PeerServers(one.peer, model) as servers:
            for name in ("none", "ngram-mod", "none"):
                servers.session(PeerMode(name))
            assert len(one.running()) == 2
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert one.running() == []


def test_servers_end_when_we_are_killed(fake: Callable[..., Fake]) -> None:
    """No cleanup runs then: the kernel has to do it."""
    one = fake()
    script = (
        "import os; from pathlib import Path; from esp_edge.bench.peers import Peer, PeerMode; "
        "from esp_edge.bench.peer_server import PeerServer; from esp_edge.config import ModelConfig; "
        f"peer = Peer(Path({str(one.path)!r}), '', ''); "
        "server = PeerServer(peer, PeerMode('none'), Path('m'), ModelConfig(), n_ctx=64, n_threads=1); "
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True)
    assert done.returncode == -9, done.stderr.decode()
    deadline = time.monotonic() + 5
    while one.running() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(one.log("start")) == 1
    assert one.running() == []


def test_the_environment_of_a_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_ARG_THREADS", "64")
    monkeypatch.setenv("GGML_KEPT", "1")
    assert "LLAMA_ARG_THREADS" not in peer_environment()
    assert peer_environment()["GGML_KEPT"] == "1"


# -- its numbers -----------------------------------------------------------------------------------------------------


def timed(predicted_n: int, **more: Any) -> dict[str, Any]:
    return {"timings": {"prompt_ms": 30.0, "predicted_n": predicted_n, "predicted_ms": 50.0, **more}}


@pytest.mark.parametrize(
    ("document", "passes", "rows", "committed", "tau"),
    [
        # 10 tokens, the first from the prompt's batch; nothing was drafted: 9 passes of one row
        (timed(10), 9, 9, 9, 1.0),
        # of 12 drafts 4 were accepted, each saved a pass: 5 passes, 5 rows of their own and 12 of drafts
        (timed(10, draft_n=12, draft_n_accepted=4), 5, 17, 9, 1.8),
        # a draft that ended at the end-of-generation token had no bonus token: never less than one pass
        (timed(4, draft_n=3, draft_n_accepted=3), 1, 4, 3, 3.0),
        (timed(1), 0, 0, 0, 0.0),
        (timed(0), 0, 0, 0, 0.0),
    ],
)
def test_passes_are_derived(document: dict[str, Any], passes: int, rows: int, committed: int, tau: float) -> None:
    stats = peer_stats(document, "llama-server:ngram-mod", 65, 20)
    assert (stats.passes, stats.rows, stats.committed_tokens, stats.tau) == (passes, rows, committed, tau)
    assert (stats.prefill_ms, stats.decode_ms) == (30.0, 50.0 if committed else 0.0)
    assert (stats.prefill_tokens, stats.prompt_tokens) == (min(1, document["timings"]["predicted_n"]), 20)
    assert (stats.drafter, stats.block_complexity) == ("llama-server:ngram-mod", 65)
    assert (stats.model_ms, stats.accepted_by_depth) == (0.0, [])


# -- its answers -----------------------------------------------------------------------------------------------------


def test_a_second_turn_sees_the_peers_own_first_answer(fake: Callable[..., Fake], model: Model) -> None:
    one = fake()
    with PeerServers(one.peer, model) as servers:
        session = servers.session(PeerMode("none"))
        first, second = converse(session, ("hello", "more"), GenerationParams(max_tokens=3))
    warm_up, *asked = one.log("ask")
    assert (warm_up["n_predict"], [line["n_predict"] for line in asked]) == (4, [3, 3])
    assert first.token_ids == (5, 6, 7)
    said = first.text
    assert said == "".join(model.tokenizer.piece(token).decode("utf-8", "replace") for token in first.token_ids)
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": said}]
    assert asked[1]["prompt"] == model.encode_chat([*messages, {"role": "user", "content": "more"}])
    assert second.stats.prompt_tokens == len(asked[1]["prompt"])
    assert second.finish_reason == "length"


def test_the_end_of_an_answer_is_a_token_but_no_text(fake: Callable[..., Fake], model: Model) -> None:
    end = min(model.tokenizer.eog_ids)
    ids = model.encode_chat([{"role": "user", "content": "hi"}])
    one = fake(answers={" ".join(map(str, ids)): [5, end]})
    with PeerServers(one.peer, model) as servers:
        answer = converse(servers.session(PeerMode("none")), ("hi",), GenerationParams(max_tokens=8))[0]
    assert answer.token_ids == (5, end)
    assert answer.text == model.tokenizer.piece(5).decode("utf-8", "replace")


def test_a_prompt_is_limited_by_our_context(fake: Callable[..., Fake], model: Model) -> None:
    one = fake()
    with PeerServers(one.peer, model) as servers:
        session = servers.session(PeerMode("none"))
        with pytest.raises(ContextLengthError):
            converse(session, ("word " * 300,), GenerationParams())
        converse(session, ("hi",), GenerationParams())
        with pytest.raises(PromptError, match="with messages"):
            list(session.generate("hi"))
    asked = one.log("ask")[-1]
    assert asked["n_predict"] == model.n_ctx - len(asked["prompt"])


# -- a run -----------------------------------------------------------------------------------------------------------

QUESTIONS = (
    Question(1, "qa", ("the rain in the rain", "again")),
    Question(2, "rag", ("an owl and an owl",)),
    Question(3, "qa", ("the rain",)),
)


def a_plan(path: Path, one: Fake, **more: Any) -> Plan:
    lanes = [*make_lanes(parse_drafters("pld"), [6]), *peer_lanes(parse_modes("ngram-simple,ngram-mod"))]
    params = GenerationParams(max_tokens=6)
    config = ModelConfig(n_ctx=256, n_threads=1)
    return Plan([ModelFile.read(path)], config, lanes, QUESTIONS, params, peer=one.peer, **more)


class KilledError(Exception):
    """Stands for a kill."""


def test_a_killed_run_asks_the_servers_that_learn_again(
    fake: Callable[..., Fake], tiny: Callable[..., Path], tmp_path: Path
) -> None:
    one = fake()
    plan = a_plan(tiny("llama"), one)
    results = RunDirectory(tmp_path / "out", plan.settings(), {})

    def progress(_done: int, _total: int, text: str) -> None:
        if "question 3" in text:
            raise KilledError

    with pytest.raises(KilledError):
        run_all(plan, results, progress=progress)
    assert one.running() == []
    before = len(one.log("ask"))
    run_all(plan, RunDirectory(tmp_path / "out", plan.settings(), {}))
    assert one.running() == []
    asked = [line["mode"] for line in one.log("ask")[before:]]
    assert asked.count("none") == asked.count("ngram-simple") == 1 + 1, "warm-up, question 3"
    assert asked.count("ngram-mod") == 1 + 3 + 1, "warm-up, the turns of questions 1 and 2 again, question 3"
    asked_before = len(one.log("start"))
    run_all(plan, RunDirectory(tmp_path / "out", plan.settings(), {}))
    assert len(one.log("start")) == asked_before, "nothing is left to ask"


def test_every_repetition_starts_servers_that_know_nothing(
    fake: Callable[..., Fake], tiny: Callable[..., Path], tmp_path: Path
) -> None:
    one = fake()
    plan = replace(a_plan(tiny("llama"), one), questions=QUESTIONS[1:], repeat=2)
    run_all(plan, RunDirectory(tmp_path / "out", plan.settings(), {}))
    started = one.log("start")
    assert sorted(line["mode"] for line in started) == sorted(["none", "ngram-simple", "ngram-mod"] * 2)
    assert len({line["pid"] for line in started}) == 6


def test_a_server_that_dies_leaves_what_was_recorded(
    fake: Callable[..., Fake], tiny: Callable[..., Path], tmp_path: Path
) -> None:
    one = fake(die_after=3)
    plan = a_plan(tiny("llama"), one)
    with pytest.raises(DecodeError, match="out of memory"):
        run_all(plan, RunDirectory(tmp_path / "out", plan.settings(), {}))
    assert one.running() == []
    assert len(RunDirectory(tmp_path / "out", plan.settings(), {}).records) >= 3


def test_another_program_is_another_run(fake: Callable[..., Fake], tiny: Callable[..., Path], tmp_path: Path) -> None:
    one = fake()
    plan = a_plan(tiny("llama"), one)
    RunDirectory(tmp_path / "out", plan.settings(), {})
    other = replace(plan, peer=replace(one.peer, version="9"))
    with pytest.raises(ConfigError, match="made with other settings: peer was"):
        RunDirectory(tmp_path / "out", other.settings(), {})


def test_a_peers_difference_is_never_a_failure() -> None:
    known: dict[str, Any] = {"model": "m", "repeat": 0, "question_id": 1, "category": "qa", "block_complexity": 1}
    known |= {"turn": 0, "position": 0, "expected": 1, "found": 2, "top2_margin": None, "margin": None}
    theirs = Difference(**known, drafter="llama-server:ngram-mod", kind="different")
    ours = Difference(**known, drafter="pld", kind="different")
    assert [one.is_failure(exact) for one in (theirs, ours) for exact in (False, True)] == [False, False, True, True]


# -- the command -----------------------------------------------------------------------------------------------------


def arguments(path: Path, tmp_path: Path, *more: str) -> list[str]:
    lines = [{"question_id": one.question_id, "category": one.category, "turns": one.turns} for one in QUESTIONS]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    base = ["bench", "specbench", "-m", str(path), "--questions", str(tmp_path / "q.jsonl"), "-c", "256", "-t", "1"]
    where = ["--out", str(tmp_path / "out"), "--no-plots"]
    return [*base, *where, "-n", "6", "--drafters", "pld", "--block-complexity", "6", *more]


def plain_answers(model: Model) -> dict[str, list[int]]:
    """The answers to the first two questions' first turns, as plain decoding gives them."""
    found = {}
    for one in QUESTIONS[:2]:
        ids = model.encode_chat([{"role": "user", "content": one.turns[0]}])
        with model.session(DraftConfig("none")) as plain:
            answer = converse(plain, one.turns[:1], GenerationParams(max_tokens=6))[0]
        found[" ".join(map(str, ids))] = list(answer.token_ids)
    return found


def test_specbench_measures_the_peer_beside_ours(
    program: Program, fake: Callable[..., Fake], model: Model, tmp_path: Path
) -> None:
    one = fake(answers=plain_answers(model))
    peer = ("--peer", f"llama-server={one.path}", "--peer-modes", "ngram-mod,ngram-simple[size-n=3,size-m=8]")
    code, out, err = program(*arguments(model.path, tmp_path, *peer), "--json")
    assert code == 0, err
    assert one.running() == []
    rows = {row["drafter"]: row for row in json.loads(out)["rows"] if row["category"] == "all"}
    modes = ["llama-server:none", "llama-server:ngram-mod", "llama-server:ngram-simple[size-n=3,size-m=8]"]
    assert list(rows) == ["none", "pld", "none[stock]", *modes]
    theirs, fast = rows["llama-server:none"], rows["llama-server:ngram-mod"]
    assert (theirs["identical"], theirs["near_ties"], theirs["n_prompts"]) == (2, 0, 3)
    assert (theirs["tau"], theirs["rows_per_pass"], theirs["speedup_peer"], theirs["identical_peer"]) == (1, 1, 1, 3)
    assert (fast["tau"], fast["rows_per_pass"], fast["identical_peer"]) == (round(5 / 3, 6), round(7 / 3, 6), 3)
    assert theirs["tokens_per_second"] == 625.0, "5 tokens in 8 ms"
    assert (fast["host_ms_per_pass"], fast["model_ms_per_pass"]) == (None, None)
    assert rows["pld"]["speedup_peer"] == pytest.approx(rows["pld"]["tokens_per_second"] / 625.0, rel=1e-3)
    assert rows["pld"]["host_ms_per_pass"] > 0


def test_the_report_says_what_a_peer_is(
    program: Program, tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Fake(tmp_path / "peer")
    argv = arguments(tiny("llama"), tmp_path, f"--peer=llama-server={one.path}", "--peer-modes", "ngram-mod", "--exact")
    monkeypatch.setattr("sys.argv", ["esp-edge", *argv])
    code, out, _ = program(*argv)
    assert code == 0, "a peer's answers are not ours to fail for"
    assert "| over stock | over peer | same as plain | same as peer |" in out
    text = (tmp_path / "out" / "report.md").read_text("utf-8")
    assert "It is llama-server 1.2.3 (build 4, commit abc), " in text
    assert "DIFFERENT OUTPUT" not in text
    assert "exact mode says nothing about it" in text
    command = next(line for line in text.splitlines() if line.startswith("esp-edge bench"))
    assert str(tmp_path) not in command
    assert "--peer=llama-server=llama-server --peer-modes ngram-mod" in command


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (("--peer", "llama-server={}", "--temp", "0.8"), "use --temp 0 or drop --peer"),
        (("--peer", "llama-server={}/nowhere"), "there is no file"),
        (("--peer", "llama-server={}", "--peer-modes", "ngram-map"), "is no draft-free mode"),
        (("--peer-modes", "none"), "it needs --peer"),
    ],
)
def test_what_cannot_be_is_told_before_anything_is_measured(
    program: Program, tiny: Callable[..., Path], tmp_path: Path, more: tuple[str, ...], why: str
) -> None:
    one = Fake(tmp_path / "peer")
    code, _, err = program(*arguments(tiny("llama"), tmp_path), *(word.format(one.path) for word in more))
    assert code in (1, 2)
    assert why in one_error(err)
    assert not (tmp_path / "out").exists()
    assert one.log("start") == []
