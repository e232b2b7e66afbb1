"""Gradients of experts are those of the tokens that each saw, beside the family's own autograd."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from quantflow.core import determinism
from quantflow.files.rank_folders import rank_folder
from quantflow.measuring import measure
from quantflow.measuring.backward import backward, generator_for, sampled_gradient
from quantflow.measuring.job import MeasureJob
from quantflow.models.capture import LayerStream
from quantflow.models.load import open_source
from quantflow.models.open import graph_for
from quantflow.planning.recipe import Calibration, Measure
from quantflow.reporting.progress_line import ProgressLine

SHAPE = {
    "vocab_size": 23,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "initializer_range": 0.3,
}
CHOICE = {"num_experts_per_tok": 2}
SPARSE = {**CHOICE, "num_experts": 5, "moe_intermediate_size": 24}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
FAMILIES = {
    "mixtral": {**CHOICE, "num_local_experts": 5},
    # a shared expert with a gate of its own
    "qwen2_moe": {**SPARSE, "shared_expert_intermediate_size": 20},
    "qwen3_moe": {**SPARSE, "head_dim": 8, "norm_topk_prob": True},
    # a tensor of all experts in the checkpoint, gate and up interleaved, biases
    "gpt_oss": {**CHOICE, "num_local_experts": 5, "head_dim": 8},
    # a dense layer first, a router of sigmoids with a bias, shared experts
    "deepseek_v3": {
        **CHOICE,
        **LATENT,
        "v_head_dim": 8,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
    },
}
SEQUENCES = [torch.tensor([0, 5, 9, 2, 22, 7, 5, 11]), torch.tensor([3, 1, 4, 16, 2])]
SEED = 7
LINEARS = ("gate_proj", "up_proj", "down_proj")


def opened(folder, family):
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**{**SHAPE, **FAMILIES[family]})
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.1)
    model.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="eager").eval()
    source = open_source(folder)
    return model, LayerStream(source, graph_for(source.config))


def labels_of(logits, index):
    """The labels that the seed draws; sequences have fewer than 64 tokens."""
    probabilities = logits.detach().softmax(-1)
    return torch.multinomial(probabilities, 1, generator=generator_for(SEED, index))[:, 0]


def brought_back(stream, sequence, index):
    """Linear -> sum over tokens of g^T x; and the gradient by the first layer's input."""
    (state,) = stream.begin([sequence])
    inputs = [state.hidden.clone()]
    for layer in stream.graph.layers:
        with stream.layer(layer.index) as module:
            inputs.append(stream.run(module, state))
        state.store.put(0, inputs[-1])
    found = {}

    def observe(name, x, g):
        found[name] = g.flatten(0, -2).T @ x.flatten(0, -2)

    with stream.head():
        gradient = sampled_gradient(stream, inputs[-1], generator=generator_for(SEED, index))
    for layer in reversed(stream.graph.layers):
        state.store.put(0, inputs[layer.index])
        with stream.layer(layer.index) as module, backward(stream, module, layer) as through:
            gradient = through(state, gradient, observe)
    return found, gradient


def by_expert(family, name, stacked):
    """(linear, its gradient) of a stacked tensor's gradient, by the checkpoint's names."""
    experts, _, entry = name.rpartition(".")
    if family == "mixtral":
        experts = experts.replace(".mlp.", ".block_sparse_moe.")
    gate, up, down = ("w1", "w3", "w2") if family == "mixtral" else LINEARS
    for number, whole in enumerate(stacked):
        rows = whole.T if family == "gpt_oss" else whole  # [O, I]
        if entry == "down_proj":
            yield f"{experts}.{number}.{down}", rows
        else:
            halves = (rows[0::2], rows[1::2]) if family == "gpt_oss" else rows.chunk(2)
            yield from zip(
                (f"{experts}.{number}.{gate}", f"{experts}.{number}.{up}"), halves, strict=True
            )


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_at_experts_make_up_the_familys_own_gradients_by_its_weights(family, tmp_path):
    """An expert's gradient by its weight is the sum of g^T x over the tokens that it saw."""
    model, stream = opened(tmp_path, family)
    reached = set()
    for index, sequence in enumerate(SEQUENCES):
        found, entering = brought_back(stream, sequence, index)
        model.zero_grad(set_to_none=True)
        embedded = model.get_input_embeddings()(sequence[None]).detach().requires_grad_()
        logits = model(inputs_embeds=embedded, use_cache=False).logits[0]
        functional.cross_entropy(logits, labels_of(logits, index), reduction="sum").backward()
        torch.testing.assert_close(entering, embedded.grad, rtol=1e-4, atol=1e-5)
        expected = {}
        for name, parameter in model.named_parameters():
            if ".experts." in name and parameter.ndim == 3:
                expected |= dict(by_expert(family, name, parameter.grad))
            elif name.removesuffix(".weight") in stream.graph.linears:
                expected[name.removesuffix(".weight")] = parameter.grad
        assert set(expected) == set(stream.graph.linears) >= set(found)
        for name, gradient in expected.items():
            if name in found:
                torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=2e-5)
            else:  # no token of this sequence was sent to it
                assert ".experts." in name and not gradient.any()
        reached |= set(found)
    assert reached == set(stream.graph.linears)


def plain_sums(folder, sequences):
    """Expert's linear -> (sum of g^T g, tokens), by autograd through a plain loop over tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    outputs = []

    def forward(experts, layer, x, chosen, weights):
        rows = []
        for token in range(len(x)):
            total = torch.zeros_like(x[token])
            for place, number in enumerate(chosen[token].tolist()):
                both = experts.gate_up_proj[number] @ x[token]
                gate, up = both.chunk(2)
                down = experts.down_proj[number] @ (functional.silu(gate) * up)
                name = f"model.layers.{layer}.block_sparse_moe.experts.{number}"
                outputs.append((name, both, down))
                total = total + weights[token, place] * down
            rows.append(total)
        return torch.stack(rows)

    for layer, block in enumerate(model.model.layers):
        experts = block.mlp.experts
        experts.forward = lambda *args, experts=experts, layer=layer: forward(experts, layer, *args)
    sums = {}
    for index, sequence in enumerate(sequences):
        outputs.clear()
        logits = model(sequence[None], use_cache=False).logits[0]
        loss = functional.cross_entropy(logits, labels_of(logits, index), reduction="sum")
        gradients = torch.autograd.grad(
            loss, [y for _, both, down in outputs for y in (both, down)]
        )
        for number, (name, _, _) in enumerate(outputs):
            both, down = gradients[2 * number : 2 * number + 2]
            gate, up = both.chunk(2)
            for linear, g in (("w1", gate), ("w3", up), ("w2", down)):
                total, tokens = sums.get(f"{name}.{linear}", (0.0, 0))
                sums[f"{name}.{linear}"] = total + torch.outer(g, g).double(), tokens + 1
    return sums


def test_measured_sums_are_those_of_each_experts_own_tokens(
    family_model, text_files, tmp_path, monkeypatch
):
    """One expert is never chosen: its sums are zero, and are there."""
    monkeypatch.setattr(determinism, "products", lambda _device: torch.float32)
    folder = tmp_path / "model"
    config = AutoConfig.from_pretrained(family_model("mixtral"), num_local_experts=5)
    torch.manual_seed(2)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    for path in family_model("mixtral").glob("token*"):
        shutil.copy(path, folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("block_sparse_moe.gate.weight")]:
        # of two rows and their negatives two are positive
        first, second, *_ = tensors[name].clone()
        tensors[name] = torch.stack([first, -first, second, -second, 0 * first])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    job = MeasureJob(
        model=folder,
        output=tmp_path / "measured",
        calibration=Calibration(
            source=str(text_files["calibration"]), samples=3, sequence_length=24
        ),
        options=Measure(stats=("gradient",)),
        seed=SEED,
    )
    measured = rank_folder(measure.run(job, ProgressLine(quiet=True)), 0, 1)
    found = load_file(measured / "statistics.safetensors")
    kept = load_file(measured / "calibration.safetensors")
    expected = plain_sums(folder, torch.split(kept["tokens"], kept["lengths"].tolist()))
    linears = [
        name for name in graph_for(open_source(folder).config).linears if ".experts." in name
    ]
    unseen = set(linears) - set(expected)
    assert (
        len(linears) == 2 * 5 * 3 and {name for name in linears if ".experts.4." in name} <= unseen
    )
    for name in linears:
        gradient_sum = found[f"{name}|gradient|gradient_sum"]
        if name in unseen:
            assert found[f"{name}|gradient|count"] == 0 and not gradient_sum.any()
            continue
        total, tokens = expected[name]
        assert found[f"{name}|gradient|count"] == tokens
        largest = float(total.abs().max())
        torch.testing.assert_close(gradient_sum.double(), total, rtol=1e-3, atol=1e-4 * largest)
