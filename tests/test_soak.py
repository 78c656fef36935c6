"""``scripts/soak``: what it checks, that it notices what is wrong, and short runs on the bundled model."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from script_modules import load_script

SCRIPT = Path(__file__).parent.parent / "scripts" / "soak"


@pytest.fixture(scope="module")
def soak() -> Any:
    return load_script("soak")


class Scripted:
    """A client whose answers are given; ``{code}`` in them is the number of the request."""

    port = 0

    def __init__(self, text: str) -> None:
        self._text = text

    def _answer(self, document: Any) -> str:
        words = [word.strip('".,}]') for word in json.dumps(document).split()]
        code = next((word for word in words if word.isdigit() and len(word) == 4), "")
        return self._text.replace("{code}", code)

    def post(self, _path: str, document: Any) -> dict[str, Any]:
        text = self._answer(document)
        call = {"function": {"arguments": json.dumps({"code": text})}}
        message = {"content": text, "tool_calls": [call]}
        return {"choices": [{"index": n, "text": text, "message": message} for n in range(document.get("n", 1))]}

    def stream(self, _path: str, document: Any) -> Any:
        yield {"choices": [{"text": self._answer(document)}]}


@pytest.mark.parametrize("kind", ["text", "stream", "long", "two answers", "tool"])
def test_another_requests_answer_is_noticed(soak: Any, kind: str) -> None:
    right, wrong = (soak.Load(Scripted(text), soak.Record()) for text in (" {code}. The", " 12345"))
    for load in (right, wrong):
        load.once(kind, random.Random(1))
    assert (right.record.failures, right.record.counts[kind]) == ([], 1)
    assert "the answer to number" in wrong.record.failures[0]["why"]
    assert not wrong.record.counts[kind]


def test_a_chat_is_compared_with_its_answer_alone(soak: Any) -> None:
    load = soak.Load(Scripted("the same"), soak.Record())
    load.learn()
    assert len(load.solo) == 2 * len(soak.ASKED)
    for kind in ("chat", "sampled"):
        load.once(kind, random.Random(1))
    assert load.record.failures == []
    load.client = Scripted("another")
    load.once("chat", random.Random(1))
    assert "instead of the answer that it had alone" in load.record.failures[0]["why"]


def test_an_answer_may_be_over_before_it_is_cancelled(soak: Any) -> None:
    """Drafts that are accepted whole make 14 events of 400 tokens."""
    load = soak.Load(Scripted("hello"), soak.Record())
    for seed in range(5):
        load.once("cancel", random.Random(seed))
    assert (load.record.failures, load.record.counts["cancel"]) == ([], 5)
    load.client.stream = lambda _path, _document: (_ for _ in ())
    load.once("cancel", random.Random(1))
    assert "an answer without an event" in load.record.failures[0]["why"]


def samples(slope: float, minutes: int = 15) -> list[dict[str, float]]:
    """One every ten seconds; memory rises quickly for the first minutes, then with the slope."""
    found = []
    for n in range(6 * minutes + 1):
        t = n / 6
        rss = 300 + 20 * min(t, 3) + slope * t
        found.append({"t": 60 * t, "rss": rss, "tokens": 100 * t, "active": 8, "queue": 1, "health": 0.004})
    return found


def good(soak: Any) -> Any:
    totals = {"requests": 9, "finished": 6, "cancelled": 3, "failed": 0}
    engine = {"active": 0, "queue": 0, "slots": [{"state": "idle"}] * 8, "totals": totals}
    end = {"engine": engine, "statuses": {"200": 9, "400": 2}, "first_s": 0.05, "exit": 0}
    return soak.Record(samples=samples(0.1), end=end, first=[0.1, 0.2], seconds=900.0)


def test_warm_memory_is_judged_by_its_slope(soak: Any) -> None:
    slope, growth = soak.slope(samples(2.5))
    assert (slope, growth) == (pytest.approx(2.5), pytest.approx(25))
    assert soak.slope(samples(2.5)[:1]) == (0, 0)
    record = good(soak)
    assert all(ok for ok, _ in soak.checks(record, 1.0).values())
    record.samples = samples(2.5)
    assert failed(soak, record) == ["memory is flat"]
    record.samples = samples(-12.0, minutes=1)  # too little in all to say anything
    assert failed(soak, record) == []


def failed(soak: Any, record: Any) -> list[str]:
    return [name for name, (ok, _) in soak.checks(record, 1.0).items() if not ok]


def test_every_check_can_fail(soak: Any) -> None:
    faults = {
        "no slot is leaked": lambda end: end["engine"]["slots"].append({"state": "decode"}),
        "no status of 500 and more": lambda end: end["statuses"].update({"503": 1}),
        "the next request starts at once": lambda end: end.update(first_s=3.0),
        "the server ends in peace": lambda end: end.update(exit=-6),
    }
    for name, break_it in faults.items():
        record = good(soak)
        record.end["engine"] = json.loads(json.dumps(record.end["engine"]))
        break_it(record.end)
        assert failed(soak, record) == [name]
    record = good(soak)
    record.end["engine"]["totals"]["requests"] = 10
    assert failed(soak, record) == ["no slot is leaked"]
    record = good(soak)
    record.failures = [{"kind": "text", "why": "WrongError: x", "second": 1.0}]
    assert failed(soak, record) == ["every request ends as it must", "no answer is another's"]
    assert len(failed(soak, soak.Record())) > 4, "a run that saw nothing shows nothing"


def test_the_report_names_what_failed(soak: Any, tmp_path: Path) -> None:
    record = good(soak)
    record.failures = [{"kind": "tool", "why": "status 500", "second": 12.5}]
    record.stopped = True
    settings = {"model": "m.gguf", "exact": True, "streams": 8}
    text = soak.report(record, settings, soak.checks(record, 1.0), soak.draw(record, tmp_path))
    assert "exact mode, 8 streams, 15.0 minutes, stopped early" in text
    assert "| every request ends as it must | **FAILED** | 1 failures |" in text
    assert "- second 12.5, tool: status 500" in text
    assert "soak.png" in text
    assert (tmp_path / "soak.svg").stat().st_size > 1000


def test_counters_are_summed_over_their_labels(soak: Any) -> None:
    text = '# HELP a_total A.\na_total{path="/x",status="200"} 3.0\na_total{path="/y",status="200"} 2.0\nab_total 9.0\n'
    assert soak.counter(text, "a_total") == 5
    assert soak.counter(text, "ab_total") == 9


# -- the bundled model -----------------------------------------------------------------------------------------------


@pytest.mark.model
def test_a_short_soak(model_path: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "-m", str(model_path), "--minutes", "0.2", "--out", str(tmp_path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=240)
    report = (tmp_path / "report.md").read_text("utf-8")
    assert done.returncode == 0, report + done.stderr
    assert "**FAILED**" not in report
    document = json.loads((tmp_path / "soak.json").read_text("utf-8"))
    assert document["settings"]["model"] == model_path.name
    assert all(check["ok"] for check in document["checks"].values())
    assert sum(document["counts"].values()) > 8
    assert len(document["samples"]) > 5
    assert {path.name for path in tmp_path.iterdir()} >= {"report.md", "soak.png", "soak.svg", "server.log"}
    assert str(model_path.parent) not in report


@pytest.mark.model
def test_ctrl_c_reports_what_ran(model_path: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "-m", str(model_path), "--streams", "2", "--out", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    seen, deadline = "", time.monotonic() + 120
    while "requests" not in seen and time.monotonic() < deadline:
        seen += process.stderr.read(1)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "stopped early" in out
    assert (tmp_path / "report.md").read_text("utf-8") == out.rstrip("\n") + "\n"
    assert json.loads((tmp_path / "soak.json").read_text("utf-8"))["stopped"] is True
