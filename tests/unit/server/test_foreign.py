"""A folder that another program quantized, served as it is."""

import torch

from quantflow.core.scheme import named
from quantflow.formats.weight_layout import integers
from quantflow.models.tokenizer import load_tokenizer
from quantflow.runtime.load import load


def test_a_folder_whose_groups_are_out_of_order_answers_over_http(
    llama, tmp_path, write_foreign, serve
):
    folder = tmp_path / "f"
    scheme = named(integers(4, 32, symmetric=True, where="a test"), None, "pack-quantized")
    write_foreign(folder, llama, "gptq", scheme, ordered=True)
    words = load_tokenizer(folder)
    ids = torch.tensor([words("value scale round")["input_ids"]])
    model = load(folder, decoder="transformers", backend="reference").model
    expected = model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
    with serve(artifact=folder, chat_template=None) as asking:
        answer = asking.generate("value scale round", max_new_tokens=6)
        assert answer.status == 200, answer.body
        assert answer.json()["generated_text"] == words.decode(expected, skip_special_tokens=True)
        assert asking.models.first.loaded.name == "lean"
