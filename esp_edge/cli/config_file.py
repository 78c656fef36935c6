"""The configuration file: values of flags in TOML, below the command line and the environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from esp_edge.cli.conversation import closest
from esp_edge.cli.inputs import read_text
from esp_edge.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["default_path", "read_defaults"]

FILE_NAME = "config.toml"


def default_path(platform: str, environment: Mapping[str, str], home: Path) -> Path:
    """Where the file is looked for when none is named; ``platform`` as in ``sys.platform``."""
    if platform == "win32":
        root = Path(environment.get("APPDATA") or home / "AppData" / "Roaming")
    elif platform == "darwin":
        root = home / "Library" / "Application Support"
    else:
        root = Path(environment.get("XDG_CONFIG_HOME") or home / ".config")
    return root / "esp_edge" / FILE_NAME


def read_defaults(named: str | None, context: Any) -> dict[str, Any]:
    """Click's ``default_map`` for a program (its context), from the named file or else the usual one, if it is there.

    Keys at the top serve every command that has such a flag, those of a table its own commands, which win.

    Raises:
        ConfigError: broken TOML, an unknown key, or a value that the flag refuses.
        PromptError: the named file cannot be read.
    """
    path = Path(named) if named else _usual_file()
    if path is None:
        return {}
    try:
        table = tomllib.loads(read_text(path))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is no TOML: {error}") from None
    program = context.command
    _check_keys(table, program, str(path))
    return _defaults(program, [(str(path), table)], context)


def _usual_file() -> Path | None:
    try:
        path = default_path(sys.platform, os.environ, Path.home())
    except RuntimeError:  # nobody's home
        return None
    return path if path.is_file() else None


def _subcommands(command: Any) -> dict[str, Any]:
    return getattr(command, "commands", {})


def _flags(command: Any) -> dict[str, Any]:
    """Key -> parameter of a command that does something: every long name, and MODEL where it is an argument."""
    found = {}
    for parameter in command.params:
        for name in parameter.opts:
            if name.startswith("--") or name == "model":
                found[_key(name)] = parameter
            if name == "model":  # TOML has no room for a key model beside a table [model.show]
                found["hf_repo"] = parameter
    return found


def _key(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def _all_keys(command: Any) -> Iterator[str]:
    for below in _subcommands(command).values():
        yield from _all_keys(below)
    if not _subcommands(command):
        yield from _flags(command)


def _check_keys(table: Mapping[str, Any], command: Any, where: str) -> None:
    commands, keys = _subcommands(command), set(_all_keys(command))
    for key, value in table.items():
        if isinstance(value, dict) and key in commands:
            _check_keys(value, commands[key], _within(where, key))
        elif isinstance(value, dict) and _key(key) not in keys:
            raise ConfigError(f"{where}: there is no command {key}{closest(key, commands)}")
        elif _key(key) not in keys:
            raise ConfigError(f"{where}: there is no setting {key}{closest(_key(key), sorted(keys))}")


def _within(where: str, key: str) -> str:
    """``FILE`` -> ``FILE: [key]`` -> ``FILE: [key.key]``."""
    return f"{where[:-1]}.{key}]" if where.endswith("]") else f"{where}: [{key}]"


def _defaults(command: Any, tables: Sequence[tuple[str, Mapping[str, Any]]], context: Any) -> dict[str, Any]:
    commands = _subcommands(command)
    if commands:
        where, inner = tables[-1]
        settings = {key: value for key, value in inner.items() if key not in commands or not isinstance(value, dict)}
        outer = [*tables[:-1], (where, settings)]  # [model] and [bench.quants] are tables, though flags have the names
        found = {}
        for name, below in commands.items():
            own = inner.get(name)
            table: Mapping[str, Any] = own if isinstance(own, dict) else {}
            if context.command is not command or name == context.invoked_subcommand:  # others may refuse a value
                found[name] = _defaults(below, [*outer, (_within(where, name), table)], context)
        return found
    flags, values = _flags(command), {}
    for where, table in tables:
        for key, value in table.items():
            flag = flags.get(_key(key))
            if flag is not None:
                values[flag.name] = _value(flag, value, f"{where}: {key}", context)
    return values


def _value(flag: Any, value: Any, where: str, context: Any) -> Any:
    """What the command line would have given, tried on the flag so that the file is named when it does not fit."""
    items = value if isinstance(value, list) else [value]
    if not all(isinstance(item, bool | int | float | str) for item in items):
        raise ConfigError(f"{where} must be a text, a number, true, false or a list of them, but {value!r} was found")
    given: Any
    if getattr(flag, "is_flag", False):
        if not isinstance(value, bool):
            raise ConfigError(f"{where} must be true or false, but {value!r} was found")
        given = value
    elif getattr(flag, "multiple", False):
        given = [_text(item) for item in items]
    else:
        given = ",".join(map(_text, items))  # widths of a tree, drafters of a benchmark
    try:
        flag.process_value(context, given)
    except Exception as error:  # click's own class, whose home differs between versions of typer
        if not hasattr(error, "format_message"):
            raise
        reason = str(getattr(error, "message", error)).rstrip(".")
        raise ConfigError(f"{where} = {value!r}: {reason}") from None
    return given


def _text(value: bool | int | float | str) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)
