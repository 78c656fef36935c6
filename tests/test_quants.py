"""Quantisations side by side: perplexity against a slow twin, files, rows, the answer, resuming, and the command."""

from __future__ import annotations

import json
import math
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_fakes import Program, make_program, one_error

from esp_edge.bench import quants as bench
from esp_edge.bench import run
from esp_edge.bench.perplexity import (
    Corpus,
    Perplexity,
    perplexity,
    questions_text,
    read_stored,
    relative,
    store,
    windows_of,
)
from esp_edge.bench.quant_plots import plot_quants
from esp_edge.bench.quants import Weights, answer, make_files, quant_report, quant_rows, quant_table
from esp_edge.bench.questions import Question
from esp_edge.config import ModelConfig
from esp_edge.errors import ConfigError, PromptError
from esp_edge.models.quantize import QuantizationWarning
from esp_edge.session import Model, load
from esp_edge.step import Step
from esp_edge.tree import DraftTree

TEXT = "the rain in spain stays mainly in the plain, or so they say; " * 8
CONFIG = ModelConfig(n_ctx=256, n_threads=1)


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Program:
    return make_program(monkeypatch, capsys)


# -- perplexity ------------------------------------------------------------------------------------------------------


def slow_nll(model: Model, text: str, n_ctx: int, max_windows: int = 0) -> Iterator[float]:
    """llama.cpp's definition, a token a pass and the whole softmax in numpy (float64)."""
    ids = model.tokenizer.encode(text, add_special=True)
    context = model.new_context(1, n_ctx=n_ctx)
    step = Step(context)
    for window in range(min(len(ids) // n_ctx, max_windows or len(ids))):
        tokens = ids[window * n_ctx : (window + 1) * n_ctx]
        if model.tokenizer.adds_bos:
            tokens[0] = model.tokenizer.bos
        step.reset()
        for position, token in enumerate(tokens[:-1]):
            step.run(DraftTree.root_only(token))
            logits = step.native.logits(0).astype(np.float64)
            step.commit(())
            if position >= n_ctx // 2:
                yield float(np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[tokens[position + 1]])
    context.close()


@pytest.mark.parametrize("arch", ["llama", "gemma3", "mamba"])  # gemma3's vocabulary wants a BOS, mamba goes row by row
@pytest.mark.parametrize(("n_ctx", "windows"), [(64, 0), (33, 2)])
def test_perplexity_is_llama_cpps(tiny: Callable[..., Path], arch: str, n_ctx: int, windows: int) -> None:
    with load(str(tiny(arch)), CONFIG) as model:
        assert model.tokenizer.adds_bos == (arch == "gemma3")
        wanted = np.array(list(slow_nll(model, TEXT, n_ctx, windows)))
        found = perplexity(model, Corpus("a text", TEXT, n_ctx, windows))
        assert not list(model.contexts)
    assert found.n_tokens == len(wanted) == found.windows * (n_ctx - 1 - n_ctx // 2)
    np.testing.assert_allclose(found.nll, wanted, atol=5e-3)  # one row a pass takes another kernel
    # the end of llama.cpp's perplexity(): sums of nll and of its squares
    mean = wanted.sum() / len(wanted)
    variance = (wanted**2).sum() / len(wanted) - mean**2
    assert found.value == pytest.approx(math.exp(mean), rel=1e-3)
    assert found.error == pytest.approx(math.exp(mean) * math.sqrt(variance / (len(wanted) - 1)), rel=1e-3)


def test_perplexity_is_the_same_in_exact_mode(tiny: Callable[..., Path]) -> None:
    """A window of 300 tokens has 149 scored rows, more than an exact pass may have."""
    results = []
    for exact in (False, True):
        with load(str(tiny("llama")), replace(CONFIG, exact=exact)) as model:
            results.append(perplexity(model, Corpus("a text", TEXT * 2, 300)))
    assert results[0] == results[1]
    assert results[0].n_tokens == 149 * results[0].windows


def test_perplexity_copies_no_logits(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Only single log-probabilities leave the compiled step, one a scored token."""
    asked = []

    class Spy:
        def __init__(self, outputs: Any) -> None:
            self._outputs = outputs

        def logprob(self, row: int, token_id: int) -> float:
            asked.append(row)
            return float(self._outputs.logprob(row, token_id))

    plain_run = Step.run
    monkeypatch.setattr(Step, "run", lambda self, tree: Spy(plain_run(self, tree)))
    seen = []
    with load(str(tiny("llama")), CONFIG) as model:
        perplexity(model, Corpus("a text", TEXT, 64, 3), progress=lambda *state: seen.append(state))
    assert asked == [*range(31)] * 3
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_windows_of_a_text(tiny: Callable[..., Path]) -> None:
    with load(str(tiny("gemma3")), CONFIG) as model:
        ids = model.tokenizer.encode(TEXT, add_special=True)
        windows = windows_of(model.tokenizer, Corpus("a text", TEXT, 50))
        assert len(windows) == len(ids) // 50
        assert [window[0] for window in windows] == [model.tokenizer.bos] * len(windows)
        assert [window[1:] for window in windows] == [ids[i * 50 + 1 : (i + 1) * 50] for i in range(len(windows))]
        assert windows_of(model.tokenizer, Corpus("a text", TEXT, 50, 3)) == windows[:3]


def test_a_text_that_cannot_be_used(tiny: Callable[..., Path]) -> None:
    with load(str(tiny("llama")), CONFIG) as model:
        with pytest.raises(PromptError, match=r"needs a text of at least 128 tokens, but a.txt has \d+; give a longer"):
            perplexity(model, Corpus("a.txt", "the rain", 64))
        with pytest.raises(ConfigError, match="trained for 512 tokens, but windows of 600 were asked for"):
            perplexity(model, Corpus("a.txt", TEXT * 9, 600))
    with pytest.raises(ConfigError, match="windows of 8 tokens or more, but 4 was given"):
        Corpus("a.txt", TEXT, 4)


def test_the_error_of_a_ratio_is_that_of_the_differences() -> None:
    base = Perplexity((1.0, 5.0, 3.0, 7.0), 1)
    found = Perplexity((1.1, 5.1, 3.1, 7.3), 1)
    ratio, error = relative(found, base)
    assert ratio == pytest.approx(math.exp(0.15))
    assert error == pytest.approx(ratio * np.std([0.1, 0.1, 0.1, 0.3]) / math.sqrt(3))
    assert error < 0.05 * found.error / base.value
    assert relative(base, base) == (1, 0)
    with pytest.raises(ConfigError, match="one vocabulary"):
        relative(found, Perplexity((1.0, 2.0), 1))


def test_the_questions_as_a_text() -> None:
    questions = [Question(i, c, (f"{c}{i}", f"more{i}")) for i, c in enumerate("aabab")]
    assert questions_text(questions).split("\n\n")[::2] == ["a0", "b2", "a1", "b4", "a3"]
    assert questions_text(questions).startswith("a0\n\nmore0\n\nb2")


def test_a_stored_perplexity_belongs_to_its_file_text_and_settings(tiny: Callable[..., Path], tmp_path: Path) -> None:
    path, corpus = tiny("llama"), Corpus("a text", TEXT, 64)
    found = Perplexity((1.25, 0.125), 2)
    assert read_stored(tmp_path, path, corpus, CONFIG) is None
    store(tmp_path, path, corpus, CONFIG, found)
    assert read_stored(tmp_path, path, corpus, CONFIG) == found
    assert read_stored(tmp_path, path, replace(corpus, name="renamed"), replace(CONFIG, n_threads=2)) == found
    copy = tmp_path / "llama.gguf"
    shutil.copy(path, copy)
    assert read_stored(tmp_path, copy, corpus, CONFIG) == found
    for other in (
        (tiny("llama", seed=1), corpus, CONFIG),
        (path, replace(corpus, text=TEXT + "."), CONFIG),
        (path, replace(corpus, n_ctx=32), CONFIG),
        (path, replace(corpus, windows=1), CONFIG),
        (path, corpus, replace(CONFIG, type_k="q8_0")),
        (path, corpus, replace(CONFIG, exact=True)),
    ):
        assert read_stored(tmp_path, *other) is None
    next(tmp_path.glob("perplexity-*.json")).write_text('{"nll": [1', "utf-8")
    assert read_stored(tmp_path, path, corpus, CONFIG) is None


# -- files -----------------------------------------------------------------------------------------------------------


def no_progress(*_: Any) -> None:
    pass


def test_files_are_made_once(tiny: Callable[..., Path], tmp_path: Path) -> None:
    source = tiny("llama")
    files = make_files(source, ["q8_0", "source", "F16", "Q8_0", "fp32", "FP16"], tmp_path, progress=no_progress)
    assert [(file.quant, file.path.name) for file in files] == [
        *[("Q8_0", "llama-Q8_0.gguf"), ("F32", "llama.gguf"), ("F16", "llama-F16.gguf")]
    ]
    assert files[1].path == source
    times = [file.path.stat().st_mtime_ns for file in files]
    assert make_files(source, ["Q8_0", "F32", "F16"], tmp_path, progress=no_progress) == files
    assert [file.path.stat().st_mtime_ns for file in files] == times
    files[0].path.write_bytes(files[0].path.read_bytes()[:-500])  # incomplete: made again
    assert make_files(source, ["Q8_0"], tmp_path, progress=no_progress) == files[:1]
    assert files[0].path.stat().st_mtime_ns != times[0]


def test_the_sources_own_quantisation_is_the_source(tiny: Callable[..., Path], tmp_path: Path) -> None:
    source = tiny("llama", dtype="Q8_0")
    with warnings.catch_warnings():
        warnings.simplefilter("error", QuantizationWarning)
        files = make_files(source, ["Q8_0", "source"], tmp_path / "work", progress=no_progress)
    assert [file.path for file in files] == [source]
    assert not (tmp_path / "work").exists()
    with pytest.warns(QuantizationWarning):
        make_files(source, ["Q4_0"], tmp_path / "work", progress=no_progress)


def test_an_unknown_quantisation(tiny: Callable[..., Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"must be one of BF16, .*but 'Q9_9' was given"):
        make_files(tiny("llama"), ["Q8_0", "Q9_9"], tmp_path / "work", progress=no_progress)
    assert not (tmp_path / "work").exists()


def test_sizes(tiny: Callable[..., Path]) -> None:
    whole, small = Weights.read(tiny("llama")), Weights.read(tiny("llama", dtype="Q8_0"))
    assert whole.bits_per_weight == 32
    assert 8.5 < small.bits_per_weight < 10  # Q8_0 has 8.5, the norms 32
    assert whole.file_bytes == tiny("llama").stat().st_size > small.file_bytes


# -- rows and answer -------------------------------------------------------------------------------------------------


def speed_row(model: str, drafter: str, block: int, speed: float, plain: float, **more: Any) -> dict[str, Any]:
    return {
        **{"model": model, "quant": model[1:], "drafter": drafter, "block_complexity": block, "category": "all"},
        **{"tau": 1.5, "rows_per_pass": float(block), "tokens_per_second": speed, "speedup": speed / plain},
        **{"speedup_min": speed / plain, "speedup_max": speed / plain, "n_prompts": 2, "n_tokens": 60},
        **{"identical": 2, "near_ties": 0, **more},
    }


def example(**more: Any) -> dict[str, Any]:
    """A summary of two files and two drafters; the answers of ``bad`` on Q4_0 are wrong."""
    wrong = {"drafter": "bad", "block_complexity": 8, "model": "mQ4_0", "kind": "different"}
    rest = {"repeat": 0, "question_id": 1, "category": "qa", "turn": 0, "position": 3, "expected": 1, "found": 2}
    cost = {n: {"rows": n, "ms": 10.0 + 2 * n} for n in (1, 2, 4, 8)}
    return {
        "machine": {"cpu": "A", "threads": 2, "os": "B", "date": "C"},
        "settings": {"exact": False},
        "rows": [
            speed_row("mQ8_0", "none", 1, 80.0, 80.0),
            speed_row("mQ8_0", "esp", 8, 70.0, 80.0),
            speed_row("mQ8_0", "esp", 8, 1.0, 80.0, category="qa"),
            speed_row("mQ4_0", "none", 1, 100.0, 100.0),
            speed_row("mQ4_0", "esp", 8, 120.0, 100.0),
            speed_row("mQ4_0", "bad", 8, 900.0, 100.0, identical=1),
        ],
        "cost": {"mQ8_0": list(cost.values()), "mQ4_0": [cost[1], cost[2]]},
        "differences": [{**wrong, **rest, "top2_margin": 1.0, "margin": None}],
        "failures": 1,
        **more,
    }


WEIGHTS = {"mQ4_0": Weights(50 << 20, 4.5), "mQ8_0": Weights(3 << 29, 8.5)}
RESULTS = {"mQ4_0": Perplexity((2.1, 3.1, 1.2), 2), "mQ8_0": Perplexity((2.0, 3.0, 1.0), 2)}


def example_rows() -> list[dict[str, Any]]:
    return quant_rows(example(), WEIGHTS, RESULTS)


def test_rows_put_everything_side_by_side() -> None:
    rows = example_rows()
    assert [(row["quant"], row["drafter"]) for row in rows] == [("Q4_0", "esp"), ("Q4_0", "bad"), ("Q8_0", "esp")]
    small, wrong, large = rows
    assert (small["plain_tokens_per_second"], small["tokens_per_second"], small["speedup"]) == (100, 120, 1.2)
    assert (small["failures"], wrong["failures"]) == (0, 1)
    assert (large["t1_ms"], large["t2_over_t1"], large["t4_over_t1"], large["tn_over_t1"]) == (
        *[12, round(14 / 12, 4), 1.5, round(26 / 12, 4)],
    )
    assert (small["t2_over_t1"], small["t8_over_t1"], small["tn_over_t1"]) == (round(14 / 12, 4), None, None)
    assert large["perplexity"] == pytest.approx(math.exp(2), abs=1e-5)
    assert (large["perplexity_ratio"], large["perplexity_ratio_error"]) == (1, 0)
    assert small["perplexity_ratio"] == pytest.approx(math.exp(0.4 / 3), abs=1e-5)
    assert (small["bits_per_weight"], small["file_bytes"], small["perplexity_tokens"]) == (4.5, 50 << 20, 3)
    json.dumps(rows, allow_nan=False)


def test_without_drafters_a_file_has_one_row_of_plain_decoding() -> None:
    summary = example()
    summary["rows"] = [row for row in summary["rows"] if row["drafter"] == "none"]
    rows = quant_rows(summary, WEIGHTS, RESULTS)
    assert [(row["quant"], row["drafter"], row["speedup"]) for row in rows] == [
        ("Q4_0", "none", 1),
        ("Q8_0", "none", 1),
    ]
    assert "Download Q4_0" in answer(rows, 20)


def test_the_table_says_what_a_file_is_once() -> None:
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in quant_table(example_rows()).splitlines()]
    assert lines[0][:5] == ["quantization", "size", "bits/weight", "perplexity", "over the best"]
    assert lines[2][:3] == ["Q4_0", "50.0 MiB", "4.50"]
    assert lines[2][4].startswith("+14.26 ± ")
    assert lines[2][5:] == [*["12.00", "1.17", "-", "-", "esp @ 8", "-", "1.500", "100.0", "120.0", "1.20x", "2/2"]]
    assert lines[3][:9] == [""] * 9
    assert lines[3][-2:] == ["9.00x (void)", "1/2"]
    assert (lines[4][1], lines[4][4]) == ("1.50 GiB", "best")


def test_the_answer_is_the_fastest_of_the_good_ones() -> None:
    rows = example_rows()
    found = answer(rows, 2)
    assert found.startswith(
        "Download Q8_0 (1.50 GiB): of 2 files no other has a perplexity within 2 % of its own, 7.39 ± 4.2"
    )
    assert (
        "80.0 tokens/s without a drafter; faster but worse: Q4_0, 120.0 tokens/s with esp @ 8, perplexity +14" in found
    )
    found = answer(rows, 15)
    assert found.startswith(
        "Download Q4_0 (50.0 MiB): 2 of 2 files have a perplexity within 15 % of the best (Q8_0, 7.39"
    )
    assert found.endswith("is the fastest on this machine, 120.0 tokens/s with esp @ 8.")
    assert "900" not in found, "a drafter whose answers are wrong is no reason"


def test_the_answer_names_what_is_as_fast() -> None:
    rows = [row for row in example_rows() if row["drafter"] == "esp"]
    rows[1]["plain_tokens_per_second"] = 119.0
    assert answer(rows, 15).endswith("120.0 tokens/s with esp @ 8 (Q8_0 within 5 % of that).")


def test_one_file_is_no_choice() -> None:
    assert answer(example_rows()[2:], 2).startswith("Only Q8_0 (1.50 GiB) was measured, so there is nothing to choose")


def a_document(source_quant: str = "Q4_1", failures: int = 0) -> Mapping[str, Any]:
    rows = example_rows()
    text = {"name": "a.txt", "n_ctx": 64}
    source = {"model": "m", "quant": source_quant}
    base = {"machine": example()["machine"], "source": source, "text": text, "command": "esp-edge bench quants"}
    return {**base, "answer": answer(rows, 2), "rows": rows, "failures": failures}


def test_the_report_warns_of_what_weakens_it() -> None:
    text = quant_report(a_document(failures=1), ["plots/quants-m.png"])
    assert "DIFFERENT OUTPUT: 1 answers" in text
    assert "Q4_0, Q8_0 were made from Q4_1, which was quantized already" in text
    assert "3 scored tokens of a.txt, windows of 64 tokens" in text
    assert "![quants-m.png](plots/quants-m.png)" in text
    clean = quant_report(a_document("BF16"), [])
    assert "DIFFERENT" not in clean
    assert "were made from" not in clean


def test_the_plot_is_written_as_png_and_svg(tmp_path: Path) -> None:
    assert plot_quants(example_rows(), tmp_path, "m") == "quants-m.png"
    assert (tmp_path / "quants-m.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "quants-m.svg").read_text("utf-8")


# -- the command -----------------------------------------------------------------------------------------------------

UNTIMED = ["model", "quant", "file_bytes", "perplexity", "drafter", "block_complexity", "tau", "n_tokens", "identical"]


def arguments(model: Path, folder: Path, *more: str, words: int = 40) -> list[str]:
    questions = folder / "q.jsonl"
    turns = ["the rain " * words, "an owl in a tree " * words]
    lines = [{"question_id": i, "category": c, "turns": [t]} for i, (c, t) in enumerate(zip("ab", turns, strict=True))]
    questions.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    text = folder / "text.txt"
    text.write_text(TEXT * 2, "utf-8")
    base = ["bench", "quants", "-m", str(model), "--questions", str(questions), "--out", str(folder / "out")]
    base += ["--text", str(text), "--drafters", "esp[mask-init=vocab-mean],pld", "--block-complexity", "5"]
    return [*base, "-c", "512", "-t", "1", "-n", "6", "--ppl-ctx", "64", "--ppl-chunks", "3", *more]


def untimed(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{name: row[name] for name in UNTIMED} for row in document["rows"]]


def test_command(program: Program, tiny: Callable[..., Path], tmp_path: Path) -> None:
    command = arguments(tiny("llama"), tmp_path, "--quants", "Q8_0,q8_0,source", "--exact")
    code, out, err = program(*command, "--json")
    assert code == 0, err
    document, folder = json.loads(out), tmp_path / "out"
    assert json.loads((folder / "quants.json").read_text("utf-8")) == document
    assert [(row["quant"], row["drafter"], row["identical"], row["failures"]) for row in document["rows"]] == [
        (quant, drafter, 2, 0) for quant in ("Q8_0", "F32") for drafter in ("esp[mask-init=vocab-mean]", "pld")
    ]
    for row in document["rows"]:
        assert None not in row.values(), "T(5) is measured as well, which the Spec-Bench run alone would not do"
        assert row["perplexity_tokens"] == 3 * 31
    assert document["text"]["windows"] == 3
    assert document["answer"].startswith("Download ")
    assert document["answer"] in (folder / "report.md").read_text("utf-8")
    assert "# Benchmark" in (folder / "benchmark.md").read_text("utf-8")
    assert [path.name for path in (folder / "models").iterdir()] == ["llama-Q8_0.gguf"]
    assert (folder / "plots" / "quants-llama.png").exists()
    code, out, _ = program(*command)
    assert code == 0
    assert len([line for line in out.splitlines() if line.startswith("|")]) == 2 + 4
    assert document["answer"] in out
    assert json.loads((folder / "quants.json").read_text("utf-8"))["rows"] == document["rows"], "nothing is done twice"


def test_a_stopped_run_goes_on(
    program: Program, tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("whole", "torn"):
        (tmp_path / name).mkdir()
    options = ("--quants", "Q8_0,source", "--no-plots", "--json")
    code, out, err = program(*arguments(tiny("llama"), tmp_path / "whole", *options))
    assert code == 0, err
    wanted = json.loads(out)
    torn = arguments(tiny("llama"), tmp_path / "torn", *options)

    def stop_in(place: Any, name: str, after: int) -> None:
        original, calls = getattr(place, name), []

        def stopping(*values: Any, **named: Any) -> Any:
            calls.append(1)
            if len(calls) > after:
                raise KeyboardInterrupt
            return original(*values, **named)

        patch.setattr(place, name, stopping)

    for place, name, after in ((bench, "perplexity", 1), (bench, "cost_rows", 0), (run, "converse", 5)):
        with monkeypatch.context() as patch:
            stop_in(place, name, after)
            assert program(*torn)[0] == 130
    with monkeypatch.context() as patch:
        stop_in(bench, "perplexity", 0)  # both are there by now
        code, out, err = program(*torn)
    assert code == 0, err
    assert untimed(json.loads(out)) == untimed(wanted)


def test_the_questions_are_the_text_where_none_is_given(
    program: Program, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    command = arguments(tiny("llama"), tmp_path, "--quants", "source", "--no-plots", "--json")
    at = command.index("--text")
    del command[at : at + 2]
    code, out, err = program(*command)
    assert code == 0, err
    document = json.loads(out)
    assert document["text"]["name"] == "the questions of q.jsonl"
    assert document["answer"].startswith("Only F32 ")


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (("--quants", "Q8_0,Q9_9"), "'Q9_9' was given"),
        (("--quants", ""), "'' was given"),
        (("--quants", "IQ1_S"), "importance matrix"),
        (("--text", "missing.txt"), "missing.txt cannot be read"),
        (("--ppl-ctx", "4"), "windows of 8 tokens or more"),
        (("--drafters", "magic"), "'magic' is no drafter"),
        (("--questions", "missing.jsonl"), "cannot be read"),
        (("--within", "-1"), "--within"),
    ],
)
def test_usage(program: Program, tiny: Callable[..., Path], tmp_path: Path, more: tuple[str, ...], why: str) -> None:
    code, _, err = program(*arguments(tiny("llama"), tmp_path), *more)
    assert code in (1, 2)
    assert why in one_error(err)
    assert not (tmp_path / "out").exists()


def test_a_text_that_is_too_short_is_told_before_anything_is_measured(
    program: Program, tiny: Callable[..., Path], tmp_path: Path
) -> None:
    command = arguments(tiny("llama"), tmp_path, "--quants", "source", "--ppl-ctx", "500", "--no-plots")
    code, _, err = program(*command)
    assert code == 1
    assert "at least 1000 tokens, but text.txt has" in err
    assert not (tmp_path / "out" / "results.jsonl").exists()


def test_a_directory_of_another_run_is_refused_before_anything_is_measured(
    program: Program, tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = arguments(tiny("llama"), tmp_path, "--quants", "source", "--no-plots")

    def stop(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(bench, "perplexity", stop)
    assert program(*command)[0] == 130
    code, _, err = program(*command, "-n", "7", "--ppl-chunks", "2")
    assert code == 1
    assert "was made with other settings: max_tokens was 6, now 7" in one_error(err)


@pytest.mark.model
def test_on_the_bundled_model(program: Program, quantized: Callable[[str], Path], tmp_path: Path) -> None:
    work = quantized("Q4_0").parent
    command = arguments(quantized("Q8_0"), tmp_path, "--quants", "source,Q4_0", "--work", str(work), words=4)
    lines = (tmp_path / "q.jsonl").read_text("utf-8").splitlines()
    (tmp_path / "q.jsonl").write_text(lines[0], "utf-8")
    few = ("-n", "4", "-c", "128", "-t", "0", "--ppl-chunks", "2", "--block-complexity", "4", "--drafters", "pld")
    code, out, err = program(*command, *few, "--json", "--no-plots")
    assert code == 0, err
    rows = json.loads(out)["rows"]
    assert [row["quant"] for row in rows] == ["Q4_0", "Q8_0"]
    assert all(row["identical"] + row["near_ties"] == 1 and row["t1_ms"] > 0 for row in rows)
    assert rows[0]["bits_per_weight"] == pytest.approx(5.35, abs=0.1)
    assert rows[1]["perplexity"] < 60
