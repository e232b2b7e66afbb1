"""What a request gets is the same, to the bit, alone and beside whatever else runs."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from quantflow.backends import kernels, native
from quantflow.core.scheme import PRESETS
from quantflow.runtime.batching import BatchLimits, BatchRequest, Engine
from quantflow.runtime.decoding import generate
from quantflow.runtime.generate_job import Lookup, Rules, Sampling
from quantflow.runtime.lean import LeanDecoder
from quantflow.runtime.load import load

ROOT = Path(__file__).resolve().parents[4]
TEXT = (ROOT / "quantflow/errors.py").read_text()
pytestmark = pytest.mark.skipif(
    native.why_not(kernels.SOURCE, cpu_flags=kernels.CPU_FLAGS) is not None,
    reason="our kernels do not run here",
)


def requests(tokenizer, count: int, *, seed: int) -> list[BatchRequest]:
    """Return prompts of mixed length, some of which begin alike, with mixed options."""
    draw = random.Random(seed)
    system = tokenizer(TEXT[:700])["input_ids"]
    made = []
    for index in range(count):
        begin, length = draw.randrange(2000), draw.choice([3, 30, 150, 600])
        own = tokenizer(TEXT[begin : begin + length])["input_ids"]
        ids = (system + own if draw.random() < 0.4 else own)[:300]
        rules = Rules()
        if draw.random() < 0.3:
            rules = Rules(
                repetition_penalty=1.3,
                frequency_penalty=0.5,
                no_repeat_ngram_size=3,
                bad_words=((5, 7), (11,)),
            )
        made.append(
            BatchRequest(
                input_ids=tuple(ids),
                max_new_tokens=draw.choice([1, 5, 20, 40]),
                sampling=Sampling(temperature=0.8, top_k=30, top_p=0.9, seed=index)
                if draw.random() < 0.4
                else None,
                rules=replace(rules, min_new_tokens=draw.choice([0, 4])),
                logit_bias={draw.randrange(100): 4.0} if draw.random() < 0.2 else {},
                ends=(draw.randrange(400),) if draw.random() < 0.5 else (),
                stop=draw.choice([(), (), ("\n", "the ")]),
                top_n=draw.choice([0, 3]),
                prompt_logprobs=draw.random() < 0.15,
                lookup=Lookup(tokens=4) if draw.random() < 0.3 else None,
            )
        )
    return made


def alone(decoder, tokenizer, request: BatchRequest):
    """Events and prompt log-probabilities of a request on an engine that has seen no other."""
    limits = BatchLimits(max_batch_size=1, prefill_chunk=4096, max_total_tokens=400)
    with Engine(decoder, limits=limits, tokenizer=tokenizer) as engine:
        stream = engine.submit(request)
        return list(stream), stream.prompt


def together(decoder, tokenizer, asked: list[BatchRequest], *, seed: int, **limits):
    """Return the same of many at once, submitted in any order, and the engine's counters."""
    order = random.Random(seed).sample(range(len(asked)), len(asked))
    limits = BatchLimits(
        **{"max_concurrent_requests": len(asked), "max_total_tokens": 400} | limits
    )
    with Engine(decoder, limits=limits, tokenizer=tokenizer) as engine:
        streams = {index: engine.submit(asked[index]) for index in order}
        events = {index: list(stream) for index, stream in streams.items()}
        return [
            (events[index], streams[index].prompt) for index in range(len(asked))
        ], engine.counters()


@pytest.mark.parametrize(
    ("scheme", "kv_cache"),
    [
        ("W8A8", "bfloat16"),
        ("W4A16", "int8"),
        ("W8A8", "int4"),
        ("W8A8", "int5"),
        ("FP8", "float8"),
        ("W8A8", "float32"),
    ],
)
def test_a_request_gets_the_same_bits_alone_and_in_any_company(
    folders, tokenizer, scheme, kv_cache
):
    decoder = load(folders(scheme), decoder="lean", kv_cache=kv_cache, dtype=torch.bfloat16).decoder
    asked = requests(tokenizer, 20, seed=1)
    by_themselves = [alone(decoder, tokenizer, request) for request in asked]
    for seed, limits in enumerate(
        [{"prefill_chunk": 7, "max_batch_size": 6}, {"prefill_chunk": 100}]
    ):
        in_company, counters = together(decoder, tokenizer, asked, seed=seed, **limits)
        assert in_company == by_themselves
        assert counters.pool.used == counters.running == counters.waiting == 0
        assert counters.pool.hit_tokens > 0


def test_fp8_that_was_measured_is_served_with_the_scales_of_its_inputs(
    tokenizer, make_artifact, tmp_path
):
    model = LlamaForCausalLM.from_pretrained(ROOT / "examples/tiny-llama", dtype=torch.float32)
    make_artifact(tmp_path, model.config, PRESETS["FP8"], model=model)
    ids = tokenizer(TEXT[:200])["input_ids"]

    def served() -> torch.Tensor:
        decoder = load(tmp_path, decoder="lean", verify=False).decoder
        with Engine(
            decoder, limits=BatchLimits(max_batch_size=1, max_total_tokens=400), tokenizer=tokenizer
        ) as engine:
            stream = engine.submit(
                BatchRequest(input_ids=tuple(ids), max_new_tokens=1, prompt_logprobs=True)
            )
            list(stream)
        return torch.tensor([token.logprob for token in stream.prompt[1:]])

    def expected() -> torch.Tensor:
        rows = torch.tensor([ids])
        with torch.no_grad():
            said = (
                load(tmp_path, backend="reference", verify=False)
                .model(rows)
                .logits[0, :-1]
                .log_softmax(dim=-1)
            )
        return said.gather(1, rows[0, 1:, None])[:, 0]

    found, wanted = [served()], [expected()]
    tensors = load_file(tmp_path / "model.safetensors")
    scales = {
        name: tensor / 256 for name, tensor in tensors.items() if name.endswith("input_scale")
    }
    save_file(
        tensors | scales, tmp_path / "model.safetensors"
    )  # so that many inputs are beyond the largest code
    found.append(served())
    wanted.append(expected())
    changed = (wanted[1] - wanted[0]).abs().mean()
    assert all(
        (ours - theirs).abs().mean() < changed / 20
        for ours, theirs in zip(found, wanted, strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["W8A8", "W4A16", "FP8"])
def test_two_hundred_requests_get_the_same_bits_alone_and_in_any_company(
    folders, tokenizer, scheme
):
    decoder = load(folders(scheme), decoder="lean", dtype=torch.bfloat16).decoder
    asked = requests(tokenizer, 200, seed=2)
    by_themselves = [alone(decoder, tokenizer, request) for request in asked]
    for seed, limits in enumerate(
        [{"prefill_chunk": 16}, {"prefill_chunk": 300, "max_batch_size": 150}]
    ):
        assert together(decoder, tokenizer, asked, seed=seed, **limits)[0] == by_themselves


def test_guesses_save_steps_and_change_no_bit(folders, tokenizer):
    decoder = load(folders("W8A8"), decoder="lean", dtype=torch.bfloat16).decoder
    ids = tuple(tokenizer("self.name = name\n" * 12)["input_ids"])
    found = []
    for lookup in (None, Lookup(tokens=5)):
        asked = BatchRequest(
            input_ids=ids,
            max_new_tokens=40,
            lookup=lookup,
            sampling=Sampling(temperature=0.3, seed=1),
        )
        with Engine(decoder, limits=BatchLimits(max_total_tokens=400, max_batch_size=4)) as engine:
            found.append((list(engine.submit(asked)), engine.counters().steps))
    assert found[0][0] == found[1][0]
    assert found[1][1] < found[0][1]


def test_an_engine_says_whether_bits_depend_on_what_else_runs(folders):
    for backend, reason in (
        ("auto", None),
        ("reference", "reference sums in another order for more tokens"),
    ):
        decoder = load(folders("W8A8"), decoder="lean", backend=backend).decoder
        with Engine(decoder, limits=BatchLimits(max_batch_size=2)) as engine:
            assert engine.why_not_invariant == reason


def test_tokens_are_those_of_generate(folders, tokenizer):
    decoder = load(folders("W8A8"), decoder="lean").decoder
    assert isinstance(decoder, LeanDecoder)
    asked = [
        replace(request, top_n=0, logit_bias={}, stop=(), prompt_logprobs=False, lookup=None)
        for request in requests(tokenizer, 12, seed=3)
    ]
    found, _ = together(decoder, tokenizer, asked, seed=0, prefill_chunk=11)
    decoder = load(folders("W8A8"), decoder="lean").decoder
    for request, (events, _) in zip(asked, found, strict=True):
        options = {
            "sampling": request.sampling,
            "rules": request.rules,
            "eos_token_id": request.ends,
        }
        ids = torch.tensor([request.input_ids])
        whole = generate(decoder, ids, max_new_tokens=request.max_new_tokens, **options)[
            0, ids.shape[1] :
        ]
        assert [event.id for event in events] == whole.tolist()
