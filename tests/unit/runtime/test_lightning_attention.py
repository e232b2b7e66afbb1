"""Lightning attention (MiniMax): layers in released order, engines, rows that stay, refusals."""

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING

from quantflow.core.scheme import PRESETS, with_group_size
from quantflow.errors import UnsupportedError, UsageError
from quantflow.models import architecture
from quantflow.runtime import delta_net
from quantflow.runtime.artifact import open_artifact
from quantflow.runtime.batching import BatchLimits, BatchRequest, Engine
from quantflow.runtime.decoding import Lookup, generate
from quantflow.runtime.lean import LeanDecoder, why_not
from quantflow.runtime.load import load
from quantflow.runtime.ranks.tensor_parallel import spans_of

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "intermediate_size": 48,
    "vocab_size": 96,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "num_local_experts": 4,
    "block_size": 16,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "full_attn_alpha_factor": 3.5,
    "linear_attn_alpha_factor": 2.5,
    "mlp_alpha_factor": 1.5,
    "full_attn_beta_factor": 0.9,
    "linear_attn_beta_factor": 1.1,
    "mlp_beta_factor": 0.7,
}
# lightning attention first, as released
LAYERS = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
CONFIG = CONFIG_MAPPING["minimax"](
    **SIZES, layer_types=LAYERS, architectures=["MiniMaxForCausalLM"]
)
W4A8 = with_group_size(PRESETS["W4A8"], 16)
W8A16 = PRESETS["W8A16"]


def ids(rows: int, count: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 96, (rows, count), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("pieces", [1, 4, 50])
def test_a_text_has_the_logits_of_transformers_in_whatever_pieces(pieces, tmp_path, make_artifact):
    make_artifact(tmp_path, CONFIG, W8A16)
    model = load(tmp_path, decoder="transformers", backend="reference").model
    decoder, text = LeanDecoder(open_artifact(tmp_path, backend="reference")), ids(2, 50)
    padding = torch.tensor([7, 0])
    decoder.begin(rows=2, capacity=50)
    parts = text.tensor_split(pieces, dim=1)
    found = torch.cat(
        [
            decoder.forward(part, padding=None if at else padding, last_only=False)
            for at, part in enumerate(parts)
        ],
        dim=1,
    )
    for row, skip in enumerate(padding.tolist()):
        theirs = model(text[row : row + 1, skip:], use_cache=False).logits[0]
        assert torch.allclose(found[row, skip:], theirs, atol=2e-5, rtol=2e-5)


def test_rates_that_no_file_holds_follow_from_the_number_of_the_layer(tmp_path, make_artifact):
    model = make_artifact(tmp_path, CONFIG, W8A16)
    artifact = open_artifact(tmp_path)
    sizes = architecture.read(CONFIG.to_dict()).delta
    for index in (0, 1, 3):
        stored = delta_net._rates(
            artifact, sizes, index, f"model.layers.{index}.self_attn.slope_rate"
        )
        made = delta_net._rates(artifact, sizes, index, "nowhere")
        theirs = model.model.layers[index].self_attn.slope_rate.flatten()
        assert torch.equal(stored, theirs) and torch.allclose(made, theirs, rtol=1e-6)


def test_a_row_of_an_engine_has_the_same_bits_alone_and_beside_others(tmp_path, make_artifact):
    make_artifact(tmp_path, CONFIG, W4A8)
    decoder = LeanDecoder(open_artifact(tmp_path))
    if decoder.why_not_invariant is not None:
        pytest.skip(decoder.why_not_invariant)
    begin = ids(1, 64)[0].tolist()
    asked = [
        BatchRequest(input_ids=(*begin, *range(3, 3 + length)), max_new_tokens=12)
        for length in (1, 5, 30, 2, 17)
    ]

    def answers(limits: BatchLimits, requests: list[BatchRequest]):
        with Engine(decoder, limits=limits) as engine:
            streams = [engine.submit(request) for request in requests]
            return [list(stream) for stream in streams], engine.counters()

    alone = []
    for request in asked:
        found, _ = answers(BatchLimits(max_batch_size=1, max_total_tokens=120), [request])
        alone += found
    limits = BatchLimits(max_batch_size=3, max_total_tokens=120, prefill_chunk=7)
    # twice: what a row leaves in its slot is not seen by the next
    together, counters = answers(limits, asked * 2)
    assert together == alone * 2
    assert counters.pool.hit_tokens == counters.pool.cached == counters.pool.used == 0


def test_one_and_two_threads_give_the_same_bits(tmp_path, make_artifact):
    make_artifact(tmp_path, CONFIG, W8A16)
    decoder, found = LeanDecoder(open_artifact(tmp_path)), []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            decoder.begin(rows=2, capacity=60)
            found.append([decoder.forward(ids(2, 40, 1)), decoder.forward(ids(2, 1, 2))])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


def test_rows_that_are_kept_have_their_states(tmp_path, make_artifact):
    make_artifact(tmp_path, CONFIG, W8A16)
    decoder, texts = LeanDecoder(open_artifact(tmp_path)), ids(3, 30, 4)
    alone = []
    for text in texts:
        decoder.begin(rows=1, capacity=30)
        alone.append(decoder.forward(text[None], last_only=False)[0, 20:])
    decoder.begin(rows=2, capacity=30)
    decoder.forward(texts[[2, 0], :20])
    decoder.keep(torch.tensor([1, 1, 0]))
    found = decoder.forward(texts[[0, 0, 2], 20:], last_only=False)
    assert all(torch.equal(found[row], alone[at]) for row, at in enumerate((0, 0, 2)))


def test_a_state_is_cropped_to_nothing_alone_and_guesses_are_refused(tmp_path, make_artifact):
    make_artifact(tmp_path, CONFIG, W8A16)
    artifact = open_artifact(tmp_path)
    decoder = LeanDecoder(artifact)
    assert decoder.stateful
    decoder.begin(rows=1, capacity=12)
    first = decoder.forward(ids(1, 9))
    with pytest.raises(UsageError, match="positions of 9: lightning attention has the state of"):
        decoder.crop(5)
    decoder.crop(0)
    assert torch.equal(decoder.forward(ids(1, 9)), first)
    assert str(why_not(artifact, crops=True)).endswith("out of the state of lightning attention")
    with pytest.raises(UnsupportedError, match="speculation: "):
        generate(decoder, ids(1, 9), max_new_tokens=3, method=Lookup())


def test_adapters_by_request_and_several_processes_are_refused(tmp_path, make_artifact):
    make_artifact(tmp_path, CONFIG, W8A16)
    artifact = open_artifact(tmp_path)
    with pytest.raises(UnsupportedError, match="2 ranks share attention, not the lightning attent"):
        spans_of(artifact, 2)
    with pytest.raises(UnsupportedError, match="the layers of lightning attention have none"):
        LeanDecoder(artifact).adapt(artifact, {"a": tmp_path})


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"rotary_dim": 16}, "it does not know what rotary_dim=16 of config.json does"),
        ({"head_dim": 24}, "heads of a gated delta net's keys have 24"),
        ({"hidden_act": "gelu"}, "with silu, not with 'gelu'"),
        ({"layer_types": ["linear_attention"] * 4}, "has no layer with attention"),
        ({"sliding_window": 8}, "it knows sliding_window=None of config.json, not 8"),
        ({"mlp_beta_factor": "1"}, "mlp_beta_factor of config.json is '1', no number"),
    ],
)
def test_what_lightning_attention_is_not_is_said(change, why):
    found = architecture.read(CONFIG.to_dict() | change)
    reason = found if isinstance(found, str) else delta_net.why_not(found)
    assert reason is not None and why in reason
