"""``esp-edge generate``: a prompt in, its answer out."""

from __future__ import annotations

import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from esp_edge.cli import batch
from esp_edge.cli.answer import Answer, answer, open_session, to_messages
from esp_edge.cli.inputs import STDIN, is_terminal, read_text, without_line_end
from esp_edge.cli.options import DraftOptions, LoadOptions, ModelName, SamplingOptions, option
from esp_edge.cli.output import (
    INTERRUPTED,
    Bar,
    Notices,
    both_terminals,
    console,
    note,
    print_json,
    stats_table,
    summary,
    write_text,
)
from esp_edge.config import DraftConfig, GenerationParams, ModelConfig
from esp_edge.errors import PromptError

if TYPE_CHECKING:
    from esp_edge.session import Prompt, Session

__all__ = ["generate"]

EXAMPLE = 'give one, such as: esp-edge generate "Why is the sky blue?"'


def generate(
    *,
    load: LoadOptions,
    sampling: SamplingOptions,
    draft: DraftOptions,
    prompt: Annotated[str | None, typer.Argument(help="Text, or - for stdin (also when stdin is no terminal).")] = None,
    model: ModelName = "smollm2",
    file: Annotated[Path | None, option("-f", "--file", text="Read the prompt from a file.")] = None,
    raw: Annotated[bool, option("--raw", text="The prompt as it is, without the chat template.")] = False,
    system: Annotated[str | None, option("-sys", "--system", text="System prompt.")] = None,
    as_json: Annotated[bool, option("--json", text="Print one JSON document.")] = False,
    jsonl: Annotated[
        Path | None,
        option("--jsonl", text="Answer many requests, one {id, prompt or messages} a line; - = stdin."),
    ] = None,
    out: Annotated[
        Path | None,
        option(
            "--out", text="With --jsonl: append to a file; ids answered there are skipped, failed ones asked again."
        ),
    ] = None,
    stats: Annotated[
        bool | None, option("--stats/--no-stats", text="One line of statistics in the end. (default: on a terminal)")
    ] = None,
    explain: Annotated[
        bool,
        option(
            "--explain",
            text="In the end, all statistics and why the drafter drafted as it did; with --jsonl in every document.",
        ),
    ] = False,
) -> None:
    """Answer a prompt, or many with --jsonl."""
    _check_usage(prompt, file, jsonl, out)
    if raw and system is not None:
        raise typer.BadParameter("it is part of the chat template: drop --raw or --system", param_hint="'--system'")
    params, drafting, loading = sampling.params(), draft.config(), load.config()
    if jsonl is not None:
        requests = batch.read_requests(jsonl, params, system=system, raw=raw)
        _run_batch(requests, out, model, loading, drafting, explain=explain)
        return
    if params.logprobs is not None and not as_json:
        raise typer.BadParameter(
            "log-probabilities are part of the JSON document: add --json", param_hint="'--logprobs'"
        )
    text = _read_prompt(prompt, file)
    with open_session(model, loading, drafting) as session:
        if not raw:
            notices = Notices()
            notices.show(session.model.template_warning)
        result = _run_one(session, text if raw else to_messages(text, system), params, as_json)
        if explain:
            explanation = session.explain(result.stats)
            console().print(stats_table(result.stats, explanation, kernels=session.model.kernels))
        _finish(result, stats)


def _check_usage(prompt: str | None, file: Path | None, jsonl: Path | None, out: Path | None) -> None:
    sources = [name for name, value in (("PROMPT", prompt), ("--file", file), ("--jsonl", jsonl)) if value is not None]
    if len(sources) > 1:
        raise typer.BadParameter(f"give one of PROMPT, --file and --jsonl, not {' and '.join(sources)}")
    if out is not None and jsonl is None:
        raise typer.BadParameter("it holds the results of --jsonl; without that, use > FILE", param_hint="'--out'")
    if out is not None and jsonl is not None and _is_same_file(jsonl, out):
        raise typer.BadParameter("it is the file of the requests; results need their own", param_hint="'--out'")


def _is_same_file(first: Path, second: Path) -> bool:
    try:
        return first.samefile(second)
    except (OSError, ValueError):  # one of them is not there, or cannot be a name
        return False


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt, wherever it comes from. A line end at the very end of a file is not part of it."""
    if prompt is not None and prompt != STDIN:
        text = prompt
    elif file is not None:
        text = without_line_end(read_text(file))
    elif prompt == STDIN or not is_terminal():
        text = without_line_end(read_text(STDIN))
    else:
        raise typer.BadParameter(f"there is no prompt; {EXAMPLE}")
    if not text:
        raise PromptError(f"the prompt is empty; {EXAMPLE}")
    return text


def _run_one(session: Session, prompt: Prompt, params: GenerationParams, as_json: bool) -> Answer:
    """Print an answer: as it comes, or as a document when it is complete."""
    result = answer(session, prompt, params, None if as_json else write_text)
    if as_json and result.finish_reason is not None:
        document = result.document(f"gen-{uuid.uuid4().hex}", session, logprobs=params.logprobs is not None)
        if session.explain(result.stats) is not None:
            document["explanation"] = session.explain(result.stats)
        print_json(document)
    elif not as_json and not result.text.endswith("\n"):
        write_text("\n")
    return result


def _finish(result: Answer, stats: bool | None) -> None:
    Notices().show(result.stats.note)
    if both_terminals() if stats is None else stats:
        note(summary(len(result.token_ids), result.stats))
    if result.finish_reason is None:
        raise typer.Exit(INTERRUPTED)


def _run_batch(
    requests: list[batch.Request],
    out: Path | None,
    model: str,
    loading: ModelConfig,
    drafting: DraftConfig,
    *,
    explain: bool,
) -> None:
    done = {} if out is None else batch.finished(out)
    todo = [request for request in requests if done.get(request.request_id, True)]
    n_failed = 0
    if len(todo) < len(requests):
        note(f"{len(requests) - len(todo)} of {len(requests)} requests are answered in {out} already")
    if todo:
        # a bar between documents on one terminal would be torn apart
        shown = out is not None or not sys.stdout.isatty()
        with (
            batch.open_results(out) as results,
            open_session(model, loading, drafting) as session,
            Bar("answering", shown=shown) as bar,
        ):
            n_failed = batch.run(session, todo, results, bar=bar, explain=explain)
    if n_failed:
        note(f"{n_failed} of {len(requests)} requests failed; their documents say why")
        raise typer.Exit(1)
