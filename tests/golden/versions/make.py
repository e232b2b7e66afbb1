"""Write the files of a version from a tiny model.

python tests/golden/versions/make.py tests/golden/versions/0.1.0

model/ is the source; artifact/, measurement/ and unfinished/ are what export, measure and a killed
quantize left. They are written once by the version of their name, and read by every later one
(test_versions.py).
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from quantflow.stages.cli import cli
from quantflow.stages.cli.output import exit_code

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "intermediate_size": 32,
    "vocab_size": 32,
    "max_position_embeddings": 64,
}
HEADS = {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16}


def run(*arguments: object) -> None:
    """Run a command line."""
    assert exit_code(cli, [*map(str, arguments), "-q"]) == 0, arguments


def main(folder: Path) -> None:
    """Write a version's folders."""
    torch.manual_seed(0)
    model, work = folder / "model", folder / "work"
    config = LlamaConfig(
        **SIZES,
        **HEADS,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(model)
    words = {f"w{number}": number for number in range(SIZES["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="w2", eos_token="w1"
    ).save_pretrained(model)
    rows = [[3 + (7 * row + 5 * at) % 29 for at in range(12)] for row in range(6)]
    (folder / "tokens.jsonl").write_text(
        "".join(json.dumps({"input_ids": row}) + "\n" for row in rows)
    )
    run(
        "measure",
        model,
        "-o",
        folder / "measurement",
        "--calibration",
        folder / "tokens.jsonl",
        "--stats",
        "amax,channel_amax,min_max",
    )
    run(
        "quantize",
        model,
        "-o",
        work,
        "--scheme",
        "W8A8_STATIC",
        "--measurement",
        folder / "measurement",
    )
    run("export", work, "-o", folder / "artifact")
    shutil.copytree(work, folder / "unfinished")  # as a kill between its two layers leaves it
    for name in (
        "DONE.json",
        "quantize.json",
        "layers/00001.safetensors",
        "layers/00001.json",
        ".hashes.json",
    ):
        (folder / "unfinished" / name).unlink(missing_ok=True)
    for path in (
        *folder.glob("**/canary.*"),
        *folder.glob("*.log"),
        *folder.glob(".*"),
        *folder.glob("measurement/.*"),
    ):
        if path.is_file():
            path.unlink()
    for path in (*folder.glob("work"), *folder.glob("unfinished/canary*")):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
