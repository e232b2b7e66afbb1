import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
)
from transformers.generation.logits_process import (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from quantflow.errors import InputError, UsageError
from quantflow.runtime.decoding import Sampling, distribution, generate

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61}
SIZES |= {"intermediate_size": 48, "max_position_embeddings": 64}
GROUPED = {"num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, **GROUPED),
    "mistral": MistralConfig(**SIZES, **GROUPED, sliding_window=8),
    "qwen2": Qwen2Config(**SIZES, **GROUPED),
    "gpt_neox": GPTNeoXConfig(**SIZES, bos_token_id=None, eos_token_id=None),
}


def random_model(config):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            parameter.data += torch.randn_like(parameter) * 0.2
    return model.eval()


@pytest.fixture(scope="module")
def model():
    return random_model(CONFIGS["llama"])


def prompt(length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(61, (1, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("length", [1, 13])
def test_greedy_decoding_equals_transformers_token_for_token(family, length):
    model = random_model(CONFIGS[family])
    ids = prompt(length)
    expected = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, pad_token_id=0
    )
    assert len(set(expected[0, length:].tolist())) > 1
    assert torch.equal(generate(model, ids, max_new_tokens=20), expected)


def test_decoding_stops_after_an_end_of_text_token_as_transformers_does(model):
    ids = prompt(5)
    free = generate(model, ids, max_new_tokens=20)[0, 5:].tolist()
    stop = free[6]
    expected = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=20,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=stop,
    )
    unused = next(token for token in range(61) if token not in free)
    for stops in (stop, [stop], (unused, stop)):
        assert torch.equal(generate(model, ids, max_new_tokens=20, eos_token_id=stops), expected)
    assert expected[0, -1] == stop


def test_the_stream_sees_every_new_token_in_order(model):
    seen: list[int] = []
    result = generate(model, prompt(4), max_new_tokens=9, stream=seen.append)
    assert seen == result[0, 4:].tolist()
    assert len(seen) == 9


def test_the_same_seed_draws_the_same_tokens_and_another_seed_others(model):
    def sample(seed: int) -> list[int]:
        return generate(model, prompt(4), max_new_tokens=30, sampling=Sampling(seed=seed))[
            0
        ].tolist()

    assert sample(1) == sample(1)
    assert len({tuple(sample(seed)) for seed in range(4)}) == 4


def test_sampling_neither_reads_nor_moves_the_global_generator(model):
    before = torch.random.get_rng_state()
    generate(model, prompt(4), max_new_tokens=3, sampling=Sampling(seed=1))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_sampling_among_one_token_is_greedy(model):
    ids = prompt(6)
    expected = generate(model, ids, max_new_tokens=12)
    for sampling in (
        Sampling(top_k=1),
        Sampling(top_p=1e-6),
        Sampling(top_p=1e-9),
        Sampling(temperature=1e-4),
    ):
        assert torch.equal(generate(model, ids, max_new_tokens=12, sampling=sampling), expected)


def test_probabilities_worked_by_hand():
    logits = torch.tensor([math.log(8), math.log(4), math.log(3), math.log(1)])
    assert distribution(logits, Sampling()).tolist() == pytest.approx([0.5, 0.25, 3 / 16, 1 / 16])
    assert distribution(logits, Sampling(top_k=2)).tolist() == pytest.approx([2 / 3, 1 / 3, 0, 0])
    assert distribution(logits, Sampling(top_p=0.6)).tolist() == pytest.approx([2 / 3, 1 / 3, 0, 0])
    assert distribution(logits, Sampling(temperature=0.5)).tolist() == pytest.approx(
        [64 / 90, 16 / 90, 9 / 90, 1 / 90]
    )


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**20),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([None, 1, 5, 61, 200]),
    top_p=st.sampled_from([None, 0.01, 0.5, 0.95, 1.0]),
)
def test_probabilities_are_those_of_transformers_warpers(seed, temperature, top_k, top_p):
    logits = torch.randn(61, generator=torch.Generator().manual_seed(seed)) * 3
    scores = TemperatureLogitsWarper(temperature)(None, logits[None])
    if top_k is not None:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p is not None and top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    actual = distribution(logits, Sampling(temperature=temperature, top_k=top_k, top_p=top_p))
    assert torch.equal(actual, scores[0].softmax(dim=-1))


def test_tokens_are_drawn_as_often_as_their_probability_says():
    class Constant(torch.nn.Module):
        config = CONFIGS["llama"]

        def forward(self, input_ids, **_):
            logits = torch.tensor([0.7, 0.2, 0.1]).log()
            return type("Output", (), {"logits": logits.expand(1, 1, 3)})

    counts = torch.zeros(3)
    for seed in range(40):
        tokens = generate(Constant(), prompt(1), max_new_tokens=60, sampling=Sampling(seed=seed))[
            0, 1:
        ]
        counts += torch.bincount(tokens, minlength=3)
    # 2400 draws: the standard deviation of a share is at most 0.0102.
    assert torch.allclose(counts / counts.sum(), torch.tensor([0.7, 0.2, 0.1]), atol=0.04)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 0.0}, "temperature=0.0; use a positive number, or greedy decoding"),
        (
            {"temperature": float("nan")},
            "temperature=nan; use a positive number, or greedy decoding",
        ),
        ({"top_k": 0}, "top_k=0; use 1 or more"),
        ({"top_p": 0.0}, "top_p=0.0; use 0 < top_p <= 1"),
        ({"top_p": 1.5}, "top_p=1.5; use 0 < top_p <= 1"),
    ],
)
def test_sampling_values_outside_their_ranges_are_refused(options, message):
    with pytest.raises(UsageError) as caught:
        Sampling(**options)
    assert str(caught.value) == message


def test_prompts_that_cannot_be_decoded_are_refused(model):
    for ids in (prompt(0), prompt(3)[:0], torch.zeros(3, dtype=torch.int64)):
        with pytest.raises(
            UsageError,
            match=r"^input_ids: shape \[.*\], \[B, S\] is decoded; give prompts of a token",
        ):
            generate(model, ids, max_new_tokens=1)
    with pytest.raises(UsageError, match=r"^max_new_tokens=0; use 1 or more"):
        generate(model, prompt(3), max_new_tokens=0)
    with pytest.raises(
        UsageError, match=r"^prompt of 60 \+ max_new_tokens=5: the model has 64 positions; shorten"
    ):
        generate(model, prompt(60), max_new_tokens=5)
    assert generate(model, prompt(60), max_new_tokens=4).shape == (1, 64)


def test_logits_with_nan_are_an_error_and_not_a_token():
    broken = random_model(CONFIGS["llama"])
    broken.lm_head.weight.data[5] = float("nan")
    with pytest.raises(InputError, match=r"^logits after 3 tokens hold NaN; "):
        generate(broken, prompt(3), max_new_tokens=2)
