"""`compare` with a running server: what it tells of few tokens bounds its divergence from below."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from quantflow.errors import InputError
from quantflow.validating.served_engine import nearest_distribution, open_served
from tests.shared import run

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "examples/tiny-llama"
WORDS = ("--tokens", "200", "--sequence-length", "50", "--json", "-q")


def test_a_served_artifact_is_at_most_as_far_as_it_is_and_else_has_its_figures(
    server, artifact, tmp_path, capsys
):
    assert run("compare", MODEL, artifact, server.url, *WORDS, "-o", tmp_path / "c") == 0
    found = json.loads(capsys.readouterr().out)
    folder, served = found["candidates"]
    assert served["name"] == f"{server.ask('GET', '/info').json()['model_id']} at {server.url}"
    assert (served["stored"], served["bytes"], served["logprobs_per_position"]) == (
        "served",
        None,
        20,
    )
    for here, there in zip(folder["windows"]["kld"], served["windows"]["kld"], strict=True):
        assert 0 < there < 1.05 * here
    for metric in ("ppl_ratio", "top1_agreement"):
        ours, its = (row["metrics"][metric]["value"] for row in (folder, served))
        assert its == pytest.approx(ours, rel=2e-3)
    # known from below: it may be worse than the folder, and never better
    assert [pair["verdict"] for pair in found["pairs"]] == ["undecided"]
    page = (tmp_path / "c/compare.html").read_text()
    assert "tells of the 20 likeliest tokens" in page and "&gt;= 0.0" in page
    # the same model answers alike: nothing runs again
    before = (tmp_path / "c/compare.json").read_bytes()
    assert run("compare", MODEL, artifact, f"{server.url}/v1", *WORDS, "-o", tmp_path / "c") == 0
    assert (tmp_path / "c/compare.json").read_bytes() == before


def test_log_probabilities_name_tokens_by_ids_where_it_is_asked_for(server):
    body = {"prompt": [40, 41, 42], "max_tokens": 1, "echo": True, "logprobs": 2}
    plain = server.ask("POST", "/v1/completions", body).json()["choices"][0]["logprobs"]
    body["return_tokens_as_token_ids"] = True
    named = server.ask("POST", "/v1/completions", body).json()["choices"][0]["logprobs"]
    assert named["tokens"][:3] == ["token_id:40", "token_id:41", "token_id:42"]
    assert named["token_logprobs"][:3] == plain["token_logprobs"][:3]
    assert all("token_id:41" in one for one in named["top_logprobs"][1:2])
    assert named["text_offset"][:3] == plain["text_offset"][:3]
    refused = server.ask(
        "POST",
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "x"}],
            "return_tokens_as_token_ids": True,
        },
    )
    assert refused.status == 422
    assert refused.json()["error"]["param"] == "return_tokens_as_token_ids"


def distributions(seed=0, size=50):
    generator = torch.Generator().manual_seed(seed)
    p = torch.randn(size, dtype=torch.float64, generator=generator).mul(2).softmax(-1)
    q = (p.log() + 0.3 * torch.randn(size, dtype=torch.float64, generator=generator)).softmax(-1)
    return p, q


@pytest.mark.parametrize("count", [1, 3, 10, 49])
@pytest.mark.parametrize("seed", range(4))
def test_the_nearest_distribution_that_fits_bounds_the_divergence_from_below(seed, count):
    p, q = distributions(seed)
    own = int(q.argsort()[count // 2])  # the text's token is not among the likeliest
    told = {int(t): float(q[t].log()) for t in (*q.topk(count).indices, own)}
    log_q = nearest_distribution(p, told, own=own)
    assert float(log_q.exp().sum()) == pytest.approx(1, abs=1e-6)
    assert all(float(log_q[token]) == value for token, value in told.items())
    assert int(log_q.argmax()) == int(q.argmax())
    bound = float((p * (p.log() - log_q)).sum())
    true = float((p * (p.log() - q.log())).sum())
    merged = sum(p[t] * (p[t].log() - q[t].log()) for t in told)
    rest = 1 - sum(p[t] for t in told)
    merged += rest * (rest.log() - (1 - sum(q[t] for t in told)).log())
    # merged, the untold tokens forget that none is likelier than a told one
    assert float(merged) - 1e-6 <= bound <= true + 1e-6


def test_all_tokens_told_give_the_divergence_itself_and_none_may_lie_beyond_the_vocabulary():
    p, q = distributions()
    told = {token: float(value) for token, value in enumerate(q.log())}
    torch.testing.assert_close(nearest_distribution(p, told, own=3), q.log())
    with pytest.raises(InputError, match="token 50 is told, the source has 50"):
        nearest_distribution(p, {**told, 50: -20.0}, own=3)


class Told(BaseHTTPRequestHandler):
    """Answers `logprobs` as the class says, whatever is asked; more than `most` are refused."""

    logprobs: object = None
    status = 200
    most = 20
    seen: str | None = None

    def do_POST(self):
        type(self).seen = self.headers["Authorization"]
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body = json.dumps({"choices": [{"logprobs": self.logprobs}]}).encode()
        self.send_response(self.status if asked["logprobs"] <= self.most else 400)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Say nothing."""


BY_TEXT = {"tokens": ["a"] * 9, "top_logprobs": [None, *[{"a": -1.0}] * 8]}
NAN = {
    "tokens": [f"token_id:{n}" for n in range(9)],
    "token_logprobs": [None, *[float("nan")] * 8],
    "top_logprobs": [None, *[{"token_id:1": -1.0}] * 8],
}
OTHERS = {**NAN, "tokens": ["token_id:5"] * 9, "token_logprobs": [None, *[-1.0] * 8]}


@contextmanager
def serving(monkeypatch, **words):
    """The address of a server that answers so."""
    for name, value in words.items():
        monkeypatch.setattr(Told, name, value)
    with ThreadingHTTPServer(("127.0.0.1", 0), Told) as there:
        threading.Thread(target=there.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{there.server_port}/v1#name"
        finally:
            there.shutdown()


def test_a_server_is_asked_for_as_many_tokens_as_it_allows(monkeypatch):
    whole = {**NAN, "token_logprobs": [None, *[-1.0] * 8]}
    for most, count in ((5000, 1000), (20, 20), (5, 5)):
        with serving(monkeypatch, logprobs=whole, most=most) as address:
            assert open_served(address, key="secret").count == count
            assert Told.seen == "Bearer secret"


@pytest.mark.parametrize(
    ("logprobs", "status", "message"),
    [
        (None, 200, "no log-probabilities of the prompt by token ids"),
        (BY_TEXT, 200, "ValueError a token named 'a'"),
        (NAN, 200, "a log-probability of nan"),
        (OTHERS, 200, "was asked for 8 tokens and tells of 8 others"),
        (None, 401, "status 401"),
        (None, 400, "status 400"),
    ],
)
def test_a_server_that_tells_something_else_is_refused(monkeypatch, logprobs, status, message):
    with (
        serving(monkeypatch, logprobs=logprobs, status=status) as address,
        pytest.raises(InputError, match=message),
    ):
        open_served(address)


@pytest.mark.parametrize(
    ("words", "code", "cause"),
    [
        (("http://127.0.0.1:9",), 3, "start the server, or check its address"),
        (("http://127.0.0.1:9", "--write-base", "x.kld"), 2, "leave --write-base out"),
    ],
)
def test_no_server_and_a_base_beside_one_are_refused(tmp_path, capsys, words, code, cause):
    assert run("compare", MODEL, *words, "-o", tmp_path / "c") == code
    assert cause in capsys.readouterr().err
