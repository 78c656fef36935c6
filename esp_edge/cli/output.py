"""What the commands print: results on stdout; notes, progress, tables of statistics and errors on stderr."""

from __future__ import annotations

import functools
import json
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TextIO

import typer

from esp_edge.errors import EspEdgeError
from esp_edge.metrics import GenerationStats

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

__all__ = [
    "Bar",
    "Notices",
    "both_terminals",
    "console",
    "error",
    "note",
    "one_line",
    "one_line_errors",
    "print_json",
    "quiet_stdout",
    "stats_table",
    "summary",
    "warnings_as_notes",
    "write_text",
]

MOST_SIZES = 6  # sizes of passes that a table lists
INTERRUPTED, BROKEN_PIPE = 130, 141  # what a shell reports for SIGINT and SIGPIPE


@functools.cache
def console() -> Console:
    """The console on stderr; it follows ``sys.stderr``."""
    from rich.console import Console  # noqa: PLC0415 - rich is slow to import

    return Console(stderr=True, highlight=False)


def one_line(text: object) -> str:
    """A text without line ends and control characters."""
    return " ".join("".join(char if char.isprintable() else " " for char in str(text)).split())


def note(text: object) -> None:
    """A dim line on stderr."""
    console().print(one_line(text), style="dim", markup=False, soft_wrap=True)


def error(text: object) -> None:
    """``esp-edge: error: ...`` on one line of stderr."""
    print(f"esp-edge: error: {one_line(text)}", file=sys.stderr, flush=True)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn what a command raises on purpose, and what the system does to it, into one line and an exit code."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        quiet_stdout()
        raise typer.Exit(BROKEN_PIPE) from None
    except (EspEdgeError, ImportError) as failure:  # an ImportError says which command rebuilds the extension
        error(failure)
        raise typer.Exit(1) from None
    except MemoryError:
        error("the machine has not enough free memory; use a smaller model or --ctx-size")
        raise typer.Exit(1) from None
    except OSError as failure:
        where = f"{failure.filename}: " if failure.filename else ""
        error(f"{where}{failure.strerror or failure}")
        raise typer.Exit(1) from None


@contextmanager
def warnings_as_notes() -> Iterator[None]:
    """Show Python warnings as notes, without the line of code that raised them."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = lambda message, *_args, **_options: note(message)
        yield


def quiet_stdout() -> None:
    """Point stdout nowhere: its reader has left, and the interpreter would complain about the rest at exit."""
    with suppress(OSError, ValueError, AttributeError):  # a stand-in of a test has no descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def both_terminals() -> bool:
    """Whether a person sees both stdout and stderr."""
    return sys.stdout.isatty() and sys.stderr.isatty()


def write_text(text: str) -> None:
    """Text on stdout, at once."""
    if text:
        sys.stdout.write(text)
        sys.stdout.flush()


def print_json(document: Any, file: TextIO | None = None) -> None:
    """One JSON document on a line, in ASCII: valid wherever it goes, lone surrogates of an id included."""
    file = sys.stdout if file is None else file
    file.write(json.dumps(document, allow_nan=False) + "\n")
    file.flush()


class Notices:
    """Notes shown once each."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def show(self, text: str | None) -> None:
        """Show a note unless it was shown."""
        if text and text not in self._seen:
            self._seen.add(text)
            note(text)


class Bar:
    """A progress bar on stderr that appears with the first :meth:`update`; without a terminal, one line of text.

    Args:
        text: what is being done.
        unit: ``items``, ``bytes`` or ``percent``: how the counts are written.
        shown: False = never appears.
    """

    def __init__(self, text: str, *, unit: str = "items", shown: bool = True) -> None:
        self._text = text
        self._unit = unit
        self._shown = shown
        self._progress: Progress | None = None
        self._task: Any = None

    def update(self, done: int, total: int, text: str | None = None) -> None:
        """So far ``done`` of ``total`` (0 = not known); ``text`` replaces what is being done."""
        if not self._shown:
            return
        self._text = text or self._text
        if self._progress is None:
            self._start(total)
        if self._progress is not None:
            self._progress.update(self._task, description=self._text, completed=done, total=total or None)

    def update_file(self, name: str, done: int, total: int) -> None:
        """The same for a file that is being fetched."""
        self.update(done, total, f"downloading {name}")

    def _start(self, total: int) -> None:
        from rich.progress import Progress  # noqa: PLC0415 - rich is slow to import

        if not console().is_terminal:
            note(self._text)
            self._shown = False
            return
        # stdout is not redirected: it carries results, which must not end up on stderr
        self._progress = Progress(
            *self._columns(), console=console(), transient=True, redirect_stdout=False, refresh_per_second=4
        )
        self._task = self._progress.add_task(self._text, total=total or None)
        self._progress.start()

    def _columns(self) -> list[Any]:
        from rich import progress  # noqa: PLC0415

        counts = {
            "items": progress.MofNCompleteColumn,
            "bytes": progress.DownloadColumn,
            "percent": progress.TaskProgressColumn,
        }
        text = progress.TextColumn("{task.description}", markup=False)
        return [text, progress.BarColumn(), counts[self._unit](), progress.TimeRemainingColumn()]

    def close(self) -> None:
        """Take the bar away."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def summary(n_tokens: int, stats: GenerationStats) -> str:
    """One line about an answer."""
    return (
        f"{n_tokens} tokens, {stats.tokens_per_second:.1f} tokens/s, tau {stats.tau:.2f}, "
        f"{stats.rows_per_pass:.1f} rows/pass"
    )


def stats_table(
    stats: GenerationStats, explanation: Mapping[str, Any] | None = None, *, kernels: object = None
) -> Table:
    """Statistics of an answer, acceptance by depth and source included, and why the drafter drafted as it did.

    Args:
        explanation: of :meth:`esp_edge.session.Session.explain`.
        kernels: what the model computes with (:class:`esp_edge.models.kernels.Kernels`).
    """
    from rich.table import Table  # noqa: PLC0415 - rich is slow to import

    table = Table(title="last answer", show_header=False, title_justify="left")
    told = [("kernels", one_line(str(kernels)))] if kernels is not None else []
    for name, value in [*_stats_rows(stats), *told, *(_explained(explanation) if explanation else [])]:
        table.add_row(name, value)
    return table


def _stats_rows(stats: GenerationStats) -> list[tuple[str, str]]:
    rows = [
        ("drafter", stats.drafter if stats.mask_init is None else f"{stats.drafter}, masks {stats.mask_init}"),
        ("tau", f"{stats.tau:.3f}"),
        ("tokens/s", f"{stats.tokens_per_second:.1f}"),
        ("passes", str(stats.passes)),
        ("rows/pass", f"{stats.rows_per_pass:.2f}"),
        ("accepted / draft tokens", _rate(stats.accepted_tokens, stats.draft_tokens)),
    ]
    for depth, drafted in enumerate(stats.drafted_by_depth, start=1):
        accepted = stats.accepted_by_depth[depth - 1] if depth <= len(stats.accepted_by_depth) else 0
        rows.append((f"passes accepted to depth {depth}", _rate(accepted, drafted)))
    for source, drafted in sorted(stats.drafted_by_source.items(), key=lambda item: -item[1]):
        rows.append((f"drafts from {source}", _rate(stats.accepted_by_source.get(source, 0), drafted)))
    sizes = sorted(stats.sizes.items(), key=lambda item: -item[1])[:MOST_SIZES]
    rows += [
        ("passes by rows", ", ".join(f"{n} of {size}" for size, n in sizes)),
        ("host ms/pass", f"{stats.host_ms_per_pass:.3f}"),
        ("model ms/pass", f"{stats.model_ms_per_pass:.3f}"),
        ("prefill ms", f"{stats.prefill_ms:.1f}"),
        ("prompt tokens", f"{stats.prompt_tokens}, {stats.cached_tokens} of them from the KV cache"),
    ]
    if stats.seed is not None:
        rows.append(("seed", str(stats.seed)))
    if stats.note:
        rows.append(("note", one_line(stats.note)))
    return rows


def _explained(explanation: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The rows of a table that say why."""
    cost = explanation["cost"]
    one = cost["1"]
    bands, saved = explanation["calibration"], explanation["saved_ms"]
    rows = [
        ("ms of a pass by rows", ", ".join(f"{n}: {ms:.1f} ({ms / one:.2f}x)" for n, ms in cost.items())),
        ("worth of a millisecond", f"{explanation['price']:.3f} tokens"),
    ]
    if explanation["plain_ms"]:  # there was a decode pass
        compared = f"{abs(saved):.0f} ms {'more' if saved >= 0 else 'less'}"
        rows.append(("plain decoding would take", f"{explanation['plain_ms']:.0f} ms, {compared}"))
    if bands:
        told = ", ".join(f"{band['predicted']:.2f}/{band['observed']:.2f}" for band in bands)
        rows.append(("predicted / observed", told))
    if explanation["mask_gain"] is not None:
        rows.append(("tokens that masks bring", f"{explanation['mask_gain']:.2f} a pass"))
    if explanation["reason"]:
        rows.append(("why so few drafts", one_line(explanation["reason"])))
    return rows


def _rate(part: int, whole: int) -> str:
    return f"{part} / {whole}  ({100 * part / whole:.1f} %)" if whole else f"{part} / {whole}"
