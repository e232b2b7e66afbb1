"""The fields of other servers' requests, and what becomes of each here.

A field that changes an answer is applied, or its request is refused by the field's name: an answer
that lacks what was asked for fails far from its cause. Fields that change none are ignored, and so
are fields that no server has. `ROWS` is the table of docs/serving.md; a test compares them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from quantflow.server.errors import invalid


class Fate(StrEnum):
    """What becomes of a field."""

    APPLIED = "applied"
    REFUSED = "refused"
    IGNORED = "ignored"


@dataclass(frozen=True)
class FieldRow:
    """Fields that share their fate.

    Attributes:
        names: names of the fields.
        servers: servers that have them.
        fate: what becomes of them.
        note: what they do here, why they are ignored, or what to give in their place.
        neutral: values beside null, false and empty ones that ask for nothing, so that they are
            never refused.
        only: requests where they are refused: chat, completions, prompt (TGI's routes); everywhere
            if empty.
    """

    names: tuple[str, ...]
    servers: str
    fate: Fate
    note: str
    neutral: tuple[Any, ...] = ()
    only: tuple[str, ...] = ()


def _applied(names: str, servers: str, note: str) -> FieldRow:
    return FieldRow(tuple(names.split()), servers, Fate.APPLIED, note)


def _refused(
    names: str, servers: str, note: str, *, neutral: tuple[Any, ...] = (), only: str = ""
) -> FieldRow:
    return FieldRow(tuple(names.split()), servers, Fate.REFUSED, note, neutral, tuple(only.split()))


def _ignored(names: str, servers: str, note: str) -> FieldRow:
    return FieldRow(tuple(names.split()), servers, Fate.IGNORED, note)


ROWS: tuple[FieldRow, ...] = (
    # where a text ends
    _applied("stop", "all", "strings that end the text; special tokens too"),
    _applied("stop_sequences", "TGI (old)", "as `stop`"),
    _applied("stop_token_ids", "vLLM, SGLang", "tokens that end the text, no part of it"),
    _applied(
        "ignore_eos",
        "vLLM, llama.cpp, SGLang",
        "end tokens do not end the text; a complete grammar does",
    ),
    _applied(
        "min_tokens min_new_tokens",
        "vLLM, SGLang",
        "no end token and none of `stop_token_ids` before; stop strings count; not with a grammar",
    ),
    _applied(
        "include_stop_str_in_output no_stop_trim",
        "vLLM, SGLang",
        "the text keeps the stop string, or the token of `stop_token_ids`, that ended it",
    ),
    _refused("stop_regex stop_words", "SGLang, TensorRT-LLM", "give `stop`"),
    _refused("min_length", "transformers", "give `min_tokens`", neutral=(0,)),
    _refused("max_length max_time t_max_predict_ms", "TGI, llama.cpp", "give the number of tokens"),
    _refused("n_indent", "llama.cpp", "give `stop`", neutral=(0,)),
    # how long it is
    _applied("max_tokens n_predict", "all, llama.cpp", "new tokens; -1: as many as fit"),
    _applied("max_completion_tokens", "OpenAI", "as `max_tokens`"),
    _applied("truncate truncate_prompt_tokens", "TGI, vLLM", "the last tokens of the prompt"),
    _refused("n_keep n_discard", "llama.cpp", "give `truncate`", neutral=(0, -1)),
    # how tokens are drawn
    _applied(
        "temperature top_k top_p min_p typical_p",
        "all",
        "`top_k` 0 and -1, `top_p` and `typical_p` 1: all tokens (OpenAI's routes)",
    ),
    _applied("repetition_penalty repeat_penalty", "vLLM, TGI, SGLang, llama.cpp", "one number"),
    _applied(
        "frequency_penalty presence_penalty",
        "all",
        "of the generated tokens alone, as OpenAI's",
    ),
    _applied("no_repeat_ngram_size", "transformers", "no n-gram stands twice"),
    _applied(
        "logit_bias", "OpenAI, llama.cpp", "token -> bias, or llama.cpp's pairs; `false` forbids"
    ),
    _applied("bad_words", "vLLM", "words that are never generated"),
    _applied(
        "allowed_token_ids",
        "vLLM",
        "no other token is generated: end tokens must be among them; with a grammar, what both "
        "allow",
    ),
    _applied(
        "top_n_sigma",
        "llama.cpp",
        "logits so many standard deviations below the highest; 0 and less: all tokens",
    ),
    _applied("seed", "all", "-1: any (OpenAI's routes)"),
    _refused("repeat_last_n", "llama.cpp", "penalties count the whole text", neutral=(-1, 0)),
    _refused("mirostat", "llama.cpp", "give `top_p`", neutral=(0,)),
    _refused("mirostat_mode", "clients of llama.cpp", "give `top_p`", neutral=(0,)),
    _refused("dynatemp_range", "llama.cpp", "give `temperature`", neutral=(0,)),
    _refused("tfs_z", "llama.cpp (old)", "give `top_p`", neutral=(1,)),
    _refused("top_a", "clients of llama.cpp", "give `min_p`", neutral=(0,)),
    _refused("xtc_probability", "llama.cpp", "leave it out", neutral=(0,)),
    _refused("dry_multiplier", "llama.cpp", "give `repetition_penalty`", neutral=(0,)),
    _refused("samplers sampler_seq", "llama.cpp", "the order of the filters is fixed"),
    _refused("min_keep", "llama.cpp", "leave it out", neutral=(0, 1)),
    _refused(
        "logits_processors custom_logit_processor custom_params vllm_xargs",
        "vLLM, SGLang",
        "leave it out: no code runs for a request",
    ),
    _refused("do_sample", "TGI", "give `temperature` 0", neutral=(True,), only="chat completions"),
    _refused(
        "suppress_tokens bad_words_ids force_words_ids eta_cutoff epsilon_cutoff guidance_scale "
        "negative_prompt diversity_penalty num_beam_groups",
        "transformers",
        "leave it out",
        neutral=(0, 1),
    ),
    _refused("watermark", "TGI", "leave it out", only="chat completions"),
    _refused(
        "ban_eos_token custom_token_bans banned_tokens banned_strings",
        "text-generation-webui",
        "give `ignore_eos`, `logit_bias` or `bad_words`",
    ),
    _refused("use_beam_search", "vLLM", "`quantflow generate --num-beams` has beams"),
    _refused("num_beams", "transformers", "`quantflow generate` has beams", neutral=(1,)),
    _refused("length_penalty", "vLLM", "it is for beams", neutral=(1,)),
    _refused("num_return_sequences", "transformers", "give `n` or `best_of`", neutral=(1,)),
    _refused("penalty_alpha", "transformers", "`quantflow generate` has it", neutral=(0,)),
    _refused("best_of", "vLLM (old)", "give `n`", neutral=(1,), only="chat"),
    _refused("n", "OpenAI", "give `best_of`", neutral=(1,), only="prompt"),
    _refused("max_tokens max_completion_tokens", "OpenAI", "give `max_new_tokens`", only="prompt"),
    _refused("max_new_tokens", "TGI", "give `max_tokens`", only="chat completions"),
    _ignored(
        "mirostat_tau mirostat_eta dynatemp_exponent xtc_threshold dry_base dry_allowed_length "
        "dry_penalty_last_n dry_sequence_breakers",
        "llama.cpp",
        "they say how; what they belong to is refused",
    ),
    # what the text may be
    _applied(
        "guided_json guided_regex guided_choice guided_grammar structured_outputs",
        "vLLM",
        "constrain the answer; one constraint of a request",
    ),
    _applied("json_schema", "llama.cpp, SGLang", "constrains the answer"),
    _applied("regex ebnf", "SGLang", "constrain the answer; `ebnf` is a grammar in GBNF or Lark"),
    _applied("grammar", "TGI, llama.cpp", "TGI's object, or a grammar in GBNF or Lark as a text"),
    _applied(
        "response_format",
        "OpenAI, TGI, llama.cpp",
        "`json_object` with and without `schema`, `json_schema` with and without its wrapper, "
        "`json`, `regex`",
    ),
    _refused("structural_tag", "vLLM, SGLang", "give `tools`"),
    _refused("guided_decoding", "TensorRT-LLM", "give `structured_outputs`"),
    _refused("format", "Ollama", "give `response_format`"),
    _refused("guided_whitespace_pattern", "vLLM", "JSON has one space at most between its parts"),
    _refused("grammar_lazy grammar_triggers", "llama.cpp", "give `tools`"),
    _ignored("guided_decoding_backend", "vLLM", "llguidance makes all masks"),
    # tools
    _applied("tools tool_choice parallel_tool_calls", "OpenAI", "see Calls and reasoning"),
    _applied(
        "functions function_call",
        "OpenAI (old)",
        "as `tools` and `tool_choice`; the answer has `function_call` too",
    ),
    _refused(
        "functions function_call",
        "OpenAI (old)",
        "ask /v1/chat/completions",
        only="completions prompt",
    ),
    _refused("tools tool_choice", "OpenAI", "ask /v1/chat/completions", only="completions prompt"),
    _refused("web_search_options", "OpenAI", "leave it out"),
    # the prompt
    _applied(
        "chat_template_kwargs reasoning_effort enable_thinking guideline tool_prompt "
        "add_generation_prompt continue_final_message",
        "OpenAI, vLLM, SGLang, TGI",
        "see Conversations",
    ),
    _refused("thinking think", "Anthropic, DeepSeek, Ollama", "give `enable_thinking`"),
    _refused("system instructions", "Anthropic, OpenAI", "give a message of the role system"),
    _refused("input max_output_tokens", "OpenAI", "ask /v1/chat/completions as it is described"),
    _refused("adapter_id", "TGI", "name the adapter as `model`", only="chat completions"),
    _applied(
        "add_special_tokens",
        "vLLM, llama.cpp",
        "false: nothing is put around a prompt; true: also around a rendered chat",
    ),
    _refused(
        "add_bos_token", "text-generation-webui", "give `add_special_tokens`", neutral=(True,)
    ),
    _refused("chat_template", "vLLM", "start the server with --chat-template"),
    _refused("documents", "vLLM", "put them into a message"),
    _refused("prompt suffix echo", "OpenAI", "ask /v1/completions", only="chat"),
    _refused("messages", "OpenAI", "ask /v1/chat/completions", only="completions prompt"),
    _refused(
        "image_data multimodal_data images audio", "llama.cpp, OpenAI", "this model reads text"
    ),
    _refused("modalities", "OpenAI", "this model writes text", neutral=(["text"],)),
    _refused("verbosity", "OpenAI", "say it in a message", neutral=("medium",)),
    _refused("lora lora_path lora_request", "llama.cpp, SGLang", "name the adapter as `model`"),
    _refused("session_params", "SGLang", "give the whole prompt"),
    _refused("cache_salt", "vLLM", "beginnings of prompts are shared among all requests"),
    _refused("kv_transfer_params bootstrap_host", "vLLM, SGLang", "one process runs the model"),
    # what the answer says beside the text
    _refused(
        "include_reasoning separate_reasoning stream_reasoning parse_tool_calls",
        "vLLM, SGLang, llama.cpp",
        "start the server with --reasoning-parser or --tool-parser",
        neutral=(True,),
    ),
    _refused(
        "reasoning_format",
        "llama.cpp",
        "start the server with --reasoning-parser",
        neutral=("auto", "deepseek"),
    ),
    _applied("skip_special_tokens", "vLLM, SGLang", "false: special tokens have their text"),
    _refused("echo", "OpenAI", "give `return_full_text`", only="prompt"),
    _refused("return_full_text", "TGI", "give `echo` to /v1/completions", only="chat completions"),
    _refused(
        "logprobs top_logprobs",
        "OpenAI",
        "give `details`, `top_n_tokens`",
        neutral=(0,),
        only="prompt",
    ),
    _refused("top_logprobs", "OpenAI", "give `logprobs` 1 to 5", neutral=(0,), only="completions"),
    _refused(
        "top_n_tokens decoder_input_details",
        "TGI",
        "give `logprobs`, or ask TGI's routes",
        neutral=(0,),
        only="chat completions",
    ),
    _refused("prompt_logprobs", "vLLM", "give `echo` and `logprobs` to /v1/completions"),
    _refused("n_probs post_sampling_probs", "llama.cpp", "give `logprobs`", neutral=(0,)),
    _applied(
        "return_tokens_as_token_ids", "vLLM", "completions: `logprobs` names tokens `token_id:17`"
    ),
    _refused("return_tokens_as_token_ids", "vLLM", "/tokenize has the ids", only="chat prompt"),
    _refused("return_hidden_states", "SGLang", "leave it out"),
    _ignored(
        "spaces_between_special_tokens",
        "vLLM, SGLang",
        "the tokenizer decides it",
    ),
    _ignored(
        "return_tokens timings_per_token return_progress response_fields",
        "llama.cpp",
        "the answer is OpenAI's",
    ),
    _ignored(
        "user metadata store service_tier safety_identifier prompt_cache_key "
        "prompt_cache_retention prediction",
        "OpenAI",
        "accounting, storage, and hints on speed",
    ),
    _ignored("request_id rid priority mm_processor_kwargs", "vLLM, SGLang", "no answer differs"),
    _ignored("cache_prompt id_slot", "llama.cpp", "beginnings of prompts are always shared"),
    # fields at a wrong place
    _refused("extra_body", "OpenAI's client", "put its fields beside the others"),
    _refused("options", "Ollama", "put its fields beside the others", only="chat completions"),
    _refused("parameters", "TGI", "put its fields beside the others", only="chat completions"),
    _refused("sampling_params", "SGLang", "put its fields beside the others"),
)
# what may stand in objects inside a body: object -> rows
NESTED: Mapping[str, tuple[FieldRow, ...]] = {
    "structured_outputs": (
        _applied("json regex choice grammar json_object", "vLLM", "one of them"),
        _refused("structural_tag", "vLLM", "give `tools`"),
        _refused("whitespace_pattern", "vLLM", "JSON has one space at most between its parts"),
        _ignored(
            "disable_fallback disable_any_whitespace disable_additional_properties",
            "vLLM",
            "no answer is wrong for them",
        ),
    ),
    "messages": (
        _applied(
            "function_call",
            "OpenAI (old)",
            "as `tool_calls`; a message of the role function is its result",
        ),
        _refused("audio", "OpenAI", "this model reads text"),
        _applied("reasoning_content reasoning", "vLLM, SGLang", "see Conversations"),
        _ignored(
            "prefix partial", "DeepSeek, Moonshot", "a last message of the assistant is continued"
        ),
    ),
    "stream_options": (
        _ignored(
            "continuous_usage_stats include_obfuscation",
            "vLLM, OpenAI",
            "usage comes once, at the end",
        ),
    ),
    "response_format.json_schema": (
        _ignored("name description strict", "OpenAI", "a constraint is always strict"),
    ),
    "tools.function": (
        _ignored("strict", "OpenAI", "a call that is forced always fits; no other is constrained"),
    ),
}


def refuse(value: Any, rows: tuple[FieldRow, ...], *, place: str = "", inside: str = "") -> None:
    """Refuse an object that has a field which asks for what is not done here.

    Args:
        value: the object, as JSON; anything else has no fields.
        rows: what becomes of its fields.
        place: kind of the request: chat, completions or prompt.
        inside: name of the object in its body; empty for the body itself.

    Raises:
        Refused: of kind validation; the message names the first such field.
    """
    if not isinstance(value, dict):
        return
    for row in rows:
        if row.fate is not Fate.REFUSED or (row.only and place not in row.only):
            continue
        for name in row.names:
            if name in value and not _asks_nothing(value[name], row.neutral):
                shown = f"{inside}.{name}" if inside else name
                raise invalid(f"`{shown}` is not supported: {row.note}")


def table() -> str:
    """The table in Markdown."""
    lines = ["| field | of | what happens |", "|---|---|---|"]
    for inside, rows in (("", ROWS), *NESTED.items()):
        for row in rows:
            names = ", ".join(f"`{inside}.{name}`" if inside else f"`{name}`" for name in row.names)
            where = f" ({', '.join(_PLACES[one] for one in row.only)})" if row.only else ""
            lines.append(f"| {names} | {row.servers} | {row.fate}{where}: {row.note} |")
    return "\n".join(lines) + "\n"


_PLACES = {"chat": "chats", "completions": "/v1/completions", "prompt": "TGI's routes"}


def _asks_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Whether a value is null or empty, or one of those that change nothing; false is one.

    Where true changes nothing, false does.
    """
    if isinstance(value, bool):
        return value is (True in [one for one in neutral if isinstance(one, bool)])
    return value is None or value in ("", [], {}) or value in neutral
