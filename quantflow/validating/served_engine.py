"""A model behind an OpenAI-compatible server, for comparisons: token ids -> log-probabilities.

Reads    POST <url>/v1/completions with a window's token ids as `prompt`, `echo`, `logprobs` (1000,
         or fewer where the server allows no more) and `return_tokens_as_token_ids`, by which tokens
         are named `token_id:17`; GET <url>/v1/models
Fails    3 no such server, or one that answers something else

A server gives the log-probabilities of a position's likeliest tokens and of the text's own token.
The other tokens share what is left of the probability, each at most as likely as the least likely
one that was given. Of all distributions that fit, the one nearest to the source's
(`nearest_distribution`) takes the place of the server's, so the divergence is a bound from below.
Perplexity and the likeliest token are given, so they are the server's own.
"""

import json
import math
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from quantflow.errors import InputError
from quantflow.files.canonical import digest_of

# Tokens of a position that are asked for, the most that the server allows: vLLM's default limit is
# 20, OpenAI's 5.
COUNTS = (1000, 100, 20, 5)
PROBE = tuple(range(8))  # a prompt whose answer stands for the model that is served
TIMEOUT = 600  # seconds until a window's answer begins
LEAST = 1e-9  # probability that untold tokens have together at least
_PREFIX = "token_id:"
_REMEDY = "give a server whose /v1/completions has echo and return_tokens_as_token_ids, as vLLM's"
_BELOW = 1 - 1e-6  # so much less than a told token an untold one has, that none ties with the first
_FLOOR = -1000.0  # log-probability of a token that the source never predicts

TokenLogprobs = Sequence[Mapping[int, float]]


@dataclass(frozen=True, kw_only=True)
class RemoteModel:
    """A served model.

    Attributes:
        url: address of the server, without /v1.
        model: name that requests give.
        count: tokens of a position that are asked for.
        key: the server's key; None where it asks for none.
    """

    url: str
    model: str
    count: int
    key: str | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """The model's name, and where it is served."""
        return f"{self.model} at {self.url}"

    def identity(self) -> dict[str, str]:
        """What tells it from another model at the same place: its answer to a fixed prompt."""
        told = self.token_logprobs(torch.tensor(PROBE))
        rounded = [{str(key): round(value, 3) for key, value in one.items()} for one in told]
        return {"server": self.name, "answer": digest_of(rounded)}

    def logits(self, tokens: Tensor, baseline: Tensor) -> Tensor:
        """Log-probabilities of a sequence, [S, V] float32; the last row is the baseline's.

        Args:
            tokens: [S] int64.
            baseline: the source's logits, [S, V].

        Raises:
            InputError: the server cannot be reached, or its answer cannot be used.
        """
        told = self.token_logprobs(tokens)
        rows = [
            nearest_distribution(row.double().softmax(dim=-1), of_row, own=int(token))
            for row, of_row, token in zip(baseline[:-1], told, tokens[1:], strict=True)
        ]
        last = baseline[-1].float().log_softmax(dim=-1)
        return torch.stack([*(row.float() for row in rows), last])

    def token_logprobs(self, tokens: Tensor, *, count: int | None = None) -> TokenLogprobs:
        """What the server tells of every token but the first: token -> log-probability.

        Args:
            tokens: [S] int64.
            count: tokens of a position that are asked for; None is the model's own.

        Raises:
            InputError: see `logits`.
        """
        asked = {
            "model": self.model,
            "prompt": tokens.tolist(),
            "max_tokens": 1,
            "temperature": 0,
            "echo": True,
            "logprobs": self.count if count is None else count,
            "return_tokens_as_token_ids": True,
        }
        answer = _ask(f"{self.url}/v1/completions", asked, key=self.key)
        try:
            logprobs = answer["choices"][0]["logprobs"]
            names = list(map(_id, logprobs["tokens"][: len(tokens)]))
            found = [
                {_id(name): float(value) for name, value in one.items()}
                for one in logprobs["top_logprobs"][1 : len(tokens)]
            ]
            own = list(map(float, logprobs["token_logprobs"][1 : len(tokens)]))
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise InputError(
                f"{self.name}: its answer has no log-probabilities of the prompt by token ids: "
                f"{type(error).__name__} {error}",
                _REMEDY,
            ) from error
        if names != tokens.tolist() or len(found) != len(tokens) - 1:
            raise InputError(
                f"{self.name}: was asked for {len(tokens)} tokens and tells of {len(names)} others",
                _REMEDY,
            )
        if not all(math.isfinite(value) and value <= 1e-3 for value in own):
            raise InputError(
                f"{self.name}: a log-probability of {max(own, key=abs)}", "check the model"
            )
        return [
            {**one, int(token): value}
            for one, token, value in zip(found, tokens[1:], own, strict=True)
        ]


def open_served(address: str, *, key: str | None = None) -> RemoteModel:
    """The model at an address such as `http://localhost:8000/v1#name`.

    Without a name it is the server's first. The server is asked for how many tokens of a position
    it tells.

    Raises:
        InputError: no server is there, or it answers something else.
    """
    place, _, name = address.partition("#")
    url = place.rstrip("/").removesuffix("/v1")
    if not name:
        try:
            name = str(_ask(f"{url}/v1/models", None, key=key)["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise InputError(f"{url}/v1/models: names no model", f"give {url}#NAME") from error
    model = RemoteModel(url=url, model=name, count=COUNTS[-1], key=key)
    for count in COUNTS[:-1]:
        with suppress(_Refused):
            model.token_logprobs(torch.tensor(PROBE), count=count)
            return replace(model, count=count)
    model.token_logprobs(torch.tensor(PROBE))
    return model


def nearest_distribution(p: Tensor, told: Mapping[int, float], *, own: int) -> Tensor:
    """The distribution nearest to the source's among those that fit what was told.

    The untold tokens have what is left, in the proportions of the source, but none of them more
    than the least likely one of the likeliest (the text's own may be told beside them). So
    KL(p || result) is at most KL(p || the server's own).

    Args:
        p: the source's probabilities, [V] float64.
        told: token -> log-probability.
        own: the text's token.

    Returns:
        Log-probabilities, [V] float64, finite.

    Raises:
        InputError: a token beyond the vocabulary.
    """
    if max(told) >= len(p):
        raise InputError(
            f"token {max(told)} is told, the source has {len(p)}",
            "compare models that were made from one source",
        )
    tokens = torch.tensor(list(told), device=p.device)
    log_q = torch.full_like(p, _FLOOR)
    log_q[tokens] = torch.tensor(list(told.values()), dtype=p.dtype, device=p.device)
    left = max(1 - float(log_q[tokens].exp().sum()), LEAST)
    least = min((value for token, value in told.items() if token != own), default=told[own])
    least = math.exp(least) * _BELOW
    free = p.clone()
    free[tokens] = 0
    while (total := float(free.sum())) > 0:
        above = free * (left / total) > least
        if not above.any():
            inside = free > 0
            log_q[inside] = (free[inside] * (left / total)).log().clamp_min(_FLOOR)
            break
        log_q[above] = math.log(least)
        left = max(left - least * int(above.sum()), LEAST)
        free[above] = 0
    return log_q


class _Refused(InputError):
    """The server refuses the request: it may allow another."""


def _ask(url: str, body: Mapping[str, Any] | None, *, key: str | None) -> Any:
    """The JSON that a server answers with; a body is posted.

    Raises:
        InputError: no answer, or none in JSON.
    """
    headers = {"Content-Type": "application/json"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(url, data=data, headers=headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        text = error.read(500).decode(errors="replace").strip()
        kind = _Refused if error.code in (400, 422) else InputError
        raise kind(f"{url}: status {error.code}: {text}", _REMEDY) from error
    except (OSError, ValueError) as error:
        raise InputError(f"{url}: {error}", "start the server, or check its address") from error


def _id(name: str) -> int:
    """The token that `token_id:17` names.

    Raises:
        ValueError: it is named by its text.
    """
    if not name.startswith(_PREFIX):
        raise ValueError(f"a token named {name!r}")
    return int(name.removeprefix(_PREFIX))
