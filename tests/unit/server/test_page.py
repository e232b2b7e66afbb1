"""The page in headless Chromium over WebDriver; skipped where chromedriver is not installed."""

import base64
import json
import os
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest

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

    def picture(self, name):
        if PICTURES:
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
    for name in ("style.css", "app.js"):
        asset = server.get(f"/page/{name}")
        assert asset.status == 200 and f"page/{name}".encode() in page.body
        assert (
            b"http:" not in asset.body
            and b"https:" not in asset.body
            and b"//" not in page.body.replace(b"<!doctype", b"")
        )
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "height", "dark"), [(1300, 850, False), (390, 844, False), (1300, 850, True)]
)
def test_somebody_talks_with_the_model(server, browser, width, height, dark):
    browser.open(server.url, width, height)
    browser.wait("document.getElementById('model').textContent === 'python-model'")
    if dark:
        browser.run("theme('dark')")
    browser.run(
        "document.getElementById('max_tokens').value = 40; "
        "document.getElementById('temperature').value = 0"
    )
    browser.click("#tokens")
    browser.write("#input", "def")
    browser.click("#send")
    browser.wait("document.querySelector('.note')?.textContent.includes('tokens/s')")
    body = {"messages": [{"role": "user", "content": "def"}], "temperature": 0, "max_tokens": 40}
    expected = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    assert (
        browser.run("return document.querySelector('.turn.assistant .text').textContent")
        == expected
    )
    tokens = browser.run("return document.querySelectorAll('.token').length")
    assert tokens == 40
    browser.run("document.querySelectorAll('.token')[3].focus()")
    assert browser.wait("document.querySelectorAll('#tip tr').length") >= 5
    browser.picture(f"chat-{width}{'-dark' * dark}")
    browser.click("#tab_complete")
    browser.write("#input", "class Stack:\n"[:-1])
    browser.click("#send")
    browser.wait("document.querySelectorAll('.note')[1]?.textContent.includes('tokens/s')")
    assert browser.run("return document.querySelector('.turn.code .text').textContent").startswith(
        "class Stack:"
    )
    browser.run(
        "document.getElementById('card_box').open = true; "
        "document.getElementById('settings').open = true"
    )
    assert "W8A16" in browser.run("return document.getElementById('card').textContent")
    assert browser.run("return document.documentElement.scrollWidth <= innerWidth")
    browser.picture(f"complete-{width}{'-dark' * dark}")
    assert browser.errors() == []


@pytest.mark.slow
def test_a_key_is_asked_for_and_a_mistake_is_told(serve, browser):
    with serve(api_key="secret") as server:
        browser.open(server.url, 1300, 850)
        browser.wait("document.getElementById('state').textContent === 'Unauthorized'")
        browser.write("#key", "secret")
        browser.run("document.getElementById('key').dispatchEvent(new Event('change'))")
        browser.wait("document.getElementById('model').textContent === 'python-model'")
        browser.run("document.getElementById('temperature').value = -1")
        browser.write("#input", "def")
        browser.click("#send")
        told = browser.wait("document.querySelector('.turn.bad .text')?.textContent")
        assert "`temperature` must be strictly positive" in told
