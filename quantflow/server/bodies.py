"""Bodies of requests, as pydantic reads them: TGI's and OpenAI's fields, each with its type alone.

validation.py refuses wrong values, in TGI's order and words. Unknown fields are ignored, as both
programs ignore them. `openapi.py` describes these classes.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

U32 = Annotated[int, Field(strict=True, ge=0, le=2**32 - 1)]
I32 = Annotated[int, Field(strict=True, ge=-(2**31), le=2**31 - 1)]
U64 = Annotated[int, Field(strict=True, ge=0, le=2**64 - 1)]
I64 = Annotated[int, Field(strict=True, ge=-(2**63), le=2**63 - 1)]
Number = Annotated[float, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]


class Body(BaseModel):
    """A JSON object: numbers are finite, text is no number, and true and false are neither."""

    model_config = ConfigDict(allow_inf_nan=False, frozen=True, extra="ignore")


class Grammar(Body):
    """The rule of a text: a JSON schema, a regular expression, or one of several texts."""

    type: Literal["json", "regex", "choice", "json_object"]
    value: Any = None


class Parameters(Body):
    """TGI's parameters of a continuation."""

    best_of: U32 | None = None
    temperature: Number | None = None
    repetition_penalty: Number | None = None
    frequency_penalty: Number | None = None
    top_k: I32 | None = None
    top_p: Number | None = None
    typical_p: Number | None = None
    do_sample: Flag = False
    max_new_tokens: U32 | None = 100
    return_full_text: Flag | None = None
    stop: list[str] = Field(default_factory=list)
    truncate: U64 | None = None
    watermark: Flag = False
    details: Flag = False
    decoder_input_details: Flag = False
    seed: U64 | None = None
    top_n_tokens: U32 | None = None
    grammar: Grammar | None = None
    adapter_id: str | None = None


WITHOUT_PARAMETERS = Parameters(do_sample=True)  # TGI's default where the whole object is left out


class GenerateBody(Body):
    """A prompt and how it is continued."""

    inputs: str
    parameters: Parameters = WITHOUT_PARAMETERS


class CompatBody(GenerateBody):
    """A prompt for `/` and `/invocations`, whose body says whether the answer is streamed."""

    stream: Flag = False


class VertexInstance(Body):
    """One prompt of Vertex."""

    inputs: str
    parameters: Parameters = WITHOUT_PARAMETERS


class VertexBody(Body):
    """Prompts of Vertex."""

    instances: list[VertexInstance]


class FunctionCall(Body):
    """A call that an earlier answer made."""

    name: str
    arguments: str | dict[str, Any] = "{}"


class ToolCall(Body):
    """A call that an earlier answer made, with its id."""

    id: str | None = None
    type: str = "function"
    function: FunctionCall


class ContentPart(Body):
    """A part of a message."""

    type: str
    text: str | None = None


class Message(Body):
    """One message of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # another name of `reasoning_content`


class Function(Body):
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    arguments: dict[str, Any] | None = None  # TGI's name of `parameters`


class Tool(Body):
    """A tool that the model may use."""

    type: str = "function"
    function: Function


class FunctionName(Body):
    """The name of the function that must be called."""

    name: str


class ToolChoice(Body):
    """The function that must be called."""

    type: str = "function"
    function: FunctionName


class JsonSchema(Body):
    """OpenAI's wrapping of a schema."""

    name: str = "answer"
    json_schema: Any = Field(default=None, alias="schema")
    strict: Flag | None = None


class ResponseFormat(Body):
    """OpenAI's `text`, `json_object`, `json_schema`; TGI's types with a `value`."""

    type: Literal["text", "json_object", "json_schema", "json", "regex"]
    value: Any = None
    json_schema: JsonSchema | None = None


class StreamOptions(Body):
    """The content of a stream beside the text."""

    include_usage: Flag = False


class OpenAIBody(Body):
    """The fields that chats and completions have in common."""

    model: str | None = None
    max_tokens: U32 | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: I32 | None = None
    min_p: Number | None = None
    typical_p: Number | None = None
    repetition_penalty: Number | None = None
    frequency_penalty: Number | None = None
    presence_penalty: Number | None = None
    logit_bias: dict[str, Number] | None = None
    n: U32 | None = None
    seed: I64 | None = None
    stop: str | list[str] | None = None
    stream: Flag | None = False
    stream_options: StreamOptions | None = None
    truncate: U64 | None = None
    user: str | None = None


class ChatBody(OpenAIBody):
    """A conversation, and how it goes on."""

    messages: list[Message]
    max_completion_tokens: U32 | None = None
    logprobs: Flag | None = False
    top_logprobs: U32 | None = None
    response_format: ResponseFormat | None = None
    guideline: str | None = None
    tools: list[Tool] | None = None
    tool_choice: str | ToolChoice | None = None  # auto, none, required, or a function
    parallel_tool_calls: Flag | None = None
    tool_prompt: str | None = None  # TGI's, for templates that do not know tools
    add_generation_prompt: Flag | None = None
    continue_final_message: Flag | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    enable_thinking: Flag | None = None


class CompletionBody(OpenAIBody):
    """A prompt as text, as tokens, or several of them."""

    prompt: str | list[str] | list[I64] | list[list[I64]]
    best_of: U32 | None = None
    echo: Flag | None = False
    logprobs: U32 | None = None
    suffix: str | None = None
    response_format: ResponseFormat | None = None


class InvocationBody(Body):
    """SageMaker's body: a chat with `messages`, a completion with `prompt`, or `inputs`."""

    model_config = ConfigDict(allow_inf_nan=False, frozen=True, extra="allow")
