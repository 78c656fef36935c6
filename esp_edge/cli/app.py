"""The ``esp-edge`` program: its commands, and how their failures leave it."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from esp_edge.cli.analyze import alignment, profile
from esp_edge.cli.bench import cost, specbench
from esp_edge.cli.bench_ablate import ablate
from esp_edge.cli.bench_quants import quants
from esp_edge.cli.bench_serve import serve as bench_serve
from esp_edge.cli.bench_trace import replay, trace
from esp_edge.cli.chat import chat
from esp_edge.cli.completion import SHELLS, add_completion, enable, install, one_of, script, with_shell
from esp_edge.cli.config_file import read_defaults
from esp_edge.cli.generate import generate
from esp_edge.cli.model import calibrate, quantize, show
from esp_edge.cli.models import list_, pull, remove
from esp_edge.cli.models import show as show_file
from esp_edge.cli.options import command_line_first, expand_options
from esp_edge.cli.output import BROKEN_PIPE, error, note, one_line_errors, quiet_stdout, write_text
from esp_edge.cli.serve import serve
from esp_edge.cli.tune import tune

__all__ = ["app", "main"]

PROGRAM = "esp-edge"
ENVIRONMENT = "Flags are also read from the environment: --ctx-size from ESP_EDGE_CTX_SIZE."
CONFIG = (
    "TOML file with flags, such as ctx_size = 2048; those of one command in its table, generate or "
    "bench.specbench. The command line counts first, then the environment, this file, the defaults. (default: "
    "$ESP_EDGE_CONFIG, or esp_edge/config.toml under ~/.config, %APPDATA% or ~/Library/Application Support)"
)
# The base of everything a wrong command line raises; its home differs between versions of typer.
_UsageError: Any = next(cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "ClickException")
_shell = functools.partial(typer.Option, metavar="|".join(SHELLS), autocompletion=one_of(SHELLS))
_GROUP: dict[str, Any] = {
    "invoke_without_command": True,
    "no_args_is_help": False,
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}

app = typer.Typer(**_GROUP, add_completion=False, help="Lossless multi-token decoding for local GGUF models.")
models = typer.Typer(**_GROUP, help="Look at model files, quantize them, measure what suits them.")
app.add_typer(models, name="model")
store = typer.Typer(**_GROUP, help="List, download, show and remove models.")
app.add_typer(store, name="models")
benchmarks = typer.Typer(**_GROUP, help="Measure drafters and passes on this machine.")
app.add_typer(benchmarks, name="bench")
analyses = typer.Typer(**_GROUP, help="Look inside a model while it is probed.")
app.add_typer(analyses, name="analyze")


def _add(group: typer.Typer, function: Callable[..., None]) -> None:
    command = expand_options(function)
    add_completion(command)

    @functools.wraps(command)
    def guarded(context: typer.Context, **values: Any) -> None:
        def source(name: str) -> str:
            found = context.get_parameter_source(name)
            return "DEFAULT" if found is None else found.name

        with one_line_errors():
            command(**command_line_first(values, source))

    parameters = inspect.signature(command).parameters.values()
    context = inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    guarded.__signature__ = inspect.Signature([context, *parameters])  # type: ignore[attr-defined]
    guarded.__annotations__ = {"context": typer.Context, **command.__annotations__}
    group.command(function.__name__.rstrip("_"), epilog=ENVIRONMENT)(guarded)


for _group, _function in (
    (app, generate),
    (app, chat),
    (app, serve),
    (app, tune),
    (store, list_),
    (store, pull),
    (store, show_file),
    (store, remove),
    (models, show),
    (models, quantize),
    (models, calibrate),
    (benchmarks, specbench),
    (benchmarks, cost),
    (benchmarks, ablate),
    (analyses, alignment),
    (analyses, profile),
    (benchmarks, quants),
    (benchmarks, trace),
    (benchmarks, replay),
    (benchmarks, bench_serve),
):
    _add(_group, _function)


@app.callback()
def _program(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    config: Annotated[
        str | None,
        typer.Option("--config", metavar="FILE", envvar="ESP_EDGE_CONFIG", show_envvar=False, help=CONFIG),
    ] = None,
    show_completion: Annotated[
        str | None, _shell("--show-completion", help="Print a script that completes with Tab, and stop.")
    ] = None,
    install_completion: Annotated[
        str | None, _shell("--install-completion", help="Put it where the shell looks for it, and stop.")
    ] = None,
) -> None:
    if version:
        from esp_edge import __version__  # noqa: PLC0415

        write_text(f"{PROGRAM} {__version__}\n")
    elif show_completion is not None:
        with one_line_errors():
            write_text(script(show_completion))
        raise typer.Exit
    elif install_completion is not None:
        with one_line_errors():
            _install(install_completion)
        raise typer.Exit
    elif context.invoked_subcommand is None:
        write_text(context.get_help())
    else:
        with one_line_errors():
            context.default_map = read_defaults(config, context)


def _install(shell: str) -> None:
    file, start = install(shell, Path.home())
    note(f"new {shell} terminals complete esp-edge now" + (f", by a line in {start}" if start else ""))
    write_text(f"{file}\n")


@models.callback()
@store.callback()
@benchmarks.callback()
@analyses.callback()
def _group_help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        write_text(context.get_help())


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the program and exit: 0, 1 after an error, 2 after a wrong command line, 130 after Ctrl-C."""
    _open_streams()
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")  # a terminal that cannot show a character is no reason to stop
    sys.exit(_run(with_shell(argv)))


def _open_streams() -> None:
    """Give closed outputs (``>&-``) a place where nobody reads, instead of None."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - open to the end


def _run(argv: list[str] | None) -> int:
    enable()
    try:
        code = app(args=argv, prog_name=PROGRAM, standalone_mode=False)
        sys.stdout.flush()
    except BrokenPipeError:
        quiet_stdout()
        return BROKEN_PIPE
    except _UsageError as failure:
        context = getattr(failure, "ctx", None)
        command = context.command_path if context is not None else PROGRAM
        error(f"{failure.format_message()} (see {command} --help)")
        return int(failure.exit_code)
    except typer.Abort:
        return 1
    return code if isinstance(code, int) else 0
