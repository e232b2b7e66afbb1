"""Who reaches a server, and under which name: addresses, headers, frames, descriptors.

Reports of the kinds: secdev/scapy#67 and websocket-client/websocket-client#607 (select() beyond
1,024 descriptors), kserve/kserve#5446 and BerriAI/litellm#19091 (a connection that the server
closes while the proxy before it keeps it).
"""

import os
import resource
import socket
from contextlib import ExitStack, suppress

import pytest
from transformers import AutoTokenizer

from quantflow.errors import ResourceError
from quantflow.models import chat_template
from quantflow.server.app import allowed_hosts
from quantflow.server.process import bound, public_warning, server_of
from quantflow.server.settings import ServeJob, is_loopback

LOOPBACK = (
    *("127.0.0.1", "127.0.0.2", "127.1", "2130706433", "0x7f.1"),
    *("::1", "0:0:0:0:0:0:0:1", "::ffff:127.0.0.1"),
    *("localhost", "LOCALHOST", "localhost.localdomain", "ip6-localhost"),
)
PUBLIC = ("0.0.0.0", "::", "192.0.2.1", "::ffff:192.0.2.1", "0")
HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
POST = (
    b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    b"Content-Type: application/json\r\n"
)


def job(artifact, **options):
    return ServeJob(artifact=artifact, port=0, **options)


@pytest.mark.parametrize("host", LOOPBACK)
def test_a_loopback_is_one_in_any_spelling(host, artifact):
    """Also a name that this machine does not know, since nothing is bound then."""
    assert allowed_hosts(job(artifact, host=host), None) is not None
    assert allowed_hosts(job(artifact, host=host), b"key") is None


@pytest.mark.parametrize("host", PUBLIC)
def test_a_public_address_has_any_name(host, artifact):
    assert allowed_hosts(job(artifact, host=host), None) is None


def test_an_address_is_no_name_that_a_page_can_choose(serve):
    with serve(host="127.0.0.2", allowed_host=("Proxy.example",)) as server:
        url = f"http://127.0.0.2:{server.port}"
        for host, status in {
            "attacker.example": 421,
            "127.0.0.2.attacker.example": 421,
            "192.0.2.1": 421,
            "": 421,
            "127.0.0.2": 200,
            f"127.0.0.1:{server.port}": 200,
            "[::1]:80": 200,
            "LOCALHOST": 200,
            "proxy.example": 200,
        }.items():
            with socket.create_connection(("127.0.0.2", server.port), timeout=10) as client:
                client.sendall(f"GET /info HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
                assert client.recv(100).startswith(f"HTTP/1.1 {status}".encode()), (url, host)


def test_a_host_without_an_address_is_refused_before_a_model_is_opened(artifact):
    with pytest.raises(ResourceError, match=r"host 'nowhere\.invalid'"):
        bound(job(artifact, host="nowhere.invalid"))


@pytest.mark.parametrize("host", ["127.1", "localhost", "", "::1"])
def test_what_is_bound_is_the_address(host, artifact):
    with bound(job(artifact, host=host)) as listening:
        address = listening.getsockname()[0]
        assert is_loopback(address) == (host != "") and address == job(artifact, host=host).address


def test_a_server_for_everybody_without_a_key_says_so(artifact):
    assert public_warning(job(artifact), "127.0.0.1") is None
    assert public_warning(job(artifact, api_key="k"), "0.0.0.0") is None
    for address in ("0.0.0.0", "::", "192.0.2.1"):
        line = public_warning(job(artifact), address)
        assert line.startswith("warning: no key") and "API_KEY" in line


def answer_to(server, data):
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as client:
        found = b""
        # a server that has refused a request does not read the rest of it
        with suppress(ConnectionError):
            client.sendall(data)
        with suppress(ConnectionError):
            while piece := client.recv(65536):
                found += piece
        return found


@pytest.fixture(scope="module")
def strict(serve):
    with serve(header_limit=1000) as server:
        yield server


@pytest.mark.parametrize(
    "more",
    [
        b"X: " + b"x" * 1000 + b"\r\n",
        b"X: " + b"x" * 120_000 + b"\r\n",
        b"X: " + b"x" * 300_000 + b"\r\n",
        b"".join(b"X%d: y\r\n" % number for number in range(150)),
        b"X: " + b"x" * 2000,  # and no end
    ],
    ids=["one", "large", "larger than a read", "many", "unfinished"],
)
def test_headers_have_a_limit_however_they_come(strict, more):
    found = answer_to(strict, HEAD + more + b"\r\n")
    cut = len(more) > 200_000 and not found  # the rest came after the answer, which it took away
    assert cut or (found[9:12] == b"431" and b'"error_type":"headers_too_large"' in found)
    assert strict.get("/health").status == 200


def test_the_limit_counts_the_first_line_and_the_headers_alone(strict):
    assert (
        answer_to(strict, b"GET /?" + b"x" * 1000 + b" HTTP/1.1\r\nHost: a\r\n\r\n")[9:12] == b"431"
    )
    room = 1000 - len(HEAD) - len(b"X: \r\n")
    assert answer_to(strict, HEAD + b"X: " + b"x" * room + b"\r\n\r\n")[9:12] == b"200"
    assert answer_to(strict, HEAD + b"X: " + b"x" * (room + 1) + b"\r\n\r\n")[9:12] == b"431"
    body = b'{"inputs":"a","x":"' + b"x" * 5000 + b'"}'
    answer = answer_to(strict, POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    assert answer[9:12] == b"200"


def test_a_request_of_two_lengths_is_refused(strict):
    """Read as chunks, its end would be another request for a proxy that goes by the length."""
    body = b"0\r\n\r\nGET /info HTTP/1.1\r\nHost: localhost\r\n\r\n"
    both = b"Content-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n" % len(body)
    found = answer_to(strict, POST + both + body)
    assert found.count(b"HTTP/1.1 ") == 1 and found[9:12] == b"400"


def test_what_is_no_request_is_refused_in_json(strict):
    found = answer_to(strict, b"NO REQUEST AT ALL\r\n\r\n")
    assert found[9:12] == b"400" and b'"error_type":"bad_request"' in found


def test_no_other_page_shows_this_one_in_a_frame(server):
    headers = server.get("/", Accept="text/html").headers
    policy = dict(
        rule.strip().split(" ", 1) for rule in headers["content-security-policy"].split(";")
    )
    for name in ("frame-ancestors", "base-uri", "form-action", "default-src"):
        assert policy[name] == "'none'"
    assert headers["x-frame-options"] == "DENY"


def test_a_connection_is_kept_longer_than_proxies_keep_it(server, artifact):
    for options, seconds in (({}, 90), ({"keep_alive_seconds": 200.4}, 200)):
        made = server_of(job(artifact, **options), server.site, None)
        assert made.config.timeout_keep_alive == seconds > 75
    assert (
        server_of(job(artifact, client_timeout=1.0), server.site, None).config.timeout_keep_alive
        == 90
    )


def test_conversations_are_rendered_beside_more_than_1024_connections(artifact):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1500:
        pytest.skip("the system allows no 1,500 descriptors")
    tokenizer = AutoTokenizer.from_pretrained(artifact)
    renderer = chat_template.Renderer()
    with ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1500), hard))
        nothing = os.open(os.devnull, os.O_RDONLY)
        stack.callback(os.close, nothing)
        for _ in range(1100):
            stack.callback(os.close, os.dup(nothing))
        stack.callback(renderer.close)
        rendered = chat_template.render(
            tokenizer,
            [{"role": "user", "content": "hi"}],
            answer=True,
            template="{{ messages[0].content }}",
            renderer=renderer,
        )
    assert getattr(rendered, "text", rendered) == "hi"
