"""What runs on a GPU machine, tried without one: the parity script, its choice of questions, and the CUDA build."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from script_modules import load_script

from esp_edge.bench import parity as bench
from esp_edge.bench.parity import OWN_QUESTIONS, Clock, in_turn, parity, parity_plan
from esp_edge.bench.questions import Question
from esp_edge.bench.results import RunDirectory
from esp_edge.bench.run import ModelFile, Plan
from esp_edge.errors import ConfigError

SCRIPTS = Path(__file__).parent.parent / "scripts"
N_LANES = 13  # plain decoding, 10 of table 1, and the two naive ones of table 4
NO_LIMIT = 1e6


@pytest.fixture(scope="module")
def script() -> Any:
    return load_script("gpu_parity")


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "has_gpu", lambda: False)


# -- the script ------------------------------------------------------------------------------------------------------


def test_a_dry_run_leaves_the_whole_report(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """As a user starts it; on a machine with a GPU it says nothing about a dry run."""
    words = [str(tiny("llama")), "--tiny", "-t", "1", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "gpu_parity"), *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert ("no GPU: this is a dry run on the CPU" in done.stderr) != bench.has_gpu()
    folder = tmp_path / "llama"
    summary = json.loads((folder / "summary.json").read_text("utf-8"))
    assert summary["machine"]["n_gpu_layers"] == (-1 if bench.has_gpu() else 0)
    assert len(summary["settings"]["drafters"]) == N_LANES
    assert summary["settings"]["max_tokens"] == 8
    assert len((folder / "results.jsonl").read_text("utf-8").splitlines()) == N_LANES
    assert max(row["rows"] for row in summary["cost"]["llama"]) == 60
    for table, entries in (("table1", 10), ("table4", 4)):
        document = json.loads((folder / f"ablate-{table}.json").read_text("utf-8"))
        assert len(document["rows"]) == entries
        assert (folder / "plots" / f"ablate-{table}-llama.svg").stat().st_size > 0
        assert (folder / f"ablate-{table}.md").read_text("utf-8").startswith(f"# Table {table[-1]}")
        assert f"# Table {table[-1]}" in done.stdout
    assert (folder / "plots" / "cost-llama.png").stat().st_size > 0
    assert "# Benchmark" in (folder / "report.md").read_text("utf-8")


def test_without_a_gpu_only_a_dry_run_is_allowed(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(script, "has_gpu", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_parity", "--out", str(tmp_path / "out")])
    assert script.main() == 1
    assert "gpu_parity: error: no GPU: run scripts/build_cuda" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_gpu_gets_all_layers(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    for present, layers in ((True, -1), (False, 0)):
        monkeypatch.setattr(bench, "has_gpu", lambda present=present: present)
        plan = parity_plan(ModelFile.read(tiny("llama")), OWN_QUESTIONS, 100)
        assert plan.config.n_gpu_layers == layers
        assert len(plan.lanes) == N_LANES
        assert {lane.block_complexity for lane in plan.lanes} == {1, 30, 60}


def test_the_device_is_read_from_llama_cpps_log() -> None:
    log = ["llama_model_load: using device CUDA0 (NVIDIA H200) (0000:18:00.0) - 142000 MiB free", "print_info: x"]
    assert bench._device(log) == "CUDA0 (NVIDIA H200) (0000:18:00.0)"
    assert bench._device(["print_info: x"]) == "CPU"


# -- how many questions ----------------------------------------------------------------------------------------------


def test_any_first_part_of_the_questions_is_balanced() -> None:
    questions = [Question(number, category, ("a",)) for number, category in enumerate("aaabbc")]
    assert [question.question_id for question in in_turn(questions)] == [0, 3, 5, 1, 4, 2]
    assert in_turn([]) == []


def a_plan(path: Path, n_tokens: int = 4) -> Plan:
    questions = [Question(number, "qa", (text,)) for number, text in enumerate(("the rain", "an owl", "a cat"))]
    return parity_plan(ModelFile.read(path), questions, n_tokens, n_threads=1)


@pytest.mark.parametrize(("seconds", "wanted"), [(0.1, 3), (180.0, 2), (1e5, 1)])
def test_the_trial_decides_how_many_questions_are_asked(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, wanted: int
) -> None:
    monkeypatch.setattr(bench, "_trial", lambda _plan: (seconds, 5.0, "CUDA0"))
    said: list[str] = []
    plan, device = bench._fitted(a_plan(tiny("llama")), tmp_path, Clock(540.0), said.append)
    assert (len(plan.questions), device) == (wanted, "CUDA0")
    assert f"{wanted} of 3 asked" in said[0]
    # a run that goes on asks no more and no fewer, whatever the speed is now
    monkeypatch.setattr(bench, "_trial", lambda _plan: pytest.fail("there is nothing to try"))
    again, _ = bench._fitted(a_plan(tiny("llama")), tmp_path, Clock(1.0), said.append)
    assert again.questions == plan.questions


def test_the_trial_measures_every_lane(tiny: Callable[..., Path], no_gpu: None) -> None:
    del no_gpu
    seconds, load_seconds, device = bench._trial(a_plan(tiny("llama")))
    assert 0 < seconds < 60
    assert 0 < load_seconds < 60
    assert device == "CPU"


class Ends(Clock):
    """A clock whose time is up after some questions of some lanes."""

    calls = 0

    def __init__(self, after: int) -> None:
        super().__init__(NO_LIMIT)
        self.after = after

    @property
    def is_up(self) -> bool:
        self.calls += 1
        return self.calls > self.after


def test_out_of_time_reports_what_was_finished(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_gpu: None
) -> None:
    del no_gpu
    monkeypatch.setattr(bench, "_trial", lambda _plan: (1.0, 1.0, "CPU"))
    said: list[str] = []
    warm_ups = N_LANES + 2  # the progress is told of other things, too
    clock = Ends(warm_ups + N_LANES + N_LANES // 2)
    summary, documents = parity(a_plan(tiny("llama")), tmp_path, clock, said.append, plots=False)
    assert any(text.startswith("out of time: the report is of") for text in said)
    n = int(next(text for text in said if text.startswith("out of")).split()[-2])
    assert 1 <= n < 3
    assert {row["n_prompts"] for row in summary["rows"]} == {n}
    assert all(row["n_prompts"] == n for document in documents for row in document["rows"])
    run = json.loads((tmp_path / "run.json").read_text("utf-8"))
    assert RunDirectory(tmp_path, run["settings"], run["machine"]).settings["questions"].startswith(f"{n} questions")
    assert json.loads((tmp_path / "parity.json").read_text("utf-8"))["questions"] == n


def test_too_little_time_is_an_error(
    tiny: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_gpu: None
) -> None:
    del no_gpu
    monkeypatch.setattr(bench, "_trial", lambda _plan: (1.0, 1.0, "CPU"))
    with pytest.raises(ConfigError, match="not one question was finished in time; give more --minutes"):
        parity(a_plan(tiny("llama")), tmp_path, Clock(0.0), lambda _text: None, plots=False)


# -- the CUDA build --------------------------------------------------------------------------------------------------


class Build:
    """Runs ``scripts/build_cuda`` where only the named programs exist; ``python`` writes down what it was asked."""

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self.log = folder / "log"
        self.bin.mkdir()
        for tool in ("bash", "dirname", "grep", "sort", "paste"):
            found = shutil.which(tool)
            assert found is not None
            (self.bin / tool).symlink_to(found)
        self.add("python", f'echo "${{CMAKE_ARGS:-}} | $*" >>"{self.log}"')

    def add(self, name: str, body: str = ":") -> None:
        (self.bin / name).write_text(f"#!{self.bin / 'bash'}\n{body}\n", "utf-8")
        (self.bin / name).chmod(0o755)

    def __call__(self, *words: str, **environment: str) -> tuple[int, str, Sequence[str]]:
        """(exit code, stderr, what python was asked)."""
        done = subprocess.run(
            [str(self.bin / "bash"), str(SCRIPTS / "build_cuda"), *words],
            env={"PATH": str(self.bin), "CUDA_HOME": str(self.bin / "none"), **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stderr, self.log.read_text("utf-8").splitlines() if self.log.exists() else ()


@pytest.fixture
def build(tmp_path: Path) -> Build:
    if os.name != "posix":  # pragma: no cover - a bash script
        pytest.fail("scripts/build_cuda needs bash")
    return Build(tmp_path)


def test_build_without_nvcc(build: Build) -> None:
    code, err, asked = build("h200")
    assert (code, asked) == (1, ())
    assert err == "build_cuda: nvcc was not found: install the CUDA toolkit, or set CUDA_HOME to where it is\n"


def test_build_without_a_gpu_asks_for_its_name(build: Build) -> None:
    build.add("nvcc")
    code, err, asked = build()
    assert (code, asked) == (1, ())
    assert "no GPU was found here: name its architecture, for example scripts/build_cuda h200" in err


@pytest.mark.parametrize("name", ["gtx", "8.6", "9", "90; rm"])
def test_build_refuses_unknown_names(build: Build, name: str) -> None:
    build.add("nvcc")
    code, err, asked = build(name)
    assert (code, asked) == (1, ())
    assert f"unknown GPU '{name}'" in err


@pytest.mark.parametrize(
    ("words", "architectures"),
    [(("a100",), "80"), (("H100", "h200"), "90"), (("orin",), "87"), (("86", "a100", "120a"), "120a;80;86")],
)
def test_build_for_named_gpus(build: Build, words: tuple[str, ...], architectures: str) -> None:
    build.add("nvcc")
    code, err, asked = build(*words, CMAKE_ARGS="-DGGML_CUDA_F16=on")
    assert (code, err) == (0, "")
    llama = next(line for line in asked if "llama-cpp-python==" in line)
    assert llama.startswith(f"-DGGML_CUDA=on -DCMAKE_CUDA_ARCHITECTURES={architectures} -DGGML_CUDA_F16=on | ")
    assert "--no-binary llama-cpp-python" in llama
    ours = [line for line in asked if "--no-build-isolation" in line]
    assert len(ours) == 2
    assert asked.index(llama) < asked.index(ours[0])


def test_build_finds_the_gpus_of_this_machine(build: Build) -> None:
    build.add("nvcc")
    build.add("nvidia-smi", "printf '9.0\\n8.0\\n9.0\\n'")
    code, _, asked = build()
    assert code == 0
    assert any("-DCMAKE_CUDA_ARCHITECTURES=80;90 " in line for line in asked)


def test_build_takes_nvcc_from_cuda_home(build: Build, tmp_path: Path) -> None:
    home = tmp_path / "cuda"
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "nvcc").write_text("#!/bin/sh\n", "utf-8")
    (home / "bin" / "nvcc").chmod(0o755)
    assert build("87", CUDA_HOME=str(home))[0] == 0
