"""Bodies of requests, as pydantic reads them: TGI's and OpenAI's fields, each with its type alone.

validation.py refuses wrong values, in TGI's order and words. Fields that other servers have, and
this one not, are refused by name (fields.py). Unknown fields are ignored, as both programs ignore
them. `openapi.py` describes these classes.
"""

from math import isfinite
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from quantflow.server.errors import invalid
from quantflow.server.fields import NESTED, ROWS, FieldRow, refuse

Item = TypeVar("Item")

U32 = Annotated[int, Field(strict=True, ge=0, le=2**32 - 1)]
I32 = Annotated[int, Field(strict=True, ge=-(2**31), le=2**31 - 1)]
U64 = Annotated[int, Field(strict=True, ge=0, le=2**64 - 1)]
I64 = Annotated[int, Field(strict=True, ge=-(2**63), le=2**63 - 1)]
NewTokens = Annotated[int, Field(strict=True, ge=-1, le=2**32 - 1)]  # -1: as many as fit
Number = Annotated[float, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]
MOST_TOOLS = 1024  # of a request, and calls of a message
MOST_INSTANCES = 1024  # of a request
# a list whose first mistake is told: no others are collected
Many = Annotated[list[Item], Field(fail_fast=True)]


def _in_turn(value: Any) -> Any:
    """The value itself: between two calls of Python other threads run."""
    return value


def _numbers(value: Any) -> Any:
    """A mapping to numbers or false, read in Python: pydantic would keep all other threads out."""
    if not isinstance(value, dict):
        raise PydanticCustomError("mapping", "Input should be an object")
    for key, number in value.items():
        finite = isinstance(number, int) or (isinstance(number, float) and isfinite(number))
        if number is True or not finite:
            raise PydanticCustomError(
                "number", "{key}: Input should be a number", {"key": key[:40]}
            )
    return value


InTurn = Annotated[Item, BeforeValidator(_in_turn)]  # an item of a list that may be long


class Body(BaseModel):
    """A JSON object: numbers are finite, text is no number, and true and false are neither."""

    model_config = ConfigDict(allow_inf_nan=False, frozen=True, extra="ignore")
    others: ClassVar[tuple[FieldRow, ...]] = ()  # fields of other servers, and what becomes of them
    place: ClassVar[str] = ""  # kind of the request
    inside: ClassVar[str] = ""  # name of the object in its body

    @model_validator(mode="before")
    @classmethod
    def refuse_others(cls, value: Any) -> Any:
        """Refuse a field that would change the answer, and is not applied.

        Raises:
            Refused: of kind validation.
        """
        refuse(value, cls.others, place=cls.place, inside=cls.inside)
        return value


class Grammar(Body):
    """The rule of a text.

    It is a JSON schema, a regular expression, one of several texts, or a grammar in GBNF or Lark.
    """

    type: Literal["json", "json_schema", "regex", "choice", "json_object", "grammar"]
    value: Any = None


class StructuredOutputs(Body):
    """vLLM's object with one constraint."""

    others = NESTED["structured_outputs"]
    inside = "structured_outputs"

    json_value: Any = Field(default=None, alias="json")
    regex: str | None = None
    choice: Many[str] | None = None
    grammar: str | None = None
    json_object: Flag | None = None


Bias = Number | Literal[False]  # false: never
BiasByToken = Annotated[
    dict[str, Any], PlainValidator(_numbers, json_schema_input_type=dict[str, Bias])
]


class Asking(Body):
    """The fields that all routes have, under the names of the servers that have them."""

    others = ROWS

    temperature: Number | None = None
    top_k: I32 | None = None
    top_p: Number | None = None
    min_p: Number | None = None
    typical_p: Number | None = None
    top_n_sigma: Number | None = None  # llama.cpp's
    repetition_penalty: Number | None = None
    repeat_penalty: Number | None = None  # llama.cpp's name
    frequency_penalty: Number | None = None
    presence_penalty: Number | None = None
    no_repeat_ngram_size: U32 | None = None
    logit_bias: BiasByToken | Many[InTurn[tuple[U32, Bias]]] | None = None
    bad_words: Many[str] | None = None
    allowed_token_ids: Many[U32] | None = None
    truncate: U64 | None = None
    truncate_prompt_tokens: U64 | None = None  # vLLM's name
    add_special_tokens: Flag | None = None
    skip_special_tokens: Flag | None = None
    stop_token_ids: Many[U32] | None = None
    ignore_eos: Flag | None = None
    min_tokens: U32 | None = None
    min_new_tokens: U32 | None = None  # SGLang's name
    include_stop_str_in_output: Flag | None = None
    no_stop_trim: Flag | None = None  # SGLang's name
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: Many[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    json_schema: Any = None
    regex: str | None = None
    ebnf: str | None = None


class Parameters(Asking):
    """TGI's parameters of a continuation."""

    place = "prompt"

    best_of: U32 | None = None
    do_sample: Flag = False
    max_new_tokens: U32 | None = 100
    return_full_text: Flag | None = None
    stop: Many[str] = Field(default_factory=list)
    stop_sequences: Many[str] | None = None  # an older name
    watermark: Flag = False
    details: Flag = False
    decoder_input_details: Flag = False
    seed: U64 | None = None
    top_n_tokens: U32 | None = None
    grammar: Grammar | str | None = None
    adapter_id: str | None = None


WITHOUT_PARAMETERS = Parameters(do_sample=True)  # TGI's default where the whole object is left out


class VertexInstance(Body):
    """A prompt and how it is continued, as Vertex has several."""

    others = ROWS
    place = "prompt"

    inputs: str
    parameters: Parameters = Field(default_factory=lambda: WITHOUT_PARAMETERS)  # never copied

    @model_validator(mode="before")
    @classmethod
    def refuse_misplaced(cls, value: Any) -> Any:
        """Refuse parameters beside the prompt, where no server reads them.

        Raises:
            Refused: of kind validation.
        """
        if isinstance(value, dict):
            for name in value.keys() & Parameters.model_fields.keys() - cls.model_fields.keys():
                raise invalid(f"`{name}` stands beside `inputs`, it belongs into `parameters`")
        return value


class GenerateBody(VertexInstance):
    """A prompt and how it is continued."""


class CompatBody(GenerateBody):
    """A prompt for `/` and `/invocations`, whose body says whether the answer is streamed."""

    stream: Flag = False


class VertexBody(Body):
    """Prompts of Vertex."""

    instances: Annotated[Many[InTurn[VertexInstance]], Field(max_length=MOST_INSTANCES)]


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

    others = NESTED["messages"]
    inside = "messages"

    role: str
    content: str | Many[InTurn[ContentPart]] | None = None
    name: str | None = None
    tool_calls: Annotated[Many[InTurn[ToolCall]], Field(max_length=MOST_TOOLS)] | None = None
    function_call: FunctionCall | None = None  # an older form of `tool_calls`
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


class ResponseFormat(Body):
    """OpenAI's `text`, `json_object`, `json_schema`; TGI's types with a `value`.

    A schema stands in OpenAI's `json_schema.schema`, or in llama.cpp's `schema`.
    """

    type: Literal["text", "json_object", "json_schema", "json", "regex"]
    value: Any = None
    json_schema: dict[str, Any] | None = None
    own_schema: Any = Field(default=None, alias="schema")


class StreamOptions(Body):
    """The content of a stream beside the text."""

    include_usage: Flag = False


class OpenAIBody(Asking):
    """The fields that chats and completions have in common."""

    model: str | None = None
    max_tokens: NewTokens | None = None
    max_completion_tokens: NewTokens | None = None
    n_predict: NewTokens | None = None  # llama.cpp's name
    n: U32 | None = None
    seed: I64 | None = None
    stop: str | Many[str] | None = None
    stop_sequences: Many[str] | None = None
    stream: Flag | None = False
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    grammar: Grammar | str | None = None
    user: str | None = None


class ChatBody(OpenAIBody):
    """A conversation, and how it goes on."""

    place = "chat"

    messages: Many[InTurn[Message]]
    logprobs: Flag | None = False
    top_logprobs: U32 | None = None
    guideline: str | None = None
    tools: Annotated[Many[InTurn[Tool]], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: str | ToolChoice | None = None  # auto, none, required, or a function
    functions: Annotated[Many[InTurn[Function]], Field(max_length=MOST_TOOLS)] | None = None
    function_call: str | FunctionName | None = None  # an older form of tools and their choice
    parallel_tool_calls: Flag | None = None
    tool_prompt: str | None = None  # TGI's, for templates that do not know tools
    add_generation_prompt: Flag | None = None
    continue_final_message: Flag | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    enable_thinking: Flag | None = None


class CompletionBody(OpenAIBody):
    """A prompt as text, as tokens, or several of them."""

    place = "completions"

    prompt: str | Many[str] | Many[InTurn[I64]] | Many[InTurn[Many[I64]]]
    best_of: U32 | None = None
    echo: Flag | None = False
    logprobs: U32 | None = None
    return_tokens_as_token_ids: Flag | None = False
    suffix: str | None = None


class InvocationBody(Body):
    """SageMaker's body: a chat with `messages`, a completion with `prompt`, or `inputs`."""

    model_config = ConfigDict(allow_inf_nan=False, frozen=True, extra="allow")
