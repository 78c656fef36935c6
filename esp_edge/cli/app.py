"""The ``esp-edge`` program: its commands, and how their failures leave it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NoReturn

import typer

from esp_edge.cli.bench import cost, specbench
from esp_edge.cli.chat import chat
from esp_edge.cli.generate import generate
from esp_edge.cli.model import calibrate, quantize, show
from esp_edge.cli.options import expand_options
from esp_edge.cli.output import BROKEN_PIPE, error, one_line_errors, quiet_stdout, write_text

__all__ = ["app", "main"]

PROGRAM = "esp-edge"
ENVIRONMENT = "Flags are also read from the environment: --ctx-size from ESP_EDGE_CTX_SIZE."
# The base of everything a wrong command line raises; its home differs between versions of typer.
_UsageError: Any = next(cls for cls in typer.BadParameter.__mro__ if cls.__name__ == "ClickException")
_GROUP: dict[str, Any] = {
    "invoke_without_command": True,
    "no_args_is_help": False,
    "pretty_exceptions_enable": False,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}

app = typer.Typer(**_GROUP, help="Lossless multi-token decoding for local GGUF models.")
models = typer.Typer(**_GROUP, help="Look at model files, quantize them, measure what suits them.")
app.add_typer(models, name="model")
benchmarks = typer.Typer(**_GROUP, help="Measure drafters and passes on this machine.")
app.add_typer(benchmarks, name="bench")


def _add(group: typer.Typer, function: Callable[..., None]) -> None:
    command = expand_options(function)

    @functools.wraps(command)
    def guarded(**values: Any) -> None:
        with one_line_errors():
            command(**values)

    guarded.__signature__ = command.__signature__  # type: ignore[attr-defined]
    group.command(function.__name__, epilog=ENVIRONMENT)(guarded)


for _group, _function in (
    (app, generate),
    (app, chat),
    (models, show),
    (models, quantize),
    (models, calibrate),
    (benchmarks, specbench),
    (benchmarks, cost),
):
    _add(_group, _function)


@app.callback()
def _program(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        from esp_edge import __version__  # noqa: PLC0415

        write_text(f"{PROGRAM} {__version__}\n")
    elif context.invoked_subcommand is None:
        write_text(context.get_help())


@models.callback()
@benchmarks.callback()
def _group_help(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        write_text(context.get_help())


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the program and exit: 0, 1 after an error, 2 after a wrong command line, 130 after Ctrl-C."""
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")  # a terminal that cannot show a character is no reason to stop
    sys.exit(_run(None if argv is None else list(argv)))


def _run(argv: list[str] | None) -> int:
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
