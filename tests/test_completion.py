"""Completion with Tab: what the program offers, the scripts, and the shells of this machine that run them."""

from __future__ import annotations

import os
import pty
import re
import select
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cli_fakes import Program, make_program, one_error
from huggingface_hub import constants

from esp_edge.cli.completion import SHELLS, install, script, with_shell
from esp_edge.config import DRAFTERS, FUSED_SOURCES, KV_TYPES, MASK_INITS

Tab = Callable[[str], list[str]]
MODEL = "acme/toy-GGUF:Q8_0"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Program:
    made = make_program(monkeypatch, capsys)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(download(tmp_path)))
    return made


def download(home: Path) -> Path:
    """A cache with one model in it."""
    snapshot = home / "hub/models--acme--toy-GGUF/snapshots/abc"
    snapshot.mkdir(parents=True)
    (snapshot / "toy-Q8_0.gguf").write_bytes(b"x")
    return home / "hub"


@pytest.fixture
def tab(program: Program, monkeypatch: pytest.MonkeyPatch) -> Tab:
    """``tab("esp-edge ge")``: the values that are offered."""

    def ask(line: str) -> list[str]:
        monkeypatch.setenv("_ESP_EDGE_COMPLETE", "complete_fish")
        monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
        monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)
        monkeypatch.setenv("COLUMNS", "9999")
        code, out, err = program()
        assert (code, err) == (0, "")
        return [value.partition("\t")[0] for value in out.splitlines() if value]

    return ask


# -- what is offered -------------------------------------------------------------------------------------------------


def test_commands_and_flags(tab: Tab) -> None:
    assert {"generate", "chat", "serve", "models", "bench"} <= set(tab("esp-edge "))
    assert tab("esp-edge gen") == ["generate"]
    assert tab("esp-edge models ") == ["list", "pull", "show", "remove"]
    assert "--block-complexity" in tab("esp-edge generate --b")
    assert tab("esp-edge serve --allowed") == ["--allowed-host"]
    assert "--drafter" in tab("esp-edge chat -m x --temp 0.5 --dr")
    flags = tab("esp-edge generate --")
    assert len(flags) > 40
    assert all(re.fullmatch(r"--[a-z0-9-]+", flag) for flag in flags), "a help text of two lines is no value"


@pytest.mark.parametrize(
    ("flag", "values"),
    [
        ("--drafter", DRAFTERS),
        ("--mask-init", MASK_INITS),
        ("--sources", FUSED_SOURCES),
        ("--cache-type-k", KV_TYPES),
        ("-ctv", KV_TYPES),
        ("--flash-attn", ("on", "off")),
        ("--impl", ("efficient", "naive")),
        ("--occurrence", ("newest", "first")),
    ],
)
def test_values_of_flags(tab: Tab, flag: str, values: tuple[str, ...]) -> None:
    assert tab(f"esp-edge generate {flag} ") == list(values)
    if flag.startswith("--"):
        assert tab(f"esp-edge generate {flag}={values[-1][:1]}") == [v for v in values if v[0] == values[-1][0]]


def test_values_of_one_command(tab: Tab) -> None:
    assert tab("esp-edge serve --pooling ") == ["auto", "mean", "last", "none"]
    assert tab("esp-edge serve --log-level wa") == ["warning"]
    assert tab("esp-edge serve --drafter dr") == ["draft-model"]
    assert tab("esp-edge bench specbench --drafters esp,rec") == ["esp,recycling"]
    assert tab("esp-edge generate --sources suffix+a") == ["suffix+adjacency"]
    assert tab("esp-edge --show-completion ") == ["bash", "zsh", "fish"]
    assert tab("esp-edge generate --system ") == [], "the shell then offers files"
    assert tab("esp-edge generate --prediction-file /") == []


@pytest.mark.model
def test_models_that_are_here(tab: Tab) -> None:
    for line in (
        "generate -m ",
        "chat --model ",
        "generate -hf ",
        "models show ",
        "model show ",
        "serve --draft-model ",
    ):
        assert tab(f"esp-edge {line}") == ["smollm2", MODEL]
    assert tab("esp-edge generate -m acme/toy-GGUF:Q") == [MODEL]
    assert tab("esp-edge models remove ") == [MODEL]
    assert tab("esp-edge generate -m ./mo") == []


def test_settings_of_the_environment_do_not_matter(tab: Tab, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("CTX_SIZE", "many"), ("MODEL", "x"), ("DRAFTER", "?"), ("CONFIG", "no/such"), ("PORT", "-1")):
        monkeypatch.setenv(f"ESP_EDGE_{name}", value)
    assert tab("esp-edge serve --drafter ra") == ["racer"]
    assert tab("esp-edge models remove acme") == [MODEL]
    assert tab("esp-edge gen") == ["generate"]


def test_a_line_that_cannot_be_is_quietly_not_completed(tab: Tab) -> None:
    for line in (
        "esp-edge nothing ",
        "esp-edge generate --none ",
        'esp-edge generate "',
        "",
        "esp-edge models show a b c ",
    ):
        assert isinstance(tab(line), list)


# -- the scripts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_is_printed_for_the_shell_that_is_named(program: Program, tmp_path: Path, shell: str) -> None:
    code, out, err = program("--show-completion", shell)
    assert (code, out, err) == (0, script(shell), "")
    assert program("--show-completion", shell, "generate", "hi")[1] == out, "no command runs"
    assert program.loads == []
    file = tmp_path / "script"
    file.write_text(out, "utf-8")
    if shutil.which(shell):
        check = subprocess.run([shell, "-n", str(file)], capture_output=True, text=True, check=False)
        assert (check.returncode, check.stderr) == (0, "")


def test_another_shell_is_an_error(program: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for flag in ("--show-completion", "--install-completion"):
        code, out, err = program(flag, "tcsh")
        assert (code, out) == (1, "")
        assert "bash, zsh, fish" in one_error(err)
    assert not list(tmp_path.glob(".*"))


def test_without_a_name_it_is_the_shell_around(monkeypatch: pytest.MonkeyPatch) -> None:
    import shellingham  # noqa: PLC0415

    assert with_shell(["generate", "x"]) == ["generate", "x"]
    assert with_shell([]) == []
    assert with_shell(["--show-completion", "zsh"]) == ["--show-completion", "zsh"]
    monkeypatch.setattr(shellingham, "detect_shell", lambda: ("fish", "/bin/fish"))
    assert with_shell(["--install-completion"]) == ["--install-completion", "fish"]

    def fail() -> None:
        raise shellingham.ShellDetectionFailure

    monkeypatch.setattr(shellingham, "detect_shell", fail)
    monkeypatch.setenv("SHELL", "/usr/bin/zsh")
    assert with_shell(["--show-completion"]) == ["--show-completion", "zsh"]
    monkeypatch.delenv("SHELL")
    assert with_shell(["--show-completion"]) == ["--show-completion", "bash"]


def test_installing_twice_changes_nothing_more(
    program: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("ZDOTDIR", raising=False)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    (tmp_path / ".bashrc").write_bytes(b"alias x=\xff'y'")  # no UTF-8, no line end
    for shell in SHELLS:
        for _ in range(2):
            code, out, _ = program("--install-completion", shell)
            assert code == 0
            assert Path(out.strip()).read_text("utf-8") == script(shell)
    lines = (tmp_path / ".bashrc").read_bytes().splitlines()
    assert lines == [b"alias x=\xff'y'", f"source '{tmp_path}/.bash_completions/esp-edge.sh'".encode()]
    assert (tmp_path / ".zshrc").read_text("utf-8").count("compinit") == 2
    assert (tmp_path / ".config/fish/completions/esp-edge.fish").is_file()


# -- real shells -----------------------------------------------------------------------------------------------------

# each prints what has been typed so far, between brackets, at Ctrl-T
SETUPS = {
    "bash": (["--norc", "-i"], 'source ~/.bashrc; bind -x \'"\\C-t": printf "<[%s]>\\n" "$READLINE_LINE"\''),
    "zsh": (["-i"], "d() { print -r -- \"<[$BUFFER]>\" }; zle -N d; bindkey '^T' d; bindkey '^U' kill-whole-line"),
    "fish": (["-i"], 'bind \\ct \'echo "<["(commandline)"]>"\'; bind \\cu \'commandline ""\''),
}


@contextmanager
def terminal(argv: list[str], environment: dict[str, str]) -> Iterator[int]:
    """A program with a terminal of its own."""
    pid, descriptor = pty.fork()
    if pid == 0:
        os.execvpe(argv[0], argv, environment)
    try:
        yield descriptor
    finally:
        os.close(descriptor)  # hangs up
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def read_until(descriptor: int, end: bytes, seconds: float = 30.0) -> bytes:
    found, stop = b"", time.monotonic() + seconds
    while end not in found:
        assert time.monotonic() < stop, found
        if select.select([descriptor], [], [], 0.1)[0]:
            found += os.read(descriptor, 1 << 16)
    return found


@pytest.mark.parametrize("shell", [shell for shell in SHELLS if shutil.which(shell)])
def test_a_real_shell_completes(shell: str, tmp_path: Path) -> None:
    """What Tab makes of a line."""
    cases = {
        "esp-edge gen": "esp-edge generate ",
        "esp-edge serve --drafter=rec": "esp-edge serve --drafter=recycling ",
        "esp-edge chat -m acme/toy-GGUF:Q": f"esp-edge chat -m {MODEL} ",
        "esp-edge models show ac": f"esp-edge models show {MODEL} ",
        "esp-edge chat -m hub/models--ac": "esp-edge chat -m hub/models--acme--toy-GGUF/",  # a file of the user's own
    }
    download(tmp_path)
    program = tmp_path / "bin" / "esp-edge"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m esp_edge "$@"\n', "utf-8")
    program.chmod(0o755)
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("ESP_EDGE_", "HF_", "XDG_", "ZDOT"))
    }
    environment = kept | {
        "HOME": str(tmp_path),
        "HF_HOME": str(tmp_path),
        "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(Path(__file__).parent.parent),
        "TERM": "xterm",
        "ESP_EDGE_CTX_SIZE": "in the way",
    }
    install(shell, tmp_path)
    options, setup = SETUPS[shell]
    with terminal([shell, *options], environment) as descriptor:
        os.write(descriptor, f"cd {tmp_path}; {setup}; echo REA''DY\n".encode())
        read_until(descriptor, b"READY\r\n")
        for line, expected in cases.items():
            os.write(descriptor, f"{line}\t\x14".encode())
            answer = re.findall(rb"<\[(.*?)\]>", read_until(descriptor, b"]>"), re.DOTALL)[-1]
            assert answer.decode() == expected
            os.write(descriptor, b"\x15")
