"""Where an answer ends, and what is never in it: a fine-tune in ChatML with an old configuration.

The tokenizer's end is `<|im_end|>`; generation_config.json still has `</s>`, and a word that the
tokenizer does not flag. A bias stands for a model that was trained to end its turn.
"""

import json
import shutil

import pytest

import quantflow
from quantflow.errors import UsageError
from quantflow.runtime.chat_job import ChatJob
from quantflow.runtime.generate_job import Sampling
from quantflow.runtime.generation_config import SamplingDefaults
from tests.unit.server.conftest import ROOT

ENDS, WORD = 4095, 299
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
CHAT = {"messages": [{"role": "user", "content": "def"}], "temperature": 0, "max_tokens": 8}


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """The example model as such a fine-tune, whose maker also says how tokens are drawn."""
    folder = tmp_path_factory.mktemp("tuned") / "tuned"
    folder.mkdir()
    for name in FILES:
        shutil.copy(ROOT / "examples/tiny-llama" / name, folder / name)
    words = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = words["model"]["vocab"]
    last = max(vocabulary, key=vocabulary.get)
    assert vocabulary.pop(last) == ENDS
    words["model"]["merges"] = [pair for pair in words["model"]["merges"] if "".join(pair) != last]
    vocabulary["<|im_end|>"] = ENDS
    words["added_tokens"].append(dict(words["added_tokens"][1], id=ENDS, content="<|im_end|>"))
    (folder / "tokenizer.json").write_text(json.dumps(words))
    named = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**named, "eos_token": "<|im_end|>"}))
    generation = {"eos_token_id": [1, WORD], "do_sample": True, "temperature": 0.01, "top_k": 1}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.fixture(scope="module")
def server(serve, tuned):
    with serve(artifact=tuned) as asking:
        yield asking


def chat(server, **options):
    answer = server.post("/v1/chat/completions", {**CHAT, **options})
    assert answer.status == 200, answer.body
    return answer.json()["choices"][0], answer.json()["usage"]["completion_tokens"]


def streamed(server, path, body):
    events = server.post(path, {**body, "stream": True}).events()[:-1]
    choices = [event["choices"][0] for event in events]
    return "".join(one.get("text") or one.get("delta", {}).get("content") or "" for one in choices)


def text_of(choice):
    return choice["message"]["content"]


def test_all_ends_count(server):
    assert server.models.first.loaded.eos_token_ids == (1, WORD, ENDS)
    for end in (1, WORD, ENDS):
        choice, count = chat(server, logit_bias={str(end): 100})
        assert (text_of(choice), choice["finish_reason"], count) == ("", "stop", 1)


def after_two(end):
    """A choice of three tokens: two that a regular expression forces, and an end."""
    return {"regex": "x = 1", "logit_bias": {str(end): 100}}


@pytest.mark.parametrize("end", [WORD, ENDS])
def test_an_end_token_has_no_text_in_any_answer(server, end):
    body = {"prompt": "def", "temperature": 0, "max_tokens": 12, **after_two(end)}
    answer = server.post("/v1/completions", {**body, "logprobs": 1}).json()["choices"][0]
    assert (answer["text"], answer["finish_reason"]) == ("x = 1", "stop")
    offsets = answer["logprobs"]["text_offset"]
    assert offsets[-1] == len("x = 1") and offsets == sorted(offsets)
    assert streamed(server, "/v1/completions", body) == "x = 1"
    assert text_of(chat(server, **after_two(end))[0]) == "x = 1"
    assert streamed(server, "/v1/chat/completions", CHAT | after_two(end)) == "x = 1"
    parameters = {"max_new_tokens": 12, "details": True, **after_two(end)}
    whole = server.generate("def", **parameters).json()
    assert whole["generated_text"] == "x = 1" and whole["details"]["finish_reason"] == "eos_token"
    last = whole["details"]["tokens"][-1]
    assert last["id"] == end and last["special"]  # clients add up the tokens that are not special
    events = server.post("/generate_stream", {"inputs": "def", "parameters": parameters}).events()
    tokens = [event["token"] for event in events]
    assert "".join(one["text"] for one in tokens if not one["special"]) == "x = 1"
    assert events[-1]["generated_text"] == "x = 1"


def test_constrained_json_is_json(server):
    """vllm-project/vllm#2538: `{"a": 1}` and the text of the end."""
    schema = {"properties": {"a": {"const": 1}}, "required": ["a"]}
    choice, _ = chat(server, guided_json=schema, logit_bias={str(WORD): 100}, max_tokens=30)
    assert json.loads(text_of(choice)) == {"a": 1} and choice["finish_reason"] == "stop"


TIMEZONE = {"type": "object", "properties": {"tz": {"enum": ["UTC"]}}, "required": ["tz"]}


def test_a_forced_call_has_the_arguments_that_its_tool_lists(server):
    """ggml-org/llama.cpp#8180, guidance-ai/guidance#1050: keys without end, and no call."""
    for parameters, arguments in ((TIMEZONE, {"tz": "UTC"}), (None, {})):
        tool = {"type": "function", "function": {"name": "now", "parameters": parameters}}
        choice, _ = chat(server, tools=[tool], tool_choice="required", max_tokens=60)
        (call,) = choice["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == arguments
        assert choice["finish_reason"] == "tool_calls"


def test_what_a_schema_asks_for_in_vain_is_said(server):
    listed = {"type": "array", "items": {"const": 1}, "maxItems": 2, "uniqueItems": True}
    format = {"type": "json_schema", "json_schema": {"name": "a", "schema": listed}}
    for stream in (False, True):
        body = {**CHAT, "response_format": format, "stream": stream}
        answer = server.post("/v1/chat/completions", body)
        assert answer.status == 200 and "uniqueItems" in answer.headers["x-grammar-left-out"]
    grammar = {"type": "json", "value": listed}
    assert "uniqueItems" in server.generate("def", grammar=grammar).headers["x-grammar-left-out"]
    assert server.generate("def").headers["x-grammar-left-out"] is None


def test_a_pipeline_ends_there_too(tuned):
    with quantflow.pipeline(tuned) as generator:
        assert generator._ends == (1, WORD, ENDS)
        generator._ends = tuple(range(4096))  # whatever the model says is an end
        options = {"max_new_tokens": 4, "return_full_text": False, "do_sample": False}
        assert generator("def", **options) == [{"generated_text": ""}]


def test_a_pipeline_draws_as_the_maker_says(tuned, monkeypatch):
    with quantflow.pipeline(tuned) as generator:
        assert generator._defaults.values() == {"temperature": 0.01, "top_k": 1}
        wild = SamplingDefaults(temperature=3.0, samples=True)
        monkeypatch.setattr(generator, "_defaults", wild)
        options = {"max_new_tokens": 6, "return_full_text": False}
        texts = {generator("def", seed=seed, **options)[0]["generated_text"] for seed in range(3)}
        assert len(texts) == 3
        greedy = generator("def", do_sample=False, **options)
        assert generator("def", top_k=1, seed=9, **options) == greedy
        wild = SamplingDefaults(temperature=3.0)  # it does not say that tokens are drawn
        monkeypatch.setattr(generator, "_defaults", wild)
        assert generator("def", seed=4, **options) == greedy
    with pytest.raises(UsageError, match="generation_config 'all'"):
        quantflow.pipeline(tuned, generation_config="all")


def test_a_chat_draws_as_the_maker_says(tuned, template):
    texts = {}
    for choice in ("auto", "none"):
        job = ChatJob(
            artifact=tuned,
            chat_template=template,
            generation_config=choice,
            max_new_tokens=8,
            seed=1,
        )
        partner = job.partner()
        answers = [partner.answer(CHAT["messages"]) for _ in range(3)]
        texts[choice] = {"".join(piece.text for piece in pieces) for pieces in answers}
        partner.close()
    assert len(texts["auto"]) == 1 and len(texts["none"]) > 1


def test_what_is_asked_for_in_a_chat_wins():
    job = ChatJob(artifact="x", temperature=0.2, top_k=3)
    assert job.sampling(5, temperature=0.9, min_p=0.1) == Sampling(
        temperature=0.2, top_k=3, min_p=0.1, seed=5
    )
    assert ChatJob(artifact="x").sampling(0) == Sampling(temperature=0.7)
    assert ChatJob(artifact="x").sampling(0, temperature=0) is None
    with pytest.raises(UsageError, match="generation_config none with a server"):
        ChatJob(url="http://x", generation_config="none")


@pytest.mark.parametrize("stop", ["<s>", "x<s>", "<s>y"], ids=str)
def test_a_special_token_may_be_a_stop_string(server, stop):
    """vllm-project/vllm#2123, ollama/ollama#7449: the usual cure of answers that never end."""
    grammar = 'start: "x" <s> "y" <s> "zz"'
    body = {"grammar": grammar, "max_tokens": 12, "stop": [stop]}
    before, inside = {"<s>": ("x", "x"), "x<s>": ("", "x"), "<s>y": ("x", "xy")}[stop]
    choice, _ = chat(server, **body)
    assert (text_of(choice), choice["finish_reason"]) == (before, "stop")
    assert streamed(server, "/v1/chat/completions", CHAT | body) == before
    assert text_of(chat(server, **body, include_stop_str_in_output=True)[0]) == inside
    whole = server.generate("def", grammar=grammar, max_new_tokens=12, stop=[stop]).json()
    assert whole["generated_text"] == inside


def test_special_tokens_have_their_text_where_a_request_wants_it(server):
    body = {"grammar": 'start: "x" <s> "y"', "skip_special_tokens": False}
    assert text_of(chat(server, **body)[0]) == "x<s>y"
    assert text_of(chat(server, **{**body, "skip_special_tokens": True})[0]) == "xy"


def test_a_request_has_end_tokens_of_its_own(server):
    bias = {"logit_bias": {"29": 100}}
    told = server.models.first.tokenizer.decode([29])
    assert chat(server, **bias)[1] == 8
    choice, count = chat(server, **bias, stop_token_ids=[29])
    assert (text_of(choice), choice["finish_reason"], count) == ("", "stop", 1)
    kept, _ = chat(server, **bias, stop_token_ids=[29], include_stop_str_in_output=True)
    assert text_of(kept) == told
    whole = server.generate("def", max_new_tokens=3, stop_token_ids=[29], **bias).json()
    assert whole["generated_text"] == ""
    refused = server.post("/v1/chat/completions", {**CHAT, "stop_token_ids": [4096]})
    assert refused.status == 422 and b"4096 is not one of 4096" in refused.body
    refused = server.post("/v1/chat/completions", {**CHAT, "stop_token_ids": list(range(99))})
    assert refused.status == 422 and b"up to 64" in refused.body


def test_ends_may_be_ignored_and_put_off(server):
    """vllm-project/vllm#1097, ROCm/ATOM#1562: benchmarks measured other lengths."""
    bias = {"logit_bias": {str(ENDS): 100}}
    choice, count = chat(server, **bias, ignore_eos=True)
    assert (text_of(choice), choice["finish_reason"], count) == ("", "length", 8)
    for name in ("min_tokens", "min_new_tokens"):
        choice, count = chat(server, **bias, **{name: 5})
        assert (choice["finish_reason"], count) == ("stop", 6)
    details = server.generate("def", max_new_tokens=8, min_new_tokens=3, details=True, **bias)
    assert details.json()["details"]["generated_tokens"] == 4
    choice, _ = chat(server, ignore_eos=True, regex="yes")  # a grammar has an end
    assert (text_of(choice), choice["finish_reason"]) == ("yes", "stop")
    for wrong, text in (({"min_tokens": 9}, "9 and 8"), ({"min_tokens": 1, "regex": "a"}, "gram")):
        refused = server.post("/v1/chat/completions", {**CHAT, **wrong})
        assert refused.status == 422 and text.encode() in refused.body


def test_the_makers_sampling_counts_where_a_request_says_nothing(server):
    body = {"messages": CHAT["messages"], "max_tokens": 8}
    texts = [
        server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
        for _ in range(3)
    ]
    assert texts == [text_of(chat(server)[0])] * 3
    sampled = {
        server.post("/v1/completions", {"prompt": "def", "max_tokens": 9})
        .body.split(b'"text"')[1]
        .split(b'"logprobs"')[0]
        for _ in range(3)
    }
    assert len(sampled) == 1
    assert len({server.post("/generate", {"inputs": "def"}).body for _ in range(2)}) == 1
    info = server.get("/info").json()
    assert info["generation_defaults"] == {"temperature": 0.01, "top_k": 1}
    assert info["generation_config"] == "auto"


def test_a_request_that_says_something_overrides_it(server):
    wild = {"temperature": 2.0, "top_k": -1, "max_tokens": 12}
    texts = {text_of(chat(server, **wild, seed=seed)[0]) for seed in range(3)}
    assert len(texts) == 3
    assert len({text_of(chat(server, **wild, seed=7)[0]) for _ in range(2)}) == 1
    assert len({text_of(chat(server, **wild, seed=-1)[0]) for _ in range(3)}) > 1


def test_the_makers_sampling_may_be_left_out(serve, tuned):
    with serve(artifact=tuned, generation_config="none") as asking:
        assert asking.get("/info").json()["generation_defaults"] == {}
        body = {"messages": CHAT["messages"], "max_tokens": 12}
        answers = [asking.post("/v1/chat/completions", body).json() for _ in range(3)]
        assert len({text_of(answer["choices"][0]) for answer in answers}) > 1
