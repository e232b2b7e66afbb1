"""Which text an artifact may be judged on."""

import pytest
import torch

from quantflow.errors import InputError
from quantflow.models.identity import CANARY_TOKENS, tensor_hash
from quantflow.models.load import load_tokenizer
from quantflow.planning.recipe import Validate
from quantflow.validation import validate


def test_a_heading_that_both_texts_have_is_no_overlap_and_64_tokens_are(llama, tmp_path):
    words = load_tokenizer(llama)
    heading, body = "value scale round\n\n", " ".join(["group layer token model range shift pack zero point"] * 12)
    text = tmp_path / "heldout.txt"
    text.write_text(heading + body)
    short, long = (torch.tensor(words(part.strip())["input_ids"]) for part in (heading, body))
    assert len(short) < CANARY_TOKENS < len(long)
    options = Validate(text=str(text), tokens=96, sequence_length=96)
    job = validate.ValidateJob(artifact=llama, baseline=llama, report=tmp_path / "r", options=options)

    def manifest(*sequences):
        heads = [tensor_hash(sequence[:CANARY_TOKENS]) for sequence in sequences]
        return {"measurement": {"calibration": {"sequence_length": 128}, "sequence_heads": heads}}

    assert validate._sequences(job, manifest(short))
    with pytest.raises(InputError, match="begins with the 64 tokens of a calibration sequence"):
        validate._sequences(job, manifest(short, long))
