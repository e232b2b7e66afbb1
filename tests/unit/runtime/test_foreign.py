"""Folders of other programs in the runtime, beside transformers' model of their weights."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quantflow.core.scheme import named
from quantflow.formats.weight_layout import integers
from quantflow.runtime import projection
from quantflow.runtime.decoding import generate
from quantflow.runtime.load import load

IDS = torch.arange(3, 19)[None]


def scheme(bits: int, *, symmetric: bool):
    return named(integers(bits, 32, symmetric=symmetric, where="a test"), None, "pack-quantized")


def with_weights(model, weights):
    """Return transformers' model with other weights, in float32."""
    made = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    parameters = dict(made.named_parameters())
    with torch.no_grad():
        for name, weight in weights.items():
            parameters[name].copy_(weight)
    return made.eval()


def greedy(model, count: int) -> list[int]:
    ids = IDS
    with torch.no_grad():
        for _ in range(count):
            ids = torch.cat([ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    return ids[0, IDS.shape[1] :].tolist()


@pytest.mark.parametrize(("bits", "symmetric"), [(4, True), (4, False), (8, True), (3, True)])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_inputs_in_the_order_of_their_groups_run_in_the_lean_decoder(
    llama, tmp_path, write_foreign, bits, symmetric, backend
):
    weights = write_foreign(
        tmp_path / "f", llama, "gptq_v2", scheme(bits, symmetric=symmetric), ordered=True
    )
    assert (
        load_file(tmp_path / "f" / "model.safetensors")["model.layers.0.mlp.down_proj.g_idx"]
        .diff()
        .lt(0)
        .any()
    )
    loaded = load(tmp_path / "f", decoder="auto", backend=backend)
    assert loaded.name == "lean"
    expected = with_weights(llama, weights)
    with torch.no_grad():
        theirs = expected(IDS).logits
    loaded.decoder.begin(rows=1, capacity=64)
    ours = loaded.decoder.forward(IDS, last_only=False)
    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)
    assert generate(loaded.decoder, IDS, max_new_tokens=12)[0].tolist()[-12:] == greedy(
        expected, 12
    )


def test_one_call_for_all_layers_has_the_bits_of_a_call_for_each_operation(
    llama, tmp_path, write_foreign, monkeypatch
):
    write_foreign(tmp_path / "f", llama, "gptq", scheme(4, symmetric=True), ordered=True)

    def walk():
        decoder = load(tmp_path / "f", decoder="lean").decoder
        decoder.begin(rows=2, capacity=32)
        steps = (IDS.expand(2, -1), IDS[:, :1].expand(2, -1), IDS[:, 1:2].expand(2, -1))
        return [decoder.forward(ids).clone() for ids in steps]

    together = walk()
    monkeypatch.setattr(
        projection, "partial", lambda function, **settings: lambda x: function(x, **settings)
    )
    assert all(torch.equal(one, many) for one, many in zip(together, walk(), strict=True))


def test_linears_with_the_order_of_others_are_products_of_their_own(llama, tmp_path, write_foreign):
    folder = tmp_path / "f"
    weights = write_foreign(folder, llama, "gptq", scheme(4, symmetric=True), ordered=True)
    source, plain = load_file(folder / "model.safetensors"), tmp_path / "plain"
    others = write_foreign(plain, llama, "gptq", scheme(4, symmetric=True))
    name = "model.layers.1.self_attn.k_proj"
    mixed = source | {
        key: tensor
        for key, tensor in load_file(plain / "model.safetensors").items()
        if key.startswith(name)
    }
    save_file(mixed, folder / "model.safetensors", metadata={"format": "pt"})
    loaded = load(folder, decoder="lean")
    expected = with_weights(llama, weights | {f"{name}.weight": others[f"{name}.weight"]})
    loaded.decoder.begin(rows=1, capacity=64)
    with torch.no_grad():
        torch.testing.assert_close(
            loaded.decoder.forward(IDS, last_only=False), expected(IDS).logits, rtol=2e-5, atol=2e-5
        )
