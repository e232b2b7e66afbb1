"""Tokenizer files that would take gigabytes are refused before a library reads them.

Those of known models are not.
"""

import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.decoders import Decoder

from quantflow.errors import InputError
from quantflow.files import canonical
from quantflow.models.tokenizer import load_tokenizer
from quantflow.models.tokenizer_bounds import MAX_GROWTH, growth, refuse_bombs

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "tiny-llama"


def replace(pattern, content):
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(key, *parts):
    return {"type": "Sequence", key: list(parts)}


DOUBLING = replace({"String": "a"}, "aa")
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
TWICE = {"Sequence": {"id": "A", "type_id": 0}}
TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [TWICE, TWICE],
    "pair": [],
    "special_tokens": {},
}
SPACE = {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always", "split": True}
BOMBS = {
    "doubling": {"normalizer": sequence("normalizers", *[DOUBLING] * 45)},
    "without types": {
        "normalizer": {"normalizers": [{key: DOUBLING[key] for key in ("pattern", "content")}] * 45}
    },
    "sequences": {
        "normalizer": sequence("normalizers", *[sequence("normalizers", *[DOUBLING] * 5)] * 9)
    },
    "an expression": {"normalizer": replace({"Regex": "a*"}, "x" * 5000)},
    "prepended": {
        "normalizer": sequence("normalizers", *[{"type": "Prepend", "prepend": "x" * 99}] * 3)
    },
    "decoder": {"decoder": sequence("decoders", *[DOUBLING] * 45)},
    "bytes of bytes": {"pre_tokenizer": sequence("pretokenizers", *[BYTES] * 45)},
    "text twice": {"post_processor": sequence("processors", *[TEMPLATE] * 45)},
    "together": {
        "normalizer": replace({"String": "a"}, "a" * 100),
        "pre_tokenizer": sequence("pretokenizers", BYTES, BYTES),
    },
}
KNOWN = {
    "llama": {
        "normalizer": sequence(
            "normalizers", {"type": "Prepend", "prepend": "_"}, replace({"String": " "}, "_")
        ),
        "decoder": sequence(
            "decoders", replace({"String": "_"}, " "), {"type": "ByteFallback"}, {"type": "Fuse"}
        ),
    },
    "clip": {
        "normalizer": sequence(
            "normalizers", {"type": "NFC"}, replace({"Regex": r"\s+"}, " "), {"type": "Lowercase"}
        ),
        "pre_tokenizer": sequence("pretokenizers", BYTES),
    },
    "t5": {
        "normalizer": sequence(
            "normalizers", {"type": "NFKC"}, {"type": "Strip"}, replace({"Regex": " {2,}"}, "_")
        ),
        "pre_tokenizer": SPACE,
    },
    "bert": {
        "normalizer": {"type": "BertNormalizer"},
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
    },
    "none": {"normalizer": None, "decoder": 5, "pre_tokenizer": [], "post_processor": {}},
}


@pytest.fixture
def folder(tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EXAMPLE / name, tmp_path)
    return tmp_path


def written(folder, parts):
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | parts))


@pytest.mark.parametrize("name", BOMBS)
def test_parts_that_make_thousands_of_characters_of_one_are_refused(name, folder):
    written(folder, BOMBS[name])
    with pytest.raises(
        InputError, match=r"tokenizer.json: .* may make .* characters of one, 1024 are allowed"
    ):
        load_tokenizer(folder)


@pytest.mark.parametrize("name", KNOWN)
def test_parts_of_known_tokenizers_are_allowed(name, folder):
    written(folder, KNOWN[name])
    refuse_bombs(folder)


PARTS = st.one_of(
    st.sampled_from(
        [
            {"type": "NFC"},
            {"type": "NFKC"},
            {"type": "NFKD"},
            {"type": "Lowercase"},
            {"type": "StripAccents"},
        ]
    ),
    st.builds(
        lambda text: {"type": "Prepend", "prepend": text}, st.text("ab ", min_size=1, max_size=3)
    ),
    st.builds(
        lambda text, content: replace({"String": text}, content),
        st.text("ab", min_size=1, max_size=2),
        st.text("abé", max_size=4),
    ),
    st.builds(
        lambda text, content: replace({"Regex": text}, content),
        st.sampled_from(["a", "b+", "a|b", "."]),
        st.text("ab", max_size=3),
    ),
)
BARE = {
    "version": "1.0",
    "added_tokens": [],
    "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
}


@given(st.lists(PARTS, max_size=4), st.text("abé \ufdfa\u0390İ", min_size=1, max_size=5))
def test_no_text_grows_by_more_than_is_said(parts, text):
    normalizer = sequence("normalizers", *parts)
    made = Tokenizer.from_str(
        json.dumps({**BARE, "normalizer": normalizer})
    ).normalizer.normalize_str(text)
    assert len(made) <= growth(normalizer) * len(text)


def test_a_chain_that_is_allowed_makes_no_more_than_its_bound_of_a_character():
    chain = sequence("normalizers", *[DOUBLING] * 10)
    assert growth(chain) == MAX_GROWTH
    assert (
        len(
            Tokenizer.from_str(json.dumps({**BARE, "normalizer": chain})).normalizer.normalize_str(
                "a"
            )
        )
        == MAX_GROWTH
    )


@pytest.mark.parametrize(
    "name",
    ["tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.json"],
)
def test_a_file_of_more_items_than_are_read_is_refused_before_a_library_reads_it(
    name, folder, monkeypatch
):
    monkeypatch.setattr(canonical, "MAX_CONTAINERS", 10_000)
    (folder / name).write_bytes(b"[" + b"[]," * 10_000 + b"[]]")
    with pytest.raises(InputError, match=f"{name}: 10002 tables and lists"):
        load_tokenizer(folder)


def test_parts_that_are_nested_too_deep_are_refused(folder):
    deep = '{"normalizers":[' * 5000 + "]}" * 5000
    (folder / "tokenizer.json").write_text(f'{{"normalizer":{deep}}}')
    with pytest.raises(InputError, match="nested too deep"):
        load_tokenizer(folder)


STRIP = {"type": "Strip", "content": "a"}


@pytest.mark.parametrize(("start", "stop"), [(0, 2), (1, 1), (0, 10**18), (2, 2)])
def test_a_decoder_that_ends_the_library_on_short_tokens_is_refused(start, stop, folder, capfd):
    decoder = {**STRIP, "start": start, "stop": stop}
    if stop < 10:
        # pyo3's PanicException
        with pytest.raises(BaseException, match="but the index|slice index"):
            Decoder.decode(decoders.Strip("a", start, stop), ["aaa"[: start + stop - 1]])
        assert "panicked" in capfd.readouterr().err
    written(folder, {"decoder": sequence("decoders", decoder)})
    with pytest.raises(InputError, match=f"decoder: Strip from {start} to {stop} ends the library"):
        load_tokenizer(folder)


@pytest.mark.parametrize(("start", "stop"), [(1, 0), (0, 1), (5, 0)])
def test_a_decoder_that_strips_at_one_end_is_allowed(start, stop, folder):
    written(folder, {"decoder": sequence("decoders", {**STRIP, "start": start, "stop": stop})})
    refuse_bombs(folder)
