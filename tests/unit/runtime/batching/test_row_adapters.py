"""LoRA adapters by request: the logits of merged weights, with bits that are the row's own."""

import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from quantflow.errors import InputError, UnsupportedError, UsageError
from quantflow.runtime.batching import BatchLimits, BatchRequest, Engine
from quantflow.runtime.generate_job import Sampling
from quantflow.runtime.load import load

LAYER = "model.layers.{}."
TINY = {  # of the example model: out, in
    LAYER.format(0) + "self_attn.q_proj": (512, 512),
    LAYER.format(0) + "self_attn.v_proj": (256, 512),
    LAYER.format(1) + "self_attn.o_proj": (512, 512),
    LAYER.format(2) + "mlp.up_proj": (1024, 512),
    LAYER.format(3) + "mlp.down_proj": (512, 1024),
}
IDS = tuple(range(5, 25))


@pytest.fixture(scope="module")
def adapters(write_adapter, tmp_path_factory):
    """Three adapters of the example model, of different ranks; the last of two linears alone."""
    folder = tmp_path_factory.mktemp("adapters")
    few = dict(list(TINY.items())[1:3])
    for seed, (name, shapes) in enumerate(
        {"pirate": TINY, "poet": TINY, "few": few}.items(), start=1
    ):
        write_adapter(folder / name, shapes, seed=seed, rank=2 * seed)
    return {name: folder / name for name in ("pirate", "poet", "few")}


def adapted(folder, adapters, **options):
    loaded = load(folder, decoder="lean", **options)
    loaded.decoder.adapt(loaded.artifact, adapters)
    return loaded.decoder


@pytest.mark.parametrize(
    ("family", "shapes"),
    [
        (
            "llama",
            {
                LAYER.format(0) + "self_attn.k_proj": (64, 64),
                LAYER.format(0) + "self_attn.v_proj": (64, 64),
                LAYER.format(1) + "mlp.gate_proj": (128, 64),
            },
        ),
        (
            "gpt_neox",  # whose fused q/k/v comes head by head
            {
                "gpt_neox.layers.0.attention.query_key_value": (192, 64),
                "gpt_neox.layers.1.mlp.dense_4h_to_h": (64, 128),
            },
        ),
        (
            "gptj",  # whose neighbouring features are rotated together
            {
                "transformer.h.0.attn.q_proj": (64, 64),
                "transformer.h.0.attn.v_proj": (64, 64),
                "transformer.h.1.mlp.fc_in": (128, 64),
            },
        ),
        (
            "codegen",  # whose heads lie in four blocks
            {"transformer.h.0.attn.qkv_proj": (192, 64)},
        ),
    ],
)
def test_an_adapter_gives_what_the_merged_weights_give(
    family, shapes, family_model, write_adapter, tmp_path
):
    source = family_model(family)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    shapes = {name: tuple(model.get_submodule(name).weight.shape) for name in shapes}
    deltas = write_adapter(tmp_path / "adapter", shapes, seed=3)

    def expected():
        with torch.no_grad():
            found = model(torch.tensor([IDS])).logits[0].log_softmax(-1)
        return [float(found[at, token]) for at, token in enumerate(IDS[1:])]

    plain = expected()
    for name, delta in deltas.items():
        model.get_submodule(name).weight.data += delta
    merged = expected()
    assert max(abs(a - b) for a, b in zip(plain, merged, strict=True)) > 0.01
    decoder = adapted(source, {"a": tmp_path / "adapter"})
    with Engine(decoder, limits=BatchLimits(max_total_tokens=64, max_batch_size=2)) as engine:
        for adapter, wanted in ((None, plain), ("a", merged)):
            found = [one.logprob for one in engine.prompt_logprobs(IDS, adapter=adapter)][1:]
            assert found == pytest.approx(wanted, abs=2e-4)


@pytest.mark.parametrize("scheme", ["W8A8", "W4A16"])
def test_rows_of_several_adapters_have_the_bits_that_each_has_alone(scheme, folders, adapters):
    decoder, draw = adapted(folders(scheme), adapters, dtype=torch.bfloat16), random.Random(4)
    asked = [
        BatchRequest(
            input_ids=tuple(draw.randrange(4, 400) for _ in range(draw.randint(1, 60))),
            max_new_tokens=draw.choice([3, 12]),
            sampling=Sampling(seed=index) if index % 3 == 0 else None,
            top_n=2,
            adapter=draw.choice([None, *adapters]),
        )
        for index in range(16)
    ]
    # a prefix that rows of one adapter share, and those of another do not
    same = IDS + tuple(range(40, 70))
    asked += [
        BatchRequest(input_ids=same, max_new_tokens=4, top_n=2, adapter=name)
        for name in (None, "pirate", "poet", None)
    ]
    alone = []
    for request in asked:
        with Engine(decoder, limits=BatchLimits(max_batch_size=1, max_total_tokens=128)) as engine:
            alone.append(list(engine.submit(request)))
    assert (
        alone[-4] == alone[-1]
        and alone[-4][0].logprob != alone[-3][0].logprob != alone[-2][0].logprob
    )
    for limits in ({"prefill_chunk": 9}, {"prefill_chunk": 200, "max_batch_size": 5}):
        order = draw.sample(range(len(asked)), len(asked))
        with Engine(decoder, limits=BatchLimits(max_total_tokens=128, **limits)) as engine:
            streams = {index: engine.submit(asked[index]) for index in order}
            assert [list(streams[index]) for index in range(len(asked))] == alone
            assert engine.counters().pool.used == 0


def test_an_adapter_that_does_not_fit_is_refused_by_the_name_of_its_tensor(
    folders, write_adapter, tmp_path
):
    loaded = load(folders("W8A8"), decoder="lean")
    for name, shape, said, kind in (
        (
            LAYER.format(0) + "self_attn.k_proj",
            (512, 512),
            r"k_proj maps 512 to 256, A \[4, 512\], B \[512, 4\]",
            InputError,
        ),
        (
            LAYER.format(9) + "self_attn.k_proj",
            (256, 512),
            "layers.9.self_attn.k_proj is no linear of the model",
            InputError,
        ),
        (
            "lm_head",
            (4096, 512),
            "lm_head: only linears of attention and of an MLP have adapters",
            UnsupportedError,
        ),
    ):
        write_adapter(tmp_path, {name: shape}, seed=0)
        with pytest.raises(kind, match=said):
            loaded.decoder.adapt(loaded.artifact, {"a": tmp_path})
    assert loaded.decoder.adapters == ()


def test_an_engine_knows_the_adapters_of_its_decoder(folders, adapters):
    decoder = adapted(folders("W8A8"), adapters)
    with (
        Engine(decoder, limits=BatchLimits(max_batch_size=1)) as engine,
        pytest.raises(UsageError, match="adapter 'parrot': the engine has pirate, poet, few"),
    ):
        engine.submit(BatchRequest(input_ids=(1,), max_new_tokens=1, adapter="parrot"))
