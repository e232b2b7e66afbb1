"""Cards that share a model of any family, here threads, measure what one process measures.

The models are transformers' own, tiny and random. The cards' sums go through a stand-in of
torch.distributed.
"""

from pathlib import Path
from threading import get_ident
from types import SimpleNamespace

import pytest
import torch
from torch import distributed
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    CodeGenConfig,
    FalconConfig,
    GemmaConfig,
    GPT2Config,
    GPTBigCodeConfig,
    GPTJConfig,
    GPTNeoXConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
)

from quantflow.distributed.sharding import placements
from quantflow.distributed.transformers_split import channels_of
from quantflow.measuring import measure
from quantflow.measuring.job import MeasureJob
from quantflow.measuring.merging.ranks import unify
from quantflow.measuring.record import read_measurement
from quantflow.models import architecture
from quantflow.models.reading import read_tensor
from quantflow.planning.recipe import Calibration, Measure
from quantflow.reporting.progress_line import ProgressLine
from quantflow.runtime.artifact import open_folder
from quantflow.runtime.ranks.tensor_parallel import Ranks
from tests.conftest import FALCON, GPT, GROUPED, SHAPE, write_tokenizer
from tests.shared import slow_but

QUIET = ProgressLine(quiet=True)
STATS = ("amax", "channel_amax", "min_max", "mean_abs")
HEADS = {"num_attention_heads": 8}
GPT_HEADS = {**GPT, "n_head": 8}
MQA = {**SHAPE, **HEADS, "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 1}
FALCON_HEADS = {**FALCON, **HEADS, "num_kv_heads": 2, "new_decoder_architecture": True}
# family -> configuration, and the numbers of cards
MODELS = {
    "bloom": (BloomConfig(vocab_size=320, hidden_size=64, n_layer=2, n_head=8), (2, 4)),
    "opt": (OPTConfig(**{**SHAPE, **HEADS}, ffn_dim=128, word_embed_proj_dim=32), (2,)),
    "falcon 7b": (
        FalconConfig(**{**FALCON, "hidden_size": 72, "num_attention_heads": 9}),
        (2,),
    ),
    "falcon 40b": (FalconConfig(**FALCON_HEADS), (2, 4)),
    "falcon 180b": (FalconConfig(**{**FALCON_HEADS, "num_kv_heads": 4}), (4,)),
    "falcon 11b": (FalconConfig(**FALCON_HEADS, num_ln_in_parallel_attn=1), (2,)),
    "falcon rw": (
        FalconConfig(
            **{**FALCON, **HEADS}, alibi=True, parallel_attn=False, multi_query=False, bias=True
        ),
        (2,),
    ),
    "gptj": (GPTJConfig(**GPT_HEADS, rotary_dim=8), (2,)),
    "codegen": (CodeGenConfig(**GPT_HEADS, rotary_dim=8), (2, 8)),
    "gpt_neox": (GPTNeoXConfig(**{**SHAPE, **HEADS}), (2,)),
    "gpt2": (GPT2Config(**GPT_HEADS), (2, 4)),
    "gpt_bigcode": (GPTBigCodeConfig(**GPT_HEADS, n_positions=128), (2,)),
    "gpt_bigcode, a key for each head": (
        GPTBigCodeConfig(**GPT_HEADS, n_positions=128, multi_query=False),
        (2,),
    ),
    "phi": (PhiConfig(**{**SHAPE, **HEADS}, pad_token_id=1), (2,)),
    "phi3": (Phi3Config(**{**GROUPED, **HEADS}, pad_token_id=1), (2,)),
    "gemma": (GemmaConfig(**MQA), (2,)),
}
CASES = [(family, cards) for family, (_, counts) in MODELS.items() for cards in counts]


class Cards(SimpleNamespace):
    """The mesh of a replica's cards, whose group is what threads meet over."""

    ndim = 1

    def get_group(self):
        return self.wire


def all_reduce(x, op=distributed.ReduceOp.SUM, group=None):
    parts = group.gather(x.contiguous())
    x.copy_(parts.sum(dim=0) if op == distributed.ReduceOp.SUM else parts.amin(dim=0))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Folder of a tiny model of a family, made on first use."""
    made: dict[str, Path] = {}

    def make(family):
        if family not in made:
            made[family] = folder = tmp_path_factory.mktemp("models") / "model"
            config = MODELS[family][0]
            config.initializer_range = 0.1
            torch.manual_seed(0)
            built = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            with torch.no_grad():
                for name, parameter in built.named_parameters():
                    if name.endswith("bias"):
                        parameter.normal_(0, 0.1)
            built.save_pretrained(folder)
            write_tokenizer(folder)
        return made[family]

    return make


def job_of(folder, output, text_files, cards=1):
    calibration = Calibration(source=str(text_files["calibration"]), samples=2, sequence_length=24)
    options = Measure(ranks=cards, tp=cards, stats=STATS)
    return MeasureJob(model=folder, output=output, calibration=calibration, options=options)


LONGER = [("bloom", 4), ("falcon 40b", 2), ("falcon 180b", 4), ("falcon 11b", 2), ("codegen", 8)]
LONGER += [("gpt2", 2), ("gpt_bigcode, a key for each head", 2)]


@pytest.mark.parametrize(
    ("family", "cards"), slow_but(CASES, *(case for case in CASES if case not in LONGER))
)
def test_cards_unified_are_one_process(
    family, cards, model, text_files, tmp_path, among, monkeypatch
):
    folder = model(family)
    single = measure.run(job_of(folder, tmp_path / "one", text_files), QUIET)
    whole = read_measurement(next(single.glob("rank-*")))
    job = job_of(folder, tmp_path / "cards", text_files, cards)
    local = {}
    monkeypatch.setattr(distributed, "all_reduce", all_reduce)
    monkeypatch.setattr(measure.replicas, "meshed", lambda *_, **__: local[get_ident()])

    def rank(wire):
        local[get_ident()] = Cards(wire=wire)
        measure._measure_rank(job, QUIET, rank=wire.rank, world=cards)

    among(cards, rank)
    ranks = [read_measurement(each) for each in sorted((tmp_path / "cards").glob("rank-*"))]
    (merged,) = unify(ranks, [list(range(cards))])
    assert merged.meta["tensors"] == whole.meta["tensors"]
    assert set(merged.statistics) == set(whole.statistics)
    for key, value in whole.statistics.items():
        ours = merged.statistics[key]
        if "|weight|" in key or key.endswith("|count"):
            assert torch.equal(ours, value), key
        else:
            torch.testing.assert_close(
                ours, value, rtol=1e-4, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}"
            )
    for card in ranks:  # a card's cache is of its own heads alone
        caches = [
            name for name in whole.meta["tensors"] if f"{name}|k_cache|amax" in whole.statistics
        ]
        assert len(caches) == 2
        for name in caches:
            placement = card.meta["tensors"][name]
            for cache, heads in (("k_cache", "k_heads"), ("v_cache", "v_heads")):
                of_heads = whole.statistics[f"{name}|{heads}|channel_amax"]
                assert len(of_heads) == placement["full_shape"][0]
                torch.testing.assert_close(
                    card.statistics[f"{name}|{cache}|amax"],
                    of_heads[channels_of(placement)].max(),
                    rtol=1e-4,
                    atol=1e-5,
                )


@pytest.mark.parametrize(("family", "cards"), CASES)
def test_ranks_that_run_hold_the_rows_of_those_that_measure(family, cards, model):
    """One description of a family's heads cuts both."""
    folder = model(family)
    artifact = open_folder(folder, verify=False)
    source = measure.open_source(folder)
    names = architecture.read(artifact.checkpoint.config).names
    shapes = {name: info.shape for name, info in source.checkpoint.infos.items()}
    for rank in range(cards):
        running = Ranks(artifact, SimpleNamespace(rank=rank, world=cards)).artifact.checkpoint
        measuring = placements(source.config, shapes, tp=cards, rank=rank)
        for name in (f"{names.layers}.1.{linear}" for linear in names.qkv):
            # one linear may have become those of its queries, keys and values
            parts = [f"{name}{part}.weight" for part in ("", ".0", ".1", ".2")]
            rows = [weight(running, part) for part in parts if part in running.tensors]
            whole = weight(source.checkpoint, f"{name}.weight")
            assert torch.equal(torch.cat(rows), whole[channels_of(measuring[name])]), (rank, name)


def weight(checkpoint, name):
    file, info = checkpoint.tensors[name]
    return read_tensor(checkpoint.folder / file, info)
