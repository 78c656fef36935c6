"""``esp-edge bench quants``: which quantization of a model to use on this machine."""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from esp_edge.cli.bench import AnswerOptions, AsJson, NoPlots, model_file, shown_command
from esp_edge.cli.inputs import read_text
from esp_edge.cli.options import LoadOptions, ModelName, option
from esp_edge.cli.output import Bar, note, print_json, warnings_as_notes, write_text

if TYPE_CHECKING:
    from esp_edge.bench.perplexity import Corpus
    from esp_edge.bench.questions import Question
    from esp_edge.bench.run import ModelFile

__all__ = ["quants"]

_bench = functools.partial(option, panel="Benchmark")
_perplexity = functools.partial(option, panel="Perplexity")


@dataclass(frozen=True)
class PerplexityOptions:
    """The text whose perplexity is measured."""

    text: Annotated[
        Path | None, _perplexity("--text", text="UTF-8 file for the perplexity. (default: what the questions ask)")
    ] = None
    ppl_ctx: Annotated[int, _perplexity("--ppl-ctx", text="Tokens of a window.")] = 512
    ppl_chunks: Annotated[int, _perplexity("--ppl-chunks", text="Windows at most; 0 = the whole text.", min=0)] = 32

    def corpus(self, file: Path, questions: Sequence[Question]) -> Corpus:
        """The text of the option, or else that of all questions of ``file``."""
        from esp_edge.bench.perplexity import Corpus, questions_text  # noqa: PLC0415 - loads llama.cpp

        if self.text is not None:
            return Corpus(self.text.name, read_text(self.text), self.ppl_ctx, self.ppl_chunks)
        return Corpus(f"the questions of {file.name}", questions_text(questions), self.ppl_ctx, self.ppl_chunks)


def quants(
    *,
    load: LoadOptions,
    answers: AnswerOptions,
    read: PerplexityOptions,
    questions: Annotated[Path, _bench("--questions", text="Spec-Bench's question.jsonl, or a file of that format.")],
    out: Annotated[Path, _bench("--out", text="Directory of the results; a run that was stopped there goes on.")],
    model: ModelName = "smollm2",
    quant: Annotated[
        str,
        _bench(
            "--quants", metavar="A,B", text="Made from the model where they are missing; source = the model itself."
        ),
    ] = "Q4_0,Q8_0,source",
    work: Annotated[
        Path | None, _bench("--work", text="Directory of the made files. (default: models in --out)")
    ] = None,
    drafters: Annotated[
        str, _bench("--drafters", metavar="A,B[OPTION=VALUE,...]", text="Compared with plain decoding.")
    ] = "auto",
    block_complexity: Annotated[str, _bench("--block-complexity", metavar="N,N", text="Rows of one pass.")] = "10",
    per_category: Annotated[
        int, _bench("--per-category", text="The first N questions of each category; 0 = all.", min=0)
    ] = 1,
    within: Annotated[
        float, _perplexity("--within", text="Percent above the best that a recommended file may be.", min=0)
    ] = 2.0,
    as_json: AsJson = False,
    no_plots: NoPlots = False,
) -> None:
    """Compare quantizations of a model: size, cost of rows, speed with and without drafters, perplexity.

    Ends with the file to download for this machine. Exit code 1 when an answer is not plain decoding's (see specbench).
    Writes quants.json, report.md, benchmark.md and plots, beside everything specbench writes.
    """
    from esp_edge.bench import plots, spec  # noqa: PLC0415 - the rest loads llama.cpp
    from esp_edge.bench.questions import load_questions, select  # noqa: PLC0415

    lanes = spec.make_lanes(spec.parse_drafters(drafters), spec.parse_numbers(block_complexity, "--block-complexity"))
    asked = load_questions(questions)
    config = load.config()
    if not no_plots:
        plots.require_matplotlib()
    corpus = read.corpus(questions, asked)
    from esp_edge.bench import quants as bench  # noqa: PLC0415
    from esp_edge.bench.run import Plan  # noqa: PLC0415

    source, files = _files(model, quant.split(","), work or out / "models", config.n_threads)
    plan = Plan(files, config, lanes, select(asked, per_category), answers.params(), answers.repeat)
    measure = functools.partial(bench.measure, plan, corpus, out, source=source, within=within, plots=not no_plots)
    with Bar("benchmark") as bar:
        document = measure(command=shown_command(sys.argv), progress=bar.update)
    if as_json:
        print_json(document)
    else:
        write_text(bench.overview(document))
    note(f"details: {out / 'report.md'}")
    if document["failures"]:
        raise typer.Exit(1)


def _files(model: str, names: Sequence[str], folder: Path, threads: int) -> tuple[ModelFile, list[ModelFile]]:
    """The source and what is made from it."""
    from esp_edge.bench.quants import SOURCE, make_files  # noqa: PLC0415
    from esp_edge.models.quantize import target_names  # noqa: PLC0415

    target_names([name for name in names if name.strip().lower() != SOURCE] or ["F32"])  # before any download
    source = model_file(model)
    with warnings_as_notes(), Bar("quantizing", unit="percent") as bar:
        files = make_files(
            source.path,
            names,
            folder,
            threads=threads,
            progress=lambda name, part: bar.update(round(1000 * part), 1000, f"writing {name}"),
        )
    return source, files
