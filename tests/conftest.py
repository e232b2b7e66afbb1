"""Small models with a real tokenizer and text, and ranks as threads.

They are made once per session, under pytest's own folders.

Results of torch depend on the number of threads, so every test has one, with make as without; so
have the processes that tests start.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import importlib.util
import io
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from quantflow.exporting import proof
from quantflow.measuring.job import MeasureJob
from quantflow.planning.recipe import Measure
from quantflow.quantizing.job import QuantizeJob

if TYPE_CHECKING:
    from quantflow.planning.recipe import Quantize

torch.set_num_threads(1)  # where something imported it earlier

# How long a case takes says how busy the machine is, nothing of the code.
settings.register_profile(
    "untimed", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("untimed")

VOCABULARY = 320


def pytest_configure(config: pytest.Config) -> None:
    """Add the hooks that record what other programs confirmed (proof_records.py)."""
    spec = importlib.util.spec_from_file_location(
        "proof_records", Path(__file__).with_name("proof_records.py")
    )
    assert spec is not None and spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    config.pluginmanager.register(hooks, "proof_records")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print a failure when it happens: a run that is stopped at a limit has no summary."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\n{report.nodeid} ({report.when})\n{report.longreprtext[-4000:]}", flush=True)


WRAPPED = ("kimi_k25", "mllama")  # language models beside what reads images
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
GROUPED = {**SHAPE, "num_key_value_heads": 2}
EXPERTS = 4
MIXED = {**GROUPED, "num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**GROUPED),
    "mistral": lambda: MistralConfig(**GROUPED),
    "qwen2": lambda: Qwen2Config(**GROUPED),
    "qwen3": lambda: Qwen3Config(**GROUPED, head_dim=16),
    "gpt_neox": lambda: GPTNeoXConfig(**SHAPE),
    "mixtral": lambda: MixtralConfig(**GROUPED, num_local_experts=EXPERTS, num_experts_per_tok=2),
    "qwen2_moe": lambda: Qwen2MoeConfig(**MIXED, shared_expert_intermediate_size=160),
    "qwen3_moe": lambda: Qwen3MoeConfig(**MIXED, head_dim=16, norm_topk_prob=True),
    "olmoe": lambda: OlmoeConfig(
        **GROUPED, num_experts=EXPERTS, num_experts_per_tok=2, pad_token_id=1
    ),
}
GPT = {
    "vocab_size": VOCABULARY,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_inner": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
FALCON = {key: value for key, value in SHAPE.items() if key != "intermediate_size"} | {
    "ffn_hidden_size": 128
}
GEMMA = {**GROUPED, "head_dim": 16, "pad_token_id": 1}
LATENT = {
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
SPARSE_ATTENTION = {
    "indexer_types": ["full", "shared"],
    "index_topk": 8,
    "index_n_heads": 2,
    "index_head_dim": 16,
}
OF_DEEPSEEK = {
    "num_key_value_heads": 4,
    "n_routed_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
}
READS_IMAGES = {**GROUPED, "num_hidden_layers": 3, "cross_attention_layers": [1], "pad_token_id": 1}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_global_layers": 1,
    "attention_heads": 2,
}
VISION |= {
    "image_size": 28,
    "patch_size": 14,
    "vision_output_dim": 64,
    "intermediate_layers_indices": [0],
}
DISCOVERED: dict[str, Callable[[], PreTrainedConfig]] = {  # in no table of quantflow
    "bloom": lambda: CONFIG_MAPPING["bloom"](
        vocab_size=VOCABULARY,
        hidden_size=64,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    ),
    "codegen": lambda: CONFIG_MAPPING["codegen"](**GPT, rotary_dim=8),
    "cohere": lambda: CONFIG_MAPPING["cohere"](**GROUPED, pad_token_id=1),
    "falcon": lambda: CONFIG_MAPPING["falcon"](**FALCON),
    "falcon new": lambda: CONFIG_MAPPING["falcon"](
        **FALCON, new_decoder_architecture=True, num_kv_heads=2
    ),
    "falcon alibi": lambda: CONFIG_MAPPING["falcon"](
        **FALCON, alibi=True, parallel_attn=False, multi_query=False, bias=True
    ),
    "gemma": lambda: CONFIG_MAPPING["gemma"](**GEMMA),
    "gemma2": lambda: CONFIG_MAPPING["gemma2"](**GEMMA, sliding_window=16),
    "gemma3": lambda: CONFIG_MAPPING["gemma3_text"](**GEMMA, sliding_window=16),
    "glm_moe_dsa": lambda: CONFIG_MAPPING["glm_moe_dsa"](
        **{**SHAPE, **SPARSE_ATTENTION, **LATENT, **OF_DEEPSEEK}
    ),
    "gpt_bigcode": lambda: CONFIG_MAPPING["gpt_bigcode"](**GPT, n_positions=128),
    "gptj": lambda: CONFIG_MAPPING["gptj"](**GPT, rotary_dim=8),
    "granite": lambda: CONFIG_MAPPING["granite"](
        **GROUPED, residual_multiplier=0.5, embedding_multiplier=2.0
    ),
    "kimi_k25": lambda: CONFIG_MAPPING["kimi_k25"](
        text_config={
            **SHAPE,
            **LATENT,
            **OF_DEEPSEEK,
            "model_type": "deepseek_v3",
            "n_group": 1,
            "topk_group": 1,
        },
        vision_config={
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "intermediate_size": 64,
        },
    ),
    "mllama": lambda: CONFIG_MAPPING["mllama"](text_config=READS_IMAGES, vision_config=VISION),
    "mpt": lambda: CONFIG_MAPPING["mpt"](
        vocab_size=VOCABULARY, d_model=64, n_layers=2, n_heads=4, bos_token_id=0, eos_token_id=1
    ),
    "olmo2": lambda: CONFIG_MAPPING["olmo2"](**GROUPED, pad_token_id=1),
    "opt": lambda: CONFIG_MAPPING["opt"](
        **SHAPE, ffn_dim=128, word_embed_proj_dim=64, pad_token_id=1
    ),
    "phi": lambda: CONFIG_MAPPING["phi"](**GROUPED),
    "phi3": lambda: CONFIG_MAPPING["phi3"](**GROUPED, pad_token_id=1),
    "smollm3": lambda: CONFIG_MAPPING["smollm3"](**GROUPED, pad_token_id=1, no_rope_layers=[1, 0]),
    "stablelm": lambda: CONFIG_MAPPING["stablelm"](**GROUPED),
    "starcoder2": lambda: CONFIG_MAPPING["starcoder2"](**GROUPED),
}


def sentences(count: int, seed: int) -> list[str]:
    """Return made-up documents of a few dozen words."""
    generator = torch.Generator().manual_seed(seed)
    words = [
        "value",
        "scale",
        "round",
        "group",
        "layer",
        "token",
        "model",
        "range",
        "shift",
        "pack",
        "zero",
        "point",
    ]
    picks = torch.randint(len(words), (count, 60), generator=generator).tolist()
    return [" ".join(words[i] for i in row) + "." for row in picks]


def write_tokenizer(folder: Path) -> None:
    """Write a byte-level BPE with a BOS into a folder."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences(40, seed=5), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)


def write_model(
    folder: Path, family: str = "llama", *, seed: int = 0, dtype: torch.dtype = torch.bfloat16
) -> Path:
    """Write a random model of a family with its tokenizer.

    Its weights are large enough that layers matter.
    """
    torch.manual_seed(seed)
    config = {**FAMILIES, **DISCOVERED}[family]()
    config.initializer_range = 0.1
    kind = AutoModelForImageTextToText if family in WRAPPED else AutoModelForCausalLM
    model = kind.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.1)
    model.to(dtype).save_pretrained(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def text_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Calibration and held-out text as .jsonl."""
    folder = tmp_path_factory.mktemp("text")
    paths = {}
    for name, count, seed in (("calibration", 12, 1), ("heldout", 40, 2)):
        paths[name] = folder / f"{name}.jsonl"
        paths[name].write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in sentences(count, seed))
        )
    return paths


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in bf16; tests copy it before they change it."""
    return write_model(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="session")
def qwen3_vl_mixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, Path]]:
    """A tiny Qwen3-VL mixture, and its two folders.

    One has experts as the model has them, the other as it was released, axes exchanged.
    """
    sizes = {
        "vocab_size": 96,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    sizes |= {
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 96,
        "pad_token_id": 1,
    }
    rotated = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 64,
        "out_hidden_size": 64,
    }
    config = CONFIG_MAPPING["qwen3_vl_moe"](
        text_config={**sizes, "rope_parameters": rotated},
        vision_config={**vision, "deepstack_visual_indexes": [0]},
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    folders = {name: tmp_path_factory.mktemp("qwen3_vl") / name for name in ("model", "released")}
    for folder in folders.values():
        model.save_pretrained(folder)
    tensors = load_file(folders["model"] / "model.safetensors")
    other = {
        name: tensor.mT.contiguous() if ".experts." in name else tensor
        for name, tensor in tensors.items()
    }
    save_file(other, folders["released"] / "model.safetensors", metadata={"format": "pt"})
    return model, folders


@pytest.fixture(scope="session")
def write_adapter() -> Callable[..., dict[str, torch.Tensor]]:
    """Writer of a random LoRA adapter as PEFT does.

    It returns alpha / r * B A of each linear.
    """

    def write(
        folder: Path, shapes: dict[str, tuple[int, int]], *, seed: int, rank: int = 4
    ) -> dict[str, torch.Tensor]:
        draw, alpha = torch.Generator().manual_seed(seed), 12
        tensors, deltas = {}, {}
        for name, (rows, columns) in shapes.items():
            down = torch.randn(rank, columns, generator=draw) * columns**-0.5
            up = torch.randn(rows, rank, generator=draw) * 0.1
            tensors |= {
                f"base_model.model.{name}.lora_A.weight": down,
                f"base_model.model.{name}.lora_B.weight": up,
            }
            deltas[name] = alpha / rank * (up @ down)
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(
            json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": alpha})
        )
        return deltas

    return write


@pytest.fixture(scope="session")
def family_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a tiny model of a family, made on first use."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            made[family] = write_model(tmp_path_factory.mktemp("models") / family, family)
        return made[family]

    return make


class Meeting:
    """A `Communicator` between threads, which counts what goes over it.

    `table` holds every rank's part and a barrier.
    """

    def __init__(self, rank: int, world: int, table: dict[str, Any]) -> None:
        self.rank, self.world, self.parts, self._table = rank, world, 0, table

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        assert part.is_contiguous()
        self.parts += 1
        self._table["parts"][self.rank] = part.clone()
        self._table["all"].wait(300)
        found = torch.stack(self._table["parts"])
        self._table["all"].wait(300)
        return found

    def broadcast(self, numbers: torch.Tensor) -> None:
        numbers.copy_(self.gather(numbers)[0])


def meet(world: int, work: Callable[[Meeting], Any]) -> list[Any]:
    """The results of `work` for each rank's wire.

    A rank's error breaks the others' waiting, and is raised.
    """
    table = {"parts": [None] * world, "all": threading.Barrier(world)}

    def rank(number: int) -> Any:
        torch.set_num_threads(1)
        try:
            return work(Meeting(number, world, table))
        except BaseException:
            table["all"].abort()
            raise

    with ThreadPoolExecutor(world) as pool:
        futures = [pool.submit(rank, number) for number in range(world)]
    for error in (future.exception() for future in futures):
        if error is not None and not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [future.result() for future in futures]


@pytest.fixture(scope="session")
def among() -> Callable[[int, Callable[[Meeting], Any]], list[Any]]:
    """Run ranks as threads that meet; see `meet`."""
    return meet


@pytest.fixture(scope="session")
def meeting() -> Callable[[int, int], Meeting]:
    """Return the wire of one rank of a world whose others never come."""
    return lambda rank, world: Meeting(rank, world, {})


class ProofServer:
    """Forks a fresh process for each proof; see proof_server.py, which is started for the first."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None

    def ask(self, order: str) -> tuple[int, str, str]:
        """Return the exit code, stdout and stderr of the process that was given `order`."""
        if self.process is None:
            command = [sys.executable, "-P", str(Path(__file__).with_name("proof_server.py"))]
            paths = [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd="/",
                env=environment,
            )
        assert self.process.stdin is not None and self.process.stdout is not None
        request = {"order": order, "environment": dict(os.environ), "folder": str(Path.cwd())}
        print(json.dumps(request), file=self.process.stdin, flush=True)
        answer = json.loads(self.process.stdout.readline())
        return answer["code"], answer["stdout"], answer["stderr"]

    def close(self) -> None:
        if self.process is not None:
            self.process.communicate()


@pytest.fixture(scope="session", autouse=True)
def proof_server() -> Iterator[None]:
    """Let exports of this process be proved by forks of one that has imported everything.

    A start takes seconds.
    """
    server, lock = ProofServer(), threading.Lock()

    class Forked:
        """What `proving` uses of a process."""

        def __init__(self, command: list[str], **_: Any) -> None:
            assert command[1:4] == ["-P", "-m", "quantflow.exporting.proof_process"]
            self.returncode: int | None = None
            self.stdin = io.StringIO()  # takes what proof is expected

        def communicate(self, order: str = "") -> tuple[str, str]:
            with lock:
                self.returncode, *said = server.ask(order) if order else (0, "", "")
            return said[0], said[1]

        def kill(self) -> None:
            self.returncode = -9

    forked = SimpleNamespace(Popen=Forked, PIPE=subprocess.PIPE, DEVNULL=subprocess.DEVNULL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proof, "subprocess", forked)
        yield
    server.close()


@pytest.fixture
def proof_by_a_new_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let exports start the process that they start outside of tests."""
    monkeypatch.setattr(proof, "subprocess", subprocess)


@pytest.fixture(scope="module")
def measured_family(family_model, text_files, tmp_path_factory):
    """Return the measurement of a family, taken once."""
    from quantflow.measuring import measure
    from quantflow.planning.recipe import Calibration
    from quantflow.reporting.progress_line import ProgressLine

    taken = {}

    def take(family: str) -> Path:
        if family not in taken:
            calibration = Calibration(
                source=str(text_files["calibration"]), samples=6, sequence_length=48
            )
            folder = tmp_path_factory.mktemp("measured") / family
            stats = ("amax", "channel_amax", "min_max", "mean_abs")
            job = MeasureJob(
                model=family_model(family),
                output=folder,
                calibration=calibration,
                options=Measure(stats=stats),
            )
            taken[family] = measure.run(job, ProgressLine(quiet=True))
        return taken[family]

    return take


@pytest.fixture
def cards(monkeypatch):
    """Return a function that quantizes as N ranks would, one after the other in this process."""
    from quantflow.quantizing import quantize
    from quantflow.reporting.progress_line import ProgressLine

    def run(
        model: Path,
        output: Path,
        recipe: "Quantize",
        *,
        ranks: int,
        only: tuple[int, ...] | None = None,
        measurement: Path | None = None,
    ) -> Path:
        monkeypatch.setattr(quantize, "die_with_parent", lambda: None)
        job = QuantizeJob(
            model=model, output=output, entry=recipe, ranks=ranks, measurement=measurement
        )
        for rank in range(ranks) if only is None else only:
            monkeypatch.setenv("RANK", str(rank))
            monkeypatch.setenv("WORLD_SIZE", str(ranks))
            quantize.run(job, ProgressLine(quiet=True))
        monkeypatch.delenv("RANK")
        monkeypatch.delenv("WORLD_SIZE")
        return output

    return run


@pytest.fixture(scope="session")
def write_foreign():
    """Writer of a model as another program would have quantized it.

    It rounds plainly, in one of that program's layouts.
    """
    from safetensors.torch import load_file

    from quantflow.algorithms import rtn
    from quantflow.core.qtensor import QuantizedLinear
    from quantflow.core.scheme import LinearScheme
    from quantflow.formats import LAYOUTS, compressed_tensors
    from quantflow.models.load import open_source
    from quantflow.models.open import graph_for

    def write(
        folder: Path, model: Path, layout: str, scheme: LinearScheme, *, ordered: bool = False
    ) -> dict[str, torch.Tensor]:
        """Write the folder and return what its quantized weights are, by name.

        With `ordered` groups are of inputs that do not stand together, of linears that share an
        input the same ones.
        """
        source, config = load_file(model / "model.safetensors"), open_source(model).config
        graph, packed, tensors, weights = graph_for(config), LAYOUTS[layout], {}, {}
        packed = packed.with_order() if ordered else packed
        generator, orders, dtype = (
            torch.Generator().manual_seed(7),
            {},
            compressed_tensors.scale_dtype(scheme, torch.float16),
        )
        chosen = [name for name in graph.linears if f"{name}.weight" in source]
        for name, tensor in source.items():
            linear_name = name.removesuffix(".weight")
            if linear_name not in chosen:
                tensors[name] = tensor
                continue
            kind = (
                linear_name.rpartition(".")[0]
                if "down" not in linear_name and "o_proj" not in linear_name
                else linear_name
            )
            order = (
                orders.setdefault(kind, torch.randperm(tensor.shape[1], generator=generator))
                if ordered
                else None
            )
            weight = tensor.float() if order is None else tensor.float()[:, order]
            made = rtn.quantize_group(
                {linear_name: weight}, scheme, statistics={}, scale_dtype=dtype
            )[linear_name]
            linear = QuantizedLinear(weight=made.weight, scheme=scheme, order=order)
            tensors |= packed.encode(linear_name, linear, scale_dtype=torch.float16)
            split = made.weight.qvalue.float().view(len(weight), made.weight.scale.shape[1], -1)
            zero_point = 0 if made.weight.zero_point is None else made.weight.zero_point[..., None]
            real = ((split - zero_point) * made.weight.scale[..., None]).view(weight.shape)
            weights[name] = real if order is None else real[:, torch.argsort(order)]
        ignore = [name for name in ("lm_head", "embed_out") if f"{name}.weight" in source]
        shutil.copytree(model, folder)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        told = json.loads((folder / "config.json").read_text())
        words = packed.quantization_config(
            dict.fromkeys(chosen, scheme), ignore=ignore, model_type=told["model_type"]
        )
        (folder / "config.json").write_text(json.dumps(told | {"quantization_config": words}))
        return weights

    return write


@pytest.fixture
def run_apart() -> Callable[..., None]:
    """Runner of a file of tests in a process of its own.

    torch cannot forget a kind of device once it was registered.
    """

    def run(tests: str, *words: str) -> None:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            *words,
            Path(__file__).parent / tests,
        ]
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")
        }
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]

    return run
