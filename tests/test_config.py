"""One schema for flags, environment and configuration file, and ``serve --print-config`` as its mirror."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from cli_fakes import Program, make_program, one_error

from esp_edge.cli.app import app

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# a value that is not the default, as the command line takes it
SAMPLES: dict[str, str] = {
    "model": "owner/repo:Q4_0",
    "ctx_size": "512",
    "threads": "3",
    "n_gpu_layers": "5",
    "flash_attn": "off",
    "no_flash_attn": "",
    "cache_type_k": "q8_0",
    "cache_type_v": "bf16",
    "exact": "",
    "max_tokens": "7",
    "temp": "0.25",
    "top_k": "9",
    "top_p": "0.5",
    "min_p": "0.125",
    "typical": "0.75",
    "repeat_penalty": "1.5",
    "repeat_last_n": "32",
    "presence_penalty": "0.5",
    "frequency_penalty": "-0.5",
    "dry_multiplier": "0.5",
    "dry_base": "2.5",
    "dry_allowed_length": "4",
    "dry_penalty_last_n": "64",
    "seed": "11",
    "logit_bias": "5-inf",
    "stop": "END",
    "grammar": 'root ::= "a"',
    "grammar_file": "FILE",
    "json_schema": '{"type": "object"}',
    "json_schema_file": "SCHEMA",
    "logprobs": "2",
    "ignore_eos": "",
    "prediction_file": "FILE",
    "drafter": "suffix",
    "block_complexity": "20",
    "masks": "2",
    "tree": "4,2",
    "mask_init": "sample",
    "mask_update": "0.5",
    "prune": "no",
    "impl": "naive",
    "keep": "",
    "occurrence": "first",
    "draft_seed": "3",
    "sources": "suffix+esp",
    "draft_model": "other.gguf",
    "host": "0.0.0.0",
    "port": "1234",
    "parallel": "2",
    "max_queue": "3",
    "cors_origin": "https://chat.example",
    "allowed_host": "chat.example",
    "alias": "mine",
    "no_web": "",
    "metrics": "no",
    "pooling": "mean",
    "max_body_size": "2.5",
    "shutdown_timeout": "4",
    "log_level": "info",
    "kernels": "stock",
    "no_repack": "",
    "no_defer_head": "",
    "rpc": "127.0.0.1:50052",
}
HIDDEN = ("api_key", "print_config")  # the one is never printed, the other prints


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Program:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").write_text('root ::= "a"', "utf-8")
    (tmp_path / "SCHEMA").write_text("{}", "utf-8")
    return make_program(monkeypatch, capsys)


def commands(group: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """(path, command) of everything that does something."""
    group = typer.main.get_command(app) if group is None else group
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*path, name))
        else:
            yield (*path, name), command


def options(command: Any) -> dict[str, Any]:
    """Name -> option, without --help."""
    return {p.name: p for p in command.params if p.param_type_name == "option" and p.name != "help"}


SERVE = options(dict(commands())[("serve",)])


def given(name: str, value: str) -> list[str]:
    """A flag on the command line."""
    option = SERVE[name]
    if value == "no":
        return [next(flag for flag in option.secondary_opts)]
    return [next(flag for flag in option.opts if flag.startswith("--")), *([value] if value else [])]


def in_toml(name: str, value: str) -> str:
    return f"{name} = {'false' if value == 'no' else json.dumps(value) if value else 'true'}\n"


def in_environment(value: str) -> str:
    return {"": "1", "no": "0"}.get(value, value)


def printed(program: Program, *argv: str) -> str:
    code, out, err = program(*argv, "--print-config")
    assert (code, err) == (0, ""), err
    return out


# -- the schema ------------------------------------------------------------------------------------------------------


def test_every_flag_is_a_key_of_the_file_and_a_variable() -> None:
    without = set()
    for path, command in commands():
        for name, option in options(command).items():
            longs = [flag.removeprefix("--").replace("-", "_") for flag in option.opts if flag.startswith("--")]
            assert longs, f"{path}: {option.opts} has no long name, so no key in the file"
            if option.envvar is None:
                without.add((*path, longs[0]))
            else:
                assert option.envvar == f"ESP_EDGE_{longs[0].upper()}", (path, name)
    by_hand = {("stop",), ("print_config",), ("cache",)}  # read apart; prints; ESP_EDGE_CACHE is a directory
    assert {key for key in without if key[0] != "tune" and key[-1:] not in by_hand} == set()


def test_every_key_is_taken_by_its_command(program: Program, tmp_path: Path) -> None:
    """A file with all flags of a command, each with its default, in the command's table."""
    for path, command in commands():
        lines = [f"[{'.'.join(path)}]"]
        for name, option in options(command).items():
            key = next(flag for flag in option.opts if flag.startswith("--")).removeprefix("--")
            if option.is_flag:
                lines.append(f"{key} = {str(bool(option.default)).lower()}")
            elif isinstance(option.default, str | int | float) and name != "config":
                lines.append(f"{key} = {json.dumps(option.default)}")
            else:
                lines.append(f"# {key}")
        file = tmp_path / "all.toml"
        file.write_text("\n".join(lines), "utf-8")
        code, out, err = program("--config", str(file), *path, "--help")
        assert (code, err) == (0, ""), (path, err)
        assert "Usage" in out


def test_every_flag_of_serve_has_a_sample() -> None:
    assert set(SAMPLES) | set(HIDDEN) == set(SERVE)


ALONE = (  # flags that exclude the others
    ("grammar",),
    ("grammar_file",),
    ("json_schema",),
    ("json_schema_file",),
    ("flash_attn",),
    ("no_flash_attn",),
    ("exact",),
)
TOGETHER = tuple(name for name in SAMPLES if (name,) not in ALONE)


@pytest.mark.parametrize("names", [TOGETHER, *ALONE])
def test_flag_variable_and_file_say_the_same(
    program: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, names: tuple[str, ...]
) -> None:
    plain = printed(program, "serve")
    by_flag = printed(program, "serve", *(word for name in names for word in given(name, SAMPLES[name])))
    before, after = tomllib.loads(plain), tomllib.loads(by_flag)
    assert [name for name in names if before.get(name) == after.get(name)] == []
    file = tmp_path / "config.toml"
    for table in ("", "[serve]\n"):
        file.write_text(table + "".join(in_toml(name, SAMPLES[name]) for name in names), "utf-8")
        assert printed(program, "--config", str(file), "serve") == by_flag
        file.write_text(table + by_flag, "utf-8")  # what was printed says the same as a file
        assert printed(program, "--config", str(file), "serve") == by_flag
    for name in names:
        monkeypatch.setenv(f"ESP_EDGE_{name.upper()}", in_environment(SAMPLES[name]))
    assert printed(program, "serve") == by_flag


@pytest.mark.parametrize(("name", "other"), [("ctx_size", "64"), ("drafter", "pld"), ("prune", ""), ("stop", "X")])
def test_the_nearest_counts(
    program: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, other: str
) -> None:
    """Command line, environment, table of the command, top of the file, default."""
    file = tmp_path / "config.toml"
    key = f"ESP_EDGE_{name.upper()}"
    plain, one, two = (
        printed(program, "serve", *flags) for flags in ([], given(name, SAMPLES[name]), given(name, other))
    )
    assert one != two
    file.write_text(in_toml(name, SAMPLES[name]), "utf-8")
    argv = ("--config", str(file), "serve")
    assert printed(program, *argv) == one
    file.write_text(f"{in_toml(name, SAMPLES[name])}[serve]\n{in_toml(name, other)}", "utf-8")
    assert printed(program, *argv) == two
    monkeypatch.setenv(key, in_environment(SAMPLES[name]))
    assert printed(program, *argv) == one
    assert printed(program, *argv, *given(name, other)) == two
    monkeypatch.delenv(key)
    assert printed(program, "serve") == plain


# -- printing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["a\nb\t", '"\\', "emoji 😀 é", "\x7f\x1b", "= [x]", "# no comment", " ", "\u2028", "${HOME}"]
)
def test_any_text_comes_back(program: Program, tmp_path: Path, text: str) -> None:
    flags = ("--stop", text, "--stop", "2", "--alias", text)
    out = printed(program, "serve", *flags)
    table = tomllib.loads(out)
    assert (table["alias"], table["stop"]) == (text, [text, "2"])
    file = tmp_path / "config.toml"
    file.write_text(out, "utf-8")
    assert printed(program, "--config", str(file), "serve") == out


def test_bytes_that_are_no_text_are_an_error(program: Program) -> None:
    code, out, err = program("serve", "--print-config", "-m", "caf\udce9.gguf")
    assert (code, out) == (1, "")
    assert "UTF-8" in one_error(err)


def test_stops_of_the_environment_are_printed(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESP_EDGE_STOP", '["a b", "c"]')
    assert tomllib.loads(printed(program, "serve"))["stop"] == ["a b", "c"]


def test_keys_are_not_printed(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESP_EDGE_API_KEY", "hush hushhush")
    out = printed(program, "serve", "--alias", "x")
    assert "hush" not in out
    assert "# api_key: 2 set, not shown" in out


def test_a_wrong_setting_prints_nothing(program: Program) -> None:
    code, out, err = program("serve", "--print-config", "--allowed-host", "http://x")
    assert (code, out) == (1, "")
    assert "allowed-host" in one_error(err)
