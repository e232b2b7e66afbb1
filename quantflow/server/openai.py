"""OpenAI's routes: chats, completions and models, as the `openai` package reads them."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from starlette.responses import JSONResponse, Response

from quantflow.models.chat_form import goes_on
from quantflow.models.chat_template import with_arguments
from quantflow.server import tools as tooling
from quantflow.server.asked import asked_of, constraint_of, limit_of
from quantflow.server.bodies import (
    Body,
    ChatBody,
    CompatBody,
    CompletionBody,
    InvocationBody,
    Message,
    OpenAIBody,
    Tool,
)
from quantflow.server.errors import Refused, invalid
from quantflow.server.events import EventStream
from quantflow.server.generation import Answer, AnswerPiece, Timings
from quantflow.server.grammar import JSON_TYPES
from quantflow.server.http import FEW, Endpoint, HttpCall, LargeJson, json_answer, typed
from quantflow.server.metrics import CountedRequest
from quantflow.server.models import ServedModel
from quantflow.server.openai_answers import AnswerWriter, ChatWriter, CompletionWriter, usage
from quantflow.server.parsers import AnswerParsers, any_id
from quantflow.server.site import Site
from quantflow.server.tgi import compat_generate
from quantflow.server.validation import Asked, check

DONE = "[DONE]"
UNREAD = "x-unread-template-variables"
UNREAD_NAMES = 20  # that the header holds
COMPLETION_NAMES = MappingProxyType(
    {
        "inputs": "prompt",
        "max_new_tokens": "max_tokens",
        "top_n_tokens": "logprobs",
        "decoder_input_details": "echo",
    }
)
COMPLETION_TOKENS = 16  # OpenAI's default of /v1/completions


def chat_names(body: Any) -> Mapping[str, str]:
    """The names of TGI's fields in a chat: a client knows those of the two limits that it sent."""
    newer = isinstance(body, ChatBody) and body.max_completion_tokens is not None
    limit = "max_completion_tokens" if newer else "max_tokens"
    return {"inputs": "messages", "max_new_tokens": limit, "top_n_tokens": "top_logprobs"}


async def chat(call: HttpCall) -> Response | EventStream | LargeJson:
    """Answer a conversation."""
    timings = Timings()
    older = call.body.functions is not None
    call = await _in_new_form(call)
    site, body = call.site, call.body
    tools = tooling.offered(body.tools, body.tool_choice)
    grammar = await call.beside(lambda: tooling.forced(tools, body.tool_choice))
    wanted = constraint_of(body)
    if grammar is not None and wanted is not None:
        raise invalid("grammar and tools are mutually exclusive")
    asked = asked_of(
        body,
        grammar=grammar or wanted,
        limit=limit_of(body, default=None),
        top=(body.top_logprobs or 0) if body.logprobs else 0,
    )
    adapter = site.models.adapter(body.model)
    async with site.models.using(body.model) as model:
        with site.metrics.asked() as counted:
            # what can be refused before it is rendered
            check(asked, site.service.limits, text=None, float8=model.float8)
            with site.service.admission.held(asked.rows):
                prompt = await render(call, model, tools)
            reads = prompt.parsers
            # JSON that a grammar makes comes behind reasoning that the prompt begins, or without
            # any
            makes_json = grammar is not None or (wanted is not None and wanted.type in JSON_TYPES)
            reasoning = reads.closing(prompt.text, prompt.prefix) if makes_json else None
            answer = await _begin(
                site,
                model,
                asked,
                timings,
                counted=counted,
                text=prompt.text,
                rendered=True,
                kept=reads.kept(tools=bool(tools)),
                reasoning=reasoning,
                adapter=adapter,
            )
    reader = partial(
        reads.reader,
        tooling.schemas(tools),
        prompt=prompt.text,
        prefix=prompt.prefix,
        forced=grammar is not None,
        reasons=not makes_json or reasoning is not None,
        parallel=body.parallel_tool_calls is not False,
    )
    writer = ChatWriter(
        model,
        name=adapter or model.name,
        reader=reader,
        new_id=any_id if reads.calls is None else reads.calls.new_id,
        earlier=sum(len(message.tool_calls or ()) for message in body.messages),
        older=older,
        logprobs=bool(body.logprobs),
    )
    return await _respond(site, [answer], writer, body, headers=prompt.headers)


async def _in_new_form(call: HttpCall) -> HttpCall:
    """The request of a chat, with tools for functions."""
    body = await call.beside(lambda: tooling.in_new_form(call.body))
    return call if body is call.body else replace(call, body=body)


async def completions(call: HttpCall) -> Response | EventStream | LargeJson:
    """Continue one prompt or several."""
    site, body = call.site, call.body
    timings = Timings()
    if body.suffix:
        raise invalid("Suffix is not supported and can be achieved by preprocessing the prompt.")
    prompts = _prompts(body)
    most = site.job.limits.max_client_batch_size
    if len(prompts) > most:
        text = f"Number of prompts exceeds the maximum allowed batch size of {most}"
        raise Refused("batch size exceeded", text)
    limit = limit_of(body, default=COMPLETION_TOKENS)
    asked = asked_of(
        body,
        grammar=constraint_of(body),
        limit=limit,
        top=body.logprobs or 0,
        prefill=bool(body.echo) and (body.logprobs is not None or limit == 0),
        echoes=bool(body.echo),
        best_of=body.best_of,
    )
    answers: list[Answer] = []
    adapter = site.models.adapter(body.model)
    try:
        async with site.models.using(body.model) as model:
            for prompt in prompts:
                prompt_fields: dict[str, Any] = (
                    {"text": prompt}
                    if isinstance(prompt, str)
                    else {"text": None, "tokens": prompt}
                )
                with site.metrics.asked() as counted:
                    prompt_fields |= {"adapter": adapter, "counted": counted}
                    answers.append(await _begin(site, model, asked, timings, **prompt_fields))
    except BaseException as error:
        for answer in answers:
            answer.__exit__(type(error), error, None)
        raise
    writer = CompletionWriter(
        model,
        name=adapter or model.name,
        echo=bool(body.echo),
        logprobs=body.logprobs is not None,
        by_ids=bool(body.return_tokens_as_token_ids),
    )
    return await _respond(site, answers, writer, body)


async def models(call: HttpCall) -> Response:
    """List the names that requests may give as `model`."""
    site: Site = call.site
    entries = []
    for name, place in site.models.places.items():
        served = place.served
        entry: dict[str, Any] = {
            "id": name,
            "object": "model",
            "created": site.started,
            "owned_by": "quantflow",
        }
        entry["loaded"] = served is not None
        if served is not None:
            entry |= {
                "max_model_len": served.max_total_tokens,
                "root": served.manifest.get("source", {}).get("name"),
            }
        entries.append(entry)
    for name in site.job.adapter_folders:  # as vLLM lists them
        entry = {
            "id": name,
            "object": "model",
            "created": site.started,
            "owned_by": "quantflow",
            "loaded": True,
        }
        entries.append(
            entry
            | {
                "parent": site.models.first.name,
                "max_model_len": site.models.first.max_total_tokens,
            }
        )
    return JSONResponse({"object": "list", "data": entries})


async def chat_tokenize(call: HttpCall) -> Response | LargeJson:
    """The tokens of a conversation as its template writes it."""
    call = await _in_new_form(call)
    site, body = call.site, call.body
    with ExitStack() as stack:
        stack.enter_context(site.service.admission.held(1))
        async with site.models.using(body.model) as model:
            tools = tooling.offered(body.tools, body.tool_choice)
            prompt = await render(call, model, tools)
            rendered = not body.add_special_tokens
            table = await model.token_table(prompt.text, rendered=rendered)
        return json_answer(
            lambda: {"tokenize_response": iter(table), "templated_text": prompt.text},
            items=len(table),
            headers=prompt.headers,
            held=stack.pop_all(),
        )


async def invocations(call: HttpCall) -> Response | EventStream | LargeJson:
    """Answer SageMaker's requests, in the interface that the body belongs to."""
    value: Any = call.body.model_extra
    run: Any
    kind: type[Body]
    run, kind = (chat, ChatBody) if "messages" in value else (completions, CompletionBody)
    if "messages" not in value and "prompt" not in value:
        run, kind = compat_generate, CompatBody
    body = await call.beside(lambda: typed(kind, value))
    response: Response | EventStream | LargeJson = await run(replace(call, body=body))
    return response


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """The prompt of a conversation.

    Attributes:
        text: text of the prompt.
        prefix: beginning of the answer that the prompt ends with; empty where it has none.
        parsers: how its answers are read.
        headers: headers of the response, which name template variables that are never read.
    """

    text: str
    prefix: str
    parsers: AnswerParsers
    headers: Mapping[str, str]


async def render(call: HttpCall, model: ServedModel, tools: Sequence[Tool]) -> Prompt:
    """The prompt of a conversation.

    Raises:
        Refused: there is no message, one is no text, or the template refuses one.
    """
    body = call.body
    if not body.messages:
        raise invalid("`messages` cannot be empty")
    if body.continue_final_message and body.add_generation_prompt:
        raise invalid(
            "`continue_final_message` and `add_generation_prompt` are both true: the answer goes "
            "on with the last message, or begins a new one"
        )
    messages, shown = await call.beside(
        lambda: (list(map(_plain, body.messages)), tooling.shown_to_template(tools) or None)
    )
    continues = body.continue_final_message
    if continues is None:
        continues = body.add_generation_prompt is not True and goes_on(messages)
    rendered = await model.render(
        messages,
        answer=body.add_generation_prompt is not False,
        continues=continues,
        tools=shown,
        tool_prompt=body.tool_prompt,
        options=_options(body),
    )
    unread = dict.fromkeys(rendered.unread)
    if body.reasoning_effort == "none" and "enable_thinking" not in unread:
        unread.pop("reasoning_effort", None)
    # escaped, since clients choose these names
    names = ", ".join(json.dumps(name)[1:-1] for name in list(unread)[:UNREAD_NAMES])
    return Prompt(
        text=rendered.text,
        prefix=str(messages[-1]["content"]) if continues else "",
        parsers=model.parsers_of(rendered.template),
        headers={UNREAD: names} if names else {},
    )


def _options(body: ChatBody) -> dict[str, Any]:
    """Variables of the template beside messages and tools.

    Raises:
        Refused: a name is one of the tokenizer's own.
    """
    options = body.chat_template_kwargs or {}
    own = {
        "chat_template",
        "tokenize",
        "tools",
        "conversation",
        "messages",
        "documents",
        "add_generation_prompt",
        "sanitize_control_tokens",
        "padding",
        "continue_final_message",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "tokenizer_kwargs",
        "return_assistant_tokens_mask",
        "processor_kwargs",
    }
    if taken := own & options.keys():
        raise invalid(f"`chat_template_kwargs` must not hold {', '.join(sorted(taken))}")
    fields = ("guideline", "reasoning_effort", "enable_thinking")
    given = {name: value for name in fields if (value := getattr(body, name)) is not None}
    if body.reasoning_effort == "none":
        given.setdefault("enable_thinking", False)
    return given | options


def _plain(message: Message) -> dict[str, Any]:
    """A message as templates expect it: text alone."""
    content: Any = message.content
    if isinstance(content, list):
        other = next(
            (part.type for part in content if part.type != "text" or part.text is None), None
        )
        if other is not None:
            raise invalid(f"`messages` hold a part of type {other[:40]!r}; this model reads text")
        content = "\n".join(part.text or "" for part in content)
    message_fields: dict[str, Any] = {"role": message.role, "content": content or ""}
    message_fields |= {
        name: value
        for name in ("name", "tool_call_id")
        if (value := getattr(message, name)) is not None
    }
    reasoning = message.reasoning_content or message.reasoning
    if reasoning:
        message_fields["reasoning_content"] = reasoning
    if message.tool_calls:
        message_fields["tool_calls"] = [
            with_arguments(one.model_dump(exclude_none=True)) for one in message.tool_calls
        ]
    return message_fields


def _prompts(body: CompletionBody) -> list[Any]:
    """The prompts of a completion, each a text or tokens."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [prompt]
    if not prompt:
        raise invalid("`prompt` cannot be empty")
    return list(prompt)


async def _begin(
    site: Site,
    model: ServedModel,
    asked: Asked,
    timings: Timings,
    *,
    counted: CountedRequest,
    **prompt: Any,
) -> Answer:
    answer = await site.service.answer(model, asked, keeps_stop=False, timings=timings, **prompt)
    answer.counted = counted
    return answer


async def _respond(
    site: Site,
    answers: list[Answer],
    writer: AnswerWriter,
    body: OpenAIBody,
    *,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> Response | EventStream | LargeJson:
    """The response of answers whose rows are submitted, as a whole or as a stream."""
    if body.stream:
        # `_stream` ends the rows itself, but not where the client goes before it begins
        held = ExitStack()
        for answer in answers:
            held.enter_context(answer)
        events = _stream(site, answers, writer, body)
        return EventStream(events=events, headers={**headers, **answers[0].headers}, held=held)
    with ending(answers):
        for answer in answers:
            await answer.finish()
    items = sum(answer.size for answer in answers)
    return json_answer(
        lambda: writer.whole(answers, count=body.n or 1),
        items=items,
        headers={**headers, **answers[0].headers},
    )


async def _stream(
    site: Site, answers: list[Answer], writer: AnswerWriter, body: OpenAIBody
) -> AsyncGenerator[str, None]:
    """Yield the events of submitted answers, their usage if the request wants it, then [DONE]."""
    try:
        with ending(answers):
            for index in range(sum(len(answer.rows) for answer in answers)):
                for event in writer.begin(index):
                    yield event
            async for index, answer, piece in merged(answers):
                if piece.index == 0 and answer.size > FEW:  # it may begin with the whole prompt
                    write = partial(writer.token, index, answer, piece)
                    events = await site.models.workers.large(write)
                else:
                    events = writer.token(index, answer, piece)
                for event in events:
                    yield event
        if body.stream_options is not None and body.stream_options.include_usage:
            yield writer.event([], usage=usage(answers))
    except Refused as refused:
        names = chat_names(body) if isinstance(body, ChatBody) else COMPLETION_NAMES
        yield json.dumps(refused.openai_body(names), ensure_ascii=False)
    yield DONE


@contextmanager
def ending(answers: Sequence[Answer]) -> Iterator[None]:
    """End the rows of answers with the block, and count their outcome."""
    with ExitStack() as stack:
        for answer in answers:
            stack.enter_context(answer)
        yield
        for answer in answers:
            if answer.counted is not None:
                answer.counted.answered(answer)


async def merged(answers: Sequence[Answer]) -> AsyncIterator[tuple[int, Answer, AnswerPiece]]:
    """Yield the tokens of all continuations as they come, each with the number of its choice."""
    rows = [(answer, row) for answer in answers for row in range(len(answer.rows))]
    if len(rows) == 1:
        async for piece in rows[0][0].pieces(0):
            yield 0, rows[0][0], piece
        return
    queue: asyncio.Queue[tuple[int, Answer, AnswerPiece] | None | BaseException] = asyncio.Queue()

    async def follow(index: int, answer: Answer, row: int) -> None:
        try:
            async for piece in answer.pieces(row):
                queue.put_nowait((index, answer, piece))
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(follow(index, *pair)) for index, pair in enumerate(rows)]
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


_CHAT_ANSWER = {
    "id": "chatcmpl-0",
    "object": "chat.completion",
    "choices": [
        {"index": 0, "message": {"role": "assistant", "content": "Four."}, "finish_reason": "stop"}
    ],
    "usage": {"prompt_tokens": 9, "completion_tokens": 3, "total_tokens": 12},
}
_TEXT_ANSWER = {
    "id": "cmpl-0",
    "object": "text_completion",
    "choices": [{"index": 0, "text": " b):", "finish_reason": "length", "logprobs": None}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
}
_TAG = "OpenAI"
ENDPOINTS = (
    Endpoint(
        method="POST",
        path="/v1/chat/completions",
        run=chat,
        body=ChatBody,
        tag=_TAG,
        answer=_CHAT_ANSWER,
        openai=True,
        names=chat_names,
        summary="Answer a conversation; events where `stream` is true.",
    ),
    Endpoint(
        method="POST",
        path="/v1/completions",
        run=completions,
        body=CompletionBody,
        tag=_TAG,
        answer=_TEXT_ANSWER,
        openai=True,
        names=lambda body: COMPLETION_NAMES,
        summary="Continue prompts; events where `stream` is true.",
    ),
    Endpoint(
        method="GET",
        path="/v1/models",
        run=models,
        tag=_TAG,
        answer={"object": "list", "data": [{"id": "llama", "object": "model"}]},
        openai=True,
        summary="List the models.",
    ),
    Endpoint(
        method="POST",
        path="/chat_tokenize",
        run=chat_tokenize,
        body=ChatBody,
        tag=_TAG,
        answer={"tokenize_response": [], "templated_text": "<s>user: hello"},
        summary="Return the tokens of a conversation.",
    ),
    Endpoint(
        method="POST",
        path="/invocations",
        run=invocations,
        body=InvocationBody,
        tag="SageMaker",
        answer=[{"generated_text": " b):"}],
        summary="Answer a conversation, a completion or a prompt, by what the body holds.",
    ),
)
