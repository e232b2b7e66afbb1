"""The thin runtime as a verb: verify, load, and continue prompts.

Reads    the artifact; files of prompts, an adapter, a draft model or Medusa heads, if named
Writes   the texts, with --output
Resumes  nothing
Fails    2 unknown backend or options that do not go together, 3 no tokenizer or prompts that cannot
         be read, 4 a text differs from the reference, 6 a package that a source of prompts needs,
         7 the artifact is damaged
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from quantflow import cpu_threads
from quantflow.distributed.communicator import Communicator
from quantflow.errors import InputError, UsageError
from quantflow.files.canonical import read_json
from quantflow.files.disk import write_atomic
from quantflow.files.manifest import MANIFEST_NAME
from quantflow.models.token_ids import refuse_beyond
from quantflow.models.tokenizer import load_tokenizer
from quantflow.progress import SILENT, Progress
from quantflow.runtime.adapters import Adapted, attach_
from quantflow.runtime.attention_choice import attention_of
from quantflow.runtime.decoder import Decoder
from quantflow.runtime.decoding import Counts, Draft, Further, Method, generate
from quantflow.runtime.decoding.text import TextStream, continuation, stop_at, word_ids
from quantflow.runtime.generate_job import Beams, GenerateJob, Lookup, echoed
from quantflow.runtime.load import Loaded, load
from quantflow.runtime.loaded_medusa import medusa_heads
from quantflow.runtime.loaded_mtp import layer_ahead
from quantflow.runtime.prompt_files import Prompt, encode, read_prompts, shown
from quantflow.runtime.ranks import processes as rank_processes
from quantflow.runtime.shapes import shapes_line, shapes_of
from quantflow.runtime.timed_decoder import Timed
from quantflow.settings import check_numbers
from quantflow.sources.models import model_folder
from quantflow.units import size


def run(
    job: GenerateJob, stream: Callable[[str], None], progress: Progress | None = None
) -> dict[str, Any] | None:
    """Generate.

    The text of a single sequence goes to `stream` piece by piece, its prompt first.

    Returns:
        `outputs`, one per text: prompt, text, tokens; `timing`; `speculation`, the numbers of
        proposed and taken tokens, None without any; `experts`, what
        `quantflow.runtime.expert_cache` counted, None but for a mixture on disk; `decoder`, its
        name and why no faster one; `ranks`; `adapter`, the numbers of linears that it was merged
        into and stands beside; and `differing`, the prompts whose texts are not those of the
        reference. None on a rank that is not the first.
    """
    telling = SILENT if progress is None else progress
    folder = model_folder(job.artifact, revision=job.revision, progress=telling)
    job = replace(job, artifact=folder)
    _check(job)
    without = {
        "the transformers decoder": job.decoder == "transformers",
        f"device {job.device}": job.device != "cpu",
    }
    without |= {
        "an adapter": job.adapter is not None,
        "disk_offload": job.disk_offload,
        "torch_compile": job.torch_compile,
        "attention": bool(job.attention),
        "static shapes": job.shapes.fixed,
        "mtp": job.mtp is not None,
    }
    world = rank_processes.world_of(
        "generate", job.ranks, trusted=job.trust_network, without=without
    )
    if rank_processes.starts(world):
        job.signature.check(job.artifact)  # once more in each rank, which loads what it checked
        return rank_processes.start(
            "generate", job, world=world, progress=telling, stream=stream, bind=job.bind
        )
    with (
        rank_processes.bound("generate", asked=job.bind),
        rank_processes.joined("generate", world) as communicator,
    ):
        prompts: list[Prompt] = list(job.prompts)
        if job.source is not None and (communicator is None or communicator.rank == 0):
            prompts += read_prompts(job.source, column=job.column, limit=job.limit)
        prompts *= job.repeat
        expected = _reference(job.reference)
        loaded, adapted = _open(job, communicator)
        result = rank_processes.drive(
            loaded, communicator, lambda led: _continue(job, led, prompts, stream, telling)
        )
    if result is None:
        return None
    if job.output is not None:
        texts = {output["prompt"]: output["text"] for output in result["outputs"]}
        write_atomic(job.output, (json.dumps(texts, indent=2, ensure_ascii=False) + "\n").encode())
    return {
        **result,
        "ranks": world,
        "adapter": None
        if adapted is None
        else {"merged": len(adapted.merged), "beside": len(adapted.beside)},
        "differing": [
            o["prompt"]
            for o in result["outputs"]
            if expected is not None and expected.get(o["prompt"]) != o["text"]
        ],
    }


def _continue(
    job: GenerateJob,
    loaded: Loaded,
    prompts: Sequence[Prompt],
    stream: Callable[[str], None],
    progress: Progress,
) -> dict[str, Any]:
    """The outputs, their times, and the decoder."""
    tokenizer = loaded.tokenizer or load_tokenizer(loaded.artifact.checkpoint.folder)
    rows = encode(prompts, tokenizer, limit=job.max_input_tokens, chat=job.chat)
    refuse_beyond(rows, loaded.decoder.vocab_size, where="prompts")
    chat = job.chat or any(not isinstance(prompt, str) for prompt in prompts)
    echo = not chat if job.echo is None else job.echo
    method, options = _method(job, loaded, tokenizer), _options(job, loaded, tokenizer)
    room = _room(job, rows)
    decoder = Timed(loaded.decoder)
    batches = [
        range(i, min(i + job.batch_size, len(rows))) for i in range(0, len(rows), job.batch_size)
    ]
    alone = len(rows) * job.returned == 1 and not isinstance(method, Beams)
    outputs: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []
    counts = Counts()
    progress.say(f"generate: {cpu_threads.line()}")
    begin = time.perf_counter()
    telling = progress if len(batches) > 1 else SILENT
    for batch in telling.steps(batches, stage="generate", unit="batch"):
        since, told_before = time.perf_counter(), len(outputs)
        ids, padding = _left_padded(
            [rows[i] for i in batch], pad=options["pad_token_id"] or 0, device=job.device
        )
        spoken = (
            _Spoken(
                tokenizer,
                echoed(shown(prompts[0]), chat=chat) if echo else "",
                rows[0],
                stream,
                ends=options["eos_token_id"],
            )
            if alone
            else None
        )
        tell = None if spoken is None else spoken.put
        new = max(room[i] for i in batch)
        generated = generate(
            decoder,
            ids,
            padding=padding,
            method=method,
            stream=tell,
            max_new_tokens=new,
            counts=counts,
            **options,
        )
        if spoken is not None:
            spoken.end()
        for i, row in zip(
            (i for i in batch for _ in range(job.returned)),
            generated[:, ids.shape[1] :].tolist(),
            strict=True,
        ):
            tokens = _own(row[: room[i]], options["eos_token_id"], options["stop"])
            text = continuation(tokenizer, rows[i], tokens, ends=options["eos_token_id"])
            outputs.append({"prompt": shown(prompts[i]), "text": text, "tokens": tokens})
        taken, made = (
            time.perf_counter() - since,
            sum(len(output["tokens"]) for output in outputs[told_before:]),
        )
        steps.append(
            {
                "prompts": len(batch),
                "seconds": taken,
                "tokens": made,
                "tokens_per_second": made / taken,
            }
        )
    if counts.acceptance is not None:
        progress.say(
            f"generate: {counts.taken} of {counts.proposed} proposed tokens were taken "
            f"({counts.acceptance:.0%})"
        )
    if (shapes := shapes_of(loaded.decoder)) is not None:
        progress.say(f"generate: {shapes_line(shapes)}")
    seconds, count = time.perf_counter() - begin, sum(len(output["tokens"]) for output in outputs)
    experts = None if loaded.experts is None else loaded.experts.summary()
    if experts is not None:
        progress.say(
            f"generate: {count / seconds:.2f} tokens per second; {experts['hits']} of "
            f"{experts['hits'] + experts['misses']} chosen experts were in memory "
            f"({experts['hit_rate'] or 0:.0%}), {size(experts['bytes_read'])} were read"
        )
    return {
        "outputs": outputs,
        "echo": echo,
        "chat": chat,
        "timing": {
            "seconds": seconds,
            "tokens": count,
            "tokens_per_second": count / seconds,
            **decoder.summary(),
            "batches": steps,
        },
        "speculation": None
        if counts.acceptance is None
        else {
            "proposed": counts.proposed,
            "taken": counts.taken,
            "acceptance": counts.acceptance,
        },
        "experts": experts,
        "decoder": {"name": loaded.name, "reasons": list(loaded.reasons)},
        "rounded_inputs": loaded.rounded_inputs,
        "shapes": shapes,
    }


def _check(job: GenerateJob) -> None:
    """Refuse options that do not go together.

    Raises:
        UsageError: naming them.
    """
    if job.disk_offload and job.torch_compile:
        raise UsageError(
            "generate: disk_offload with torch_compile",
            "leave one of them out: weights on disk are not compiled",
        )
    if job.disk_offload and job.device != "cpu":
        raise UsageError(f"generate: disk_offload on device {job.device}", "leave one of them out")
    if job.max_memory is not None and not job.disk_offload:
        raise UsageError(
            "generate: max_memory without disk_offload",
            "give --disk-offload, or leave it out: what is in memory then is the whole model",
        )
    if not job.prompts and job.source is None:
        raise UsageError("generate: no prompt", "give --prompt, or --prompts FILE")
    check_numbers(job)
    if job.output is not None and job.returned > 1:
        raise UsageError(
            f"generate: output with {job.returned} texts per prompt",
            "leave it out, and give --json",
        )
    if job.output is not None and not job.output.parent.is_dir():
        raise UsageError(
            f"{job.output.parent}: no such folder for the texts", "make it, or name another file"
        )
    if job.batch_size < 1:
        raise UsageError(f"batch_size={job.batch_size}", "use 1 or more")
    methods = [
        name for name in ("method", "draft", "medusa", "mtp") if getattr(job, name) is not None
    ]
    if len(methods) > 1:
        raise UsageError(
            f"generate: {' and '.join(methods)} together", "choose one way to generate"
        )
    if job.force_words and not isinstance(job.method, Beams):
        raise UsageError("generate: force_words without beams", "give --num-beams, such as 4")
    if job.merge and job.adapter is None:
        raise UsageError("generate: merge without an adapter", "give --adapter")


def _open(job: GenerateJob, communicator: Communicator | None) -> tuple[Loaded, Adapted | None]:
    """The loaded artifact, and the linears that the adapter went into.

    An adapter and weights on disk go with transformers' modules.
    """
    dtype: torch.dtype = getattr(torch, job.dtype)
    speculates = (job.draft, job.medusa, job.mtp) != (None, None, None)
    crops = speculates or isinstance(job.method, Lookup)
    options: Any = {
        "backend": job.backend,
        "dtype": dtype,
        "crops": crops,
        "exact": job.exact,
        "rounded_inputs": job.rounded_inputs,
        "require_signature": job.signature.trusted,
    }
    special = [name for name in ("disk_offload", "adapter") if getattr(job, name)]
    for name, asked in (("attention", job.attention), ("static shapes", job.shapes.fixed)):
        if special and asked:
            raise UsageError(f"generate: {special[0]} with {name}", "leave one of them out")
    if not special:
        options |= {
            "decoder": job.decoder,
            "kv_cache": job.kv_cache,
            "pack": job.pack,
            "device": job.device,
        }
        options["compiled"] = job.torch_compile
        options["attention"] = attention_of(job.attention)
        options["shapes"] = job.shapes
        return load(job.artifact, communicator=communicator, **options), None
    if job.decoder == "lean" or job.kv_cache != "auto" or job.pack:
        cause = (
            f"generate: {special[0]} with decoder {job.decoder}, kv_cache {job.kv_cache}, pack "
            f"{job.pack}"
        )
        raise UsageError(cause, "leave them out: it runs in transformers' modules with their cache")
    if job.disk_offload:
        # here, as in `_draft`: it imports transformers' model code
        from quantflow.runtime.offload import load_offloaded

        loaded = load_offloaded(job.artifact, max_memory=job.max_memory, **options)
    else:
        loaded = load(job.artifact, device=job.device, compiled=job.torch_compile, **options)
    if job.adapter is None:
        return loaded, None
    assert loaded.model is not None  # these are transformers' modules
    adapted = attach_(loaded.model, job.adapter, merge=job.merge)
    return replace(
        loaded, reasons=(f"the lean decoder is not used: {special[0]} was asked for",)
    ), adapted


def _method(job: GenerateJob, loaded: Loaded, tokenizer: PreTrainedTokenizerBase) -> Method | None:
    """The method to generate by, with what it needs loaded."""
    if job.mtp is not None:
        return Further(layer=layer_ahead(loaded), tokens=job.mtp)
    if job.medusa is not None:
        return medusa_heads(loaded, job.medusa, device=job.device)
    if job.draft is not None:
        return Draft(decoder=_draft(job.draft, job), tokens=job.draft_tokens)
    if isinstance(job.method, Beams) and job.force_words:
        return replace(job.method, force_words=word_ids(tokenizer, job.force_words, before=(" ",)))
    return job.method


def _draft(folder: Path, job: GenerateJob) -> Decoder:
    """The decoder of a folder, which is an artifact or a checkpoint."""
    dtype: torch.dtype = getattr(torch, job.dtype)
    if (folder / MANIFEST_NAME).exists():
        loaded = load(
            folder,
            decoder="auto",
            backend=job.backend,
            dtype=dtype,
            device=job.device,
            crops=True,
            exact=job.exact,
        )
        return loaded.decoder
    # here: they import transformers' model code
    from quantflow.models.load import load_model, open_source
    from quantflow.runtime.transformers_decoder import TransformersDecoder

    model = load_model(open_source(folder), dtype=dtype)
    return TransformersDecoder(model.to(job.device), device=job.device, crops=True)


def _options(
    job: GenerateJob, loaded: Loaded, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """The arguments of `quantflow.runtime.decoding.generate` beside the prompts and the method."""
    ends = () if job.ignore_eos else loaded.eos_token_ids
    return {
        "sampling": job.sampling,
        "rules": replace(job.rules, bad_words=word_ids(tokenizer, job.bad_words, before=("", " "))),
        "returned": job.returned,
        "eos_token_id": ends,
        "pad_token_id": tokenizer.pad_token_id,
        "stop": stop_at(tokenizer, job.stop) if job.stop else None,
    }


def _room(job: GenerateJob, rows: Sequence[list[int]]) -> list[int]:
    """The number of tokens that may follow each prompt.

    Raises:
        UsageError: a prompt that is as long as the whole text may be; beams of several prompts,
            which end by their lengths.
    """
    if job.max_length is None:
        return [job.max_new_tokens] * len(rows)
    if isinstance(job.method, Beams) and job.batch_size > 1:
        raise UsageError(
            f"generate: max_length with beams and batch_size={job.batch_size}",
            "give --max-new-tokens",
        )
    for number, row in enumerate(rows, start=1):
        if len(row) >= job.max_length:
            raise UsageError(
                f"prompt {number}: {len(row)} tokens, max_length={job.max_length}", "give more"
            )
    return [job.max_length - len(row) for row in rows]


def _reference(path: Path | None) -> dict[str, Any] | None:
    if path is None:
        return None
    expected = read_json(path)
    if not isinstance(expected, dict):
        raise InputError(
            f"{path}: {type(expected).__name__}, a table of prompt and text is needed", "write one"
        )
    return expected


def _left_padded(rows: Sequence[list[int]], *, pad: int, device: str) -> tuple[Tensor, Tensor]:
    """Token ids [B, S], and the number of padding tokens of each row, [B]."""
    longest = max(map(len, rows))
    ids = torch.tensor([[pad] * (longest - len(row)) + row for row in rows], device=device)
    return ids, torch.tensor([longest - len(row) for row in rows], device=device)


class _Spoken:
    """The text of a single sequence on its way out.

    The prompt goes with the first piece, so not before there is one.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        prompt: str,
        tokens: Sequence[int],
        stream: Callable[[str], None],
        *,
        ends: Sequence[int],
    ) -> None:
        self._prompt, self._stream, self._ends = prompt, stream, ends
        self._text = TextStream(tokenizer, tokens, tell=self._tell)

    def put(self, token: int) -> None:
        if token not in self._ends:
            self._text.put(token)

    def end(self) -> None:
        self._text.end()
        if self._prompt:
            self._tell("")

    def _tell(self, piece: str) -> None:
        self._stream(self._prompt + piece)
        self._prompt = ""


def _own(
    tokens: list[int], ends: Sequence[int], stop: Callable[[Sequence[int]], bool] | None
) -> list[int]:
    """The tokens up to the end of the text; the others fill the batch."""
    for count in range(1, len(tokens) + 1):
        if tokens[count - 1] in ends or (stop is not None and stop(tokens[:count])):
            return tokens[:count]
    return tokens
