"""Completion with the Tab key in bash, zsh and fish: the values of flags, and the scripts that shells read.

The scripts hand the line up to the cursor to the program, in the way typer's own script for fish does, and get lines
``VALUE<tab>HELP`` back. Typer's other scripts are not used: in bash, theirs cannot complete ``owner/repo:QUANT`` and
``--flag=value``, since bash takes ``:`` and ``=`` for ends of words.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from esp_edge.cli.downloads import downloads, model_names
from esp_edge.config import DRAFTERS, FUSED_SOURCES, KV_TYPES, MASK_INITS
from esp_edge.errors import ConfigError

__all__ = ["FLAGS", "SHELLS", "add_completion", "enable", "install", "one_of", "script", "with_shell"]

FLAGS = ("--show-completion", "--install-completion")

_ASKED = "_ESP_EDGE_COMPLETE"
# with columns for any help text: a second line of it would be taken for a value
_ASK = (
    f'_TYPER_COMPLETE_FISH_ACTION=get-args _TYPER_COMPLETE_ARGS="$line" {_ASKED}=complete_fish COLUMNS=9999 '
    '"$program" 2>/dev/null'
)
_BASH = f"""\
_esp_edge() {{
    local line=${{COMP_LINE:0:COMP_POINT}} program=$1 word lead='' cut='' value
    word=${{line##*[[:space:]]}}
    if [[ $word == --*=* ]]; then  # the value alone is completed
        [[ $COMP_WORDBREAKS == *=* ]] || lead=${{word%%=*}}=
        word=${{word#*=}}
    fi
    [[ $COMP_WORDBREAKS == *:* ]] && cut=${{word%"${{word##*:}}"}}  # bash keeps what stands before a colon
    COMPREPLY=()
    while IFS=$'\\t' read -r value _; do
        [[ -n $value ]] && COMPREPLY+=("$lead${{value#"$cut"}}")
    done < <({_ASK})
}}
complete -o default -F _esp_edge esp-edge
"""
_ZSH = f"""\
#compdef esp-edge
_esp-edge() {{
    local line="${{(j: :)words[1,CURRENT]}}" program=${{~words[1]}} answer
    local -a values
    [[ $words[CURRENT] == --*=* ]] && compset -P '*='  # the value alone is completed
    for answer in "${{(@f)$({_ASK})}}"; do
        [[ -n $answer ]] || continue
        values+=("${{${{answer%%$'\\t'*}}//:/\\\\:}}:${{${{answer#*$'\\t'}}#${{answer%%$'\\t'*}}}}")
    done
    if (( $#values )); then
        _describe -V value values
    else
        _files
    fi
}}
if [[ $funcstack[1] == _esp-edge ]]; then
    _esp-edge "$@"
else
    compdef _esp-edge esp-edge
fi
"""
_FISH = f"""\
function __esp_edge
    set -l line (commandline -cp | string collect)
    set -l program (commandline -opc)[1]
    set -l lead (string match -r -- '^--[^=]*=' (commandline -ct))
    set -l found (env {_ASK})
    if test -n "$found"
        printf "$lead%s\\n" $found
    else
        __fish_complete_path (commandline -ct)
    end
end
complete --command esp-edge --no-files --arguments '(__esp_edge)'
"""
_SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}
SHELLS = tuple(_SCRIPTS)

_Values = Callable[[str], list[str]]


# -- values ----------------------------------------------------------------------------------------------------------


def one_of(words: Sequence[str]) -> _Values:
    """Those that begin with what was typed."""

    def values(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return values


def _some_of(words: Sequence[str], joint: str) -> _Values:
    """Several in one value; what was written before stays."""

    def values(incomplete: str) -> list[str]:
        head, found, last = incomplete.rpartition(joint)
        return [head + found + word for word in words if word.startswith(last)]

    return values


def _models(incomplete: str) -> list[str]:
    return [name for name in model_names() if name.startswith(incomplete)]


def _downloads(incomplete: str) -> list[str]:
    return [found.name for found in downloads() if found.name.startswith(incomplete)]


# by the parameter's name; flags whose metavar lists their values need no entry
_VALUES: dict[str, _Values] = {
    "model": _models,
    "draft_model": _models,
    "name": _downloads,  # of models remove
    "repository": _downloads,  # of models pull
    "drafter": one_of(DRAFTERS),
    "drafters": _some_of(DRAFTERS, ","),
    "sources": _some_of(FUSED_SOURCES, "+"),
    "mask_init": one_of(MASK_INITS),
    "cache_type_k": one_of(KV_TYPES),
    "cache_type_v": one_of(KV_TYPES),
}


def add_completion(command: Callable[..., Any]) -> None:
    """Give the flags and arguments of a command (their typer annotations) the values that Tab offers."""
    for name, hint in command.__annotations__.items():
        for info in getattr(hint, "__metadata__", ()):
            metavar = getattr(info, "metavar", None) or ""
            words = metavar.split("|") if re.fullmatch(r"[a-z-]+(\|[a-z-]+)+", metavar) else []
            found = _VALUES.get(name) or (one_of(words) if words else None)
            if found is not None:
                info.autocompletion = found


def enable() -> None:
    """Make this run answer the shell, if one of the scripts asks."""
    if _ASKED in os.environ:
        from typer._completion_classes import completion_init  # noqa: PLC0415

        completion_init()


# -- scripts ---------------------------------------------------------------------------------------------------------


def script(shell: str) -> str:
    """What a shell reads.

    Raises:
        ConfigError: there is none for it.
    """
    if shell not in _SCRIPTS:
        raise ConfigError(f"completion is there for {', '.join(SHELLS)}, but {shell!r} was given")
    return _SCRIPTS[shell]


def install(shell: str, home: Path) -> tuple[Path, Path | None]:
    """Write the script where the shell looks for it: (its file, the start-up file that now names it, if one has to).

    Raises:
        ConfigError: there is none for this shell.
        OSError: a file cannot be written.
    """
    text = script(shell)
    file, start, line = _places(shell, home)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, "utf-8")
    if start is not None:
        old = start.read_text("utf-8", "surrogateescape") if start.exists() else ""
        if line not in old.splitlines():
            gap = "" if not old or old.endswith("\n") else "\n"
            with start.open("a", encoding="utf-8") as out:  # appended to: nothing of the user's own can get lost
                out.write(f"{gap}{line}\n")
    return file, start


def _places(shell: str, home: Path) -> tuple[Path, Path | None, str]:
    """File of the script, start-up file, and the line it needs."""
    if shell == "bash":
        file = home / ".bash_completions" / "esp-edge.sh"
        return file, home / ".bashrc", f"source '{file}'"
    if shell == "zsh":
        folder = home / ".zfunc"
        rc = Path(os.environ.get("ZDOTDIR") or home) / ".zshrc"
        return folder / "_esp-edge", rc, f"fpath+=('{folder}'); autoload -Uz compinit; compinit"
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
    return folder / "fish" / "completions" / "esp-edge.fish", None, ""


def with_shell(argv: Sequence[str] | None) -> list[str] | None:
    """A command line (None = the process's own) whose last word is one of :data:`FLAGS`, with the user's shell added.

    What needs nothing stays as it is; None too, so that click expands wildcards where the system does not.
    """
    found = sys.argv[1:] if argv is None else list(argv)
    if found and found[-1] in FLAGS:
        return [*found, _own_shell()]
    return None if argv is None else found


def _own_shell() -> str:
    try:
        import shellingham  # type: ignore[import-untyped, unused-ignore]  # noqa: PLC0415 - comes with most typers

        return str(shellingham.detect_shell()[0])
    except Exception:  # none above us, or no such package
        return Path(os.environ.get("SHELL", "")).name or "bash"
