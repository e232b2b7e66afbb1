"""Options of other programs, a table for each verb: what each becomes here, or why it is refused.

`spelling` has the kinds of rows. An option whose rows differ by verb has one in each table; those
of all verbs are in `EVERYWHERE`.
"""

from quantflow.stages.cli.spelling import (
    MADE,
    MANY,
    MODEL,
    ONE,
    VALUES,
    WEIGHTS,
    Becomes,
    Beside,
    ByValue,
    Instead,
    Items,
    LeftOut,
    Names,
    Spelling,
    Spellings,
    Values,
)


def _value_of(option: str) -> Becomes:
    return Becomes((option,), value=True)


_MODEL = Names(MODEL)
_GRAPHS = LeftOut(
    "on --device hpu every shape is captured, on --device cuda every decode step; on a CPU "
    "nothing is"
)
_CACHE = LeftOut("a decoder allocates its cache once and keeps it, which changes no token")
_TRIM = LeftOut("of a prompt the last token's logits alone are computed")
_ATTENTION = LeftOut("attention reads the cache in blocks where that is faster")
_SHAPES = "prompts are padded on the left, and the cache has the length of the text"
_FAST = LeftOut("the fastest decoder that knows the model is taken")
_CODE = Instead(
    "leave it out: the Python files of a model are not run; convert it with the program that "
    "knows it"
)
_TOKEN = Instead("set HF_TOKEN, so that the token stands in no command line", ONE)
_CONFIG = Instead("leave it out: the model's config.json is read, also of remote families", ONE)
# options that say how many processes share a model
_COUNTED = ("--ranks", "--world-size", "--num-gpus", "--nproc-per-node", "--num-shard")
_RANKED = LeftOut("ranks share the model, and meet in a private folder")
_RANKS = Beside(
    _COUNTED, _RANKED, Instead("give --ranks N, or start it with torchrun", words=("--ranks", "N"))
)
_ADDRESS = LeftOut(_RANKED.why, ONE)
_QUANTIZE = Instead("quantize first, and name that folder here", verb="quantize")
_QUANTIZE_ONE = Instead(_QUANTIZE.remedy, ONE, verb="quantize")
_FOREIGN = Instead(
    "name the other program's folder as ARTIFACT; docs/sources.md has those that are read", ONE
)
_FOREIGN_FLAG = Instead(_FOREIGN.remedy)
_BATCH = Instead(
    "leave it out: with one scale for several tokens each would depend on those beside it; "
    "PER_BATCH_IC_BLOCK and PER_BATCH have one for each token"
)
_INPUTS = ByValue(  # how inputs are rounded at run time; a batch is the rows of one product
    {
        "PER_BATCH_IC_BLOCK": LeftOut("W4A16's inputs are rounded so, where --exact is not given"),
        "PER_BATCH": Instead(
            "leave it out: scheme W4A8 rounds each token's inputs by one scale",
        ),
        "PER_TENSOR": _BATCH,
        "PER_IC_BLOCK": _BATCH,
    }
)
_QUANT_CONFIG = _value_of("--quant-config")
_BOOK = Instead("give a text: --prompts book.txt", words=("--prompts", "book.txt"))
_GREEDY = Becomes(("--temperature", "0"))
_SAMPLE = Becomes(("--temperature", "1"))
_BFLOAT16, _FLOAT16 = Becomes(("--dtype", "bfloat16")), Becomes(("--dtype", "float16"))
_FLOAT32 = Becomes(("--dtype", "float32"))
_LOWP = ByValue(  # what linears compute in where the scheme leaves inputs alone
    {
        # inputs are rounded to 8 bits where export measured that it costs next to nothing
        "AUTO": (),
        "INT8": (),
        "BF16": ("--dtype", "bfloat16", "--exact"),
        "FP16": ("--dtype", "float16", "--exact"),
        "FP32": ("--dtype", "float32", "--exact"),
    }
)

EVERYWHERE: Spellings = {
    "--model-name-or-path": _MODEL,
    "--model-revision": _value_of("--revision"),
    "--bf16": _BFLOAT16,
    "-dt": _value_of("--dtype"),
    "--use-kv-cache": _CACHE,
    "--reuse-cache": _CACHE,
    "--use-cache": _CACHE,
    "--use-hpu-graphs": _GRAPHS,
    "--limit-hpu-graphs": _GRAPHS,
    "--clear-hpu-graphs-cache": _GRAPHS,
    "--use-graphs": _GRAPHS,
    "--trim-logits": _TRIM,
    "--attn-softmax-bf16": LeftOut("softmax is computed in float32"),
    "--use-flash-attention": _ATTENTION,
    "--flash-attention-recompute": _ATTENTION,
    "--flash-attention-causal-mask": _ATTENTION,
    "--flash-attention-fast-softmax": _ATTENTION,
    "--bucket-size": LeftOut(_SHAPES, ONE),
    "--bucket-internal": LeftOut(_SHAPES),
    "--reduce-recompile": LeftOut(_SHAPES),
    "--static-shapes": LeftOut(_SHAPES),
    "--ipex": _FAST,
    "--deployment-mode": _FAST,
    "--jit": _FAST,
    "--optimized": _FAST,
    "--verbose-workers": LeftOut("rank 0 speaks for all"),
    "--use-deepspeed": _RANKS,
    "--autotp": _RANKS,
    "--shard-model": LeftOut("each rank reads its slice of the files as they are"),
    "--bind-cores-to-rank": Becomes(("--bind",)),
    "--local-rank": _ADDRESS,
    "--master-port": _ADDRESS,
    "--master-addr": _ADDRESS,
    "--trust-remote-code": _CODE,
    "--token": _TOKEN,
    "--config-file": _CONFIG,
}
# options beside which transformers' modules run, or may
_MODULES = (
    "--decoder",
    "--device",
    "-d",
    "--mode",
    "--vanilla-model",
    "--torch-compile",
    "--static-shapes",
    "--bucket-size",
)
_OF_MODULES = LeftOut(
    "the lean decoder attends in blocks of its own; --decoder transformers has --attention"
)


def _attention(word: str) -> Beside:
    return Beside(_MODULES, Becomes(("--attention", word)), _OF_MODULES)


_RUN = {  # of verbs that run a model
    **EVERYWHERE,
    "--attn-softmax-bf16": _attention("bfloat16-softmax"),
    "--use-flash-attention": _attention("fused"),
    "--flash-attention-recompute": _attention("recompute"),
    "--flash-attention-causal-mask": _attention("causal"),
    "--flash-attention-fast-softmax": _attention("fast-softmax"),
    "--model": _MODEL,
    "-m": _MODEL,
    "--weights": Names(WEIGHTS),
    "--quantized-model-path": Names(MADE),
    "--fp16": _FLOAT16,
    "--world-size": _value_of("--ranks"),
    "--num-gpus": _value_of("--ranks"),
    "--greedy": _GREEDY,
    "--do-sample": _SAMPLE,
    "--dataset-name": _value_of("--prompts"),
    "--input-file": _value_of("--prompts"),
    "--column-name": _value_of("--column"),
    "--book-source": _BOOK,
    "--lowp-mode": _LOWP,
    "--act-quant-mode": _INPUTS,
    "--quantization-file": _QUANTIZE_ONE,
    "-qf": _QUANTIZE_ONE,
    "-d": _value_of("--device"),
    "--mode": ByValue(
        {"OPTIMIZED": (), "VANILLA": ("--decoder", "transformers")},
    ),
    "--vanilla-model": Becomes(("--decoder", "transformers")),
    "--ipex-weight-only-quantization": _QUANTIZE,
    "--ipex-smooth-quant": _QUANTIZE,
    "--gptq": _QUANTIZE,
    "--alpha": _QUANTIZE_ONE,
    "--weight-dtype": _QUANTIZE_ONE,
    "--group-size": _QUANTIZE_ONE,
    # what the 16-bit rest of a quantized model computes in
    "--int8": _FLOAT32,
    "--int8-bf16-mixed": _BFLOAT16,
    "--low-precision-checkpoint": _QUANTIZE_ONE,
    "--load-quantized-model-with-inc": _FOREIGN_FLAG,
    "--load-quantized-model-with-autogptq": _FOREIGN_FLAG,
    "--load-quantized-model-with-autoawq": _FOREIGN_FLAG,
    "--local-quantized-inc-model-path": _FOREIGN,
    "--options": Items(),
    "--help-options": Becomes(("--help",)),
    "--const-serialization-path": Instead(
        "give --pack, which keeps the prepared weights beside the artifact",
        ONE,
        words=("--pack",),
    ),
    "--csp": Instead(
        "give --pack, which keeps the prepared weights beside the artifact",
        ONE,
        words=("--pack",),
    ),
    "--show-graphs-count": Instead("leave it out: graphs are not counted"),
}
_BENCH = Instead("bench has it", ONE, verb="bench")
_BENCH_FLAG = Instead(_BENCH.remedy, verb="bench")
GENERATE: Spellings = {
    **_RUN,
    "--input-tokens": _value_of("--column"),
    "--dataset-max-samples": _value_of("--limit"),
    "--reference-file": _value_of("--reference"),
    "--peft-model": _value_of("--adapter"),
    "--use-chat-template": Becomes(("--chat",)),
    "--no-ignore-eos": LeftOut("texts end with end tokens unless --ignore-eos"),
    "--simulate-dyn-prompt": Instead("bench has it as --input-tokens", MANY, verb="bench"),
    "--n-iterations": _BENCH,
    "--warmup": _BENCH,
    "--num-iter": _BENCH,
    "--num-warmup": _BENCH,
    "--benchmark": _BENCH_FLAG,
    "--token-latency": Instead(
        "give --json, whose `timing` has it, or use `quantflow bench ARTIFACT`", words=("--json",)
    ),
    "--profile": _BENCH_FLAG,
    "--profiling-steps": _BENCH,
    "--profiling-warmup-steps": _BENCH,
    "--profiling-record-shapes": _BENCH_FLAG,
    "--profile-tokens": _BENCH,
    "-pt": _BENCH,
    "--output-dir": Instead(
        "give --output FILE for the texts, or --json; bench has --results-dir", ONE
    ),
    "--output-file": _value_of("--output"),
    "--max-iterations": _value_of("--max-new-tokens"),
    "-bs": _value_of("--batch-size"),
    "-ml": _value_of("--max-length"),
    "-l": _value_of("--limit"),
    "-r": _value_of("--repeat"),
    "--save-quantized-model-with-inc": Instead(
        "use `quantflow export MEASUREMENT -o DIR --format inc`"
    ),
}
_TEXT = Instead("leave it out: bench draws with --temperature, --top-k and --top-p alone", ONE)
BENCH: Spellings = {
    **_RUN,
    "--tokenizer-name": _MODEL,
    "-t": _MODEL,
    "--n-iterations": _value_of("--runs"),
    "--num-iter": _value_of("--runs"),
    "-r": _value_of("--runs"),
    "--warmup": _value_of("--warmups"),
    "--num-warmup": _value_of("--warmups"),
    "-w": _value_of("--warmups"),
    "--sequence-length": _value_of("--input-tokens"),
    "-s": _value_of("--input-tokens"),
    "--max-input-tokens": ByValue(
        {"0": LeftOut("prompts are whole"), "-1": LeftOut("prompts are whole")},
        otherwise=_value_of("--input-tokens"),
    ),
    "--simulate-dyn-prompt": _value_of("--input-tokens"),
    "--output-dir": _value_of("--results-dir"),
    "--profiling-steps": _value_of("--profile-tokens"),
    "--profiling-warmup-steps": _value_of("--profile-skip"),
    "--profiling-record-shapes": Becomes(("--profile-shapes",)),
    "-pt": _value_of("--profile-tokens"),
    "--decode-length": _value_of("--new-tokens"),
    "--max-new-tokens": _value_of("--new-tokens"),
    "--benchmark": LeftOut("bench is the benchmark"),
    "--token-latency": LeftOut("first and next tokens are timed apart"),
    "-bs": _value_of("--batch-size"),
    "--num-return-sequences": ByValue({"1": ()}, otherwise=_TEXT),
    "--repetition-penalty": _TEXT,
    "--frequency-penalty": _TEXT,
    "--typical-p": _TEXT,
    "--top-n-tokens": _TEXT,
    "--watermark": Instead(_TEXT.remedy),
    "--peft-model": Instead("generate has it, and its --json the timing", ONE, verb="generate"),
    "--disk-offload": Instead("generate has it, and its --json the timing", verb="generate"),
}
# of a quantized model the folder says it
VALIDATE_VALUES: Values = {"--dtype": {**VALUES["--dtype"], "int8": None}}
_NO_TEXT = "tasks say how questions are asked and answered"
_BATCHED = "questions are batched by length and memory, which changes no score"
VALIDATE: Spellings = {
    **EVERYWHERE,
    "--model": _MODEL,
    "-m": _MODEL,
    "--quantized-model-path": Names(MADE),
    "--fp16": Instead("give --dtype float32 or bfloat16", words=("--dtype", "float32")),
    "--world-size": _value_of("--ranks"),
    "--num-gpus": _value_of("--ranks"),
    "--bind-cores-to-rank": LeftOut("ranks share the cores of this process"),
    "--limit-iters": _value_of("--limit"),
    "--num-fewshot": _value_of("--shots"),
    "--output-file": _value_of("--output"),
    "--output-path": _value_of("--output"),
    "--apply-chat-template": Becomes(("--chat-template",)),
    "--buckets": LeftOut(_BATCHED, MANY),
    "--batch-size": LeftOut(_BATCHED, ONE),
    "--max-new-tokens": LeftOut(_NO_TEXT, ONE),
    "--max-input-tokens": LeftOut(_NO_TEXT, ONE),
    "--gen-kwargs": Instead("leave it out: a task's own file says how it is answered", ONE),
    "--accuracy-only": LeftOut("validate times nothing"),
    "--int8": LeftOut("the artifact's config.json says how it is quantized"),
    "--int8-bf16-mixed": _BFLOAT16,
    "--ipex-weight-only-quantization": _QUANTIZE,
    "--ipex-smooth-quant": _QUANTIZE,
    "--gptq": _QUANTIZE,
    "--lowp-mode": _LOWP,
}
_NOT_HERE = "nothing is generated or timed here; generate and bench do"
_GENERATION: dict[str, Spelling] = {  # options of generation, of verbs that generate nothing
    "--max-new-tokens": LeftOut(_NOT_HERE, ONE),
    "--num-beams": LeftOut(_NOT_HERE, ONE),
    "--do-sample": LeftOut(_NOT_HERE),
    "--greedy": LeftOut(_NOT_HERE),
    "--temperature": LeftOut(_NOT_HERE, ONE),
    "--benchmark": LeftOut(_NOT_HERE),
    "--token-latency": LeftOut(_NOT_HERE),
    "--num-iter": LeftOut(_NOT_HERE, ONE),
    "--num-warmup": LeftOut(_NOT_HERE, ONE),
    "--n-iterations": LeftOut(_NOT_HERE, ONE),
    "--warmup": LeftOut(_NOT_HERE, ONE),
    "--prompt": LeftOut(_NOT_HERE, MANY),
    "--accuracy-only": LeftOut(_NOT_HERE),
    "--tasks": LeftOut("nothing is scored here; `quantflow validate --tasks` does", MANY),
    "--batch-size": LeftOut("one sequence at a time, which changes no statistic", ONE),
    "--output-file": _value_of("--output"),
    "--bind-cores-to-rank": LeftOut("ranks share the cores of this process"),
    "--fp16": Instead("give --dtype float32 or bfloat16", words=("--dtype", "float32")),
}
_CALIBRATION: dict[str, Spelling] = {
    "--max-input-tokens": ByValue(
        {
            "0": LeftOut("sequences have --sequence-length tokens at most"),
            "-1": LeftOut("sequences have --sequence-length tokens at most"),
        },
        otherwise=_value_of("--sequence-length"),
    ),
    "--dataset": _value_of("--calibration"),
    "--dataset-name": _value_of("--calibration"),
    "--calib-iters": _value_of("--samples"),
    "--dataset-max-samples": _value_of("--samples"),
    "--limit-iters": _value_of("--samples"),
    "--column-name": Instead("give --calibration a .jsonl file, whose lines have `text`", ONE),
    "--book-source": Instead("give a text: --calibration book.txt"),
    "--model": _MODEL,
    "-m": _MODEL,
}
MEASURE: Spellings = {
    **EVERYWHERE,
    **_GENERATION,
    **_CALIBRATION,
    # of DeepSpeed's processes each has a slice of every linear
    "--world-size": Becomes(("--ranks", "{}", "--tp", "{}"), value=True),
    "--num-gpus": Becomes(("--ranks", "{}", "--tp", "{}"), value=True),
    "--tasks": Instead("give a text: --calibration FILE; tasks are asked by validate", MANY),
    "--output-dir": _value_of("--output"),
    "--quantization-file": _QUANT_CONFIG,
    "-qf": _QUANT_CONFIG,
}
_ROUNDED = ("--gptq", "--weight-dtype", "--low-precision-checkpoint", "--scheme")
_MIXED = LeftOut("--dtype of generate and bench says what the rest of the model computes in")
QUANTIZE: Spellings = {
    **EVERYWHERE,
    **_GENERATION,
    **_CALIBRATION,
    "--world-size": _value_of("--ranks"),
    "--num-gpus": _value_of("--ranks"),
    "--output-dir": _value_of("--output"),
    "--ipex-weight-only-quantization": Beside(
        _ROUNDED, Becomes(()), Becomes(("--scheme", "W8A16"))
    ),
    "--gptq": Becomes(("--scheme", "W4A16", "--algorithm", "gptq")),
    "--weight-dtype": ByValue(
        {
            "INT8": ("--scheme", "W8A16"),
            "INT4": ("--scheme", "W4A16", "--algorithm", "rtn"),
        }
    ),
    "--ipex-smooth-quant": Becomes(("--scheme", "W8A8_STATIC")),
    "--alpha": _value_of("--smoothquant"),
    "--int8": _MIXED,
    "--int8-bf16-mixed": _MIXED,
    "--lowp-mode": LeftOut(_MIXED.why, ONE),
    "--autotp": LeftOut("ranks share the artifact where it runs: generate and bench --ranks N"),
    "--act-quant-mode": _INPUTS,
    "--quantization-file": _QUANT_CONFIG,
    "-qf": _QUANT_CONFIG,
    "--low-precision-checkpoint": Instead(
        "leave it out: quantize computes it; `quantflow export DIR -o OUT --format ipex` writes "
        "the checkpoint",
        ONE,
        words=("--scheme", "W4A16", "--algorithm", "gptq"),
    ),
    "--quantized-model-path": Instead(
        "leave it out: it is quantized already; `quantflow bench DIR` and `quantflow validate DIR` "
        "take its folder",
        ONE,
    ),
    "--qconfig-summary-file": Instead(
        "give --measurement DIR, which keeps what was measured for every scheme",
        ONE,
        words=("--measurement", "DIR"),
    ),
    "--peft-model": _value_of("--adapter"),
}
EXPORT: Spellings = {
    "-m": _MODEL,
    "--model-name-or-path": _MODEL,
    "--model-revision": _value_of("--revision"),
    "--save-path": _value_of("--output"),
    "--output-dir": _value_of("--output"),
    "--saved-model-path": _value_of("--output"),
    "--max-shard-size": _value_of("--shard-size"),
    "--bf16": Becomes(("--dtype", "bf16")),
    "--local-rank": LeftOut("one process writes all files", ONE),
    "--save-quantized-model-with-inc": Becomes(("--format", "inc")),
    "--trust-remote-code": _CODE,
    "--token": _TOKEN,
}
# export names dtypes as llama.cpp does
EXPORT_VALUES: Values = {
    "--dtype": {
        "float32": "f32",
        "fp32": "f32",
        "float16": "f16",
        "fp16": "f16",
        "bfloat16": "bf16",
    }
}
UNIFY: Spellings = {
    "-r": _value_of("--ranks"),
    "--rank": _value_of("--ranks"),
    "--skip-unify-scales": LeftOut("scales are made from merged statistics, and never merged"),
    "-s": LeftOut("scales are made from merged statistics, and never merged"),
}


def _switched(word: str) -> ByValue:
    """A word of `--attention` that a truth switches on."""
    return ByValue({"TRUE": ("--attention", word), "FALSE": ()})


_LOADED = LeftOut("the folder's config.json says how the model is quantized", ONE)
_ON_THE_FLY = Instead(
    "quantize first: `quantflow quantize MODEL -o DIR --scheme W8A16`, or FP8_DYNAMIC; serve DIR"
)
_ALONE = LeftOut("one process runs the model", ONE)
_METRICS = LeftOut("metrics are at /metrics of the server's own port", ONE)
_TELEMETRY = LeftOut("nothing is sent anywhere", ONE)
_ROTARY = Instead("leave it out: rotary scaling is in the model's config.json", ONE)
_WATERMARK = LeftOut("no text has a watermark: a request for one is refused", ONE)
_TUNNEL = Instead("leave it out: a tunnel is a program of its own", ONE)
_CACHE_FOLDER = Instead("set HF_HOME, where models of the hub are kept", ONE)
SERVE: Spellings = {
    "--model-id": _MODEL,
    "--model-name-or-path": _MODEL,
    "--quantize": ByValue(
        dict.fromkeys(
            ("EETQ", "BITSANDBYTES", "BITSANDBYTES-NF4", "BITSANDBYTES-FP4", "FP8"), _ON_THE_FLY
        ),
        otherwise=_LOADED,
    ),
    "--num-shard": ByValue(
        {"1": _ALONE},
        otherwise=_value_of("--ranks"),
    ),
    "--sharded": Beside(
        ("--num-shard", "--ranks"),
        LeftOut("--num-shard says over how many", ONE),
        ByValue({"FALSE": _ALONE, "TRUE": Instead("give --num-shard N")}),
    ),
    "--hostname": _value_of("--host"),
    "--kv-cache-dtype": ByValue({"AUTO": (), "FP8_E4M3FN": ("--kv-cache", "float8")}),
    "--use-flash-attention": _switched("fused"),
    "--flash-attention-recompute": _switched("recompute"),
    "--cuda-memory-fraction": Instead(
        "give --kv-memory, a share such as 50%, or a size", ONE, words=("--kv-memory", "50%")
    ),
    "--disable-custom-kernels": LeftOut("--backend says which kernels run"),
    "--lora-adapters": Instead(
        "give --adapter NAME=DIR for each", ONE, words=("--adapter", "NAME=DIR")
    ),
    "--tokenizer-config-path": Instead(
        "give --chat-template FILE, a Jinja file", ONE, words=("--chat-template", "FILE")
    ),
    "--huggingface-hub-cache": _CACHE_FOLDER,
    "--weights-cache-override": _CACHE_FOLDER,
    "--rope-scaling": _ROTARY,
    "--rope-factor": _ROTARY,
    "--watermark-gamma": _WATERMARK,
    "--watermark-delta": _WATERMARK,
    "--json-output": LeftOut("the log is text"),
    "--otlp-endpoint": _TELEMETRY,
    "--otlp-service-name": _TELEMETRY,
    "--usage-stats": _TELEMETRY,
    "--prometheus-port": _METRICS,
    "--shard-uds-path": _ALONE,
    "--master-addr": _ALONE,
    "--master-port": _ALONE,
    "--graceful-termination-timeout": _value_of("--drain-seconds"),
    "--enable-prefill-logprobs": LeftOut("requests with decoder_input_details have them"),
    "--ngrok": Instead(_TUNNEL.remedy),
    "--ngrok-authtoken": _TUNNEL,
    "--ngrok-edge": _TUNNEL,
    "--env": Instead("use `quantflow inspect ARTIFACT`, or --version"),
    "--trust-remote-code": _CODE,
    "--token": _TOKEN,
}
# defaults of Gaudi's graph compiler for float8, where QUANT_CONFIG is set
FLOAT8_VARIABLES = {
    "ENABLE_EXPERIMENTAL_FLAGS": "true",
    "USE_DEFAULT_QUANT_PARAM": "true",
    "UPDATE_GRAPH_OUTPUT_MME": "false",
    "ENABLE_CALC_DYNAMIC_RANGE": "false",
    "UPDATE_MME_OUTPUT_PRECISION_FILTER": "v_proj,matmul_av",
    "EXPERIMENTAL_WEIGHT_SHARING": "FALSE",
}
# variable of TGI's launcher -> the option that it stands for; `serve` declares those of its own
SERVE_VARIABLES = {
    "MODEL_ID": "--model-id",
    "REVISION": "--revision",
    "DTYPE": "--dtype",
    "QUANTIZE": "--quantize",
    "NUM_SHARD": "--num-shard",
    "SHARDED": "--sharded",
    "KV_CACHE_DTYPE": "--kv-cache-dtype",
    "LORA_ADAPTERS": "--lora-adapters",
    "TOKENIZER_CONFIG_PATH": "--tokenizer-config-path",
    "USE_FLASH_ATTENTION": "--use-flash-attention",
    "FLASH_ATTENTION_RECOMPUTE": "--flash-attention-recompute",
}
