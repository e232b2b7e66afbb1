"""Stock transformers on a folder in the FP8 layout, which it dequantizes where there is no GPU."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from quantflow.core.scheme import preset, with_group_size


@pytest.mark.filterwarnings("ignore")  # it says that there is no GPU
def test_transformers_has_the_weights_of_an_fp8_folder_bit_for_bit(llama, tmp_path, write_foreign):
    weights = write_foreign(tmp_path / "f", llama, "fp8", with_group_size(preset("FP8_BLOCK"), 32))
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "f", dtype=torch.float32, output_loading_info=True)
    assert not any(report.values()), report
    found = dict(model.named_parameters())
    assert len(weights) == 14
    assert [name for name, weight in weights.items() if not torch.equal(found[name].float(), weight)] == []
