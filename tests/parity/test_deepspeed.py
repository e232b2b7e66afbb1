"""Two ranks of DeepSpeed and two of ours choose the same tokens from one BLOOM.

DeepSpeed has an environment of its own, which DEEPSPEED_ENV names (deepspeed 0.19.8 with torch 2.13
and transformers 4.57); without it the test is skipped. Its ranks are processes of a CPU that meet
over gloo, with its automatic tensor parallelism. transformers 5.23 builds BLOOM's ALiBi past the
function that this release replaces, for all heads. The kernel that adds up in shared memory is left
out: it ended by a segmentation fault where it was tried.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BloomConfig

from tests.conftest import write_tokenizer

ENVIRONMENT = os.environ.get("DEEPSPEED_ENV") or None
COUNT = 24
PROMPTS = ("value scale", "round", "group layer token model")
SCRIPT = """
import json, os, sys
import deepspeed, torch
from transformers import AutoModelForCausalLM

folder, prompts, count, output = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed(dist_backend="gloo")
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
engine = deepspeed.init_inference(
    model, tensor_parallel={"tp_size": int(os.environ["WORLD_SIZE"])}, dtype=torch.float32
)
tokens = []
for ids in prompts:
    x = torch.tensor([ids])
    with torch.no_grad():
        made = engine.module.generate(
            x,
            attention_mask=torch.ones_like(x),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
        )
    tokens.append(made[0, len(ids) :].tolist())
attention = engine.module.transformer.h[0].self_attention
if os.environ["RANK"] == "0":
    rows = list(attention.query_key_value.weight.shape)
    with open(output, "w") as file:
        json.dump({"tokens": tokens, "heads": attention.num_heads, "rows": rows}, file)
"""
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        ENVIRONMENT is None, reason="DEEPSPEED_ENV names no environment with deepspeed"
    ),
]


@pytest.fixture
def bloom(tmp_path):
    """A tiny random BLOOM, whose head is not its embedding: else it repeats one token."""
    config = BloomConfig(vocab_size=320, hidden_size=128, n_layer=3, n_head=8, pad_token_id=1)
    config.bos_token_id, config.eos_token_id = 0, 1
    config.initializer_range, config.tie_word_embeddings = 0.2, False
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.1)
    model.save_pretrained(tmp_path / "bloom")
    write_tokenizer(tmp_path / "bloom")
    return tmp_path / "bloom"


def done(command, **words):
    result = subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
        **words,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return result.stdout


def test_two_ranks_of_each_choose_the_same_tokens(bloom, tmp_path):
    words = AutoTokenizer.from_pretrained(bloom)
    prompts = [words(text)["input_ids"] for text in PROMPTS]
    (tmp_path / "theirs.py").write_text(SCRIPT)
    python = Path(str(ENVIRONMENT)) / "bin" / "python"
    launched = [python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    arguments = [bloom, json.dumps(prompts), COUNT, tmp_path / "theirs.json"]
    outside = {**os.environ, "DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0", "OMP_NUM_THREADS": "1"}
    outside.pop("PYTHONPATH", None)
    done([*launched, tmp_path / "theirs.py", *arguments], env=outside, cwd=tmp_path)
    theirs = json.loads((tmp_path / "theirs.json").read_text())
    assert (theirs["heads"], theirs["rows"]) == (4, [192, 128])  # it cut the model indeed
    ours = [sys.executable, "-m", "quantflow", "generate", bloom, "--ranks", "2", "--json"]
    for text in PROMPTS:
        ours += ["--prompt", text]
    ours += ["--max-new-tokens", COUNT, "--ignore-eos", "-q"]
    found = json.loads(done(ours))
    assert found["ranks"] == 2 and found["decoder"]["name"] == "lean"
    tokens = [output["tokens"] for output in found["outputs"]]
    assert tokens == theirs["tokens"]
    assert min(len(set(each)) for each in tokens) > 3
