import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig
from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

from quantflow.errors import InputError, UsageError
from quantflow.runtime.decoding import Draft, Lookup, Medusa, Rules, Sampling, generate, load_medusa
from quantflow.runtime.decoding.medusa import HEADS_FILE, MedusaHead
from quantflow.runtime.decoding.request import Request
from quantflow.runtime.decoding.speculation import _confirm, _Finder
from quantflow.runtime.transformers_decoder import TransformersDecoder
from tests.shared import slow

NEW = 18
SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}
SIZES |= {"bos_token_id": None, "eos_token_id": None, "num_key_value_heads": 2}


def small(vocab_size: int, *, seed: int, config=LlamaConfig, **options):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            config(**SIZES, vocab_size=vocab_size, **options), dtype=torch.float32
        )
        for parameter in model.parameters():
            parameter.data += torch.randn_like(parameter) * 0.3
    return model.eval()


class Counting(TransformersDecoder):
    """Counts forwards."""

    forwards = 0

    def forward(self, *args, **options):
        self.forwards += 1
        return super().forward(*args, **options)

    def forward_hidden(self, *args, **options):
        self.forwards += 1
        return super().forward_hidden(*args, **options)


def cut(tiny, layers: int):
    """The embedded model with its first layers only: a draft that is often right."""
    draft = AutoModelForCausalLM.from_config(
        type(tiny.config)(**{**tiny.config.to_dict(), "num_hidden_layers": layers})
    )
    weights = {
        name: value
        for name, value in tiny.state_dict().items()
        if ".layers." not in name or int(name.split(".")[2]) < layers
    }
    draft.load_state_dict(weights)
    return draft.float().eval()


@pytest.fixture(scope="module")
def draft(tiny):
    return cut(tiny, 2)


@pytest.fixture(scope="module")
def heads(tiny):
    """Heads of one random block each."""
    generator = torch.Generator().manual_seed(3)
    blocks = [
        (torch.randn(512, 512, generator=generator) * 0.01, torch.zeros(512)) for _ in range(3)
    ]
    return Medusa(
        heads=tuple(
            MedusaHead(blocks=(block,), projection=tiny.lm_head.weight.detach()) for block in blocks
        )
    )


@pytest.mark.slow
def test_a_draft_model_does_not_change_greedy_tokens(tiny, draft, batch, peer):
    ids, padding = (part[:2] for part in batch)
    for rules in (Rules(), Rules(repetition_penalty=1.3, no_repeat_ngram_size=3)):
        expected = peer(
            ids[:1, 1:],
            max_new_tokens=NEW,
            repetition_penalty=rules.repetition_penalty,
            no_repeat_ngram_size=rules.no_repeat_ngram_size,
        )
        plain = generate(tiny, ids, max_new_tokens=NEW, padding=padding, rules=rules)
        method = Draft(decoder=TransformersDecoder(draft, crops=True), tokens=4)
        found = generate(tiny, ids, max_new_tokens=NEW, padding=padding, rules=rules, method=method)
        assert torch.equal(found, plain)
        assert torch.equal(found[:1, 1:], expected)


@pytest.mark.slow
def test_tokens_are_those_of_transformers_assisted_generation(tiny, draft, rows, peer):
    ids = torch.tensor([rows[2]])
    draft.generation_config.eos_token_id = None
    expected = peer(ids, max_new_tokens=NEW, assistant_model=draft)
    assert torch.equal(
        generate(
            tiny,
            ids,
            max_new_tokens=NEW,
            method=Draft(decoder=TransformersDecoder(draft, crops=True)),
        ),
        expected,
    )


def test_the_model_as_its_own_draft_is_always_believed(tiny, rows):
    decoder = Counting(tiny, crops=True)
    generate(
        decoder,
        torch.tensor([rows[0]]),
        max_new_tokens=NEW,
        method=Draft(decoder=TransformersDecoder(tiny, crops=True), tokens=5),
    )
    # the prompt; then five proposals and one token of its own each time
    assert decoder.forwards == 1 + NEW // 6


def test_an_end_inside_the_proposals_ends_the_text(tiny, rows):
    ids = torch.tensor([rows[0]])
    plain = generate(tiny, ids, max_new_tokens=NEW)[0, len(rows[0]) :].tolist()
    end = next(token for i, token in enumerate(plain) if i > 2 and token not in plain[:i])
    expected = generate(tiny, ids, max_new_tokens=NEW, eos_token_id=end)
    seen: list[int] = []
    draft = TransformersDecoder(tiny, crops=True)
    found = generate(
        tiny,
        ids,
        max_new_tokens=NEW,
        eos_token_id=end,
        method=Draft(decoder=draft),
        stream=seen.append,
    )
    assert torch.equal(found, expected)
    assert seen == expected[0, len(rows[0]) :].tolist()


@pytest.mark.parametrize("method", [Lookup(), slow(Lookup(tokens=3, ngram=4))])
def test_a_lookup_does_not_change_greedy_tokens_and_saves_forwards(tiny, rows, peer, method):
    row = rows[0] + rows[1] + rows[0]
    decoder = Counting(tiny, crops=True)
    found = generate(decoder, torch.tensor([row]), max_new_tokens=40, method=method)
    assert torch.equal(found, peer(torch.tensor([row]), max_new_tokens=40))
    assert decoder.forwards < 40


def test_a_lookup_proposes_what_transformers_proposes():
    generator = torch.Generator().manual_seed(0)
    proposed = 0
    for _ in range(60):
        tokens = torch.randint(
            5, (1, int(torch.randint(1, 20, (1,), generator=generator))), generator=generator
        )
        peer = PromptLookupCandidateGenerator(
            num_output_tokens=4, max_matching_ngram_size=3, max_length=100
        )
        expected = peer.get_candidates(tokens)[0][0, tokens.shape[1] :]
        found, _ = _Finder(Lookup(tokens=4, ngram=3)).propose(tokens, 99, hidden=None)
        assert found.tolist() == expected.tolist()
        proposed += len(found)
    assert proposed


def test_a_sliding_window_is_cropped_with_what_lies_before_it():
    model = small(29, seed=1, config=MistralConfig, sliding_window=6)
    other = small(29, seed=2, config=MistralConfig, sliding_window=6)
    ids = torch.randint(29, (1, 9), generator=torch.Generator().manual_seed(1))
    expected = generate(model, ids, max_new_tokens=30)
    for method in (
        Draft(decoder=TransformersDecoder(other, crops=True), tokens=4),
        Lookup(tokens=4),
    ):
        assert torch.equal(generate(model, ids, max_new_tokens=30, method=method), expected)


@pytest.mark.parametrize("certain", [False, True])
def test_a_sampled_proposal_is_refused_just_so_often_that_tokens_are_distributed_as_the_models(
    certain,
):
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(2, 6, generator=generator)  # after the text, and after the proposal
    theirs = torch.randn(1, 6, generator=generator).softmax(-1)
    request = Request(input_ids=torch.zeros(1, 1), max_new_tokens=2, sampling=Sampling())
    first, bonus, draws = torch.zeros(6), torch.zeros(6), 4000
    for _ in range(draws):
        guess = (
            torch.tensor([2]) if certain else torch.multinomial(theirs[0], 1, generator=generator)
        )
        taken = _confirm(
            scores, guess, None if certain else theirs, request=request, generator=generator
        )
        first[taken[0]] += 1
        if len(taken) == 2:
            bonus[taken[1]] += 1
    own = scores.softmax(-1)
    # The total variation of 4000 draws among 6 outcomes is 0.015 on average; believing the draft
    # would be off by this:
    assert float((own[0] - (theirs[0] if not certain else torch.eye(6)[2])).abs().sum()) / 2 > 0.15
    assert float((first / draws - own[0]).abs().sum()) / 2 < 0.03
    assert float((bonus / bonus.sum() - own[1]).abs().sum()) / 2 < 0.06
    believed = own[0, 2] if certain else torch.minimum(own[0], theirs[0]).sum()
    assert float(bonus.sum()) / draws == pytest.approx(float(believed), abs=0.03)


def test_a_sampled_draft_that_is_the_model_is_always_believed_and_the_seed_decides(tiny, rows):
    def sample(seed):
        method = Draft(decoder=TransformersDecoder(tiny, crops=True), tokens=5)
        return generate(
            decoder,
            torch.tensor([rows[0]]),
            max_new_tokens=12,
            method=method,
            sampling=Sampling(seed=seed),
        )

    decoder = Counting(tiny, crops=True)
    first = sample(1)
    assert decoder.forwards == 1 + 12 // 6
    assert torch.equal(sample(1), first)
    assert not torch.equal(sample(2), first)


def test_sampling_among_one_token_is_greedy_with_every_kind_of_proposal(tiny, draft, heads, rows):
    ids = torch.tensor([rows[0]])
    expected = generate(tiny, ids, max_new_tokens=12)
    for method in (Draft(decoder=TransformersDecoder(draft, crops=True)), Lookup(), heads):
        assert torch.equal(
            generate(tiny, ids, max_new_tokens=12, method=method, sampling=Sampling(top_k=1)),
            expected,
        )


def test_medusa_heads_do_not_change_greedy_tokens(tiny, heads, batch):
    ids, padding = (part[:2] for part in batch)
    expected = generate(tiny, ids, max_new_tokens=NEW, padding=padding)
    assert torch.equal(
        generate(tiny, ids, max_new_tokens=NEW, padding=padding, method=heads), expected
    )


def test_medusa_heads_that_know_the_future_save_forwards(tiny, rows):
    ids = torch.tensor([rows[0]])
    expected = generate(tiny, ids, max_new_tokens=NEW)
    with torch.no_grad():
        states = tiny(expected.clone(), output_hidden_states=True).hidden_states[-1][0]

    class Oracle(Medusa):
        def propose(self, hidden):
            # the position that the state belongs to
            here = int((states - hidden).abs().sum(1).argmin())
            return expected[0, here + 2 : here + 5]

    decoder = Counting(tiny, crops=True)
    assert torch.equal(
        generate(decoder, ids, max_new_tokens=NEW, method=Oracle(heads=())), expected
    )
    # prompt, first token without proposals, then four tokens at a time
    assert decoder.forwards == 2 + (NEW - 1 + 3) // 4


def test_medusa_heads_are_read_and_do_what_the_paper_says(tmp_path):
    generator = torch.Generator().manual_seed(0)
    shapes = {
        "0.0.linear.weight": (4, 4),
        "0.0.linear.bias": (4,),
        "0.1.weight": (7, 4),
        "1.0.weight": (7, 4),
    }
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(tensors, tmp_path / HEADS_FILE)
    hidden = torch.randn(4, generator=generator)
    inner = tensors["0.0.linear.weight"] @ hidden + tensors["0.0.linear.bias"]
    first = tensors["0.1.weight"] @ (hidden + inner / (1 + (-inner).exp()))
    expected = [int(first.argmax()), int((tensors["1.0.weight"] @ hidden).argmax())]
    assert load_medusa(tmp_path).propose(hidden).tolist() == expected


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["0.0.linear.weight", "0.1.weight"], "no 0.0.linear.bias; convert"),
        (["0.0.linear.weight", "0.0.linear.bias"], "no 0.1.weight; convert"),
        (["medusa_head.0.weight"], "medusa_head.0.weight beside 0 heads; convert"),
    ],
)
def test_heads_of_other_names_are_refused(tmp_path, names, message):
    save_file({name: torch.zeros(2, 2) for name in names}, tmp_path / HEADS_FILE)
    with pytest.raises(InputError, match=message.replace(".", "[.]")):
        load_medusa(tmp_path)


def test_a_folder_without_heads_is_refused(tmp_path):
    with pytest.raises(InputError, match="medusa_lm_head.safetensors: No such file"):
        load_medusa(tmp_path)


def test_a_draft_of_another_vocabulary_is_refused(tiny, rows):
    with pytest.raises(
        UsageError,
        match=r"^draft: a vocabulary of 29, the model's has 4096; use a draft model with the same",
    ):
        generate(
            tiny,
            torch.tensor([rows[0]]),
            max_new_tokens=2,
            method=Draft(decoder=TransformersDecoder(small(29, seed=1), crops=True)),
        )


def test_a_decoder_that_was_not_made_to_crop_says_so(tiny, rows):
    with pytest.raises(
        UsageError, match=r"^crop to \d+ positions: the cache has \d+, crops=False; "
    ):
        generate(
            TransformersDecoder(tiny),
            torch.tensor([rows[1] * 3]),
            max_new_tokens=9,
            method=Lookup(),
        )
