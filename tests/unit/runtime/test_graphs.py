"""Replayed decode steps against transformers' own cache; a recorder stands in for the graph.

The recorder keeps the operations of a step with the tensors that they read and wrote, and repeats
them on these tensors: whatever a step took from Python is frozen, as in a graph, and waiting for a
number is refused, as under a capture.
"""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from quantflow.backends import cuda
from quantflow.core.kv import kv_scheme
from quantflow.errors import UsageError
from quantflow.runtime import graphs
from quantflow.runtime.decoder import Decoder, HiddenDecoder
from quantflow.runtime.graphs import BUCKET, GraphDecoder
from quantflow.runtime.transformers_decoder import TransformersDecoder

CPU = torch.device("cpu")
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, num_key_value_heads=2),
    "qwen3": Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=8),
    "gpt-neox": GPTNeoXConfig(**SIZES),
}


def random_model(config):
    torch.manual_seed(0)
    return (
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    )


class Recorder(TorchDispatchMode):
    """Keeps what runs under it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "a step waits for a number"
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self):
        for func, args, kwargs, result in self.calls:
            read = {
                t.untyped_storage().data_ptr()
                for t in tree_iter((args, kwargs))
                if isinstance(t, torch.Tensor)
            }
            for old, new in zip(tree_iter(result), tree_iter(func(*args, **kwargs)), strict=True):
                if isinstance(old, torch.Tensor) and old.untyped_storage().data_ptr() not in read:
                    old.copy_(new)


class Capture:
    """A `cuda.capture` that runs first, then records and repeats; it counts both."""

    def __init__(self) -> None:
        self.captured = self.replayed = 0

    def __call__(self, step):
        self.captured += 1
        step(), step()
        with Recorder() as recorder:
            result = step()

        def replay():
            self.replayed += 1
            recorder.replay()
            return result

        return replay


@pytest.fixture(autouse=True)
def capturing(monkeypatch):
    """Transformers under a capture, which it sees from the stream: it reads no mask's values."""
    monkeypatch.setattr("transformers.masking_utils.is_tracing", lambda *_: True)


@pytest.fixture(params=CONFIGS)
def pair(request):
    """A decoder that replays, its capture, and transformers' own."""
    model, capture = random_model(CONFIGS[request.param]), Capture()
    return (
        GraphDecoder(model, device=CPU, capture=capture),
        capture,
        TransformersDecoder(model, crops=True),
    )


def ids(*shape, seed=0):
    return torch.randint(0, 64, shape, generator=torch.Generator().manual_seed(seed))


def same(ours, theirs):
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def begin(pair, rows, capacity=40):
    for decoder in (pair[0], pair[2]):
        decoder.begin(rows=rows, capacity=capacity)


def both(pair, tokens, **options):
    same(pair[0].forward(tokens, **options), pair[2].forward(tokens, **options))


def steps(pair, rows, count, *, seed=5):
    for step in range(count):
        both(pair, ids(rows, 1, seed=seed + step))


def test_it_is_a_decoder_that_shows_what_its_head_reads(pair):
    assert isinstance(pair[0], Decoder) and isinstance(pair[0], HiddenDecoder)


def test_a_step_is_captured_once_and_replayed_with_the_same_logits_as_without_a_graph(pair):
    begin(pair, 1)
    both(pair, ids(1, 7))
    steps(pair, 1, 6)
    assert (pair[1].captured, pair[1].replayed) == (1, 6)


@pytest.mark.parametrize("length", [9, 40])
def test_a_prompt_is_causal_without_a_mask_where_its_values_may_be_looked_at(
    pair, monkeypatch, length
):
    monkeypatch.setattr("transformers.masking_utils.is_tracing", lambda *_: False)
    seen, attention = [], functional.scaled_dot_product_attention

    def watched(*args, **kwargs):
        seen.append((kwargs.get("attn_mask"), kwargs.get("is_causal"), args[1].shape[-2]))
        return attention(*args, **kwargs)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", watched)
    begin(pair, 1, capacity=60)
    pair[0].forward(ids(1, length))
    assert seen and all(found == (None, True, length) for found in seen)
    pair[2].forward(ids(1, length))
    both(pair, ids(1, 3, seed=1))  # several tokens behind others
    steps(pair, 1, 2)
    begin(pair, 2)
    both(pair, ids(2, 6), padding=torch.tensor([0, 2]))


def test_prompts_of_any_length_and_batches_with_padding_share_the_graph_of_their_bucket(pair):
    for length, padding in ((7, [0, 3]), (4, [2, 0]), (9, [0, 0])):
        begin(pair, 2, capacity=length + 20)
        both(pair, ids(2, length, seed=length), padding=torch.tensor(padding))
        steps(pair, 2, 3)
    assert pair[1].captured == 1
    begin(pair, 2, capacity=BUCKET + 1)
    both(pair, ids(2, 5))
    steps(pair, 2, 2)
    assert pair[1].captured == 2


def in_turns(pair, buckets):
    for _ in range(3):
        for rows, capacity in buckets:
            begin(pair, rows, capacity=capacity)
            both(pair, ids(rows, 6, seed=rows))
            steps(pair, rows, 2)


def test_texts_of_several_lengths_in_turns_keep_a_graph_per_bucket(pair):
    in_turns(pair, [(1, 2 * BUCKET), (1, BUCKET), (2, BUCKET // 2)])
    assert pair[1].captured == 3


def test_buckets_beside_the_one_in_use_are_kept_up_to_so_many_positions(pair, monkeypatch):
    monkeypatch.setattr(graphs, "KEPT", 2 * BUCKET - 1)
    in_turns(pair, [(1, BUCKET), (2, BUCKET)])
    # two rows are too many to be kept, and one row is kept beside them
    assert pair[1].captured == 1 + 3


def test_all_positions_of_several_tokens_after_a_prompt_are_not_replayed_and_keep_the_graph(
    pair,
):
    begin(pair, 1)
    both(pair, ids(1, 3))
    steps(pair, 1, 2)
    both(pair, ids(1, 4, seed=8), last_only=False)
    steps(pair, 1, 2)
    assert pair[1].captured == 1


def test_a_prompt_of_one_token_is_run_before_anything_is_captured(pair):
    begin(pair, 1)
    both(pair, ids(1, 1))
    assert pair[1].captured == 0
    steps(pair, 1, 2)
    assert pair[1].captured == 1


@pytest.mark.parametrize("rows", [[1, 0, 0], [2, 2, 1]])
def test_rows_that_are_kept_in_the_same_number_keep_their_graph(pair, rows):
    begin(pair, 3)
    both(pair, ids(3, 5), padding=torch.tensor([0, 2, 1]))
    steps(pair, 3, 2)
    for decoder in (pair[0], pair[2]):
        decoder.keep(torch.tensor(rows))
    steps(pair, 3, 3)
    assert pair[1].captured == 1


@pytest.mark.parametrize("rows", [[1], [0, 0, 1, 1, 1]])
def test_rows_that_become_fewer_or_more_get_a_graph_of_their_own(pair, rows):
    begin(pair, 2)
    both(pair, ids(2, 5), padding=torch.tensor([0, 2]))
    steps(pair, 2, 2)
    for decoder in (pair[0], pair[2]):
        decoder.keep(torch.tensor(rows))
    steps(pair, len(rows), 3)
    assert pair[1].captured == 2


def test_what_is_cropped_is_forgotten_and_written_again(pair):
    begin(pair, 1)
    both(pair, ids(1, 5))
    steps(pair, 1, 4)
    for decoder in (pair[0], pair[2]):
        decoder.crop(6)
    steps(pair, 1, 3, seed=50)
    assert pair[1].captured == 1


def test_hidden_states_are_those_of_transformers(pair):
    begin(pair, 1)
    for ours, theirs in zip(
        pair[0].forward_hidden(ids(1, 5)), pair[2].forward_hidden(ids(1, 5)), strict=True
    ):
        same(ours, theirs)


def test_logits_that_were_returned_are_not_written_over(pair):
    begin(pair, 1)
    both(pair, ids(1, 5))
    first = pair[0].forward(ids(1, 1, seed=1))
    before = first.clone()
    pair[0].forward(ids(1, 1, seed=2))
    assert torch.equal(first, before)


def test_more_than_there_is_room_for_is_refused(pair):
    begin(pair, 1, capacity=BUCKET)
    with pytest.raises(
        UsageError, match=rf"input_ids 2 x 3: the cache has 1 rows, 0 of {BUCKET} positions"
    ):
        pair[0].forward(ids(2, 3))
    with pytest.raises(UsageError, match=rf"0 of {BUCKET} positions"):
        pair[0].forward(ids(1, BUCKET + 1))
    pair[0].forward(ids(1, 3))  # what was refused left nothing
    with pytest.raises(UsageError, match="crop to 4 positions: the cache has 3"):
        pair[0].crop(4)


REASONS = {
    "experts": (
        Qwen3MoeConfig(
            **SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8
        ),
        "experts",
    ),
    "sliding": (MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=16), "slides"),
    "rotation": (
        LlamaConfig(
            **SIZES, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
        ),
        "rope_type dynamic",
    ),
    "learned positions": (GPT2Config(n_embd=16, n_layer=1, n_head=2), "by rotation alone"),
}


@pytest.mark.parametrize("case", REASONS)
def test_what_cannot_be_captured_is_said(case):
    config, said = REASONS[case]
    assert said in graphs.why_not(SimpleNamespace(config=config, kv_cache=None))


def test_a_cache_with_measured_scales_is_not_captured_and_any_other_is():
    opened = SimpleNamespace(config=CONFIGS["llama"], kv_cache=None)
    assert graphs.why_not(opened) is None
    opened.kv_cache = kv_scheme("FP8", "per_head")
    assert graphs.why_not(opened) == "a cache with measured scales grows with the text"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, torch finds none")
@pytest.mark.parametrize("config", CONFIGS)
def test_on_a_gpu_the_graph_gives_the_logits_of_the_step(config, monkeypatch):
    monkeypatch.undo()
    model = random_model(CONFIGS[config]).cuda()
    device = torch.device("cuda")
    ours, theirs = (
        GraphDecoder(model, device=device, capture=partial(cuda.capture, device=device)),
        TransformersDecoder(model),
    )
    for decoder in (ours, theirs):
        decoder.begin(rows=2, capacity=40)
    padding = torch.tensor([0, 2], device=device)
    same(
        ours.forward(ids(2, 7).cuda(), padding=padding),
        theirs.forward(ids(2, 7).cuda(), padding=padding),
    )
    for step in range(6):
        tokens = ids(2, 1, seed=step).cuda()
        same(ours.forward(tokens), theirs.forward(tokens))
