"""TGI's routes: /generate and others, with the bodies, headers and texts of its version 2."""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import ExitStack
from typing import Any

from starlette.responses import JSONResponse, Response

from quantflow.runtime.batching import TokenLogprob
from quantflow.server.asked import asked_by
from quantflow.server.bodies import CompatBody, GenerateBody, Parameters, VertexBody
from quantflow.server.errors import Refused, invalid, overloaded
from quantflow.server.events import EventStream
from quantflow.server.generation import Answer, AnswerPiece, Continuation, Timings
from quantflow.server.http import Endpoint, HttpCall, LargeJson, json_answer
from quantflow.server.metrics import CONTENT_TYPE
from quantflow.server.models import ServedModel
from quantflow.server.site import Site
from quantflow.server.validation import Asked, require_prompt

DEVICE = "cpu+quantflow"


async def generate(call: HttpCall) -> Response | LargeJson:
    """Answer a prompt as a whole."""
    answer = await _answered(call.site, call.body)
    return _whole(call.site, call.body, answer)


async def generate_stream(call: HttpCall) -> EventStream:
    """Answer a prompt token by token."""
    return await _streamed(call.site, call.body)


async def compat_generate(call: HttpCall) -> Response | EventStream | LargeJson:
    """Answer a prompt, as a whole in a list or token by token."""
    if call.body.stream:
        return await _streamed(call.site, call.body)
    answer = await _answered(call.site, call.body)
    return _whole(call.site, call.body, answer, in_list=True)


async def vertex(call: HttpCall) -> Response:
    """Answer the prompts of Vertex, all at once."""
    site: Site = call.site
    instances = call.body.instances
    most = site.job.limits.max_client_batch_size
    if len(instances) > most:
        text = f"Number of prompts exceeds the maximum allowed batch size of {most}"
        raise Refused("batch size exceeded", text)
    bodies = [
        GenerateBody(inputs=instance.inputs, parameters=instance.parameters)
        for instance in instances
    ]
    tasks = [asyncio.create_task(_answered(site, body)) for body in bodies]
    try:
        answers = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    texts = [
        _full(site, body, answer.rows[answer.best()])
        for body, answer in zip(bodies, answers, strict=True)
    ]
    return JSONResponse({"predictions": texts})


async def tokenize(call: HttpCall) -> Response | LargeJson:
    """The tokens of a prompt with their places in the text."""
    site, body = call.site, call.body
    with ExitStack() as stack:
        stack.enter_context(site.service.admission.held(1))
        async with site.models.using(body.parameters.adapter_id) as model:
            if not getattr(model.tokenizer, "is_fast", False):
                raise Refused(
                    "no fast tokenizer", "No fast tokenizer or tokenizer.json for this model"
                )
            if not body.inputs:
                raise invalid("`inputs` cannot be empty")
            special = body.parameters.add_special_tokens is not False
            table = await model.token_table(body.inputs, rendered=not special)
        return json_answer(lambda: iter(table), items=len(table), held=stack.pop_all())


async def info(call: HttpCall) -> Response:
    """The description of the server."""
    return JSONResponse(call.site.info())


async def health(call: HttpCall) -> Response:
    """Report that the engines are well: 200 without a body."""
    if call.site.models.failed is not None:
        raise Refused("healthcheck", "unhealthy")
    return Response(status_code=200)


async def metrics(call: HttpCall) -> Response:
    """All counts and times for Prometheus."""
    return Response(call.site.metrics.text(), media_type=CONTENT_TYPE)


async def _answered(site: Site, body: GenerateBody) -> Answer:
    """The answer to a prompt, with all of its tokens."""
    timings = Timings()
    parameters = body.parameters
    arguments: Any = {"adapter": site.models.adapter(parameters.adapter_id), "timings": timings}
    async with (
        site.models.using(parameters.adapter_id) as model,
        site.answering(
            lambda: _begin(site, model, asked_by(parameters), body, **arguments)
        ) as answer,
    ):
        await answer.finish()
    return answer


def _whole(
    site: Site, body: GenerateBody, answer: Answer, *, in_list: bool = False
) -> Response | LargeJson:
    """The response to a prompt that was answered."""
    best = answer.rows[answer.best()]

    def make() -> Any:
        value = _json_of(site, body, answer, best)
        return [value] if in_list else value

    return json_answer(make, items=answer.size, headers=headers_of(answer, best, body.inputs))


def _json_of(site: Site, body: GenerateBody, answer: Answer, best: Continuation) -> dict[str, Any]:
    """The JSON of an answer."""
    parameters = body.parameters
    value: dict[str, Any] = {"generated_text": _full(site, body, best)}
    if parameters.details or parameters.decoder_input_details:
        details = _details(answer, best, parameters)
        if len(answer.rows) > 1:
            details["best_of_sequences"] = [
                {"generated_text": _full(site, body, row), **_details(answer, row, parameters)}
                for row in answer.rows
                if row is not best
            ]
        value["details"] = details
    return value


async def _begin(
    site: Site, model: ServedModel, asked: Asked, body: GenerateBody, **arguments: Any
) -> Answer:
    """Submit a prompt: text, or token ids where the server takes those.

    Raises:
        Refused: see `Service.answer`; of kind validation, where something else stands among token
            ids.
    """
    if not site.job.token_ids:
        return await site.service.answer(model, asked, text=body.inputs, **arguments)
    if asked.truncate is None:
        count = body.inputs.count(",") + 1
        require_prompt(
            count,
            max_input_tokens=model.max_input_tokens,
            max_total_tokens=model.max_total_tokens,
        )
    tokens = await site.models.workers.sized(lambda: _ids(body.inputs), nbytes=len(body.inputs))
    return await site.service.answer(model, asked, text=None, tokens=tokens, **arguments)


def _ids(text: str) -> list[int]:
    """The token ids of `1,2,3`.

    Raises:
        Refused: of kind validation; something else stands there.
    """
    pieces = [piece.strip() for piece in text.split(",")] if text else []
    wrong = next(
        (
            piece
            for piece in pieces
            if not (piece.isascii() and piece.isdigit() and len(piece) < 10)
        ),
        None,
    )
    if wrong is not None:
        raise invalid(f"`inputs` must be token ids with commas between them. Given: {wrong[:20]!r}")
    return [int(piece) for piece in pieces]


async def _streamed(site: Site, body: GenerateBody) -> EventStream:
    """TGI's stream.

    An invalid request gets status 200 and an event with the error. Only a full server answers 429.
    """
    if not site.service.admission.has_room(1):  # 429 before anything is sent
        with site.metrics.asked():
            raise overloaded()
    headers = {"x-compute-type": DEVICE, "x-compute-characters": str(len(body.inputs))}
    return EventStream(events=_events(site, body), headers=headers)


async def _events(site: Site, body: GenerateBody) -> AsyncGenerator[str, None]:
    parameters = body.parameters
    try:
        adapter = site.models.adapter(parameters.adapter_id)
        async with (
            site.models.using(parameters.adapter_id) as model,
            site.answering(
                lambda: _begin(
                    site, model, asked_by(parameters, streams=True), body, adapter=adapter
                )
            ) as answer,
        ):
            async for piece in answer.pieces(0):
                yield json.dumps(
                    _event(site, body, answer, piece, tops=bool(parameters.top_n_tokens)),
                    ensure_ascii=False,
                )
    except Refused as refused:
        yield json.dumps(refused.body(), ensure_ascii=False)


def _event(
    site: Site, body: GenerateBody, answer: Answer, piece: AnswerPiece, *, tops: bool
) -> dict[str, Any]:
    """The event of one token; the last one has the whole text."""
    row = answer.rows[piece.row]
    event: dict[str, Any] = {"index": piece.index + 1, "token": token_json(piece)}
    if tops:
        event["top_tokens"] = tops_json(answer.model, piece.top)
    event |= {"generated_text": None, "details": None}
    if piece.finish:
        event["generated_text"] = _full(site, body, row)
        event["details"] = {
            "finish_reason": str(piece.finish),
            "generated_tokens": len(row.pieces),
            "input_length": len(answer.prompt),
            "seed": row.seed,
        }
    return event


def token_json(piece: AnswerPiece) -> dict[str, Any]:
    """A token as TGI shows it."""
    return {"id": piece.id, "text": piece.text, "logprob": piece.logprob, "special": piece.special}


def tops_json(model: ServedModel, top: tuple[TokenLogprob, ...]) -> list[dict[str, Any]]:
    """The likeliest tokens as TGI shows them."""
    words = model.vocabulary
    return [
        {
            "id": t.id,
            "text": words.text(t.id),
            "logprob": t.logprob,
            "special": t.id in words.special,
        }
        for t in top
    ]


def headers_of(answer: Answer, row: Continuation, text: str) -> Mapping[str, str]:
    """TGI's headers of a whole answer.

    Times are in milliseconds, but x-compute-time is in seconds.
    """
    timings = answer.timings
    generated = max(1, len(row.pieces))
    milliseconds = {
        "x-total-time": timings.total,
        "x-validation-time": timings.validation,
        "x-queue-time": timings.queue,
        "x-inference-time": timings.inference,
        "x-time-per-token": timings.inference / generated,
    }
    return {
        **answer.headers,
        "x-compute-type": DEVICE,
        "x-compute-time": f"{timings.total:.6f}",
        "x-compute-characters": str(len(text)),
        **{name: f"{seconds * 1e3:.0f}" for name, seconds in milliseconds.items()},
        "x-prompt-tokens": str(len(answer.prompt)),
        "x-generated-tokens": str(len(row.pieces)),
    }


def _full(site: Site, body: GenerateBody, row: Continuation) -> str:
    """The value of `generated_text`; as ids, special tokens are among them."""
    text, between = row.text.text, ""
    if site.job.token_ids:
        text, between = ",".join(str(piece.id) for piece in row.pieces), ","
    return body.inputs + between + text if body.parameters.return_full_text else text


def _details(answer: Answer, row: Continuation, parameters: Parameters) -> dict[str, Any]:
    """The `details` of one continuation."""
    model = answer.model
    details = parameters.details
    table: dict[str, Any] = {
        "finish_reason": str(row.finish),
        "generated_tokens": len(row.pieces),
        "seed": row.seed,
        "prefill": [],
        "tokens": [token_json(piece) for piece in row.pieces] if details else [],
    }
    if parameters.decoder_input_details:
        vocabulary = model.vocabulary
        table["prefill"] = [
            {"id": t.id, "text": vocabulary.text(t.id), "logprob": t.logprob}
            for t in answer.prefill
        ]
    if parameters.top_n_tokens:
        table["top_tokens"] = [tops_json(model, piece.top) for piece in row.pieces]
    return table


_ANSWER = {
    "generated_text": " b):",
    "details": {"finish_reason": "length", "generated_tokens": 2, "seed": None},
}
_GENERATE = "Text generation inference"
ENDPOINTS = (
    Endpoint(
        method="POST",
        path="/",
        run=compat_generate,
        body=CompatBody,
        tag=_GENERATE,
        answer=[_ANSWER],
        summary="Continue a prompt; a list of one answer, or events where `stream` is true.",
    ),
    Endpoint(
        method="POST",
        path="/generate",
        run=generate,
        body=GenerateBody,
        tag=_GENERATE,
        answer=_ANSWER,
        summary="Continue a prompt.",
    ),
    Endpoint(
        method="POST",
        path="/generate_stream",
        run=generate_stream,
        body=GenerateBody,
        tag=_GENERATE,
        summary="Continue a prompt, an event per token.",
    ),
    Endpoint(
        method="POST",
        path="/tokenize",
        run=tokenize,
        body=GenerateBody,
        tag=_GENERATE,
        answer=[{"id": 1, "text": "def", "start": 0, "stop": 3}],
        summary="Return the tokens of a prompt.",
    ),
    Endpoint(
        method="POST",
        path="/vertex",
        run=vertex,
        body=VertexBody,
        tag=_GENERATE,
        answer={"predictions": [" b):"]},
        summary="Continue prompts as Vertex sends them.",
    ),
    Endpoint(
        method="GET",
        path="/info",
        run=info,
        tag=_GENERATE,
        answer={"model_id": "llama"},
        summary="Say which model is served with which limits.",
    ),
    Endpoint(
        method="GET",
        path="/health",
        run=health,
        tag=_GENERATE,
        free=True,
        health=True,
        summary="Say that the engine is well.",
    ),
    Endpoint(
        method="GET",
        path="/ping",
        run=health,
        tag=_GENERATE,
        free=True,
        health=True,
        summary="Say that the engine is well.",
    ),
    Endpoint(
        method="GET",
        path="/metrics",
        run=metrics,
        tag=_GENERATE,
        free=True,
        health=True,
        summary="Return counts and times for Prometheus.",
    ),
)
