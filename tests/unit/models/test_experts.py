"""The view of experts as linears of their own, against the families' own modules."""

import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quantflow.errors import UnsupportedError
from quantflow.models.experts import Experts, SpreadExperts, every_token, watch_routing
from quantflow.models.hooks import watch
from quantflow.models.load import load_model, open_source
from quantflow.models.open import graph_for, open_files
from quantflow.models.skeleton import skeleton

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe")
TOKENS = torch.randint(2, 300, (1, 48), generator=torch.Generator().manual_seed(7))


def stock(folder, implementation="eager"):
    """The family's own model; `eager` is its own loop over experts."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation=implementation
    )
    return model.eval()


def mixtures(model):
    return [part for part in model.modules() if type(part).__name__.endswith("SparseMoeBlock")]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_has_a_tensor_per_expert_and_projection_and_the_graph_names_each(
    family, family_model
):
    folder = family_model(family)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - not a mapping
    assert not [name for name, shape in shapes.items() if len(shape) > 2]
    graph = graph_for(open_source(folder).config)
    linears = {
        name.removesuffix(".weight")
        for name, shape in shapes.items()
        if ".layers." in name and len(shape) == 2
    }
    assert linears == {*graph.linears, *graph.routers}
    assert graph_for(open_files(folder).config) == graph  # from config.json alone


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_the_view_has_the_logits_of_the_familys_own_model(family, family_model):
    folder = family_model(family)
    ours = load_model(open_source(folder), dtype=torch.float32)
    assert sum(isinstance(part, Experts) for part in ours.modules()) == 2
    found = ours(TOKENS).logits
    for implementation in ("eager", "grouped_mm"):
        expected = stock(folder, implementation)(TOKENS).logits
        assert (found - expected).abs().max() <= 1e-6 * expected.abs().max()


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_the_view_of_one_mixture_is_its_own_loop_to_the_last_digit_of_float32(family, family_model):
    folder = family_model(family)
    ours, theirs = (
        mixtures(load_model(open_source(folder), dtype=torch.float32)),
        mixtures(stock(folder)),
    )
    x = torch.randn(1, 40, 64, generator=torch.Generator().manual_seed(1))
    for mine, its in zip(ours, theirs, strict=True):
        expected = its(x)
        assert (mine(x) - expected).abs().max() <= 1e-6 * expected.abs().max()


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_the_view_runs_in_bfloat16_as_the_family_does(family, family_model):
    folder = family_model(family)
    ours = load_model(open_source(folder), dtype=torch.bfloat16)
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, experts_implementation="eager"
    ).eval()
    found, expected = ours(TOKENS).logits, theirs(TOKENS).logits
    assert found.dtype == torch.bfloat16
    assert (found - expected).norm() <= 0.01 * expected.norm()


@torch.no_grad()
def test_every_token_shows_each_expert_all_rows_and_returns_the_same(family_model):
    model = load_model(open_source(family_model("mixtral")), dtype=torch.float32)
    (block, *_) = mixtures(model)
    x = torch.randn(1, 40, 64, generator=torch.Generator().manual_seed(1))
    seen = {}
    watched = {
        f"experts.{number}.w1": lambda rows, _y, number=number: seen.setdefault(number, []).append(
            len(rows)
        )
        for number in range(4)
    }
    with watch(block, watched):
        routed = block(x)
        few, seen = seen, {}
        with every_token(block):
            fed = block(x)
        many, seen = seen, {}
        again = block(x)
    assert sum(sum(rows) for rows in few.values()) == 2 * 40  # each token goes to two experts
    assert many == {number: [40] for number in range(4)}
    assert (fed - routed).abs().max() <= 1e-6 * routed.abs().max()
    assert torch.equal(again, routed)  # and nothing is left of the block
    assert seen == few


@torch.no_grad()
def test_the_tokens_of_each_expert_are_counted_as_the_router_sends_them(family_model):
    model = load_model(open_source(family_model("qwen3_moe")), dtype=torch.float32)
    (block, *_) = mixtures(model)
    x = torch.randn(1, 40, 64, generator=torch.Generator().manual_seed(1))
    # [40, 2]: the softmax keeps the order of the logits
    chosen = (x[0] @ block.gate.weight.T).topk(2).indices
    expected = [int((chosen == number).sum()) for number in range(4)]
    counts = []
    with watch_routing(model, counts.append):
        block(x)
        with every_token(block):
            block(x)
    block(x)
    assert [count.tolist() for count in counts] == [expected, expected]


def test_a_model_without_experts_is_left_as_it_is(family_model):
    model = skeleton(open_source(family_model("llama")).config)
    assert not [part for part in model.modules() if isinstance(part, Experts)]


def test_experts_in_one_tensor_are_refused_by_name(family_model, tmp_path):
    folder = tmp_path / "stacked"
    shutil.copytree(family_model("olmoe"), folder)
    tensors = load_file(folder / "model.safetensors")
    experts = "model.layers.0.mlp.experts"
    stacked = torch.stack(
        [tensors.pop(f"{experts}.{number}.down_proj.weight") for number in range(4)]
    )
    save_file(
        {**tensors, f"{experts}.down_proj": stacked},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    for opened in (open_source, open_files):
        with pytest.raises(
            UnsupportedError,
            match=r"model\.layers\.0\.mlp\.experts\.down_proj \[4, 64, 128\] holds all experts",
        ):
            opened(folder)


def test_the_number_of_experts_is_read_under_either_name(family_model, tmp_path):
    folder = tmp_path / "renamed"
    shutil.copytree(family_model("qwen3_moe"), folder)
    config = json.loads((folder / "config.json").read_text())
    graphs = []
    for key in ("num_experts", "num_local_experts"):
        others = {
            name: value
            for name, value in config.items()
            if name not in ("num_experts", "num_local_experts")
        }
        (folder / "config.json").write_text(json.dumps({**others, key: 4}))
        graphs += [graph_for(open_files(folder).config), graph_for(open_source(folder).config)]
    assert all(graph == graphs[0] for graph in graphs)
    assert graphs[0].layers[0].experts == 4


@pytest.mark.parametrize("cards", [2, 4])
@pytest.mark.parametrize("every", [False, True])
@torch.no_grad()
def test_experts_on_several_cards_put_out_the_bits_of_one_process(
    cards, every, family_model, among
):
    """Also where a card has no token; weights of the others' experts are never touched."""
    folder = family_model("mixtral")

    def experts():
        model = load_model(open_source(folder), dtype=torch.float32)
        return next(part for part in model.modules() if isinstance(part, Experts))

    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(24, 64, generator=generator)
    chosen = torch.randint(0, 3, (24, 2), generator=generator)  # none goes to the last expert
    chosen[:, 1] = (chosen[:, 0] + 1 + chosen[:, 1] % 2) % 3
    weights = torch.rand(24, 2, generator=generator)
    whole = experts()
    expected = whole(hidden, chosen, weights)
    wholes = [experts() for _ in range(cards)]
    each = 4 // cards
    held = [range(card * each, card * each + each) for card in range(cards)]

    def work(wire):
        mine = wholes[wire.rank]
        for number, expert in enumerate(mine):
            for parameter in expert.parameters() if number not in held[wire.rank] else ():
                parameter.fill_(torch.nan)

        def gather(rows, counts):
            padded = torch.cat([rows, rows.new_zeros(max(counts) - len(rows), rows.shape[1])])
            return [part[:count] for part, count in zip(wire.gather(padded), counts, strict=True)]

        mine.spread = SpreadExperts(card=wire.rank, held=held, gather=gather)
        run = mine.of_every_token if every else mine
        return run(hidden, chosen, weights)

    expected = whole.of_every_token(hidden, chosen, weights) if every else expected
    for found in among(cards, work):
        assert torch.equal(found, expected) and torch.isfinite(found).all()
