"""Foreign clients against a running server; the Python of an environment that has them runs this.

    python foreign_clients.py {openai,hub,text-generation,langchain,litellm,mcp} URL

Each sends what its users send, and prints the result as JSON.
"""

import json
import sys

PROMPT = "class Stack:\n    def"
MESSAGES = [{"role": "user", "content": "def"}]


def plain_models():
    """Models as users write them: without `extra="forbid"`, with nested and optional parts."""
    from typing import Literal

    from pydantic import BaseModel, Field

    class Place(BaseModel):
        city: Literal["Rome", "Oslo"]

    class Person(BaseModel):
        """A person."""

        name: Literal["Ann", "Bob"]
        age: int = Field(ge=0, le=9)
        home: Place | None = None
        kinds: list[Literal["x", "y"]] = Field(default_factory=list, max_length=2)

    return Place, Person


def openai(url):
    from openai import BadRequestError, OpenAI

    _, person = plain_models()
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    chat = client.chat.completions
    asked = {"model": "tgi", "messages": MESSAGES, "temperature": 0}
    parsed = chat.parse(**asked, max_tokens=200, response_format=person).choices[0].message.parsed
    tool = {
        "type": "function",
        "function": {"name": "person", "parameters": person.model_json_schema()},
    }
    with chat.stream(**asked, max_tokens=200, tools=[tool], tool_choice="required") as stream:
        kinds = {event.type for event in stream}
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    chunks = list(
        chat.create(**asked, max_tokens=6, stream=True, stream_options={"include_usage": True})
    )
    try:
        chat.create(**{**asked, "messages": [{"role": "user", "content": "x y " * 2000}]})
        told = []
    except BadRequestError as error:
        told = [error.code, error.param]
    return {
        "models": [one.id for one in client.models.list()],
        "parsed": parsed.model_dump(),
        "called": person.model_validate_json(call.function.arguments).model_dump(),
        "events": sorted(kinds),
        "stream": "".join(one.choices[0].delta.content or "" for one in chunks if one.choices),
        "usage": chunks[-1].usage.completion_tokens,
        "told": told,
    }


def mcp(url):
    """The tools of three servers of MCP, each of which must be called."""
    import asyncio
    from pathlib import Path

    import jsonschema
    from mcp import ClientSession, StdioServerParameters
    from mcp.client.stdio import stdio_client
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    asked = {"model": "tgi", "messages": MESSAGES, "max_tokens": 150, "frequency_penalty": 1.5}
    found = {}

    async def of(server):
        command = str(Path(sys.executable).with_name(f"mcp-server-{server}"))
        running = stdio_client(StdioServerParameters(command=command))
        async with running as (read, write), ClientSession(read, write) as session:
            await session.initialize()
            listed = (await session.list_tools()).tools
        for one in listed:
            # the second name is that of the library's version 2
            schema = getattr(one, "inputSchema", None) or one.input_schema
            function = {"name": one.name, "parameters": schema}
            answer = client.chat.completions.create(
                **asked,
                seed=1,
                tools=[{"type": "function", "function": function}],
                tool_choice="required",
            ).choices[0]
            (call,) = answer.message.tool_calls
            whole = answer.finish_reason == "tool_calls"
            if whole:
                jsonschema.validate(json.loads(call.function.arguments), schema)
            found[one.name] = [call.function.name, whole]

    for server in ("time", "git", "fetch"):
        asyncio.run(of(server))
    return found


def hub(url):
    from huggingface_hub import InferenceClient

    client = InferenceClient(url)
    details = client.text_generation(
        PROMPT, max_new_tokens=6, details=True, decoder_input_details=True
    )
    stream = client.text_generation(PROMPT, max_new_tokens=6, stream=True, details=True)
    chat = InferenceClient(base_url=f"{url}/v1").chat.completions
    whole = chat.create(
        messages=MESSAGES, max_tokens=6, temperature=0, logprobs=True, top_logprobs=2
    )
    chunks = list(chat.create(messages=MESSAGES, max_tokens=6, temperature=0, stream=True))
    try:
        client.text_generation(PROMPT, max_new_tokens=6, top_k=0)
        told = ""
    except Exception as error:
        told = f"{error}"
    return {
        "text": client.text_generation(PROMPT, max_new_tokens=6),
        "details": [token.id for token in details.details.tokens],
        "prefill": len(details.details.prefill),
        "stream": "".join(event.token.text for event in stream),
        "chat": whole.choices[0].message.content,
        "logprobs": len(whole.choices[0].logprobs.content),
        "chat_stream": "".join(
            chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices
        ),
        "told": told,
    }


def text_generation(url):
    from text_generation import AsyncClient, Client
    from text_generation.errors import ValidationError

    client = Client(url, timeout=60)
    whole = client.generate(PROMPT, max_new_tokens=6, decoder_input_details=True)
    stream = list(client.generate_stream(PROMPT, max_new_tokens=6))
    try:
        client.generate(PROMPT, max_new_tokens=2000)
        told = ""
    except ValidationError as error:
        told = f"{error}"
    import asyncio

    async def later():
        return (await AsyncClient(url).generate(PROMPT, max_new_tokens=6)).generated_text

    return {
        "text": whole.generated_text,
        "details": [token.id for token in whole.details.tokens],
        "prefill": len(whole.details.prefill),
        "stream": "".join(event.token.text for event in stream),
        "last": stream[-1].generated_text,
        "async": asyncio.run(later()),
        "told": told,
    }


def langchain(url):
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI, OpenAI

    model = ChatOpenAI(
        base_url=f"{url}/v1", api_key="none", model="tgi", temperature=0, max_tokens=6
    )
    text = OpenAI(base_url=f"{url}/v1", api_key="none", model="tgi", temperature=0, max_tokens=6)

    @tool
    def weather(city: str) -> str:
        """Tell the weather of a city."""
        return city

    bound = ChatOpenAI(
        base_url=f"{url}/v1",
        api_key="none",
        model="tgi",
        temperature=0,
        max_tokens=200,
        frequency_penalty=1.5,
    )
    called = bound.bind_tools([weather], tool_choice="weather").invoke("def").tool_calls
    place, person = plain_models()
    roomy = ChatOpenAI(
        base_url=f"{url}/v1", api_key="none", model="tgi", temperature=0, max_tokens=200
    )
    structured = {
        method: roomy.with_structured_output(person, method=method).invoke("def").model_dump()
        for method in ("json_schema", "function_calling")
    }
    either = roomy.bind_tools([place, person], tool_choice="any")
    (chosen,) = either.invoke("def").tool_calls
    whole = None
    for chunk in either.stream("def"):
        whole = chunk if whole is None else whole + chunk
    free = roomy.bind_tools([place, person]).invoke("def")
    return {
        "chat": model.invoke("def").content,
        "chat_stream": "".join(chunk.content for chunk in model.stream("def")),
        "text": text.invoke(PROMPT),
        "batch": [answer.content for answer in model.batch(["def", "import"])],
        "called": [call["name"] for call in called],
        "structured": structured,
        "chosen": {"Place": place, "Person": person}[chosen["name"]](**chosen["args"]).model_dump(),
        "streamed": whole.tool_calls[0]["args"] == chosen["args"],
        "free": isinstance(free.content, str),
    }


def litellm(url):
    import os

    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
    import litellm

    litellm.suppress_debug_info = True
    reach = {"model": "openai/tgi", "api_base": f"{url}/v1", "api_key": "none", "num_retries": 0}
    errors = []
    for text in ("x y " * 2000, "x y " * 100_000):  # refused by its tokens, by its characters
        for more in ({}, {"max_tokens": 3}):
            try:
                litellm.completion(messages=[{"role": "user", "content": text}], **reach, **more)
            except Exception as error:
                errors.append(type(error).__name__)
    models = [
        {"model_name": "small", "litellm_params": reach},
        {"model_name": "large", "litellm_params": {**reach, "mock_response": "from the larger"}},
    ]
    router = litellm.Router(model_list=models, context_window_fallbacks=[{"small": ["large"]}])

    def answer(text):
        messages = [{"role": "user", "content": text}]
        return router.completion(model="small", messages=messages, max_tokens=6, temperature=0)

    return {
        "errors": errors,
        "fallback": answer("x y " * 2000).choices[0].message.content,
        "short": answer("def").choices[0].message.content,
    }


if __name__ == "__main__":
    run = {
        "openai": openai,
        "mcp": mcp,
        "hub": hub,
        "text-generation": text_generation,
        "langchain": langchain,
        "litellm": litellm,
    }[sys.argv[1]]
    print(json.dumps(run(sys.argv[2])))
