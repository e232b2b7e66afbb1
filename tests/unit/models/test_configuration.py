"""A configuration is what the file says, also where transformers does not look for it."""

import json

import pytest
import torch
from safetensors.torch import save_file

from quantflow.files.checkpoint import open_checkpoint
from quantflow.models.configuration import load_config

PARTS = {
    "attn_config": {"kv_n_heads": 2, "rope_theta": 500000},
    "ffn_config": {"moe_num_experts": 4, "moe_top_k": 2},
}


@pytest.mark.parametrize(
    ("more", "base"), [({}, 500000), ({"rope_parameters": {"rope_theta": 10000.0}}, 10000.0)]
)
def test_the_base_of_dbrx_angles_is_the_one_that_its_file_says(more, base, tmp_path):
    told = {"model_type": "dbrx", "d_model": 64, "n_heads": 4, "n_layers": 2, **PARTS, **more}
    (tmp_path / "config.json").write_text(json.dumps(told))
    save_file({str(at): torch.zeros(64) for at in range(4)}, tmp_path / "model.safetensors")
    config = load_config(open_checkpoint(tmp_path))
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": base}
