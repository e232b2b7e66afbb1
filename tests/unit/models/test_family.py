"""The rows of the families, against each other and against llama.cpp's own table of names."""

import subprocess
import sys
from dataclasses import fields

import pytest
from gguf.constants import MODEL_ARCH, MODEL_ARCH_NAMES, MODEL_TENSORS, TENSOR_NAMES

from quantflow.models.family import FAMILIES, PartNames, attention_heads

GGUF = [name for name, row in FAMILIES.items() if row.gguf is not None]


def names_of(parts):
    """Return role -> names of a `PartNames`, without the list of layers and what is not there."""
    values = {each.name: getattr(parts, each.name) for each in fields(PartNames)}
    del values["layers"]
    listed = {role: (name,) if isinstance(name, str) else name for role, name in values.items()}
    return {role: names for role, names in listed.items() if names is not None}


def test_rows_are_read_without_torch_and_transformers():
    program = (
        "import sys, quantflow.models.family, quantflow.models.graph, quantflow.models.source\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("family", GGUF)
def test_the_names_of_a_file_are_those_of_the_gguf_package(family):
    row = FAMILIES[family]
    (architecture,) = (
        key for key, name in MODEL_ARCH_NAMES.items() if name == row.gguf.architecture
    )
    theirs = {TENSOR_NAMES[tensor] for tensor in MODEL_TENSORS[architecture]}
    for role in names_of(row.names):
        for name in names_of(row.gguf.names)[role]:
            assert {name, f"{row.gguf.names.layers}.{{bid}}.{name}"} & theirs, (role, name)
    assert architecture in MODEL_ARCH


@pytest.mark.parametrize("family", GGUF)
def test_a_part_has_as_many_tensors_in_a_file_as_in_a_checkpoint(family):
    row = FAMILIES[family]
    assert row.decoder is not None
    in_file = names_of(row.gguf.names)
    for role, names in names_of(row.names).items():
        assert len(in_file[role]) == len(names), role
    roles = {each.name for each in fields(PartNames)}
    assert row.gguf.biased | row.gguf.may_be_biased <= roles


def test_heads_lie_in_the_linears_of_an_attention_as_they_are_cut():
    assert attention_heads(FAMILIES["llama"]) == {
        "self_attn.q_proj": ("num_attention_heads", 1),
        "self_attn.k_proj": ("num_key_value_heads", 1),
        "self_attn.v_proj": ("num_key_value_heads", 1),
        "self_attn.o_proj": ("num_attention_heads", 1),
    }
    # a head's query, key and value lie together
    assert attention_heads(FAMILIES["gpt_neox"])["attention.query_key_value"] == (
        "num_attention_heads",
        3,
    )
    # all queries, then all keys, then all values: no number of rows is a head
    assert "self_attn.qkv_proj" not in attention_heads(FAMILIES["phi3"])


def test_a_rotation_goes_through_rms_norms_of_what_a_branch_reads():
    assert [name for name, row in FAMILIES.items() if row.unrotated and not row.traced] == [
        "gpt_neox"
    ]
