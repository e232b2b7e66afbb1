"""Few shapes and a choice of attention by the command line: the same texts, counted and said."""

import json

import pytest

from tests.shared import run

LINE = ("--prompt", "value scale", "round", "--max-new-tokens", "10", "--ignore-eos", "-q")
SHAPES = {
    "static": ("--static-shapes",),
    "growing": ("--bucket_size", "4"),
    "internal": ("--bucket-size=4", "--bucket-internal"),
    "padded": ("--bucket_size", "4", "--reduce_recompile"),
}


def said(capsys, folder, *words):
    assert run("generate", folder, *words, *LINE, "--json") == 0, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def texts(llama, capsys):
    found = said(capsys, llama, "--decoder", "transformers")
    assert found["shapes"] is None
    return found["outputs"]


@pytest.mark.parametrize("words", SHAPES.values(), ids=SHAPES)
def test_texts_in_few_shapes_are_those_of_a_growing_cache(words, llama, texts, capsys):
    found = said(capsys, llama, *words)
    assert found["outputs"] == texts
    assert found["decoder"]["name"] == "transformers"
    assert found["decoder"]["reasons"][0].endswith("static shapes was asked for")
    shapes = found["shapes"]
    assert sum(count for *_, count in shapes["forwards"]) == 20  # of two prompts by themselves
    lengths = {tokens for _, tokens, *_ in shapes["forwards"]} - {1}
    assert not words[-1].startswith("--reduce") or all(length % 4 == 0 for length in lengths)


@pytest.mark.parametrize(
    "words",
    [
        ("--attention", "eager"),
        ("--attention", "fused", "--attention", "causal"),
        ("--static-shapes", "--use_flash_attention", "--flash_attention_recompute"),
    ],
    ids=" ".join,
)
def test_attention_by_choice_says_the_same(words, llama, texts, capsys):
    found = said(capsys, llama, *words)
    assert found["outputs"] == texts
    reasons = " ".join(found["decoder"]["reasons"])
    assert ("recompute: Gaudi's kernel alone has it" in reasons) == ("--static-shapes" in words)


def test_a_softmax_in_bfloat16_runs_in_the_modules(llama, capsys):
    found = said(capsys, llama, "--attention", "bfloat16-softmax")
    assert found["decoder"] == {
        "name": "transformers",
        "reasons": ["the lean decoder is not used: attention was asked for"],
    }
    words = ("--decoder", "transformers", "--attn_softmax_bf16")
    assert run("generate", llama, *words, "--prompt", "a", "--max-new-tokens", "2") == 0
    assert "left out" not in capsys.readouterr().err


def test_hints_of_other_programs_leave_the_fastest_decoder_and_that_is_said(llama, capsys):
    words = ("--use_flash_attention", "--attn_softmax_bf16")
    assert run("generate", llama, *words, "--prompt", "a", "--max-new-tokens", "2") == 0
    assert (
        "left out: --use-flash-attention, --attn-softmax-bf16: the lean decoder attends in blocks "
        "of its own; --decoder transformers has --attention" in capsys.readouterr().err
    )


def test_the_number_of_shapes_is_said(llama, capsys):
    words = ("--bucket_size", "4", "--prompt", "a", "--max-new-tokens", "7")
    assert run("generate", llama, *words) == 0
    assert "shapes were run, over a cache of 2 lengths" in capsys.readouterr().err


def test_bench_counts_shapes_too(llama, capsys):
    words = ("-b", "1", "2", "--input-tokens", "5", "--new-tokens", "4", "--runs", "1")
    line = ("bench", llama, *words, "--warmups", "0", "--static-shapes", "--json", "-q")
    assert run(*line) == 0, capsys.readouterr().err
    found = json.loads(capsys.readouterr().out)
    assert found["shapes"]["forwards"] == [
        [1, 5, 9, 9, 1],
        [1, 1, 9, 9, 3],
        [2, 5, 9, 9, 1],
        [2, 1, 9, 9, 3],
    ]
    assert found["decoder"] == "transformers"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--bucket-internal",), "bucket_internal without bucket_size"),
        (("--static-shapes", "--decoder", "lean"), "static shapes with the lean decoder"),
        (("--attention", "causal"), "attention=causal with none of eager, sdpa and fused"),
        (("--static-shapes", "--ranks", "2"), "2 ranks with static shapes"),
        (("--attention", "sdpa", "--disk-offload"), "disk_offload with attention"),
    ],
    ids=" ".join,
)
def test_what_does_not_go_together_is_refused(words, told, llama, capsys):
    assert run("generate", llama, *words, "--prompt", "a") == 2
    assert told in capsys.readouterr().err
