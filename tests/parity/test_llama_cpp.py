"""Our GGUF files in other programs: gguf-py reads them, llama.cpp runs and quantizes them.

Slow and in an environment of its own, which LLAMA_CPP_ENV names; without it every test here is
skipped.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoTokenizer,
    Mxfp4Config,
    PreTrainedTokenizerFast,
)

from quantflow.algorithms import rtn_mse
from quantflow.core.block_types import BLOCK_TYPES
from quantflow.core.dtypes import DTYPES
from quantflow.core.scheme import MIXTURES as MIXTURE_NAMES
from quantflow.core.scheme import preset
from quantflow.exporting import gguf_export
from quantflow.exporting.job import ExportJob
from quantflow.formats.llama_cpp.mixtures import Position, type_of
from quantflow.formats.llama_cpp.tokenizer import PRE_TOKENIZERS
from quantflow.planning.recipe import Export
from quantflow.reporting.progress_line import ProgressLine
from quantflow.runtime.load import load
from quantflow.stages.cli import cli
from quantflow.stages.cli.output import exit_code
from tests.conftest import write_tokenizer
from tests.gguf_mixtures import MIXTURES, publish_mxfp4, write_mixture

pytestmark = pytest.mark.slow

VARIABLE = "LLAMA_CPP_ENV"
MODEL = Path(__file__).parents[2] / "examples" / "tiny-llama"
TEXTS = [
    "def main(argv=None):\n    return parser.parse_args(argv)\n",
    "  It's 1234567 o'clock,\tisn't IT?\n\n\n  x  =  y ",
    "Grüße, 世界! naïve café 🙂🙂 ½ ٣",
    "</s> stays text, and so does <s>",
    "",
]

# gguf-py: every tensor as float32, and every field.
READ = """
import json, sys
import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize

reader = GGUFReader(sys.argv[1])
np.savez(
    sys.argv[2],
    **{t.name: dequantize(t.data, t.tensor_type).reshape(t.shape[::-1]) for t in reader.tensors},
)
print(json.dumps({name: field.contents() for name, field in reader.fields.items()}))
"""

# llama.cpp: the tokens of texts, and the logits of ids; keys and values kept in float32, one
# thread. Weights stay as the file has them: this release crashes where it repacks blocks for AMX.
RUN = """
import json, sys
import numpy as np
from llama_cpp import Llama, llama_cpp

defaults = llama_cpp.llama_model_default_params


def as_in_the_file():
    params = defaults()
    params.use_extra_bufts = False
    return params


llama_cpp.llama_model_default_params = as_in_the_file
llama = Llama(
    sys.argv[1],
    n_ctx=512,
    logits_all=True,
    n_threads=1,
    n_threads_batch=1,
    type_k=0,
    type_v=0,
    verbose=False,
)
texts, ids = json.loads(sys.argv[2]), json.loads(sys.argv[3])
llama.eval(ids)
np.save(sys.argv[4], np.array(llama.scores[: len(ids)]))
print(json.dumps([llama.tokenize(text.encode(), add_bos=True, special=False) for text in texts]))
"""

QUANTIZE = """
import ctypes, sys
import llama_cpp

params = llama_cpp.llama_model_quantize_default_params()
params.ftype, params.nthread = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{sys.argv[3]}"), 1
sys.exit(
    llama_cpp.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), ctypes.byref(params))
)
"""


# the same, weighed by an importance matrix in a file of GGUF
QUANTIZE_WEIGHED = """
import ctypes, sys
import llama_cpp
import numpy as np
from gguf import GGUFReader

read = {t.name: np.array(t.data, "f4").ravel() for t in GGUFReader(sys.argv[4]).tensors}
names = [name.removesuffix(".in_sum2") for name in read if name.endswith(".in_sum2")]
means = [read[name + ".in_sum2"] / read[name + ".counts"] for name in names]
entries = (llama_cpp.llama_model_imatrix_data * (len(names) + 1))()
for entry, name, mean in zip(entries, names, means):
    entry.name, entry.size = name.encode(), mean.size
    entry.data = mean.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
params = llama_cpp.llama_model_quantize_default_params()
params.ftype, params.nthread = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{sys.argv[3]}"), 1
params.imatrix = ctypes.cast(entries, type(params.imatrix))
sys.exit(
    llama_cpp.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), ctypes.byref(params))
)
"""


def caller(**needed: str) -> Callable[..., str]:
    """Runner of a program in the other environment, which returns what it prints.

    Without one the test is skipped; the message says how to make it.
    """
    folder = os.environ.get(VARIABLE, "")
    python = Path(folder).absolute() / "bin" / "python"
    packages = " ".join(f"{name}=={release}" for name, release in needed.items())
    how = f"python3 -m venv ENV; ENV/bin/pip install {packages} numpy"
    if not folder:
        pytest.skip(f"{VARIABLE} does not name an environment with {packages}; make one: {how}")
    ask = (
        "from importlib.metadata import version; "
        f"print({{name: version(name) for name in {list(needed)}}})"
    )
    found = (
        subprocess.run([str(python), "-c", ask], capture_output=True, text=True, check=False)
        if python.exists()
        else None
    )
    if found is None or found.stdout.strip() != str(needed):
        pytest.skip(f"{VARIABLE}={folder} does not hold {packages}: {how}")

    def run(program: str, *arguments: object) -> str:
        line = [str(python), "-c", program, *map(str, arguments)]
        result = subprocess.run(line, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr[-3000:]
        return result.stdout

    return run


@pytest.fixture(scope="module")
def read() -> Callable[..., str]:
    return caller(gguf="0.19.0")


@pytest.fixture(scope="module")
def call() -> Callable[..., str]:
    return caller(llama_cpp_python="0.3.36")


def export(source: Path, output: Path, dtype: str) -> Path:
    gguf_export.run(
        ExportJob(source=source, output=output, options=Export(format="gguf", dtype=dtype)),
        ProgressLine(quiet=True),
    )
    return output / f"model-{dtype}.gguf"


@pytest.fixture(scope="module")
def ids() -> list[int]:
    """Tokens of a text that the model was trained on the like of."""
    text = (MODEL / "train.py").read_text()
    return AutoTokenizer.from_pretrained(MODEL)(text)["input_ids"][:256]


def logits_of(model: Path, ids: list[int]) -> np.ndarray:
    with torch.no_grad():
        found = (
            AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
            .eval()(torch.tensor([ids]))
            .logits
        )
    return found[0].numpy()


def run(
    call: Callable[..., str], file: Path, ids: list[int], texts=()
) -> tuple[np.ndarray, list[list[int]]]:
    output = file.with_suffix(".npy")
    tokens = json.loads(
        call(RUN, file, json.dumps(list(texts)), json.dumps(ids), output).splitlines()[-1]
    )
    return np.load(output), tokens


def divergence(reference: np.ndarray, found: np.ndarray) -> float:
    """The mean KL divergence, in nats per token."""
    p, q = (torch.from_numpy(x).double().log_softmax(-1) for x in (reference, found))
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.proof(
    formats="gguf",
    direction="written",
    programs={"gguf": "gguf"},
    compared="every tensor and field of f16, bf16 and f32",
    environment="LLAMA_CPP_ENV",
)
def test_gguf_py_reads_every_tensor_and_field(read, tmp_path):
    source = load_file(MODEL / "model.safetensors")
    for dtype, matrix in (("f16", torch.float16), ("bf16", torch.bfloat16), ("f32", torch.float32)):
        file = export(MODEL, tmp_path / dtype, dtype)
        fields = json.loads(read(READ, file, tmp_path / "t.npz"))
        assert fields["general.architecture"] == "llama" and fields["GGUF.version"] == 3
        assert fields["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-6, rel=1e-6)
        table = json.loads((MODEL / "tokenizer.json").read_text())["model"]
        assert fields["tokenizer.ggml.tokens"] == sorted(table["vocab"], key=table["vocab"].get)
        assert fields["tokenizer.ggml.merges"] == [" ".join(pair) for pair in table["merges"]]
        found = np.load(tmp_path / "t.npz")
        assert len(found.files) == len(source) == fields["GGUF.tensor_count"]
        down = source["model.layers.2.mlp.down_proj.weight"].to(matrix).float().numpy()
        assert np.array_equal(found["blk.2.ffn_down.weight"], down)
        keys = source["model.layers.3.self_attn.k_proj.weight"].to(matrix).float().numpy()
        # heads, halves, rows of a half, columns
        pairs = keys.reshape(4, 2, 32, 512).swapaxes(1, 2).reshape(256, 512)
        assert np.array_equal(found["blk.3.attn_k.weight"], pairs)
        assert np.array_equal(
            found["output_norm.weight"], source["model.norm.weight"].float().numpy()
        )


# llama.cpp rounds what enters a product to the dtype of the weights, transformers here does not:
# float32 differs by the order of sums alone, the others by up to 2^-11 and 2^-8 of each input.
# Measured of logits up to 17: 2.7e-5, 5.6e-3 and 5.6e-2; 2e-12, 2e-7 and 1.4e-5 nats. The limits
# are some times that, for another machine adds up in another order.
@pytest.mark.proof(
    formats="gguf",
    direction="written",
    programs={"llama.cpp in llama-cpp-python": "llama-cpp-python", "gguf": "gguf"},
    compared="logits of a model in f32, f16 and bf16",
    environment="LLAMA_CPP_ENV",
)
@pytest.mark.parametrize(
    ("dtype", "largest", "nats"), [("f32", 2e-4, 1e-10), ("f16", 0.02, 2e-6), ("bf16", 0.2, 1e-4)]
)
def test_llama_cpp_computes_the_logits_of_transformers(call, tmp_path, ids, dtype, largest, nats):
    expected = logits_of(MODEL, ids)
    found, _ = run(call, export(MODEL, tmp_path / "o", dtype), ids)
    error, apart = float(np.abs(found - expected).max()), divergence(expected, found)
    print(
        f"{dtype}: largest difference {error:.2e} of logits up to {np.abs(expected).max():.1f}, "
        f"{apart:.2e} nats"
    )
    assert error < largest and apart < nats


@pytest.mark.proof(
    formats="gguf",
    direction="written",
    programs={"llama.cpp in llama-cpp-python": "llama-cpp-python", "gguf": "gguf"},
    compared="logits of each family in f32",
    environment="LLAMA_CPP_ENV",
)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gpt_neox"])
def test_llama_cpp_computes_every_family(call, tmp_path, family_model, family):
    model, ids = family_model(family), [0, *range(2, 300, 5)]
    expected = logits_of(model, ids)
    found, _ = run(call, export(model, tmp_path / "o", "f32"), ids)
    error = float(np.abs(found - expected).max() / np.abs(expected).max())
    print(f"{family}: largest difference {error:.2e} of the largest logit")
    # llama.cpp's GELU is a table of float16
    assert error < (2e-3 if family == "gpt_neox" else 1e-5)


# Measured are 9e-7 to 1.9e-6: sums in another order.
@pytest.mark.proof(
    formats="gguf",
    direction="written",
    programs={"llama.cpp in llama-cpp-python": "llama-cpp-python", "gguf": "gguf"},
    compared="logits of each family of mixtures in f32",
    environment="LLAMA_CPP_ENV",
)
@pytest.mark.parametrize("family", MIXTURES)
def test_llama_cpp_computes_every_mixture(call, tmp_path, family):
    model, ids = write_mixture(tmp_path / "m", family), [0, *range(2, 300, 5)]
    expected = logits_of(model, ids)
    found, _ = run(call, export(model, tmp_path / "o", "f32"), ids)
    error = float(np.abs(found - expected).max() / np.abs(expected).max())
    print(f"{family}: largest difference {error:.2e} of the largest logit")
    assert error < 1e-5


@pytest.mark.proof(
    formats="gguf",
    direction="written",
    programs={"llama.cpp in llama-cpp-python": "llama-cpp-python", "gguf": "gguf"},
    compared="logits of a published gpt-oss, its MXFP4 experts as they are",
    environment="LLAMA_CPP_ENV",
)
def test_llama_cpp_runs_the_experts_of_a_published_gpt_oss_as_they_are(call, tmp_path):
    """llama.cpp rounds what enters an expert to 8 bits, which is what is left."""
    model, ids = write_mixture(tmp_path / "m", "gpt_oss"), [0, *range(2, 300, 5)]
    publish_mxfp4(model)
    with torch.no_grad():
        words = Mxfp4Config(dequantize=True)
        theirs = AutoModelForCausalLM.from_pretrained(
            model, quantization_config=words, dtype=torch.float32
        )
        expected = theirs.eval()(torch.tensor([ids])).logits[0].numpy()
    dense, _ = run(call, export(model, tmp_path / "f", "f32"), ids)
    error = float(np.abs(dense - expected).max() / np.abs(expected).max())
    gguf_export.run(
        ExportJob(source=model, output=tmp_path / "o", options=Export(format="gguf")),
        ProgressLine(quiet=True),
    )
    blocks, _ = run(call, tmp_path / "o" / "model-mxfp4.gguf", ids)
    apart = divergence(expected, blocks)
    print(f"published gpt-oss: float32 {error:.2e} of the largest logit, blocks {apart:.2e} nats")
    assert error < 1e-5 and apart < 1e-3


def test_llama_cpp_computes_what_the_runtime_computes_with_an_artifact(call, tmp_path, ids):
    for line in (
        ("quantize", "--no-export", MODEL, "-o", tmp_path / "q", "--scheme", "W8A16"),
        ("export", tmp_path / "q", "-o", tmp_path / "a"),
    ):
        assert exit_code(cli, [str(argument) for argument in line]) == 0
    runtime = load(tmp_path / "a", backend="reference", exact=True)
    with torch.no_grad():
        expected = runtime.model(torch.tensor([ids])).logits[0].numpy()
    found, _ = run(call, export(tmp_path / "a", tmp_path / "o", "f32"), ids)
    error, plain = (
        float(np.abs(logits - expected).max()) for logits in (found, logits_of(MODEL, ids))
    )
    print(f"W8A16: largest difference {error:.2e}, {plain:.2e} to the model")
    assert error < 2e-4 < 0.05 < plain


@pytest.mark.parametrize("kind", ["llama3", "linear"])
def test_llama_cpp_scales_rotations_as_transformers_does(call, tmp_path, llama, kind):
    model = Path(shutil.copytree(llama, tmp_path / "model"))
    config = json.loads((model / "config.json").read_text())
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    if kind == "llama3":
        rope |= {
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    (model / "config.json").write_text(json.dumps({**config, "rope_parameters": rope}))
    ids = [0, *range(2, 300, 3)]
    expected, plain = logits_of(model, ids), logits_of(llama, ids)
    found, _ = run(call, export(model, tmp_path / "o", "f32"), ids)
    scale = np.abs(expected).max()
    assert (
        np.abs(found - expected).max() / scale
        < 1e-5
        < 1e-2
        < np.abs(plain - expected).max() / scale
    )


def test_llama_cpps_tokens_are_transformers(call, tmp_path, ids):
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    _, tokens = run(call, export(MODEL, tmp_path / "o", "f16"), ids, TEXTS)
    # transformers takes `<s>` in a text for the token, llama.cpp when asked to (special=True); here
    # it is text to both.
    expected = [tokenizer(text, split_special_tokens=True)["input_ids"] for text in TEXTS]
    assert tokens == expected


@pytest.mark.parametrize("name", PRE_TOKENIZERS.values())
def test_every_way_to_split_a_text_gives_transformers_tokens(call, tmp_path, llama, name):
    (steps, own, whole) = next(key for key, found in PRE_TOKENIZERS.items() if found == name)
    tokenizer = Tokenizer(models.BPE(ignore_merges=whole))
    before = [
        pre_tokenizers.Digits(individual_digits=True)
        if "digit" in step
        else pre_tokenizers.Split(Regex(step), "isolated")
        for step in steps
    ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*before, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=own)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        [text * 3 for text in TEXTS[:3]] + ["12 123 1234  \n\n x"] * 4, trainer
    )
    model = Path(shutil.copytree(llama, tmp_path / "model"))
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    made.save_pretrained(model)
    texts = [text for text in TEXTS if "<s>" not in text]
    _, tokens = run(call, export(model, tmp_path / "o", "f16"), [0, 5], texts)
    assert tokens == [AutoTokenizer.from_pretrained(model)(text)["input_ids"] for text in texts]


def sentence_pieces() -> Tokenizer:
    """A tokenizer in the form of the conversion from SentencePiece.

    Its merges are every way to make a token of two, by token.
    """
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(vocab_size=60, show_progress=False)
    trained.train_from_iterator([TEXTS[0], "is it a value, is it a scale, isn't it " * 4], trainer)
    learnt = sorted(trained.get_vocab(), key=trained.get_vocab().get)
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256)), *learnt]
    merges = [
        (text[:cut], text[cut:])
        for text in learnt
        for cut in range(1, len(text))
        if text[:cut] in learnt and text[cut:] in learnt
    ]
    vocab = {text: index for index, text in enumerate(texts)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def test_sentence_pieces_give_transformers_tokens(call, tmp_path, llama):
    model = Path(shutil.copytree(llama, tmp_path / "model"))
    special = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=sentence_pieces(), **special).save_pretrained(model)
    texts = [text for text in TEXTS if "<s>" not in text]
    _, tokens = run(call, export(model, tmp_path / "o", "f16"), [0, 5], texts)
    assert tokens == [AutoTokenizer.from_pretrained(model)(text)["input_ids"] for text in texts]


def test_llama_cpps_quantizer_takes_the_file(call, tmp_path, ids):
    small = tmp_path / "q4_k_m.gguf"
    call(QUANTIZE, export(MODEL, tmp_path / "o", "f16"), small, "Q4_K_M")
    assert small.stat().st_size < 0.4 * (tmp_path / "o" / "model-f16.gguf").stat().st_size
    found, _ = run(call, small, ids)
    apart = divergence(logits_of(MODEL, ids), found)
    print(f"Q4_K_M: {apart:.2e} nats")
    assert 1e-4 < apart < 0.1


# ggml's own rounding of one matrix, without and with an importance of each column.
ROUND = """
import ctypes, importlib.util, sys
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

kind = GGMLQuantizationType[sys.argv[4]]
elements, nbytes = GGML_QUANT_SIZES[kind]
library = Path(importlib.util.find_spec("llama_cpp").origin).parent / "lib" / "libggml-base.so"
floats = ctypes.POINTER(ctypes.c_float)
round_ = ctypes.CDLL(str(library)).ggml_quantize_chunk
round_.restype = ctypes.c_size_t
round_.argtypes = [
    ctypes.c_int, floats, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64, floats
]
weight, importance = (np.ascontiguousarray(np.load(path)) for path in sys.argv[1:3])
alike = np.ones_like(importance).ctypes.data_as(floats)
# two types need importances
plain = alike if sys.argv[4] in ("IQ2_XS", "IQ2_XXS") else None
found = {}
for name, weights in (("plain", plain), ("weighed", importance.ctypes.data_as(floats))):
    blocks = np.zeros((len(weight), weight.shape[1] // elements * nbytes), dtype=np.uint8)
    size = round_(
        int(kind), weight.ctypes.data_as(floats), blocks.ctypes.data, 0, *weight.shape, weights
    )
    assert size == blocks.nbytes
    found[name] = dequantize(blocks, kind)
np.savez(sys.argv[3], **found)
"""


TRAINED = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize("name", [*(name for name in BLOCK_TYPES if name[0] in "IT")])
@pytest.mark.parametrize("shape", ["gaussian", "uniform", "heavy", "trained"])
def test_our_rounding_to_nearest_loses_less_than_ggmls(call, tmp_path, name, shape):
    generator = np.random.default_rng(5)
    size = (64, 1024)
    draw = {
        "gaussian": lambda: generator.normal(size=size),
        "uniform": lambda: generator.uniform(-1, 1, size=size),
        "heavy": lambda: generator.standard_t(4, size=size),
        "trained": lambda: load_file(MODEL / "model.safetensors")[TRAINED][:64].float().numpy(),
    }[shape]
    weight = (draw() * 0.05).astype(np.float32)
    importance = np.exp(generator.normal(size=size[1])).astype(np.float32)
    np.save(tmp_path / "weight.npy", weight)
    np.save(tmp_path / "importance.npy", importance)
    call(ROUND, *(tmp_path / file for file in ("weight.npy", "importance.npy", "o.npz")), name)
    theirs = np.load(tmp_path / "o.npz")
    for case, matters in (("plain", np.ones_like(importance)), ("weighed", importance)):
        ours = (
            rtn_mse.quantize_group(
                {"w": torch.from_numpy(weight)},
                preset(name),
                statistics={rtn_mse.IMPORTANCE: torch.from_numpy(matters)},
                scale_dtype=DTYPES[BLOCK_TYPES[name].scale_dtype],
            )["w"]
            .weight.dequantize()
            .numpy()
        )
        mine, of_ggml = (
            float((np.square(found - weight) * matters).mean() / np.square(weight).mean())
            for found in (ours, theirs[case])
        )
        print(f"{name}, {shape}, {case}: {mine:.3e}, ggml {of_ggml:.3e}")
        assert mine < of_ggml


TENSORS = """
import json, sys
from gguf import GGUFReader

print(json.dumps({t.name: t.tensor_type.name for t in GGUFReader(sys.argv[1]).tensors}))
"""


# The artifact's logits are those of its file in float32 within the order of sums (2.7e-5). Those of
# the file of blocks are not: there llama.cpp rounds what enters a product to 8 bits, and the
# embedding and the head are in blocks too. Measured is a third of the divergence from the model at
# most.
@pytest.mark.proof(
    formats="gguf",
    direction="written",
    programs={"llama.cpp in llama-cpp-python": "llama-cpp-python", "gguf": "gguf"},
    compared="logits of our rounding in its types: within 2e-4 as float32; in blocks at most "
    "half of what the model is away; "
    "type of every tensor and size as its own quantizer has them",
    environment="LLAMA_CPP_ENV",
)
@pytest.mark.parametrize(
    "scheme", ["Q4_0", "IQ4_NL", "IQ4_XS", "IQ3_S", "IQ3_M", "Q3_K_M", "Q4_K_M", "Q5_K_M"]
)
def test_llama_cpp_runs_our_rounding_in_its_types(call, read, tmp_path, ids, scheme):
    for line in (
        (
            "quantize",
            "--no-export",
            MODEL,
            "-o",
            tmp_path / "q",
            "--scheme",
            scheme,
            "--algorithm",
            "rtn_mse",
        ),
        ("export", tmp_path / "q", "-o", tmp_path / "a"),
        ("export", tmp_path / "a", "-o", tmp_path / "blocks", "--format", "gguf"),
    ):
        assert exit_code(cli, [str(argument) for argument in line]) == 0
    theirs = tmp_path / "theirs.gguf"
    call(QUANTIZE, export(MODEL, tmp_path / "bf16", "bf16"), theirs, scheme)
    error, apart, ours, of_llama_cpp = beside_its_own(call, read, tmp_path, ids, theirs)
    print(
        f"{scheme}: float32 {error:.2e}; blocks {apart:.2e} nats of it, {ours:.2e} of the model, "
        f"its own {of_llama_cpp:.2e}"
    )
    assert error < 2e-4 and apart < ours / 2 and ours < 1.2 * of_llama_cpp


def beside_its_own(
    call: Callable[..., str], read: Callable[..., str], folder: Path, ids: list[int], theirs: Path
) -> tuple[float, float, float, float]:
    """How far our file and llama.cpp's own are away; their tensors have the same types.

    Args:
        call: runner of llama.cpp.
        read: runner of `gguf`.
        folder: holds our artifact, `a`, and its file, in `blocks`.
        ids: tokens.
        theirs: llama.cpp's own file.

    Returns:
        The largest difference of logits of the artifact written in float32; the divergence of our
        file from the artifact, and those of our file and of its own from the model.
    """
    with torch.no_grad():
        expected = (
            load(folder / "a", backend="reference", exact=True)
            .model(torch.tensor([ids]))
            .logits[0]
            .numpy()
        )
    (blocks,) = (folder / "blocks").glob("*.gguf")
    assert json.loads(read(TENSORS, blocks)) == json.loads(read(TENSORS, theirs))
    assert abs(blocks.stat().st_size - theirs.stat().st_size) < 4096
    found, _ = run(call, export(folder / "a", folder / "f32", "f32"), ids)
    error = float(np.abs(found - expected).max())
    plain = logits_of(MODEL, ids)
    ours, of_llama_cpp = (divergence(plain, run(call, file, ids)[0]) for file in (blocks, theirs))
    return error, divergence(expected, run(call, blocks, ids)[0]), ours, of_llama_cpp


# What the head and the embedding of the file and inputs rounded to 8 bits add is a tenth of the
# divergence at most. Its own files are nearer to the model where both were compared (IQ2_XS: 0.32
# nats beside 0.40, IQ2_XXS: 0.41 beside 0.57, IQ3_XXS: 0.094 beside 0.108), though their weighed
# squared error is larger: it counts large weights for more than their error.
@pytest.mark.proof(
    formats="gguf",
    direction="written",
    programs={"llama.cpp in llama-cpp-python": "llama-cpp-python", "gguf": "gguf"},
    compared="logits of our rounding by an importance matrix in a type with a codebook: within "
    "2e-4 as float32; in blocks at most half of what the model is away; type of every tensor and "
    "size as its own quantizer has them by the same matrix",
    environment="LLAMA_CPP_ENV",
)
@pytest.mark.parametrize("scheme", ["IQ2_XS", "IQ2_XXS", "IQ3_XXS", "IQ2_M"])
def test_llama_cpp_runs_our_rounding_by_an_importance_matrix(call, read, tmp_path, ids, scheme):
    matrix = tmp_path / "i" / "imatrix.gguf"
    (tmp_path / "c.txt").write_text((MODEL / "stdlib_text.py").read_text())
    text = ("--calibration", tmp_path / "c.txt", "--samples", "4", "--sequence-length", "256")
    form = ("--format", "imatrix", "--model", MODEL)
    for line in (
        ("measure", MODEL, "-o", tmp_path / "m", *text, "--stats", "mean_square"),
        ("export", tmp_path / "m", "-o", tmp_path / "i", *form),
        ("quantize", MODEL, "-o", tmp_path / "a", "--scheme", scheme, "--imatrix", matrix),
        ("export", tmp_path / "a", "-o", tmp_path / "blocks", "--format", "gguf"),
    ):
        assert exit_code(cli, [str(argument) for argument in line]) == 0
    theirs = tmp_path / "theirs.gguf"
    call(QUANTIZE_WEIGHED, export(MODEL, tmp_path / "bf16", "bf16"), theirs, scheme, matrix)
    error, apart, ours, of_llama_cpp = beside_its_own(call, read, tmp_path, ids, theirs)
    print(
        f"{scheme}: float32 {error:.2e}; blocks {apart:.2e} nats of it, {ours:.2e} of the model, "
        f"its own {of_llama_cpp:.2e}"
    )
    assert error < 2e-4 and apart < ours / 2


@pytest.mark.proof(
    formats="gguf",
    direction="written",
    programs={"llama.cpp in llama-cpp-python": "llama-cpp-python", "gguf": "gguf"},
    compared="a Qwen3-MoE in Q4_K_M: type of every tensor and size as its own quantizer has them, "
    "logits closer to the model than its",
    environment="LLAMA_CPP_ENV",
)
def test_a_mixture_in_q4_k_m_has_the_types_of_llama_cpps_quantizer(call, read, tmp_path):
    sizes = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 256}
    model = write_mixture(tmp_path / "m", "qwen3_moe", **sizes, head_dim=64, num_hidden_layers=4)
    words = ("--scheme", "Q4_K_M", "--algorithm", "rtn_mse")
    for line in (
        ("quantize", "--no-export", model, "-o", tmp_path / "q", *words),
        ("export", tmp_path / "q", "-o", tmp_path / "a"),
        ("export", tmp_path / "a", "-o", tmp_path / "blocks", "--format", "gguf"),
    ):
        assert exit_code(cli, [str(argument) for argument in line]) == 0
    (ours,), theirs = (tmp_path / "blocks").glob("*.gguf"), tmp_path / "theirs.gguf"
    call(QUANTIZE, export(model, tmp_path / "bf16", "bf16"), theirs, "Q4_K_M")
    assert json.loads(read(TENSORS, ours)) == json.loads(read(TENSORS, theirs))
    assert abs(ours.stat().st_size - theirs.stat().st_size) < 4096
    ids = [0, *range(2, 300, 5)]
    plain = logits_of(model, ids)
    apart = [divergence(plain, run(call, file, ids)[0]) for file in (ours, theirs)]
    print(f"Q4_K_M of a mixture: {apart[0]:.3g} nats, its own {apart[1]:.3g}")
    assert apart[0] < apart[1]


# kinds of files that llama.cpp's quantizer refuses to make without an importance matrix
WEIGHED_ALONE = ["Q2_K_S", "IQ2_XXS", "IQ2_XS", "IQ2_M", "IQ3_XXS", "IQ3_XS"]

# llama.cpp's quantizer for every kind of file: the type of each matrix, with and without an
# importance of each column.
TYPES_OF_FILES = """
import ctypes, json, sys
from pathlib import Path

import llama_cpp
import numpy as np
from gguf import GGUFReader

source, output = sys.argv[1], sys.argv[2]
matrices = [t for t in GGUFReader(source).tensors if len(t.shape) > 1]
columns = [np.ones(t.shape[0] * (t.shape[2] if len(t.shape) > 2 else 1), "f4") for t in matrices]
entries = (llama_cpp.llama_model_imatrix_data * (len(matrices) + 1))()
for entry, tensor, ones in zip(entries, matrices, columns):
    entry.name, entry.size = tensor.name.encode(), ones.size
    entry.data = ones.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
found = {}
for name in json.loads(sys.argv[3]):
    for weighed in (True, False):
        if name in json.loads(sys.argv[4]) and not weighed:
            continue  # refused without a matrix
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype, params.nthread = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{name}"), 1
        params.imatrix = ctypes.cast(entries, type(params.imatrix)) if weighed else None
        code = llama_cpp.llama_model_quantize(
            source.encode(), output.encode(), ctypes.byref(params)
        )
        assert code == 0
        types = {t.name: t.tensor_type.name for t in GGUFReader(output).tensors}
        found[f"{name} {weighed}"] = types
print(json.dumps(found))
"""
_LLAMA_MODULES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
}
_DENSE_MODULES = {
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_EXPERT_MODULES = {
    "block_sparse_moe.experts.0.w1": "ffn_gate_exps",
    "block_sparse_moe.experts.0.w3": "ffn_up_exps",
    "block_sparse_moe.experts.0.w2": "ffn_down_exps",
}
_NEOX_MODULES = {
    "attention.query_key_value": "attn_qkv",
    "attention.dense": "attn_output",
    "mlp.dense_h_to_4h": "ffn_up",
    "mlp.dense_4h_to_h": "ffn_down",
}


@pytest.mark.parametrize(
    ("family", "layers", "kv_heads", "modules", "mixtures"),
    [
        ("llama", 17, 2, _LLAMA_MODULES | _DENSE_MODULES, [*MIXTURE_NAMES]),
        ("llama", 80, 1, _LLAMA_MODULES | _DENSE_MODULES, ["Q3_K_S", "Q4_K_S"]),
        ("qwen3", 16, 1, _LLAMA_MODULES | _DENSE_MODULES, [*MIXTURE_NAMES]),
        ("gpt_neox", 16, 4, _NEOX_MODULES, [*MIXTURE_NAMES]),
        ("mixtral", 8, 2, _LLAMA_MODULES | _EXPERT_MODULES, [*MIXTURE_NAMES]),
    ],
)
def test_the_types_of_a_mixture_are_those_of_llama_cpps_quantizer(
    call, tmp_path, family, layers, kv_heads, modules, mixtures
):
    experts = 8 if family == "mixtral" else 0
    config = CONFIG_MAPPING[family](
        vocab_size=320,
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=64,
        num_local_experts=experts,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "m")
    write_tokenizer(tmp_path / "m")
    source = export(tmp_path / "m", tmp_path / "o", "bf16")
    theirs = json.loads(
        call(
            TYPES_OF_FILES,
            source,
            tmp_path / "theirs.gguf",
            json.dumps(mixtures),
            json.dumps(WEIGHED_ALONE),
        )
    )
    assert len(theirs) == 2 * len(mixtures) - len({*WEIGHED_ALONE} & {*mixtures})
    for case, types in theirs.items():
        mixture, weighed = case.split()
        for layer in range(layers):
            position = Position(
                layer=layer,
                layers=layers,
                repeats=4 // kv_heads,
                experts=experts,
                weighed=weighed == "True",
            )
            for module, name in modules.items():
                ours = type_of(mixture, module, family=family, position=position)
                assert ours == types[f"blk.{layer}.{name}.weight"], (case, layer, name)


IMPORTANCE = """
import json, sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
import numpy as np
from accuracy_llamacpp import importance

np.savez(sys.argv[4], **importance(Path(sys.argv[2]), json.loads(sys.argv[3])))
"""


def test_the_importance_matrix_of_the_benchmark_is_the_mean_square_of_what_each_linear_reads(
    call, tmp_path, ids
):
    """Of two sequences, which begin anew.

    llama.cpp rounds what enters a product to bfloat16, and the model's inputs follow.
    """
    rows, squares, counts = [ids[:100], ids[100:180]], {}, {}
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()

    def remember(name):
        def hook(_module, arguments):
            x = arguments[0].double().flatten(0, -2)
            squares[name] = squares.get(name, 0) + x.square().sum(0)
            counts[name] = counts.get(name, 0) + len(x)

        return hook

    parts = {
        "attn_q": "self_attn.q_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_down": "mlp.down_proj",
    }
    for layer in range(4):
        for there, here in parts.items():
            model.get_submodule(f"model.layers.{layer}.{here}").register_forward_pre_hook(
                remember(f"blk.{layer}.{there}.weight")
            )
    with torch.no_grad():
        for row in rows:
            model(torch.tensor([row]))
    scripts = Path(__file__).parents[2] / "benchmarks" / "peers"
    call(
        IMPORTANCE,
        scripts,
        export(MODEL, tmp_path / "o", "bf16"),
        json.dumps(rows),
        tmp_path / "i.npz",
    )
    found = np.load(tmp_path / "i.npz")
    assert len(found.files) == 4 * 7, "every linear of four layers"
    for name, total in squares.items():
        expected = (total / counts[name]).numpy()
        error = np.abs(found[name] - expected).sum() / expected.sum()
        assert counts[name] == 180 and found[name].shape == expected.shape and error < 0.01
