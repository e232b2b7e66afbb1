"""A server of the example model in 8 bits, in a thread of the test process, and its client."""

import json
import socket
import threading
import time
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from types import SimpleNamespace

import pytest

import quantflow
from quantflow.exporting import export as export_stage
from quantflow.planning.recipe import Quantize
from quantflow.progress import SILENT
from quantflow.server import process
from quantflow.server.models import Models, open_model
from quantflow.server.settings import ServeJob

ROOT = Path(__file__).resolve().parents[3]
TEMPLATE = """{{ bos_token }}{% for m in messages %}\
{% if m['role'] == 'wizard' %}{{ raise_exception('no wizards') }}{% endif %}\
{{ m['role'] }}: {{ m['content'] }}
{% endfor %}{% if tools %}tools: {{ tools | tojson }}
{% endif %}{% if add_generation_prompt %}assistant:{% endif %}"""


@pytest.fixture(scope="session")
def artifact(tmp_path_factory):
    """The example model, whose texts are Python."""
    work = tmp_path_factory.mktemp("served")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(export_stage, "_prove", lambda *_: {})  # other tests prove artifacts
        quantized = quantflow.quantize(
            ROOT / "examples/tiny-llama", work / "2", entry=Quantize(name="int8", scheme="W8A16")
        )
        return quantflow.export(quantized.folder, work / "python-model").folder


@pytest.fixture(scope="session")
def template(tmp_path_factory):
    path = tmp_path_factory.mktemp("template") / "chat.jinja"
    path.write_text(TEMPLATE)
    return path


class Answered(SimpleNamespace):
    """status, headers, and the body as bytes."""

    def json(self):
        return json.loads(self.body)

    def events(self):
        lines = [
            line.removeprefix("data: ")
            for line in self.body.decode().split("\n\n")
            if line.startswith("data: ")
        ]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]


class Asking:
    """A client of a running server.

    Attributes:
        models, site: state of the server.
        connections: open connections of the server.
        url: address of the server.
    """

    def __init__(self, models, site, port, connections=()):
        self.models, self.site, self.port, self.connections = models, site, port, connections
        self.url = f"http://127.0.0.1:{port}"

    def ask(self, method, path, body=None, headers=None):
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        given = {"Content-Type": "application/json"} if data is not None else {}
        connection.request(method, path, data, {**given, **(headers or {})})
        response = connection.getresponse()
        found = Answered(status=response.status, headers=response.headers, body=response.read())
        connection.close()
        return found

    def take_nothing(self, path, body):
        """A connection that has sent a request and takes none of the answer."""
        data = json.dumps(body).encode()
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.connect(("127.0.0.1", self.port))
        lines = [
            f"POST {path} HTTP/1.1",
            "Host: localhost",
            "Content-Type: application/json",
            f"Content-Length: {len(data)}",
        ]
        client.sendall("\r\n".join([*lines, "", ""]).encode() + data)
        return client

    def post(self, path, body, **headers):
        return self.ask("POST", path, body, headers)

    def get(self, path, **headers):
        return self.ask("GET", path, headers=headers)

    def generate(self, inputs, **parameters):
        return self.post("/generate", {"inputs": inputs, "parameters": parameters})

    def settled(self, seconds=10.0):
        """Wait until nothing waits or runs, and return the engine's counters."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            counters = self.models.first.engine.counters()
            if counters.waiting + counters.running == 0 and self.site.service.admission.rows == 0:
                return counters
            time.sleep(0.01)
        raise AssertionError(f"rows are left: {counters}")


@contextmanager
def serving(job):
    """Run a server in a thread, on a free port."""
    listening = process.bound(job)
    models = Models(job, open_model(job.artifact, job))
    site = process.site_of(job, models)
    server = process.server_of(job, site, SILENT)
    listening.listen(128)
    thread = threading.Thread(target=lambda: server.run(sockets=[listening]), daemon=True)
    thread.start()
    try:
        yield Asking(models, site, listening.getsockname()[1], server.server_state.connections)
    finally:
        server.should_exit = True
        thread.join(30)
        models.close()
        listening.close()
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def server(artifact, template):
    """One server for the tests of a module that leave it unchanged.

    Its thread ends before another module's tests begin.
    """
    with serving(ServeJob(artifact=artifact, chat_template=template, port=0)) as asking:
        yield asking


@pytest.fixture(scope="session")
def serve(artifact, template):
    """A function that runs another server with `options`."""
    return lambda **options: serving(
        ServeJob(**{"artifact": artifact, "chat_template": template, "port": 0} | options)
    )


@pytest.fixture(scope="session")
def asking():
    """A function from a port to the client of a server in another process."""
    return lambda port: Asking(None, None, port)
