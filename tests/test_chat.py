"""``esp-edge chat``: input, commands, interrupts; first on a fake model, then on the bundled one."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cli_fakes import FakeModel, Program, make_program

from esp_edge.cli.chat import read_message
from esp_edge.cli.conversation import SETTINGS, Conversation, assign, closest, settings
from esp_edge.config import DraftConfig, GenerationParams
from esp_edge.errors import ConfigError, PromptError

CALIBRATION = "measuring this model (once)"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Program:
    return make_program(monkeypatch, capsys)


def chat(program: Program, *lines: str, code: int = 0) -> tuple[str, list[str]]:
    """A piped chat: stdout and the lines of stderr."""
    found, out, err = program("chat", stdin="".join(f"{line}\n" for line in lines).encode())
    notes = err.splitlines()
    assert found == code, err
    assert "Traceback" not in err
    assert notes[0] == CALIBRATION
    return out, notes[1:]


def asked(program: Program) -> list[list[str]]:
    """For every answer the contents of the messages it was given."""
    return [[item["content"] for item in prompt] for prompt, _ in program.session.asked]


# -- input -----------------------------------------------------------------------------------------------------------


def read_all(*lines: str) -> list[tuple[str, bool]]:
    source = iter(lines)
    messages: list[tuple[str, bool]] = []
    while True:
        message = read_message(lambda _: next(source, None))
        if message is None:
            return messages
        messages.append(message)


@pytest.mark.parametrize(
    ("lines", "wanted"),
    [
        (["one", "two"], [("one", True), ("two", True)]),
        ([""], [("", True)]),
        (["one\\", "two\\", "three"], [("one\ntwo\nthree", True)]),
        (["one\\"], [("one", True)]),
        (['"""one', "  two\\", 'three"""', "four"], [("one\n  two\\\nthree", False), ("four", True)]),
        (['"""', "/help", '"""'], [("/help", False)]),
        (['"""/help"""'], [("/help", False)]),
        (['"""one', "two"], [("one\ntwo", False)]),
        (['say """x"""'], [('say """x"""', True)]),
    ],
)
def test_messages_of_one_line_and_of_many(lines: list[str], wanted: list[tuple[str, bool]]) -> None:
    assert read_all(*lines) == wanted


def test_continued_lines_are_asked_for_as_such() -> None:
    flags: list[bool] = []
    lines = iter(["a\\", "b\\", "c"])

    def read_line(continued: bool) -> str | None:
        flags.append(continued)
        return next(lines, None)

    read_message(read_line)
    assert flags == [False, True, True]


# -- the conversation ------------------------------------------------------------------------------------------------


def test_messages_pile_up(program: Program) -> None:
    out, notes = chat(program, "first", "", "second")
    assert out == "You said first\nYou said second\n"
    assert notes == []
    assert asked(program) == [["first"], ["first", "You said first", "second"]]


def test_input_without_a_last_line_end_and_with_crlf(program: Program) -> None:
    assert program("chat", stdin=b"one\r\ntwo")[1] == "You said one\nYou said two\n"


def test_a_line_that_is_not_utf8(program: Program) -> None:
    code, out, err = program("chat", stdin=b"fine\n\xff\n")
    assert (code, out) == (1, "You said fine\n")
    assert err.splitlines()[-1] == "esp-edge: error: stdin line 2 must be UTF-8, but byte 0 is 0xff; convert it first"


def test_exit_must_be_exact(program: Program) -> None:
    out, notes = chat(program, "/exited", "/exit now", "still here", "/exit", "never", code=1)
    assert out == "You said still here\n"
    assert notes == [
        "esp-edge: error: there is no command /exited; did you mean /exit? (/help lists all)",
        "esp-edge: error: /exit takes nothing behind it, but 'now' was given",
    ]
    assert chat(program, "/quit", "never")[0] == ""


def test_a_slash_can_be_sent_as_text(program: Program) -> None:
    out, notes = chat(program, "/etc/passwd is a file", '"""/help"""', " /help", code=1)
    assert out == "You said /help\nYou said  /help\n"
    assert '"""/etc/passwd is a file""" sends it as text' in notes[0]


def test_clear_and_system(program: Program) -> None:
    chat(program, "/system Be brief.", "one", "/clear", "two", "/system", "three")
    assert asked(program) == [["Be brief.", "one"], ["Be brief.", "two"], ["two", "You said two", "three"]]


def test_regen_answers_the_last_message_again(program: Program) -> None:
    out, notes = chat(program, "/regen", "one", "/regen", "two", code=1)
    assert out == "You said one\nYou said one\nYou said two\n"
    assert asked(program) == [["one"], ["one"], ["one", "You said one", "two"]]
    assert "no message to answer again" in notes[0]
    assert "temperature 0" in notes[1]


def test_a_message_too_long_is_taken_back(program: Program) -> None:
    out, notes = chat(program, "one", "x" * 300, "two", code=1)
    assert out == "You said one\nYou said two\n"
    assert "holds 200" in notes[0]
    assert asked(program)[-1] == ["one", "You said one", "two"]


def test_set_and_show(program: Program) -> None:
    _, notes = chat(
        program,
        "/set temperature 0.7",
        "/set max-tokens 2",
        "/set stop END",
        "/set block-complexity 30",
        "/set tree 15,4",
        "/set prune off",
        "one",
        "/show",
    )
    params = program.session.asked[0][1]
    assert params == GenerationParams(temperature=0.7, max_tokens=2, stop=("END",))
    assert program.session.draft == DraftConfig("esp", block_complexity=30, tree=(15, 4), masks=2, prune=False)
    shown = {line.split()[0]: line.split()[1] for line in notes}
    assert (shown["temp"], shown["tree"], shown["prune"], shown["max-tokens"]) == ("0.7", "[15,4]", "off", "2")
    assert shown["context"] == "3"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("/set", "needs a name and a value"),
        ("/set temp", "needs a name and a value"),
        ("/set temprature 1", "did you mean temperature?"),
        ("/set temp hot", "temp needs a number, but 'hot'"),
        ("/set temp -1", "temp must be"),
        ("/set masks 9", "masks must be"),
        ("/set prune maybe", "prune needs on or off"),
        ("/set tree 1,2,3,4", "masks must be"),
        ("/spec", "on or off"),
        ("/save", "name of a file"),
        ("/load no/such.json", "No such file"),
        ("/save ~nosuchuser/x", "~nosuchuser has no home directory"),
        ("/load ~nosuchuser/x", "~nosuchuser has no home directory"),
        ("/save no/such/x.json", "error: no/such/x.json cannot be written: No such file or directory"),
        ("/save a\0b", "cannot be written"),
        ("/stats", "no answer yet"),
        ("/sats", "did you mean /stats"),
        ("/help me", "takes nothing"),
    ],
)
def test_a_wrong_command_is_one_line_and_the_chat_goes_on(program: Program, line: str, why: str) -> None:
    out, notes = chat(program, line, "still here", code=1)
    assert out == "You said still here\n"
    assert len(notes) == 1
    assert notes[0].startswith("esp-edge: error: ")
    assert why in notes[0]


def test_every_setting_can_be_set_to_what_is_shown() -> None:
    params = GenerationParams(stop=("a b", "[", "ü"), temperature=0.5, ignore_eos=True)
    draft = DraftConfig("esp", tree=(4, 2), masks=2, mask_update=0.5)
    rival = DraftConfig(
        "draft-model", block_complexity=7, draft_model="a b.gguf", keep=True, seed=3, occurrence="first"
    )
    some = DraftConfig(sources="suffix+esp")
    for before in ((params, draft), (params, rival), (params, some), (GenerationParams(), DraftConfig())):
        after = before
        shown = settings(*before)
        assert set(shown) == set(SETTINGS)
        for name, text in shown.items():
            after = assign(*after, name, text)
        assert after == before


def test_spec_on_and_off(program: Program) -> None:
    def prepare(model: FakeModel) -> None:
        model.capability.reason = "masks off for a reason"

    program.prepare = prepare
    _, notes = chat(program, "/spec off", "one", "/spec on", "two")
    assert notes == ["speculation is off", "speculation is on, but masks off for a reason"]
    assert program.session.draft.drafter == "auto"


def test_spec_on_brings_the_drafter_back_that_was_off(program: Program) -> None:
    chat(program, "/set keep on", "/set drafter recycling", "/spec off", "/spec off", "one", "/spec on", "two")
    assert program.session.draft == DraftConfig("recycling", keep=True)


def test_a_draft_model_is_named_before_it_drafts(program: Program) -> None:
    _, notes = chat(program, "/set drafter draft-model", "one", code=1)
    assert "needs a second model" in notes[0]
    _, notes = chat(
        program,
        *["/set draft-model small file.gguf", "/set drafter draft-model", "/show", "/spec off", "/spec on"],
        *["/set draft-model off", "one"],
        code=1,
    )
    shown = {line.split()[0]: line.split(maxsplit=1)[1] for line in notes}
    assert (shown["draft-model"], shown["keep"], shown["occurrence"]) == ("small file.gguf", "off", "newest")
    assert "needs a second model" in notes[-1]
    assert program.session.draft == DraftConfig("draft-model", draft_model="small file.gguf")


def test_the_two_seeds_are_told_apart() -> None:
    before = GenerationParams(), DraftConfig()
    assert assign(*before, "seed", "5") == (GenerationParams(seed=5), DraftConfig())
    assert assign(*before, "draft-seed", "5") == (GenerationParams(), DraftConfig(seed=5))
    assert assign(*before, "occurrence", "first")[1] == DraftConfig(occurrence="first")


def test_sources_of_the_drafts_are_chosen_by_name(program: Program) -> None:
    """/set did not know the flag --sources."""
    _, notes = chat(program, "/set sources suffix+last", "/show", "/set sources all", "/set sources none", "x", code=1)
    shown = dict(line.split(maxsplit=1) for line in notes if len(line.split(maxsplit=1)) == 2)
    assert shown["sources"] == "suffix+last"
    assert "sources must be some of suffix" in notes[-1]
    assert program.session.draft.sources == ""


def test_stats_table(program: Program) -> None:
    _, notes = chat(program, "one two", "/stats")
    table = "\n".join(notes)
    for name in ("tau", "tokens/s", "passes", "accepted to depth 1", "host ms/pass", "model ms/pass"):
        assert name in table


def test_help_lists_every_command(program: Program) -> None:
    text = "\n".join(chat(program, "/help")[1])
    for name in ("/exit", "/quit", "/clear", "/regen", "/system", "/set", "/show", "/save", "/load", "/stats", "/spec"):
        assert name in text


def test_save_and_load(program: Program, tmp_path: Path) -> None:
    file = tmp_path / "my chat.json"
    chat(program, "/system ünd", "one", f"/save {file}")
    assert json.loads(file.read_text("utf-8"))["model"] == "fake.gguf"
    chat(program, "lost", f"/load {file}", "two", f"/save {file}")
    assert asked(program)[-1] == ["ünd", "one", "You said one", "two"]
    assert len(Conversation.load(file).history) == 4
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("content", ["# Notes", "[]", "{}", '{"messages": [{"role": 1, "content": "x"}]}', "[" * 99999])
def test_a_file_that_is_no_chat_is_neither_read_nor_overwritten(tmp_path: Path, content: str) -> None:
    file = tmp_path / "notes.md"
    file.write_text(content, "utf-8")
    with pytest.raises(PromptError, match="no saved chat"):
        Conversation.load(file)
    with pytest.raises(PromptError, match="no saved chat"):
        Conversation().save(file, "m")
    assert file.read_text("utf-8") == content


def test_closest_word() -> None:
    assert closest("/hlep", ["/help", "/exit"]) == "; did you mean /help?"
    assert closest("xyz", ["/help", "/exit"]) == ""


def test_unknown_setting_lists_nothing_when_nothing_is_close() -> None:
    with pytest.raises(ConfigError, match=r"no setting 'qqq' \(/show"):
        assign(GenerationParams(), DraftConfig(), "qqq", "1")


# -- Ctrl-C ----------------------------------------------------------------------------------------------------------


def interrupting(n_chunk: int, text: str) -> Callable[[FakeModel], None]:
    """A model that receives Ctrl-C while it makes chunk ``n_chunk`` of the answer to ``text``."""

    def prepare(model: FakeModel) -> None:
        current = [""]

        def script(asked_text: str) -> list[str]:
            current[0] = asked_text
            return ["You ", "said ", asked_text]

        def on_chunk(n: int) -> None:
            if n == n_chunk and current[0] == text:
                signal.raise_signal(signal.SIGINT)

        model.script, model.on_chunk = script, on_chunk

    return prepare


def test_ctrl_c_ends_the_answer_and_keeps_it(program: Program) -> None:
    program.prepare = interrupting(2, "one")
    out, notes = chat(program, "one", "two")
    assert out == "You said \nYou said two\n"
    assert notes == ["stopped"]
    assert asked(program)[-1] == ["one", "You said ", "two"]


def test_ctrl_c_before_the_answer_takes_the_message_back(program: Program) -> None:
    program.prepare = interrupting(1, "one")
    out, notes = chat(program, "one", "two")
    assert out == "You said two\n"
    assert "taken back" in notes[-1]
    assert asked(program)[-1] == ["two"]


# -- on the bundled model --------------------------------------------------------------------------------------------

COMMAND = [sys.executable, "-m", "esp_edge", "chat", "--mask-init", "vocab-mean", "-t", "1"]


ENVIRONMENT = {"COLUMNS": "200", "TERM": "dumb", "ESP_EDGE_CONFIG": os.devnull}


def environment() -> dict[str, str]:
    kept = ("ESP_EDGE_CACHE", "ESP_EDGE_KERNELS_ISA")
    own = {name: value for name, value in os.environ.items() if not name.startswith("ESP_EDGE_") or name in kept}
    return {**own, **ENVIRONMENT}


@pytest.mark.model
def test_a_piped_chat_remembers() -> None:
    script = "The code word is pelican.\n/spec off\nWhat is the code word?\n/stats\n/spec on\n/regen\n/exit\n"
    done = subprocess.run(
        [*COMMAND, "-n", "16"],
        input=script.encode(),
        capture_output=True,
        env=environment(),
        timeout=300,
        check=False,
    )
    err = done.stderr.decode()
    assert done.returncode == 0, err
    assert "Traceback" not in err
    answers = done.stdout.decode()
    assert answers.count("pelican") >= 2
    assert ">>>" not in answers
    assert answers.count("\n") >= 3
    assert re.search(r"tau +.* 1\.000", err)
    assert re.search(r"[1-9]\d* of them from the KV cache", err)


class Terminal:
    """A program on a terminal of its own."""

    def __init__(self, controller: int, process: subprocess.Popen[bytes]) -> None:
        self._controller = controller
        self.process = process
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self._controller, text.encode())

    def wait_for(self, text: str, timeout_s: float = 120.0, *, interrupting: bool = False) -> str:
        """Everything shown up to a text, which is then forgotten; with Ctrl-C every second until it comes."""
        deadline = time.monotonic() + timeout_s
        next_signal = time.monotonic()
        while text not in self.shown:
            if interrupting and time.monotonic() >= next_signal:  # readline misses one just before it starts to wait
                self.process.send_signal(signal.SIGINT)
                next_signal += 1.0
            assert time.monotonic() < deadline, f"{text!r} did not come, only {self.shown!r}"
            if select.select([self._controller], [], [], 0.2)[0]:
                self.shown += os.read(self._controller, 4096).decode("utf-8", "replace")
        before, _, self.shown = self.shown.partition(text)
        return before


@contextmanager
def terminal(argv: list[str]) -> Iterator[Terminal]:
    import pty  # noqa: PLC0415 - not on every system

    controller, ours = pty.openpty()
    process = subprocess.Popen(argv, stdin=ours, stdout=ours, stderr=ours, env=environment(), start_new_session=True)
    os.close(ours)
    try:
        yield Terminal(controller, process)
    finally:
        process.kill()
        process.wait()
        os.close(controller)


@pytest.mark.model
def test_a_chat_by_hand() -> None:
    with terminal([*COMMAND, "--ignore-eos", "-c", "2048"]) as person:
        person.wait_for("/help lists the commands")
        person.wait_for(">>> ")
        person.wait_for("Ctrl-D or /exit leaves", interrupting=True)
        person.wait_for(">>> ")
        person.type("Tell me a long\\\n")
        person.wait_for("... ")
        person.type("story.\n")
        person.wait_for("story.")
        person.wait_for(" ")  # the answer has begun
        person.process.send_signal(signal.SIGINT)
        person.wait_for("stopped")
        person.wait_for(">>> ")
        person.type("/stats\n")
        person.wait_for("tokens/s")
        person.wait_for(">>> ")
        person.type("\x04")
        assert person.process.wait(timeout=60) == 0
