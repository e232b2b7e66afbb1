import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig

from quantflow.errors import UsageError
from quantflow.runtime.decoder import Decoder, HiddenDecoder
from quantflow.runtime.decoding import Beams, Rules, Sampling, generate
from quantflow.runtime.transformers_decoder import TransformersDecoder
from tests.shared import slow, slow_but

NEW = 12
PAD = 2  # as in conftest.py


def test_a_padded_batch_gives_the_greedy_tokens_of_transformers(tiny, batch, peer):
    ids, padding = batch
    expected = peer(ids, padding, max_new_tokens=NEW)
    assert torch.equal(generate(tiny, ids, max_new_tokens=NEW, padding=padding), expected)


@pytest.mark.parametrize(
    "rules",
    [
        Rules(),
        slow(Rules(repetition_penalty=1.4, frequency_penalty=0.5, no_repeat_ngram_size=2)),
        Rules(min_length=16, bad_words=((200,), (321, 13))),
    ],
)
def test_a_padded_row_says_what_it_says_alone(tiny, rows, batch, rules):
    ids, padding = batch
    options = {"max_new_tokens": NEW, "rules": rules, "eos_token_id": 274, "pad_token_id": PAD}
    together = generate(tiny, ids, padding=padding, **options)
    for row, pad, result in zip(rows, padding.tolist(), together.tolist(), strict=True):
        alone = generate(tiny, torch.tensor([row]), **options)[0].tolist()
        assert result[pad:][: len(alone)] == alone
        assert set(result[pad:][len(alone) :]) <= {PAD}


def test_as_many_tokens_as_asked_for_and_those_that_no_cache_gives(tiny, rows):
    ids = torch.tensor([rows[0]])
    found = generate(tiny, ids, max_new_tokens=NEW)
    assert found.shape == (1, len(rows[0]) + NEW)
    with torch.no_grad():
        for _ in range(NEW):
            ids = torch.cat([ids, tiny(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(found, ids)


def test_a_row_that_has_ended_is_padded_until_all_have(tiny, batch, peer):
    ids, padding = batch
    free = generate(tiny, ids, max_new_tokens=NEW, padding=padding)[:, ids.shape[1] :]
    ends = free[:3, 2].tolist() + free[3:, 5].tolist()
    expected = peer(ids, padding, max_new_tokens=NEW, eos_token_id=ends)
    found = generate(
        tiny, ids, max_new_tokens=NEW, padding=padding, eos_token_id=ends, pad_token_id=PAD
    )
    assert torch.equal(found, expected)
    assert found.shape[1] < ids.shape[1] + NEW
    assert (found[:, -1] == PAD).any()


SAMPLINGS = [
    {},
    {"temperature": 0.7, "top_k": 30},
    {"top_p": 0.8, "min_p": 0.05},
    {"temperature": 1.5, "typical_p": 0.6},
]


@pytest.mark.parametrize("options", slow_but(SAMPLINGS, *SAMPLINGS[:2]))
def test_a_seed_draws_the_tokens_that_transformers_draws(tiny, batch, peer, options):
    ids, padding = batch
    whole = {"top_k": 0} | options
    torch.manual_seed(27)
    expected = peer(
        ids, padding, max_new_tokens=NEW, do_sample=True, num_return_sequences=2, **whole
    )
    chosen = Sampling(seed=27, **options)
    found = generate(tiny, ids, max_new_tokens=NEW, padding=padding, sampling=chosen, returned=2)
    assert torch.equal(found, expected)
    assert not torch.equal(found[0], found[1])


def test_another_seed_draws_other_tokens(tiny, rows):
    drawn = [
        generate(
            tiny, torch.tensor([rows[0]]), max_new_tokens=NEW, sampling=Sampling(seed=s)
        ).tolist()
        for s in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_row_ends_where_stop_says(tiny, batch):
    ids, padding = batch
    asked = []

    def stop(new):
        asked.append(tuple(new))
        return len(new) == 3

    found = generate(tiny, ids, max_new_tokens=NEW, padding=padding, stop=stop)
    assert torch.equal(found, generate(tiny, ids, max_new_tokens=3, padding=padding))
    assert {len(new) for new in asked} == {1, 2, 3}
    beams = generate(
        tiny, ids[:1, 1:], max_new_tokens=NEW, stop=lambda new: len(new) == 3, method=Beams(count=2)
    )
    assert beams.shape[1] == ids.shape[1] - 1 + 3


def test_a_padded_row_in_a_sliding_window_says_what_it_says_alone():
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "vocab_size": 29,
    }
    with torch.random.fork_rng():
        torch.manual_seed(3)
        config = MistralConfig(
            **sizes, num_key_value_heads=2, sliding_window=6, bos_token_id=None, eos_token_id=None
        )
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for parameter in model.parameters():
            parameter.data += torch.randn_like(parameter) * 0.3
    ids = torch.randint(3, 29, (2, 11), generator=torch.Generator().manual_seed(2))
    found = generate(model, ids, max_new_tokens=NEW, padding=torch.tensor([4, 0]))
    assert torch.equal(found[:1, 4:], generate(model, ids[:1, 4:], max_new_tokens=NEW))


def test_of_a_prompt_the_logits_of_the_last_token_alone_are_computed(tiny, rows):
    seen = []
    head = tiny.get_output_embeddings()
    hook = head.register_forward_hook(lambda _, given, logits: seen.append(tuple(logits.shape[:2])))
    try:
        generate(tiny, torch.tensor([rows[0]]), max_new_tokens=2)
    finally:
        hook.remove()
    assert seen == [(1, 1), (1, 1)] and len(rows[0]) > 1


def test_transformers_modules_are_a_decoder_that_shows_hidden_states(tiny):
    decoder = TransformersDecoder(tiny)
    assert isinstance(decoder, Decoder) and isinstance(decoder, HiddenDecoder)
    assert (decoder.vocab_size, decoder.positions, decoder.device) == (
        4096,
        1024,
        torch.device("cpu"),
    )


def test_a_cache_that_is_cropped_and_reordered_gives_the_logits_of_the_text_that_is_left(
    tiny, rows, batch
):
    ids, padding = batch
    decoder = TransformersDecoder(tiny, crops=True)
    with torch.inference_mode():
        decoder.begin(rows=4, capacity=20)
        decoder.forward(ids, padding=padding)
        decoder.keep(torch.tensor([3, 1, 1]))
        decoder.forward(torch.tensor([[5, 6], [7, 8], [9, 10]]))
        decoder.crop(ids.shape[1])
        found = decoder.forward(torch.tensor([[11, 12], [13, 14], [15, 16]]), last_only=False)
        for i, (row, new) in enumerate([(3, [11, 12]), (1, [13, 14]), (1, [15, 16])]):
            expected = tiny(torch.tensor([[*rows[row], *new]])).logits[0, -2:]
            assert torch.allclose(found[i], expected, atol=1e-3)
            assert torch.equal(found[i].argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"padding": torch.tensor([1])},
            r"^padding=tensor\(\[1\]\) of prompts \[4, 12\]; give each row's count",
        ),
        (
            {"padding": torch.tensor([0, 1, 2, 12])},
            r"^padding=.* of prompts \[4, 12\]; give each row's count, smaller",
        ),
        ({"returned": 2}, r"^returned=2: 1 sequences differ; sample, or use as many beams$"),
        ({"returned": 0, "sampling": Sampling()}, r"^returned=0: 0 sequences differ"),
        (
            {"stream": print},
            r"^stream: more than one sequence grows; stream one prompt, without beams$",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(tiny, batch, options, message):
    with pytest.raises(UsageError, match=message):
        generate(tiny, batch[0], max_new_tokens=2, **options)


def test_padding_is_not_counted_as_positions(tiny):
    ids = torch.randint(3, 4096, (1, 1030), generator=torch.Generator().manual_seed(0))
    found = generate(tiny, ids, max_new_tokens=2, padding=torch.tensor([1020]))
    assert torch.equal(found[:, 1020:], generate(tiny, ids[:, 1020:], max_new_tokens=2))
