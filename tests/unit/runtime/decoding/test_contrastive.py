import pytest
import torch
from torch.nn import functional

from quantflow.errors import UsageError
from quantflow.runtime.decoding import Contrastive, Rules, Sampling, generate
from quantflow.runtime.transformers_decoder import TransformersDecoder

NEW = 10


def oracle(model, row, *, alpha, top_k, new):
    """Equation 5 of the paper, without a cache: every candidate is a forward of the whole text."""
    tokens = list(row)
    for _ in range(new):
        with torch.no_grad():
            probabilities = model(torch.tensor([tokens])).logits[0, -1].softmax(-1)
            scored = []
            for probability, token in zip(*probabilities.topk(top_k), strict=True):
                states = model(
                    torch.tensor([[*tokens, int(token)]]), output_hidden_states=True
                ).hidden_states[-1][0]
                alike = max(
                    float(functional.cosine_similarity(states[-1], state, dim=0))
                    for state in states[:-1]
                )
                scored.append(((1 - alpha) * float(probability) - alpha * alike, int(token)))
        tokens.append(max(scored)[1])
    return tokens


@pytest.mark.parametrize(("alpha", "top_k"), [(0.6, 4), (0.3, 2)])
def test_contrastive_search_is_the_papers(tiny, rows, batch, alpha, top_k):
    ids, padding = (part[1:3] for part in batch)
    found = generate(
        tiny, ids, max_new_tokens=NEW, padding=padding, method=Contrastive(alpha=alpha, top_k=top_k)
    )
    plain = generate(tiny, ids, max_new_tokens=NEW, padding=padding)
    assert not torch.equal(found, plain)
    for row, pad, result in zip(rows[1:3], padding.tolist(), found.tolist(), strict=True):
        assert result[pad:] == oracle(tiny, row, alpha=alpha, top_k=top_k, new=NEW)


PAD, HERE, LIKE_PAD, OTHER = range(4)


@pytest.mark.parametrize(
    ("states", "shares", "expected"),
    [
        # The likelier one is like padding and like nothing that was said: 0.5 * 0.6 - 0 beats 0.5 *
        # 0.4 - 0.
        ([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0], [0.0, -1.0]], (0.6, 0.4), LIKE_PAD),
        # All that was said is unlike both. 0.5 * 0.4 + 0.5 * 1 beats 0.5 * 0.6 + 0.5 * 0.6,
        # whatever padding would be like.
        ([[0.0, 1.0], [1.0, 0.0], [-0.6, 0.8], [-1.0, 0.0]], (0.6, 0.4), OTHER),
    ],
    ids=["like padding", "unlike everything"],
)
def test_padding_on_the_left_was_not_said_worked_by_hand(chain, states, shares, expected):
    decoder = chain({HERE: dict(zip((LIKE_PAD, OTHER), shares, strict=True))}, states)
    method, prompts = Contrastive(alpha=0.5, top_k=2), [[HERE, HERE, HERE], [PAD, PAD, HERE]]
    for rows, padding in ((prompts, [0, 2]), (prompts[1:], [2]), ([[HERE]], [0])):
        found = generate(
            decoder,
            torch.tensor(rows),
            max_new_tokens=1,
            padding=torch.tensor(padding),
            method=method,
        )
        assert found[:, -1].tolist() == [expected] * len(rows)


def test_without_a_penalty_it_is_greedy(tiny, batch):
    ids, padding = batch
    rules = Rules(repetition_penalty=1.2)
    expected = generate(tiny, ids, max_new_tokens=NEW, padding=padding, rules=rules)
    method = Contrastive(alpha=0.0, top_k=3)
    assert torch.equal(
        generate(tiny, ids, max_new_tokens=NEW, padding=padding, method=method, rules=rules),
        expected,
    )


def test_rows_that_have_ended_are_padded_and_the_only_row_is_streamed(tiny, rows):
    method, ids = Contrastive(alpha=0.6, top_k=4), torch.tensor([rows[1]])
    seen: list[int] = []
    found = generate(tiny, ids, max_new_tokens=NEW, method=method, stream=seen.append)[
        0, len(rows[1]) :
    ].tolist()
    assert seen == found
    end = found[3]
    short = generate(tiny, ids, max_new_tokens=NEW, method=method, eos_token_id=end)[
        0, len(rows[1]) :
    ].tolist()
    assert short == found[: found.index(end) + 1]


def test_what_does_not_go_together_is_refused(tiny, rows):
    class Blind:
        vocab_size, positions, device = 4096, 1024, torch.device("cpu")

        def begin(self, **_): ...

        forward = keep = crop = begin

    ids, method = torch.tensor([rows[0]]), Contrastive(alpha=0.6, top_k=4)
    with pytest.raises(
        UsageError, match=r"^contrastive: Blind shows no hidden states; use transformers' modules$"
    ):
        generate(Blind(), ids, max_new_tokens=1, method=method)
    with pytest.raises(UsageError, match=r"^contrastive: its choice is certain"):
        generate(
            TransformersDecoder(tiny), ids, max_new_tokens=1, method=method, sampling=Sampling()
        )
    with pytest.raises(UsageError, match=r"^top_k=1 with penalty_alpha; use 2 or more candidates$"):
        Contrastive(alpha=0.6, top_k=1)
    with pytest.raises(UsageError, match=r"^penalty_alpha=1.5; use 0 <= penalty_alpha <= 1$"):
        Contrastive(alpha=1.5, top_k=4)
