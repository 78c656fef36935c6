"""The web page, driven in Debian's chromium against a scripted server (tests/web_stub.py)."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Locator, Page, Playwright, expect, sync_playwright
from server_fakes import running
from web_stub import STATIC, Reply, WebStub

from esp_edge.config import DraftConfig, ModelConfig
from esp_edge.engine import Engine
from esp_edge.server.settings import ServerSettings
from esp_edge.session import load

pytestmark = pytest.mark.browser

DESKTOP = {"width": 1280, "height": 800}
PHONE = {"width": 360, "height": 740}
LONG = "A sentence with several words in it. " * 40
ATTACKS = (
    "<script>window.pwned = 1</script>",
    "<img src=x onerror=window.pwned=1>",
    "<svg onload=window.pwned=1><script>window.pwned=1</script></svg>",
    "<iframe srcdoc='<script>parent.pwned=1</script>'></iframe>",
    "<a href=javascript:window.pwned=1>click</a>",
    "<style>body{display:none}</style><base href=//evil.example/><meta http-equiv=refresh content=0>",
    "[a](javascript:window.pwned=1)",
    "[a](JaVaScRiPt:window.pwned=1)",
    "[a]( java\tscript:window.pwned=1)",
    "[a](<javascript:window.pwned=1>)",
    "[a](data:text/html,<script>opener.pwned=1</script>)",
    "[a](vbscript:window.pwned=1)",
    "[a](//evil.example/)",
    "<javascript:window.pwned=1>",
    "[a](https://e.example/\" onclick=\"window.pwned=1)",
    "[a](https://e.example/ \"x' onmouseover='window.pwned=1\")",
    "[![i](javascript:window.pwned=1)](javascript:window.pwned=1)",
    "![i](https://evil.example/pixel.png)",
    "![i](x\" onerror=\"window.pwned=1)",
    "https://e.example/'onmouseover='window.pwned=1",
    "# <img src=x onerror=window.pwned=1>",
    "> - <img src=x onerror=window.pwned=1>",
    "| <img src=x onerror=window.pwned=1> | b |\n|---|---|\n| <script>window.pwned=1</script> | c |",
    "```html\n<script>window.pwned=1</script>\n```",
    "```\"><img src=x onerror=window.pwned=1>\ncode\n```",
    "`<img src=x onerror=window.pwned=1>`",
    "&lt;img src=x onerror=window.pwned=1&gt; &#x3c;script>",
    "[constructor]: javascript:window.pwned=1\n\n[constructor] __proto__",
)  # fmt: skip


@pytest.fixture(scope="session")
def driver() -> Iterator[Playwright]:
    with sync_playwright() as playwright:
        yield playwright


@pytest.fixture(scope="session")
def browser(driver: Playwright) -> Iterator[Browser]:
    path = shutil.which("chromium")
    assert path is not None, "these tests drive Debian's browser: apt-get install --no-install-recommends chromium"
    found = driver.chromium.launch(executable_path=path)
    yield found
    found.close()


@pytest.fixture
def stub() -> Iterator[WebStub]:
    with WebStub() as found:
        yield found


@pytest.fixture
def context(browser: Browser, stub: WebStub) -> Iterator[BrowserContext]:
    """A fresh profile. At the end: nothing left the origin, nothing was refused by the page's own policy."""
    found = browser.new_context(viewport=DESKTOP, color_scheme="light", accept_downloads=True)
    found.set_default_timeout(5000)
    addresses: list[str] = []
    faults: list[str] = []
    found.on("request", lambda request: addresses.append(request.url))
    found.on("weberror", lambda error: faults.append(str(error.error)))
    found.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
    yield found
    found.close()
    own = (stub.url, "data:", f"blob:{stub.url}")
    assert [address for address in addresses if not address.startswith(own)] == []
    expected = ("Failed to load resource", "This document requires 'TrustedHTML'")  # statuses of errors; one test tries
    assert [fault for fault in faults if not fault.startswith(expected)] == []


@pytest.fixture
def page(context: BrowserContext, stub: WebStub) -> Page:
    found = context.new_page()
    found.goto(stub.url)
    expect(found.locator("#model")).to_have_text(stub.model)
    return found


def ask(page: Page, text: str, *, wait: bool = True) -> Locator:
    """Send a message with the keyboard; the answer's element."""
    n = page.locator(".answer").count()
    page.locator("#prompt").fill(text)
    page.keyboard.press("Enter")
    answer = page.locator(".answer").nth(n)
    if wait:
        expect(answer).to_have_attribute("aria-busy", "false")
    return answer


def echo(body: dict[str, Any]) -> Reply:
    return Reply(f"You said: {body['messages'][-1]['content']}")


def contents(body: dict[str, Any]) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in body["messages"]]


# -- a conversation --------------------------------------------------------------------------------------------------


def test_sends_with_enter_and_shows_the_answer_with_its_numbers(page: Page, stub: WebStub) -> None:
    stub.answer = lambda _: Reply("Hello **there**, this is `code` and some more words to draft.")
    answer = ask(page, "Hi")
    expect(answer.locator(".body strong")).to_have_text("there")
    expect(answer.locator(".body code")).to_have_text("code")
    expect(answer.locator(".stats")).to_have_text(
        re.compile(r"tokens/s · tau \d\.\d\d · 11 tokens in .* · prompt 9 tok")
    )
    expect(page.locator("#prompt")).to_be_focused()
    expect(page.locator("#prompt")).to_have_value("")
    expect(page.locator("#live")).to_contain_text("Answer complete. Hello")
    answer.locator("summary").click()
    expect(answer.locator(".bars li")).to_have_count(4)
    expect(answer.locator(".bars li").nth(1)).to_contain_text("accepted 1 draft token")
    request = stub.requests[0]
    assert request["stream"] is True
    assert request["stream_options"] == {"include_usage": True}
    assert request["speculative"] == {"enabled": True}
    assert "temperature" not in request  # left to the server


def test_shift_enter_is_a_new_line_and_the_next_turn_carries_the_first(page: Page, stub: WebStub) -> None:
    stub.answer = echo
    page.locator("#prompt").press_sequentially("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    expect(page.locator(".answer .body")).to_have_text("You said: one\ntwo", use_inner_text=True)
    ask(page, "three")
    assert contents(stub.requests[1]) == [
        ("user", "one\ntwo"), ("assistant", "You said: one\ntwo"), ("user", "three")]  # fmt: skip


def test_text_and_speed_appear_while_the_model_writes(page: Page, stub: WebStub) -> None:
    stub.answer = lambda _: Reply(LONG, delay=0.05)
    answer = ask(page, "Go", wait=False)
    expect(answer.locator(".body")).to_contain_text("several words")
    expect(answer.locator(".stats")).to_have_text(re.compile(r"^[\d.]+ tokens/s · tau [\d.]+$"))
    expect(answer).to_have_attribute("aria-busy", "true")


@pytest.mark.parametrize("how", ["Escape", "button"])
def test_stop_keeps_what_is_there_and_ends_the_request(page: Page, stub: WebStub, how: str) -> None:
    stub.answer = lambda _: Reply(LONG, delay=0.02)
    answer = ask(page, "Go", wait=False)
    expect(answer.locator(".body")).to_contain_text("sentence")
    if how == "button":
        page.get_by_role("button", name="Stop").click()
    else:
        page.keyboard.press("Escape")
    expect(answer.locator(".foot")).to_contain_text("Stopped.")
    expect(page.locator("#send")).to_be_visible()
    expect(page.locator("#prompt")).to_be_focused()
    deadline = time.monotonic() + 3
    while not stub.n_gone and time.monotonic() < deadline:
        time.sleep(0.02)
    assert stub.n_gone == 1


def test_regenerate_asks_the_same_again(page: Page, stub: WebStub) -> None:
    stub.answer = lambda _: Reply(f"Answer number {len(stub.requests)}.")
    answer = ask(page, "Hi")
    answer.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".answer .body")).to_have_text("Answer number 2.")
    expect(page.locator(".message")).to_have_count(2)
    page.keyboard.press("Control+Shift+Enter")
    expect(page.locator(".answer .body")).to_have_text("Answer number 3.")
    assert stub.requests[0]["messages"] == stub.requests[2]["messages"]


def test_arrow_up_edits_the_last_message_and_cuts_what_follows(page: Page, stub: WebStub) -> None:
    stub.answer = echo
    ask(page, "first")
    ask(page, "second")
    page.keyboard.press("ArrowUp")
    field = page.get_by_label("Edit message")
    expect(field).to_be_focused()
    expect(field).to_have_value("second")
    page.keyboard.press("Escape")
    expect(page.locator("#prompt")).to_be_focused()
    page.locator(".user").first.get_by_role("button", name="Edit").click()
    field.fill("changed")
    page.keyboard.press("Enter")
    expect(page.locator(".answer .body")).to_have_text("You said: changed")
    expect(page.locator(".message")).to_have_count(2)
    assert contents(stub.requests[-1]) == [("user", "changed")]


def test_delete_takes_the_turn_and_undo_brings_it_back(page: Page, stub: WebStub) -> None:
    stub.answer = echo
    ask(page, "first")
    ask(page, "second")
    page.locator(".answer").first.get_by_role("button", name=re.compile("Delete")).click()
    expect(page.locator(".user .text")).to_have_text(["second"])
    page.get_by_role("button", name="Undo").click()
    expect(page.locator(".user .text")).to_have_text(["first", "second"])


def test_copy_gives_the_source_of_an_answer_and_of_a_code_block(
    context: BrowserContext, page: Page, stub: WebStub
) -> None:
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    stub.answer = lambda _: Reply("Use *this*:\n\n```python\nif a < b:\n    print(1)\n```\n")
    answer = ask(page, "Hi")
    answer.get_by_role("button", name="Copy code").click()
    assert page.evaluate("navigator.clipboard.readText()") == "if a < b:\n    print(1)"
    answer.get_by_role("button", name="Copy", exact=True).click()
    assert page.evaluate("navigator.clipboard.readText()").startswith("Use *this*:")


def test_another_servers_plain_stream_is_shown_too(page: Page, stub: WebStub) -> None:
    stub.answer = lambda _: Reply("Plain words.", plain=True)
    page.locator("#colours").click()
    answer = ask(page, "Hi")
    expect(answer.locator(".body")).to_have_text("Plain words.")
    expect(answer.locator(".src, details")).to_have_count(0)
    expect(page.locator("#legend")).to_contain_text("No accepted draft tokens")


# -- settings --------------------------------------------------------------------------------------------------------


def test_settings_reach_the_request_and_survive_a_reload(page: Page, stub: WebStub) -> None:
    page.keyboard.press("Control+,")
    expect(page.get_by_label("System prompt")).to_be_focused()
    page.get_by_label("System prompt").fill("Be brief.")
    values = {"Temperature": "0.7", "Top p": "0.9", "Top k": "40", "Min p": "0.05", "Max tokens": "64", "Seed": "7"}
    for label, value in values.items():
        page.get_by_label(label, exact=True).fill(value)
    page.get_by_label("Stop texts").fill("END\nSTOP")
    page.get_by_label("Drafter").select_option("suffix")
    page.get_by_label("Rows a pass").fill("16")
    page.get_by_label("Draft several").uncheck()
    page.reload()
    ask(page, "Hi")
    request = stub.requests[0]
    assert contents(request) == [("system", "Be brief."), ("user", "Hi")]
    wanted = {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "max_tokens": 64, "seed": 7}
    assert {name: request[name] for name in wanted} == wanted
    assert request["stop"] == ["END", "STOP"]
    assert request["speculative"] == {"enabled": False, "drafter": "suffix", "block_complexity": 16}


def test_a_number_out_of_range_is_marked_and_not_sent(page: Page, stub: WebStub) -> None:
    page.keyboard.press("Control+,")
    field = page.get_by_label("Top p")
    expect(field).to_have_attribute("placeholder", "1")
    field.fill("3")
    expect(field).to_have_attribute("aria-invalid", "true")
    expect(field).to_have_attribute("title", "A number from 0 to 1")
    ask(page, "Hi")
    assert "top_p" not in stub.requests[0]


def test_theme_goes_round_and_is_kept(page: Page) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(background)
    page.locator("#theme").click()
    page.locator("#theme").click()
    expect(page.locator("#theme")).to_have_text("Theme: dark")
    dark = page.evaluate(background)
    assert light != dark
    page.reload()
    assert page.evaluate(background) == dark


# -- speculation made visible ----------------------------------------------------------------------------------------


def test_accepted_tokens_are_coloured_by_source_with_a_legend(page: Page, stub: WebStub) -> None:
    stub.answer = lambda _: Reply(
        "Some **bold words here** and a list:\n\n- with `code in it`\n- and more words than that\n"
    )
    answer = ask(page, "Hi")
    expect(answer.locator(".src")).to_have_count(0)
    page.keyboard.press("Control+.")
    expect(page.locator("#colours")).to_have_attribute("aria-pressed", "true")
    expect(answer.locator(".body strong .src").first).to_be_visible()  # inside the rendered text
    assert {"suffix", "adjacency"} <= set(answer.locator(".src").evaluate_all("list => list.map((one) => one.title)"))
    expect(page.locator("#legend")).to_contain_text(re.compile(r"the model's own.*\d+\s%"))
    expect(page.locator("#legend")).to_contain_text(re.compile(r"suffix.*copied from earlier text"))
    coloured = answer.locator(".body").inner_text()
    page.locator("#colours").click()
    assert answer.locator(".body").inner_text() == coloured


def test_compare_runs_one_after_the_other_and_says_identical(page: Page, stub: WebStub) -> None:
    stub.answer = lambda _: Reply("The same text on both sides. " * 4, delay=0.02)
    page.locator("#prompt").fill("Compare me")
    page.keyboard.press("Control+Enter")
    dialog = page.get_by_role("dialog")
    expect(dialog.locator(".verdict")).to_contain_text("Identical text, 116 characters.")
    expect(dialog.locator(".verdict")).to_contain_text(re.compile(r"[\d.]+ times the speed: [\d.]+ to [\d.]+ tokens/s"))
    assert [request["speculative"]["enabled"] for request in stub.requests] == [False, True]
    assert stub.requests[0]["seed"] == stub.requests[1]["seed"]
    expect(dialog.locator(".side .stats")).to_have_text([re.compile(r"tau 1\.00"), re.compile(r"tau 1\.92")])
    expect(dialog.locator(".side").nth(1).locator(".bars li")).to_have_count(4)
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(page.locator(".message")).to_have_count(0)


def test_compare_shows_the_first_difference_and_can_be_stopped(page: Page, stub: WebStub) -> None:
    stub.answer = lambda body: Reply("one two four" if body["speculative"]["enabled"] else "one two three")
    ask(page, "Hi")
    page.locator(".answer").get_by_role("button", name=re.compile("Compare")).click()
    dialog = page.get_by_role("dialog")
    expect(dialog.locator(".verdict")).to_contain_text(
        "First difference at character 9: one two three against one two four"
    )
    stub.answer = lambda _: Reply(LONG, delay=0.05)
    page.locator("#compare-prompt").press("Enter")
    expect(dialog.locator(".side").first.locator(".body")).to_contain_text("sentence")
    page.keyboard.press("Escape")
    expect(dialog.locator(".verdict")).to_have_text("Stopped.")
    expect(dialog).to_be_visible()


# -- history ---------------------------------------------------------------------------------------------------------


def test_chats_survive_a_reload_and_can_be_searched_renamed_and_deleted(page: Page, stub: WebStub) -> None:
    stub.answer = echo
    ask(page, "apples")
    page.keyboard.press("Control+k")
    expect(page.locator("#empty")).to_be_visible()
    ask(page, "pears")
    page.reload()
    titles = page.locator(".chat-title")
    expect(titles).to_have_text(["pears", "apples"])
    expect(page.locator(".answer .body")).to_have_text("You said: pears")
    page.keyboard.press("Alt+ArrowDown")
    expect(page.locator(".answer .body")).to_have_text("You said: apples")
    page.get_by_label("Search chats").fill("said: pea")
    expect(titles).to_have_text(["pears"])
    page.get_by_label("Search chats").fill("")
    page.get_by_role("button", name="Rename apples").click()
    page.keyboard.type("Fruit")
    page.keyboard.press("Enter")
    expect(titles).to_have_text(["pears", "Fruit"])
    page.get_by_role("button", name="Delete Fruit").click()
    expect(titles).to_have_text(["pears"])
    page.get_by_role("button", name="Undo").click()
    expect(titles).to_have_text(["pears", "Fruit"])
    page.reload()
    expect(titles).to_have_text(["pears", "Fruit"])


def test_an_answer_goes_on_while_another_chat_is_open(page: Page, stub: WebStub) -> None:
    stub.answer = lambda body: Reply(LONG if body["messages"][-1]["content"] == "long" else "Short.", delay=0.01)
    ask(page, "long", wait=False)
    page.keyboard.press("Control+k")
    ask(page, "short")
    expect(page.locator(".answer .body")).to_have_text("Short.")
    page.locator(".chat-title", has_text="long").click()
    expect(page.locator(".answer")).to_have_attribute("aria-busy", "false")
    expect(page.locator(".answer .body")).to_have_text(LONG.strip())


def test_export_and_import_give_the_same_chats(page: Page, stub: WebStub, tmp_path: Path) -> None:
    stub.answer = lambda _: Reply("Words with **sources** in them, and some more.")
    page.locator("#colours").click()
    ask(page, "Hi")
    before = page.locator(".answer .body").evaluate("(node) => node.innerHTML")
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    path = tmp_path / "chats.json"
    download.value.save_as(path)
    assert json.loads(path.read_text("utf-8"))["format"] == "esp-edge-chats"
    page.locator("#import-file").set_input_files(path)
    expect(page.locator("#toast")).to_contain_text("Imported 0 chats, 1 were here already")
    page.keyboard.press("Control+,")
    page.get_by_role("button", name="Delete all chats").click()
    expect(page.locator(".chat-title")).to_have_count(0)
    page.locator("#import-file").set_input_files(path)
    page.locator(".chat-title", has_text="Hi").click()
    assert page.locator(".answer .body").evaluate("(node) => node.innerHTML") == before
    expect(page.locator(".answer .bars li")).to_have_count(3)


def imported(page: Page, tmp_path: Path, data: Any) -> None:
    path = tmp_path / "import.json"
    path.write_text(data if isinstance(data, str) else json.dumps(data), "utf-8")
    page.locator("#import-file").set_input_files(path)


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        ("{", "The file is not JSON."),
        ({"chats": []}, '"format" must be "esp-edge-chats"'),
        ({"format": "esp-edge-chats", "version": 2, "chats": []}, "newer version"),
        ({"format": "esp-edge-chats", "version": 1, "chats": [7]}, "chats[0] must be an object"),
        (
            {"format": "esp-edge-chats", "version": 1, "chats": [{"messages": [{"role": "system", "content": ""}]}]},
            "chats[0].messages[0].role must be user or assistant",
        ),
        (
            {"format": "esp-edge-chats", "version": 1, "chats": [{"messages": [{"role": "user", "content": {}}]}]},
            "chats[0].messages[0].content must be a text",
        ),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_with_the_reason(page: Page, tmp_path: Path, data: Any, complaint: str) -> None:
    imported(page, tmp_path, data)
    expect(page.locator("#toast")).to_contain_text("Not imported.")
    expect(page.locator("#toast")).to_contain_text(complaint)
    expect(page.locator(".chat-title")).to_have_count(0)


# -- nothing the model or a file says is executed --------------------------------------------------------------------


def assert_harmless(page: Page) -> None:
    page.evaluate("new Promise((done) => setTimeout(done, 50))")  # what a handler would need to fire
    assert page.evaluate("window.pwned") is None
    assert page.locator("#messages :is(script, img, svg, iframe, style, base, meta, object, embed, form)").count() == 0
    attributes = "list => list.flatMap((one) => [...one.attributes].map((found) => found.name))"
    assert [name for name in page.locator("#messages *").evaluate_all(attributes) if name.startswith("on")] == []
    for link in page.locator("#messages a").all():
        assert re.match(r"(https?://|mailto:)", link.get_attribute("href") or "")
        assert (link.get_attribute("rel"), link.get_attribute("target")) == ("noopener noreferrer", "_blank")


@pytest.mark.parametrize("coloured", [False, True])
def test_model_text_is_never_executed(page: Page, stub: WebStub, coloured: bool) -> None:
    stub.answer = lambda _: Reply("\n\n".join(ATTACKS), sources=('"><img src=x onerror=window.pwned=1>', "__proto__"))
    if coloured:
        page.locator("#colours").click()
    answer = ask(page, "<img src=x onerror=window.pwned=1>")
    assert_harmless(page)
    expect(answer.locator(".body")).to_contain_text("<script>window.pwned = 1</script>")
    expect(answer.locator(".body")).to_contain_text("[a](javascript:window.pwned=1)")
    for link in page.locator("#messages a").all():
        link.hover()
    expect(page.locator(".user .text")).to_have_text("<img src=x onerror=window.pwned=1>")
    page.reload()
    expect(page.locator(".answer .body")).to_contain_text("<script>")
    assert_harmless(page)


def test_an_imported_file_is_never_executed(page: Page, tmp_path: Path) -> None:
    attack = "<img src=x onerror=window.pwned=1>"
    answer = {
        "role": "assistant", "content": "\n\n".join(ATTACKS), "pieces": [[len("\n\n".join(ATTACKS)), attack]],
        "stats": {"tps": attack, "histogram": [attack, 1, 2], "drafted": 3, "accepted": 2, "tau": {}}, "error": attack,
    }  # fmt: skip
    text = json.dumps({
        "format": "esp-edge-chats", "version": 1,
        "chats": [{"id": "../" + attack, "title": attack, "system": attack, "updated": "now",
                   "messages": [{"role": "user", "content": attack}, answer]}],
    })  # fmt: skip
    imported(page, tmp_path, text.replace('"title"', '"__proto__": {"pwned": 1}, "title"'))
    page.locator(".chat-title").click()
    expect(page.locator("#title")).to_have_text(attack)
    expect(page.locator(".foot .error")).to_contain_text(attack)
    page.locator("#colours").click()
    page.keyboard.press("Control+,")
    assert page.locator("#chat-list img, header img, aside img").count() == 0
    assert page.evaluate("({}).pwned") is None
    assert_harmless(page)


def test_the_servers_facts_are_text_too(context: BrowserContext, stub: WebStub) -> None:
    stub.model = "<img src=x onerror=window.pwned=1>"
    page = context.new_page()
    page.goto(stub.url)
    expect(page.locator("#model")).to_have_text(stub.model)
    assert page.locator("img").count() == 0


def test_the_policy_of_the_page_is_strict(page: Page) -> None:
    policy = page.locator("meta[http-equiv=Content-Security-Policy]").get_attribute("content") or ""
    rules = dict(rule.strip().partition(" ")[::2] for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert rules["script-src"] == rules["style-src"] == rules["connect-src"] == "'self'"
    refused = "() => { try { document.createElement('p').innerHTML = '<b>'; return false } catch { return true } }"
    assert page.evaluate(refused)  # trusted types: no text becomes HTML, whoever tries
    for path in STATIC.iterdir():
        text = path.read_text("utf-8")
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            path
        )


# -- markdown --------------------------------------------------------------------------------------------------------

RENDER = """async ([text, pieces]) => {
  const { renderMarkdown } = await import("/static/markdown.js");
  const root = document.createElement("div");
  renderMarkdown(root, text, pieces);
  return root.innerHTML.replace(/ (dir|tabindex|role|aria-label)="[^"]*"/g, "");
}"""
LINK = '<a href="{0}" title="{0}" target="_blank" rel="noopener noreferrer">'
MARKDOWN = (
    ("plain *em* **strong** ***both*** ~~gone~~ ~5", "<p>plain <em>em</em> <strong>strong</strong> <em><strong>both"
     "</strong></em> <del>gone</del> ~5</p>"),
    ("snake_case_name and 2*3*4 and _em_", "<p>snake_case_name and 2<em>3</em>4 and <em>em</em></p>"),
    ("**open and *closed* here", "<p>**open and <em>closed</em> here</p>"),
    (r"\*not em\* \\ C:\dir", r"<p>*not em* \ C:\dir</p>"),
    ("a\nb  \nc", "<p>a<br>b  <br>c</p>"),
    ("# One #\n## Two\n####### no", '<h3 class="md1">One</h3><h4 class="md2">Two</h4><p>####### no</p>'),
    ("text\n***\n---", "<p>text</p><hr><hr>"),
    ("`` a`b `` and `open", "<p><code>a`b</code> and `open</p>"),
    ("> quoted\n> > twice\nlazy", "<blockquote><p>quoted</p><blockquote><p>twice<br>lazy</p></blockquote>"
     "</blockquote>"),
    ("- a\n- b\n  - c\n    1. d\n- e", "<ul><li>a</li><li>b<ul><li>c<ol><li>d</li></ol></li></ul></li><li>e</li></ul>"),
    ("1. a\n  - b\n2. c", "<ol><li>a<ul><li>b</li></ul></li><li>c</li></ol>"),
    ("3. a\n\n4. b", '<ol start="3"><li><p>a</p></li><li><p>b</p></li></ol>'),
    ("- a\n* b", "<ul><li>a</li></ul><ul><li>b</li></ul>"),
    ("1. a\n   ```\n   x\n   ```\n2. b", '<ol><li>a<div class="code"><div class="code-head"><span>text</span><button '
     'type="button">Copy</button></div><pre><code>x</code></pre></div></li><li>b</li></ol>'),
    ("- [x] a\n- [ ] b", '<ul><li class="task"><input type="checkbox" disabled="" checked="">a</li><li class="task">'
     '<input type="checkbox" disabled="">b</li></ul>'),
    ("see:\n| a | b\\|c |\n|:-:|--:|\n| `d` |\nend", '<p>see:</p><div class="scroll"><table><thead><tr>'
     '<th class="center">a</th><th class="right">b|c</th></tr></thead><tbody><tr><td class="center"><code>d</code></td>'
     '<td class="right"></td></tr></tbody></table></div><p>end</p>'),
    ("```py x\n*a*\n\n<b>", '<div class="code"><div class="code-head"><span>py</span><button type="button">Copy'
     "</button></div><pre><code>*a*\n\n&lt;b&gt;</code></pre></div>"),
    ("[t *e*](https://a.example/x_(y) \"T\").", f"<p>{LINK.format('https://a.example/x_(y)')}t <em>e</em></a>.</p>"),
    ("(https://a.example/b_c_d), <mailto:a@b.example>", f"<p>({LINK.format('https://a.example/b_c_d')}https://a.example/b_c_d"
     f"</a>), {LINK.format('mailto:a@b.example')}mailto:a@b.example</a></p>"),
    ("![alt](https://a.example/i.png)", '<p><a href="https://a.example/i.png" title="image, not loaded: '
     'https://a.example/i.png" target="_blank" rel="noopener noreferrer">image: alt</a></p>'),
    ("[a](relative) [b] [c][d]", "<p>[a](relative) [b] [c][d]</p>"),
)  # fmt: skip


@pytest.fixture(scope="module")
def renderer(browser: Browser) -> Iterator[Callable[..., str]]:
    """``renderer(text, pieces)`` is the HTML that the page's renderer makes."""
    with WebStub() as stub:
        page = browser.new_page()
        page.goto(stub.url)
        yield lambda text, pieces=None: page.evaluate(RENDER, [text, pieces])
        page.close()


@pytest.mark.parametrize(("text", "wanted"), MARKDOWN)
def test_markdown(renderer: Callable[..., str], text: str, wanted: str) -> None:
    assert renderer(text) == wanted


@pytest.mark.parametrize("text", [*(text for text, _ in MARKDOWN), "\r\n".join(["- a", "", "  > b `c` 😀", "d"])])
def test_every_character_remembers_its_place(renderer: Callable[..., str], text: str) -> None:
    """One piece a character, named after its place: what is shown in its span must be that character."""
    units = text.encode("utf-16-le")
    characters = [units[i : i + 2].decode("utf-16-le", "surrogatepass") for i in range(0, len(units), 2)]
    html = renderer(text, [[1, f"at{i}"] for i in range(len(characters))])
    spans = re.findall(r'<span class="src s\d" title="at(\d+)">([^<]*)</span>', html)
    assert spans
    for place, shown in spans:
        plain = shown.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&").replace("&nbsp;", "\u00a0")
        if not "\ud800" <= characters[int(place)] <= "\udfff":  # halves do not travel
            assert plain == characters[int(place)]
    places = [int(place) for place, _ in spans]
    assert places == sorted(places)


@pytest.mark.parametrize(
    "text",
    ["[" * 30000, "*a " * 10000, "**a *b " * 5000, "`" * 30000, "` `` " * 6000, ">" * 5000, "- " * 5000, "|" * 10000,
     "[a](" * 8000, "<http://" * 5000, "a **" * 8000, "\n" * 30000, "http://" * 6000, "_a_" * 8000, "*" * 30000,
     "# " * 9000, "- a\n" * 5000, "|a|b|\n" * 3000, "((" * 9000 + "](" * 3000],
    ids=lambda text: text[:8].encode("unicode_escape").decode(),
)  # fmt: skip
def test_text_made_to_be_slow_is_not(renderer: Callable[..., str], text: str) -> None:
    start = time.monotonic()
    renderer(text)
    assert time.monotonic() - start < 3


def test_a_growing_answer_ends_as_if_it_was_drawn_at_once(renderer: Callable[..., str], browser: Browser) -> None:
    text = "\n\n".join(text for text, _ in MARKDOWN)
    grow = """async ([text]) => {
      const { renderMarkdown } = await import("/static/markdown.js");
      const root = document.createElement("div");
      for (let end = 0; end < text.length; end += 7) renderMarkdown(root, text.slice(0, end));
      renderMarkdown(root, text);
      return root.innerHTML.replace(/ (dir|tabindex|role|aria-label)="[^"]*"/g, "");
    }"""
    with WebStub() as stub:
        page = browser.new_page()
        page.goto(stub.url)
        assert page.evaluate(grow, [text]) == renderer(text)
        page.close()


# -- when things go wrong --------------------------------------------------------------------------------------------


def test_an_error_is_readable_and_retry_answers(page: Page, stub: WebStub) -> None:
    error = {"message": "The prompt has 3000 tokens, the context 2048.", "code": "context_length_exceeded"}
    replies = [Reply(status=400, error=error), Reply("Now it works.")]
    stub.answer = lambda _: replies.pop(0)
    answer = ask(page, "Hi")
    expect(answer.get_by_role("alert")).to_contain_text("3000 tokens, the context 2048. Delete earlier turns or start")
    answer.get_by_role("button", name="Retry").click()
    expect(page.locator(".answer .body")).to_have_text("Now it works.")
    expect(page.locator(".answer")).to_have_count(1)


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (Reply(LONG, fails_after=3), "The model ran out of memory."),
        (Reply(LONG, breaks_after=3), "The connection ended before the answer was complete."),
        (Reply(status=500, error={"message": "Internal error."}), "Internal error."),
    ],
)
def test_an_answer_that_breaks_off_keeps_its_text(page: Page, stub: WebStub, reply: Reply, said: str) -> None:
    stub.answer = lambda _: reply
    answer = ask(page, "Hi")
    expect(answer.get_by_role("alert")).to_contain_text(said)
    if reply.status == 200:
        expect(answer.locator(".body")).to_contain_text("A sentence")


def test_a_server_that_is_gone_is_waited_for(page: Page, stub: WebStub) -> None:
    stub.stop()
    answer = ask(page, "Hi")
    expect(answer.get_by_role("alert")).to_contain_text("The server does not answer.")
    expect(page.locator("#banner")).to_contain_text("Trying again by itself")
    stub.start()
    expect(page.locator("#banner")).to_be_hidden(timeout=10000)
    answer.get_by_role("button", name="Retry").click()
    expect(page.locator(".answer .body")).to_have_text("Done.")


def test_a_model_that_loads_is_waited_for(context: BrowserContext, stub: WebStub) -> None:
    stub.is_loading = True
    page = context.new_page()
    page.goto(stub.url)
    expect(page.locator("#banner")).to_contain_text("The model is loading")
    stub.is_loading = False
    page.get_by_role("button", name="Try now").click()
    expect(page.locator("#banner")).to_be_hidden()
    expect(page.locator("#model")).to_have_text(stub.model)


def test_the_api_key_is_asked_for_and_kept_out_of_the_export(context: BrowserContext, stub: WebStub) -> None:
    stub.key = "sesame"
    page = context.new_page()
    page.goto(stub.url)
    expect(page.get_by_role("dialog", name="API key")).to_be_visible()
    page.keyboard.type("sesame")
    page.keyboard.press("Enter")
    expect(page.locator("#model")).to_have_text(stub.model)
    stub.key = "changed"
    ask(page, "Hi", wait=False)
    page.get_by_label("Key", exact=True).fill("changed")
    page.keyboard.press("Enter")
    expect(page.locator(".answer .body")).to_have_text("Done.")  # asked again by itself
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    assert "changed" not in download.value.path().read_text("utf-8")


# -- everyone can use it ---------------------------------------------------------------------------------------------


def test_the_whole_flow_works_without_a_mouse(page: Page, stub: WebStub) -> None:
    stub.answer = echo
    expect(page.locator("#prompt")).to_be_focused()
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keyboard")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    page.keyboard.press("/")
    expect(page.locator("#prompt")).to_be_focused()
    page.keyboard.type("why?")  # in a field ? and / are text
    expect(page.locator("#prompt")).to_have_value("why?")
    page.keyboard.press("Enter")
    expect(page.locator(".answer .body")).to_have_text("You said: why?")
    page.keyboard.press("Control+b")
    expect(page.locator("#chats")).to_be_hidden()
    page.keyboard.press("Control+b")
    expect(page.locator("#new-chat")).to_be_focused()
    page.keyboard.press("Control+,")
    expect(page.get_by_label("System prompt")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("#settings-toggle")).to_be_focused()


def test_every_control_has_a_name_and_every_landmark_is_there(page: Page, stub: WebStub) -> None:
    stub.answer = lambda _: Reply("Words, `code`.\n\n```\nblock\n```\n\n- [ ] task\n\n| a | b |\n|---|---|\n| c | d |")
    ask(page, "Hi")
    page.keyboard.press("Control+,")
    nameless = """() => [...document.querySelectorAll("button, input:not([type=file]), textarea, select, summary")]
      .filter((one) => !(one.getAttribute("aria-label") || one.labels?.length || one.textContent.trim()))
      .map((one) => one.outerHTML)"""
    assert page.evaluate(nameless) == []
    for role in (
        "navigation",
        "main",
        "complementary",
        "log",
        "banner" if page.locator("body > header").count() else "form",
    ):
        assert page.get_by_role(role).count() >= 1, role  # type: ignore[arg-type]
    ids = page.evaluate("[...document.querySelectorAll('[id]')].map((one) => one.id)")
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("width", [320, 360, 768, 1280])
def test_nothing_scrolls_sideways_at_any_width(page: Page, stub: WebStub, width: int) -> None:
    wide = "x" * 300
    stub.answer = lambda _: Reply(
        f"{wide}\n\n```\n{wide}\n```\n\n| {' | '.join('abcdefgh' * 2)} |\n|{'---|' * 16}\n| {wide} |"
    )
    page.set_viewport_size({"width": width, "height": 700})
    page.locator("#colours").click()
    ask(page, wide)
    for selector in ("html", "#scroll", "#legend", "header", "#composer"):
        assert page.locator(selector).evaluate("(one) => one.scrollWidth <= one.clientWidth"), selector
    if width < 860:
        page.locator("#settings-toggle").click()
        expect(page.locator("#main")).to_have_attribute("inert", "")
        assert page.locator("#settings").evaluate("(one) => one.scrollWidth <= one.clientWidth")
        page.keyboard.press("Escape")
        expect(page.locator("#settings")).to_be_hidden()
        page.locator("#chats-toggle").click()
        page.locator("#backdrop").click(position={"x": width - 5, "y": 300})
        expect(page.locator("#chats")).to_be_hidden()
    page.keyboard.press("Control+Enter")
    expect(page.locator("#compare .verdict")).to_contain_text("Identical")
    assert page.locator("#compare").evaluate("(one) => one.scrollWidth <= one.clientWidth")


def luminance(colour: tuple[float, ...]) -> float:
    channels = [c / 255 for c in colour]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: str, second: str) -> float:
    """WCAG's ratio of two computed colours."""
    light, dark = sorted(
        (luminance(tuple(map(float, re.findall(r"[\d.]+", c)[:3]))) for c in (first, second)), reverse=True
    )
    return (light + 0.05) / (dark + 0.05)


COLOURS = """(list) => list.filter((one) => one.checkVisibility()).map((one) => {
  let back = one;
  while (back && /rgba\\(.*, 0\\)|transparent/.test(getComputedStyle(back).backgroundColor)) back = back.parentElement;
  return [one.className || one.id || one.tagName, getComputedStyle(one).color, getComputedStyle(back).backgroundColor];
})"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_the_contrast_that_wcag_asks_for(page: Page, stub: WebStub, scheme: Any) -> None:
    sources = ("suffix", "adjacency", "esp1", "esp2", "esp3", "last", "pld", "recycling", "draft-model", "prediction")
    replies = [Reply("Words `code` https://a.example/ \n\n> quoted\n\n" + LONG, sources=sources), Reply(status=400)]
    stub.answer = lambda _: replies.pop(0)
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    page.locator("#colours").click()
    ask(page, "Hi")
    ask(page, "fail")
    page.keyboard.press("Control+,")
    found = page.locator("h1, h2, p, a, button, label, legend, kbd, .text, .body *, .src, .chat-title").evaluate_all(
        COLOURS
    )
    assert {f"src s{i}" for i in range(10)} <= {name for name, _, _ in found}
    weak = {(name, text, back) for name, text, back in found if contrast(text, back) < 4.5}
    assert weak == set()
    border = page.locator("#search").evaluate("(one) => getComputedStyle(one).borderTopColor")
    around = page.locator("#chats").evaluate("(one) => getComputedStyle(one).backgroundColor")
    assert contrast(border, around) >= 3


def test_nothing_moves_for_those_who_asked_for_it(page: Page, stub: WebStub) -> None:
    page.emulate_media(reduced_motion="reduce")
    stub.answer = lambda _: Reply(LONG, delay=0.05)
    ask(page, "Hi", wait=False)
    expect(page.locator("[data-busy]")).to_be_visible()
    assert page.evaluate("document.getAnimations().length") == 0


def test_an_example_fills_the_field(page: Page, stub: WebStub) -> None:
    page.locator("#examples button").first.click()
    expect(page.locator("#prompt")).to_be_focused()
    expect(page.locator("#prompt")).to_have_value(re.compile("hash table"))
    assert stub.requests == []


@pytest.mark.model
def test_the_real_server_and_model_answer_the_page(browser: Browser, model_path: Path) -> None:
    draft = DraftConfig("pld")  # what it drafts does not depend on how fast this machine is
    settings = ServerSettings(draft=draft, api_keys=("sesame",))
    with (
        load(str(model_path), ModelConfig(n_ctx=512)) as model,
        Engine(model, draft=draft, n_slots=2) as engine,
        running(engine, settings) as server,
        browser.new_context(viewport=DESKTOP) as context,
    ):
        page = context.new_page()
        faults: list[str] = []
        page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
        page.goto(server.url)
        page.get_by_label("Key", exact=True).fill("sesame")
        page.keyboard.press("Enter")
        expect(page.locator("#about")).to_contain_text("512 tokens of context, drafter pld")
        page.keyboard.press("Control+.")
        page.keyboard.press("Control+,")
        page.get_by_label("Max tokens").fill("9")
        answer = ask(page, "Repeat this list three times: apple, banana, cherry, dragonfruit.")
        expect(answer.locator(".stats")).to_have_text(
            re.compile(r"^[\d.]+ tokens/s · tau [\d.]+ · 9 tokens in .* · prompt \d+")
        )
        expect(answer.locator(".src").first).to_be_visible()
        expect(answer.locator(".foot")).to_contain_text("Ended at the token limit.")
        written = answer.locator(".body").inner_text()
        answer.get_by_role("button", name="Regenerate").click()
        expect(page.locator(".answer")).to_have_attribute("aria-busy", "false")
        assert page.locator(".answer .body").inner_text() == written  # at temperature 0
        page.reload()
        expect(page.locator(".answer .body")).to_have_text(written, use_inner_text=True)
        page.keyboard.press("Control+,")
        page.get_by_label("Max tokens").fill("")
        answer = ask(page, "Write a very long story about a ship.", wait=False)
        expect(answer.locator(".body")).not_to_be_empty(timeout=20000)
        page.get_by_role("button", name="Stop").click()
        expect(answer.locator(".foot")).to_contain_text("Stopped.")
        server.wait_idle()
        page.get_by_label("Max tokens").fill("9")
        page.locator("#prompt").focus()
        page.keyboard.press("Control+Enter")
        expect(page.locator("#compare .verdict")).to_contain_text(
            re.compile("Identical text|First difference"), timeout=20000
        )
        page.keyboard.press("Escape")
        alert = ask(page, "word " * 600).get_by_role("alert")
        expect(alert).to_contain_text(re.compile("512.*Delete earlier turns or start a new chat"))
    assert [fault for fault in faults if not fault.startswith("Failed to load resource")] == []


def test_the_page_is_small() -> None:
    assert sum(path.stat().st_size for path in STATIC.iterdir()) < 110_000
