"""Drafts of running batches: the same bits as without, in any company, and fewer steps."""

import pytest
import torch
from safetensors.torch import save_file

from quantflow.backends import kernels, native
from quantflow.runtime.batching import BatchLimits, BatchRequest, Engine
from quantflow.runtime.batching.drafts import AheadDraft, MedusaDraft
from quantflow.runtime.decoding import Further, generate, load_medusa
from quantflow.runtime.generate_job import Lookup, Rules, Sampling
from quantflow.runtime.load import load
from quantflow.runtime.mtp import AheadLayer
from tests.mtp_models import FAMILIES, bigram_, ids, write

pytestmark = pytest.mark.skipif(
    native.why_not(kernels.SOURCE, cpu_flags=kernels.CPU_FLAGS) is not None,
    reason="our kernels do not run here",
)
LIMITS = {"max_total_tokens": 128, "max_batch_size": 4}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    """A random model whose layer ahead guesses seldom right."""
    folder = tmp_path_factory.mktemp(request.param)
    write(folder, FAMILIES[request.param])
    return load(folder, decoder="lean")


@pytest.fixture(scope="module")
def rule(tmp_path_factory):
    """A model whose layer ahead is always right."""
    folder = tmp_path_factory.mktemp("rule")
    write(folder, FAMILIES["deepseek_v3"], bigram_)
    return load(folder, decoder="lean")


def ahead(loaded, tokens):
    return AheadDraft(AheadLayer(loaded.artifact, loaded.decoder.shared), tokens=tokens)


def prompt(count, seed):
    return tuple(ids(count, seed)[0].tolist())


def asked():
    """Prompts of mixed lengths, two of which begin alike, with mixed options."""
    system = prompt(40, 1)
    return [
        BatchRequest(input_ids=prompt(1, 2), max_new_tokens=20),
        BatchRequest(input_ids=system + prompt(5, 3), max_new_tokens=30),
        BatchRequest(input_ids=system + prompt(9, 4), max_new_tokens=1),
        BatchRequest(input_ids=system + prompt(30, 5), max_new_tokens=40, top_n=2),
        BatchRequest(
            input_ids=prompt(33, 6), max_new_tokens=35, sampling=Sampling(temperature=0.7, seed=5)
        ),
        BatchRequest(
            input_ids=prompt(7, 7),
            max_new_tokens=25,
            rules=Rules(repetition_penalty=1.4),
            logit_bias={9: 3.0},
        ),
        BatchRequest(input_ids=prompt(64, 8), max_new_tokens=10, prompt_logprobs=True),
        BatchRequest(input_ids=prompt(12, 9), max_new_tokens=20, lookup=Lookup(tokens=3)),
    ]


def events(loaded, draft, requests, **limits):
    with Engine(loaded.decoder, limits=BatchLimits(**LIMITS | limits), draft=draft) as engine:
        streams = [engine.submit(request) for request in requests]
        found = [(list(stream), stream.prompt) for stream in streams]
        return found, engine.counters()


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_layer_ahead_changes_no_bit_whatever_else_runs(model, tokens):
    expected, _ = events(model, None, asked())
    for limits in ({"prefill_chunk": 7}, {"max_batch_size": 2}):
        found, counters = events(model, ahead(model, tokens), asked(), **limits)
        assert found == expected
        assert counters.proposed_tokens > counters.taken_tokens
        assert counters.pool.used == 0 and counters.pool.hit_tokens >= 32


def recorded(loaded):
    """A layer ahead, and the list of its guesses."""
    layer, guesses = AheadLayer(loaded.artifact, loaded.decoder.shared), []
    plain = layer.logits

    def logits(state):
        scores = plain(state)
        guesses.extend(scores.argmax(dim=-1).tolist())
        return scores

    layer.logits = logits
    return layer, guesses


def test_guesses_are_those_of_generate(model):
    """So the columns are the same: of a prompt in pieces, and behind one that was taken over."""
    for end in (60, 64, 65, 70):
        text = prompt(90, 11)[:end]
        layer, expected = recorded(model)
        method = Further(layer=layer, tokens=2)
        generate(model.decoder, torch.tensor([text]), max_new_tokens=40, method=method)
        layer, found = recorded(model)
        draft = AheadDraft(layer, tokens=2)
        limits = BatchLimits(**LIMITS, prefill_chunk=16)
        with Engine(model.decoder, limits=limits, draft=draft) as engine:
            list(engine.submit(BatchRequest(input_ids=prompt(90, 11), max_new_tokens=1)))
            list(engine.submit(BatchRequest(input_ids=text, max_new_tokens=40)))
            assert engine.counters().pool.hit_tokens == 32 * ((end - 1) // 32)
        # `generate` guesses before its first token too
        assert found == expected[2:] and len(set(found)) > 5


def test_a_layer_that_knows_the_rule_saves_steps_for_every_row(rule):
    requests = [BatchRequest(input_ids=prompt(5, seed), max_new_tokens=24) for seed in range(3)]
    expected, _ = events(rule, None, requests)
    _, plain = events(rule, None, requests, max_batch_size=1)
    for tokens in (1, 3):
        found, counters = events(rule, ahead(rule, tokens), requests)
        assert found == expected
        assert counters.taken_tokens == counters.proposed_tokens
        assert counters.taken_tokens >= 3 * (24 * tokens // (tokens + 1) - 1)
        # one row after the other: how many rows a step has depends on when requests come
        found, alone = events(rule, ahead(rule, tokens), requests, max_batch_size=1)
        assert found == expected
        assert alone.taken_tokens == counters.taken_tokens
        assert alone.steps <= plain.steps // (tokens + 1) + 3


def test_medusa_heads_change_no_bit_and_save_steps_where_they_are_right(rule, tmp_path):
    # the next token is a function of the last: a head that says which follows the model's own
    decoder = rule.decoder
    decoder.begin(rows=96, capacity=1)
    hidden = decoder.forward_states(torch.arange(96)[:, None])[:, 0]
    decoder.begin(rows=96, capacity=1)
    after = decoder.forward(torch.arange(96)[:, None]).argmax(dim=-1)
    weight = torch.linalg.lstsq(hidden, torch.eye(96)[after[after]]).solution.T
    save_file({"0.0.weight": weight.contiguous()}, tmp_path / "medusa_lm_head.safetensors")
    heads = load_medusa(tmp_path)
    requests = [BatchRequest(input_ids=prompt(5, seed), max_new_tokens=24) for seed in range(3)]
    expected, plain = events(rule, None, requests, max_batch_size=1)
    found, counters = events(rule, MedusaDraft(heads), requests)
    assert found == expected
    assert counters.taken_tokens > counters.proposed_tokens // 2
    found, alone = events(rule, MedusaDraft(heads), requests, max_batch_size=1)
    assert found == expected
    assert alone.steps < plain.steps
