"""The page in headless Chromium over WebDriver; skipped where chromedriver is not installed."""

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[3] / "quantflow/server/page"
OWN = ["app.js", "api.js", "store.js", "turns.js", "markdown.js", "style.css"]
SIZES = [(1300, 850), (390, 844)]
PICTURES = os.environ.get("QUANTFLOW_PICTURES")  # a folder that gets a PNG per test, for people


class Browser:
    """A WebDriver session."""

    def __init__(self, url, folder):
        self._url = url
        options = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            f"--user-data-dir={folder}",
        ]
        chrome = {"args": options}
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": chrome,
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        self._session = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})[
            "sessionId"
        ]

    def _ask(self, method, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self._url + path, data, {"Content-Type": "application/json"}, method=method
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]

    def call(self, method, path, body=None):
        return self._ask(method, f"/session/{self._session}{path}", body)

    def open(self, url, width, height):
        # headless windows are never narrower than 500 px; a device's metrics are
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call(
            "POST",
            "/goog/cdp/execute",
            {"cmd": "Emulation.setDeviceMetricsOverride", "params": metrics},
        )
        self.call("POST", "/url", {"url": url})

    def run(self, script):
        return self.call("POST", "/execute/sync", {"script": script, "args": []})

    def wait(self, script, seconds=30):
        end = time.monotonic() + seconds
        while not (found := self.run(f"return {script}")):
            assert time.monotonic() < end, f"{script}: {self.run('return document.body.innerText')}"
            time.sleep(0.05)
        return found

    def write(self, selector, text):
        (element,) = self.call(
            "POST", "/element", {"using": "css selector", "value": selector}
        ).values()
        self.call("POST", f"/element/{element}/value", {"text": text})

    def click(self, selector):
        (element,) = self.call(
            "POST", "/element", {"using": "css selector", "value": selector}
        ).values()
        self.call("POST", f"/element/{element}/click", {})

    def press(self, label, within="document"):
        """Click the button of a turn, found by its label."""
        self.run(
            f"[...{within}.querySelectorAll('button')]"
            f".filter((one) => one.textContent === {label!r}).at(-1).click()"
        )

    def confirm(self):
        self.call("POST", "/alert/accept", {})

    def picture(self, name):
        if PICTURES:
            Path(PICTURES).mkdir(parents=True, exist_ok=True)
            Path(PICTURES, f"{name}.png").write_bytes(
                base64.b64decode(self.call("GET", "/screenshot"))
            )

    def errors(self):
        return [
            entry["message"]
            for entry in self.call("POST", "/se/log", {"type": "browser"})
            if entry["level"] == "SEVERE"
        ]

    def close(self):
        self.call("DELETE", "")


@pytest.fixture
def browser(tmp_path):
    if shutil.which("chromedriver") is None:
        pytest.skip("chromedriver is not installed")
    with subprocess.Popen(
        ["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True
    ) as driver:
        line = next(line for line in driver.stdout if "started successfully on port" in line)
        found = Browser(
            f"http://127.0.0.1:{int(line.rstrip('.' + chr(10)).split()[-1])}", tmp_path / "profile"
        )
        yield found
        found.close()
        driver.kill()


def test_the_page_is_for_browsers_and_asks_no_foreign_host(server):
    page = server.get("/", Accept="text/html,*/*")
    assert (
        page.headers["content-type"].startswith("text/html") and b"<h1>quantflow</h1>" in page.body
    )
    assert "default-src 'none'" in page.headers["content-security-policy"]
    plain = server.get("/")
    assert (plain.status, plain.body) == (200, b"")
    assert b"//" not in page.body.replace(b"<!doctype", b"")
    for name in (*OWN, "marked.js"):
        asset = server.get(f"/page/{name}")
        assert asset.status == 200
        kind = "text/css" if name.endswith("css") else "text/javascript"
        assert asset.headers["content-type"].startswith(kind)
        if name in OWN:
            assert not re.search(rb"https?://", asset.body)
    assert (
        server.get("/page/index.html").status == 404
        and server.get("/page/..%2fsettings.py").status == 404
    )
    card = server.get("/card").json()
    assert (
        card["schemes"] == {"W8A16": 28}
        and card["chat_template"] is True
        and len(card["digest"]) == 64
    )


def test_every_module_of_the_page_is_served_and_none_makes_html_of_text(server):
    """lm-sys/FastChat#88 and ggml-org/llama.cpp#2300: texts of models were read as HTML."""
    asked = {"app.js"}
    for name in OWN:
        text = (PAGE / name).read_text()
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacent|document\.write|srcdoc|DOMParser|eval\(|Function\(",
            text,
        ), name
        asked |= set(re.findall(r'from "\./(.*?)"', text))
    assert asked == {path.name for path in PAGE.glob("*.js")}
    assert all(server.get(f"/page/{name}").status == 200 for name in asked)


def test_the_library_is_the_released_file_with_its_licence():
    """marked 18.2.1, `lib/marked.esm.js`, unchanged."""
    digest = hashlib.sha256((PAGE / "marked.js").read_bytes()).hexdigest()
    assert digest == "5371fea86fd0656b4fc7bea7c94c663109d82789b69433eeee78d42895aa44de"
    assert "marked v18.2.1" in (PAGE / "marked.js").read_text()[:100]
    assert "Permission is hereby granted" in (PAGE / "marked.LICENSE").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "height", "dark"), [(1300, 850, False), (390, 844, False), (1300, 850, True)]
)
def test_somebody_talks_with_the_model(server, browser, width, height, dark):
    browser.open(server.url, width, height)
    browser.wait("document.getElementById('model').textContent === 'python-model'")
    if dark:
        browser.click("#theme")
    browser.run(
        "document.getElementById('max_tokens').value = 40; "
        "document.getElementById('temperature').value = 0"
    )
    body = {"messages": [{"role": "user", "content": "def"}], "temperature": 0, "max_tokens": 40}
    expected = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    browser.click("#tokens")
    browser.write("#input", "def")
    browser.click("#send")
    browser.wait("document.querySelector('.assistant .note')?.textContent.includes('tokens/s')")
    assert (
        browser.run("return document.querySelector('.turn.assistant .text').textContent")
        == expected
    )
    tokens = browser.run("return document.querySelectorAll('.token').length")
    assert tokens == 40
    assert "cut at the limit" in browser.run(
        "return document.querySelector('.assistant .note').textContent"
    )
    browser.run("document.querySelectorAll('.token')[3].focus()")
    assert browser.wait("document.querySelectorAll('#tip tr').length") >= 5
    browser.picture(f"chat-{width}{'-dark' * dark}")
    browser.click("#tab_complete")
    browser.write("#input", "class Stack:\n"[:-1])
    browser.click("#send")
    browser.wait("document.querySelector('.completion .note')?.textContent.includes('tokens/s')")
    assert browser.run(
        "return document.querySelector('.turn.completion .text').textContent"
    ).startswith("class Stack:")
    if width < 500:
        browser.click("#menu")
        time.sleep(0.3)  # it fades in
    browser.run("document.getElementById('card_box').open = true")
    assert "W8A16" in browser.run("return document.getElementById('card').textContent")
    assert browser.run("return document.documentElement.scrollWidth <= innerWidth")
    browser.picture(f"complete-{width}{'-dark' * dark}")
    assert browser.errors() == []


# Answers `texts` one after the other in the place of the model, and keeps what was asked. An answer
# is a list of deltas, with the reason of its end as the last.
CANNED = r"""
const real = window.fetch;
window.answers = TEXTS;
window.asked = [];
window.fetch = async (url, options) => {
  if (!String(url).endsWith("completions")) return real(url, options);
  window.asked.push(JSON.parse(options.body));
  const deltas = window.answers.shift();
  const finish_reason = deltas.pop();
  const events = [
    ...deltas.map((delta) => ({ choices: [{ delta, finish_reason: null }] })),
    { choices: [{ delta: {}, finish_reason }] },
    { choices: [], usage: { prompt_tokens: 9, completion_tokens: deltas.length } },
  ];
  const lines = events.map((event) => `data: ${JSON.stringify(event)}\n\n`);
  return new Response(lines.join("") + "data: [DONE]\n\n");
};
"""


@pytest.fixture
def canned(server, browser):
    """Open the page with answers that a test chooses; the result says something and waits."""

    def begin(*answers, width=1300, height=850):
        browser.open(server.url, width, height)
        browser.wait("document.getElementById('model').textContent === 'python-model'")
        listed = [
            [*({"content": part} if isinstance(part, str) else part for part in parts), finish]
            for *parts, finish in answers
        ]
        browser.run(CANNED.replace("TEXTS", json.dumps(listed)))

    return begin


def say(browser, text):
    # not typed: a new line is the key that sends
    browser.run(f"document.getElementById('input').value = {json.dumps(text)}")
    browser.click("#send")
    idle(browser)


def idle(browser):
    browser.wait("!document.body.classList.contains('busy')")


def asked(browser):
    return browser.run("return window.asked")


def texts(browser):
    return browser.run(
        "return [...document.querySelectorAll('.turn .text')].map((one) => one.textContent.trim())"
    )


MARKDOWN = """## A stack

A *stack* keeps **things**; see [its page](https://example.org/stack) or `list`.

1. push
   - at the end
2. pop &amp; return

- [x] done
- [ ] open

| call | cost |
|:-----|-----:|
| push | O(1) |
| pop<br>peek | O(1), and a rather long explanation of why that is so |

```python
class Stack:
    def push(self, item): self.items.append(item)  # a line that is longer than a phone is wide
```

> A quote.
"""
HOSTILE = """<script>window.owned = 1</script><img src=x onerror="window.owned = 2">
<style>body { display: none }</style><iframe srcdoc="<script>parent.owned = 3</script>"></iframe>

![picture](http://example.org/leak.png) [click](javascript:window.owned=4)
<svg onload=window.owned=5>
[data](data:text/html,<script>window.owned=6</script>) <form action=http://example.org><button>Send
<a href="javascript:window.owned=7">raw</a> [own](/metrics) [good](https://example.org/?a=1&b=<x>)

[ref]: javascript:window.owned=8
[ref] <javascript:window.owned=9> \u202egnp.exe"""


@pytest.mark.slow
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_an_answer_is_shown_as_markdown_with_its_reasoning_folded(browser, canned, width, height):
    """ggml-org/llama.cpp#24509: reasoning is Markdown too; #17462: <br> in cells of tables."""
    canned(
        [{"reasoning_content": "It is *easy*."}, MARKDOWN[:90], MARKDOWN[90:], "stop"],
        ["<think>Once ", "more.</thi", "nk>\n\nYes.", "length"],
        width=width,
        height=height,
    )
    say(browser, "What is a stack?")
    log = "document.querySelector('.assistant .text')"
    for selector, text in (
        ("h4", "A stack"),
        ("em", "stack"),
        ("strong", "things"),
        ("p code", "list"),
        ("ol > li ul > li", "at the end"),
        ("ol > li:nth-child(2)", "pop & return"),
        ("li:has(input:checked)", " done"),
        ("th.right, td.right", "cost"),
        ("blockquote p", "A quote."),
        (".code .bar span", "python"),
    ):
        found = browser.run(f"return {log}.querySelector({selector!r})?.textContent")
        assert found == text, selector
    assert browser.run(f"return {log}.querySelectorAll('td br').length") == 1
    assert browser.run(f"return {log}.querySelector('a').href") == "https://example.org/stack"
    copied = browser.run(f"return {log}.querySelector('.code .copy').copied")
    assert copied == MARKDOWN.partition("```python\n")[2].partition("\n```")[0]
    thoughts = "document.querySelector('.assistant .reasoning')"
    assert browser.run(f"return [{thoughts}.open, {thoughts}.hidden]") == [False, False]
    assert browser.run(f"return {thoughts}.querySelector('em').textContent") == "easy"
    assert browser.run("return document.documentElement.scrollWidth <= innerWidth")
    browser.run("document.getElementById('log').scrollTop = 0")
    browser.picture(f"markdown-{width}")
    say(browser, "Sure?")
    assert texts(browser)[3] == "Yes."
    again = "document.querySelectorAll('.assistant .reasoning .markdown')[1]"
    assert browser.run(f"return {again}.textContent") == "Once more."
    notes = browser.run(
        "return [...document.querySelectorAll('.assistant .note')].map((one) => one.textContent)"
    )
    assert "ended" in notes[0] and "cut at the limit of new tokens" in notes[1]
    browser.run("document.querySelectorAll('.reasoning').forEach((one) => { one.open = true; })")
    browser.picture(f"reasoning-{width}")
    assert browser.errors() == []


@pytest.mark.slow
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_a_hostile_answer_is_text(browser, canned, width, height):
    deep = "> " * 3000 + "\n" + "[" * 3000 + "\n" + "*a _b " * 2000
    canned([HOSTILE, "stop"], [deep, "stop"], width=width, height=height)
    say(browser, HOSTILE)
    log = "document.getElementById('log')"
    made = browser.run(
        f"return [...new Set([...{log}.querySelectorAll('*')].map((one) => one.localName))]"
    )
    assert not {"script", "img", "style", "iframe", "svg", "form", "object", "link"} & set(made)
    links = browser.run(
        f"return [...{log}.querySelectorAll('a')].map((one) => [one.href, one.rel])"
    )
    assert {href.split(":")[0] for href, _ in links} <= {"http", "https"} and len(links) == 2
    assert all(rel == "noreferrer" for _, rel in links)
    question, answer = texts(browser)
    assert question == HOSTILE.strip()
    for shown in ("<script>window.owned = 1</script>", "<iframe srcdoc=", "<svg onload", "click"):
        assert shown in answer
    fetched = browser.run("return performance.getEntriesByType('resource').map((one) => one.name)")
    assert all(url.startswith("http://127.0.0.1:") for url in fetched) and len(fetched) > 5
    browser.picture(f"hostile-{width}")
    begin = time.monotonic()
    say(browser, "deeper")
    assert time.monotonic() - begin < 10
    assert browser.run("return window.owned") is None
    assert browser.run("return document.documentElement.scrollWidth <= innerWidth")
    assert browser.errors() == []
    tried = (
        "try { document.body.innerHTML = 'x'; return 'made' } catch (error) { return error.name }"
    )
    assert browser.run(tried) == "TypeError"


@pytest.mark.slow
def test_an_answer_is_made_again_and_a_message_edited_and_a_cut_answer_goes_on(browser, canned):
    """The bodies that are asked. Parameters that nobody set are the model's, so none is sent."""
    canned(
        ["one", "stop"], ["two", "stop"], ["three ", "length"], ["four", "stop"], ["five", "stop"]
    )
    say(browser, "first")
    user = {"role": "user", "content": "first"}
    (body,) = asked(browser)
    assert body["messages"] == [user]
    assert not {"temperature", "top_p", "top_k", "max_tokens", "seed", "stop"} & set(body)
    browser.press("Regenerate")
    idle(browser)
    assert asked(browser)[1]["messages"] == [user] and texts(browser) == ["first", "two"]
    browser.run("document.getElementById('temperature').value = 0.5")
    say(browser, "second")
    assert asked(browser)[2]["temperature"] == 0.5
    assert [one["content"] for one in asked(browser)[2]["messages"]] == ["first", "two", "second"]
    browser.press("Go on")
    idle(browser)
    body = asked(browser)[3]
    assert body["messages"][-1] == {"role": "assistant", "content": "three "}
    assert body["continue_final_message"] is True and body["add_generation_prompt"] is False
    assert texts(browser) == ["first", "two", "second", "three four"]
    assert "Go on" not in browser.run("return document.getElementById('log').textContent")
    browser.press("Edit", "document.querySelector('.turn.user')")
    assert browser.run("return document.querySelector('.edit').value") == "first"
    browser.run("document.querySelector('.edit').value = 'changed'")
    browser.picture("edit-1300")
    browser.press("Send", "document.querySelector('.turn.user')")
    idle(browser)
    assert asked(browser)[4]["messages"] == [{"role": "user", "content": "changed"}]
    assert texts(browser) == ["changed", "five"]
    assert browser.errors() == []


@pytest.mark.slow
def test_a_cut_answer_goes_on_as_if_it_had_not_been_cut(server, browser):
    browser.open(server.url, 1300, 850)
    browser.wait("document.getElementById('model').textContent === 'python-model'")
    browser.run("document.getElementById('temperature').value = 0")
    for mode, role in (("chat", "assistant"), ("complete", "completion")):
        browser.click("#new")
        browser.click(f"#tab_{mode}")
        shown = f"return document.querySelector('.{role} .text').textContent"
        found = []
        for steps in ((30,), (10, 20)):
            browser.run(f"document.getElementById('max_tokens').value = {steps[0]}")
            if not found:
                say(browser, "def")
            else:
                browser.press("Regenerate")
                idle(browser)
            for step in steps[1:]:
                browser.run(f"document.getElementById('max_tokens').value = {step}")
                browser.press("Go on")
                idle(browser)
            found.append(browser.run(shown))
        assert found[0] == found[1] and len(found[0]) > 20
    assert browser.errors() == []


@pytest.mark.slow
def test_conversations_and_parameters_outlive_a_reload(server, browser, canned):
    canned(["one", "length"], ["two", "stop"])
    say(browser, "first <b>question</b>")
    browser.run("document.getElementById('seed').focus()")
    browser.write("#seed", "7")
    browser.write("#system", "Be brief.")
    browser.click("#new")
    say(browser, "second")
    assert asked(browser)[1]["messages"][0] == {"role": "system", "content": "Be brief."}
    canned(["more", "stop"])
    assert texts(browser) == ["second", "two"]
    assert browser.run("return document.getElementById('seed').value") == "7"
    names = "[...document.querySelectorAll('#conversations .name')]"
    assert browser.run(f"return {names}.map((one) => one.textContent)") == [
        "second",
        "first <b>question</b>",
    ]
    browser.picture("conversations-1300")
    browser.run(f"{names}[1].click()")
    assert texts(browser) == ["first <b>question</b>", "one"]
    browser.press("Go on")
    idle(browser)
    assert asked(browser)[0]["seed"] == 7 and texts(browser)[1] == "onemore"
    browser.run("document.querySelector('#conversations .remove').click()")
    browser.confirm()
    assert browser.run(f"return {names}.map((one) => one.textContent)") == ["second"]
    # what is not ours, or damaged, is passed over
    browser.run(
        "const [name] = Object.keys(localStorage).filter((one) => one.includes('conversation.'));"
        "localStorage.setItem(name, '{');"
        'localStorage.setItem(name + \'x\', \'{"messages": [{"role": "user"}]}\');'
    )
    canned()
    assert texts(browser) == [] and browser.run(f"return {names}.length") == 0
    browser.click("#defaults")
    browser.wait("JSON.parse(localStorage['quantflow/parameters']).seed === ''")
    assert browser.errors() == []


@pytest.mark.slow
def test_an_answer_that_broke_off_says_so_and_can_go_on(browser, canned):
    canned(["one ", None], ["two", "stop"])
    say(browser, "first")
    note = "document.querySelector('.assistant .note').textContent"
    assert "the answer broke off" in browser.run(f"return {note}")
    browser.press("Go on")
    idle(browser)
    assert texts(browser) == ["first", "one two"] and "ended" in browser.run(f"return {note}")
    # what a reload in the middle of an answer leaves
    browser.run(
        "const [name] = Object.keys(localStorage).filter((one) => one.includes('conversation.'));"
        "const kept = JSON.parse(localStorage[name]);"
        "delete kept.messages[1].finish;"
        "localStorage[name] = JSON.stringify(kept);"
    )
    canned(["three", "stop"])
    assert "broken off" in browser.run(f"return {note}")
    browser.press("Go on")
    idle(browser)
    assert texts(browser) == ["first", "one twothree"]


@pytest.mark.slow
def test_where_the_browser_keeps_nothing_the_page_still_answers(browser, canned):
    canned(["one", "stop"], ["two", "stop"])
    browser.run("Storage.prototype.setItem = () => { throw new DOMException('full'); }")
    say(browser, "first")
    assert texts(browser) == ["first", "one"]
    assert "keeps no conversations" in browser.run("return document.body.innerText")


@pytest.mark.slow
def test_every_parameter_can_be_reached_on_a_phone(server, browser):
    browser.open(server.url, 390, 844)
    browser.wait("document.getElementById('model').textContent === 'python-model'")
    height = browser.run("return document.getElementById('log').clientHeight")
    assert height > 844 / 2  # the chat has the page while the menu is closed
    browser.click("#menu")
    browser.wait("getComputedStyle(document.getElementById('side')).opacity === '1'")
    for name in ("system", "temperature", "max_tokens", "top_p", "top_k", "seed", "stop"):
        browser.run(f"document.getElementById('{name}').scrollIntoView()")
        browser.click(f"#{name}")  # fails where something covers it
        box = browser.run(
            f"return document.getElementById('{name}').getBoundingClientRect().toJSON()"
        )
        assert box["width"] >= 120 and box["height"] >= 30, name
    browser.run("document.getElementById('side').scrollTop = 0")
    browser.picture("parameters-390")
    browser.click("#close")
    browser.wait("getComputedStyle(document.getElementById('side')).visibility === 'hidden'")
    assert browser.errors() == []


@pytest.mark.slow
def test_empty_fields_show_the_models_own_defaults(serve, browser, tmp_path):
    model = Path(shutil.copytree(PAGE.parents[2] / "examples/tiny-llama", tmp_path / "model"))
    own = {"do_sample": True, "temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05}
    (model / "generation_config.json").write_text(json.dumps(own))
    with serve(artifact=model) as server:
        browser.open(server.url, 1300, 850)
        browser.wait("document.getElementById('model').textContent")
        shown = (
            "[...document.querySelectorAll('#parameters input')].map((i) => [i.id, i.placeholder])"
        )
        placeholders = dict(browser.run(f"return {shown}"))
        assert placeholders["temperature"] == "0.6" and placeholders["top_k"] == "20"
        assert placeholders["repetition_penalty"] == "1.05" and placeholders["top_p"] == "all"
        browser.run(
            "const real = window.fetch; window.asked = [];"
            "window.fetch = (url, options) => {"
            " window.asked.push(JSON.parse(options.body)); return real(url, options); };"
        )
        browser.click("#tab_complete")
        for temperature, samples in (("", True), ("0", False)):
            browser.run(f"document.getElementById('temperature').value = '{temperature}'")
            browser.run("document.getElementById('max_tokens').value = 3")
            say(browser, "def")
            parameters = asked(browser)[-1]["parameters"]
            assert parameters["do_sample"] is samples and "temperature" not in parameters
        assert browser.errors() == []


@pytest.mark.slow
def test_a_key_is_asked_for_and_a_mistake_is_told(serve, browser):
    with serve(api_key="secret") as server:
        browser.open(server.url, 390, 844)
        browser.wait("document.getElementById('state').textContent === 'Unauthorized'")
        browser.click("#key")  # the menu that holds it is open
        browser.open(server.url, 1300, 850)
        browser.wait("document.getElementById('state').textContent === 'Unauthorized'")
        browser.write("#key", "secret")
        browser.run("document.getElementById('key').dispatchEvent(new Event('change'))")
        browser.wait("document.getElementById('model').textContent === 'python-model'")
        browser.run("document.getElementById('temperature').value = -1")
        browser.write("#input", "def")
        browser.click("#send")
        told = browser.wait("document.querySelector('.turn.bad .note')?.textContent")
        assert "`temperature` must be strictly positive" in told
        browser.picture("error-1300")
        assert "secret" not in json.dumps(browser.run("return {...localStorage}"))
        browser.click("#defaults")
        assert browser.run("return document.getElementById('key').value") == "secret"
        # the question that was refused is not asked a second time
        browser.run("document.getElementById('temperature').value = 0")
        browser.run("document.getElementById('max_tokens').value = 3")
        browser.press("Try again")
        browser.wait("document.querySelector('.assistant .note')?.textContent.includes('tokens/s')")
        assert browser.run("return document.querySelectorAll('.turn').length") == 2
