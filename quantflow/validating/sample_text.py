"""How an artifact continues the beginning of a text."""

from pathlib import Path

from quantflow.errors import InputError
from quantflow.measuring.text import read_documents
from quantflow.models.tokenizer import load_tokenizer
from quantflow.runtime.generate_job import GenerateJob


def sample_text(
    artifact: Path,
    *,
    model: Path,
    text: Path,
    prompt_tokens: int,
    new_tokens: int,
    disk_offload: bool = False,
) -> tuple[str, str]:
    """The beginning of a text file, and its continuation by the most likely token each time.

    Args:
        artifact: the artifact's folder.
        model: the source, whose tokenizer reads the text.
        text: a file as calibration takes them.
        prompt_tokens: tokens of its first document, at most.
        new_tokens: tokens that are added.
        disk_offload: read the weights from disk for every token.

    Raises:
        QuantflowError: an artifact that cannot be run here, or a text without tokens.
    """
    tokenizer = load_tokenizer(model)
    document = next((tokens for tokens in read_documents(text, tokenizer) if tokens), None)
    if document is None:
        raise InputError(f"{text}: no document has a token", "give another text")
    prompt = str(tokenizer.decode(document[:prompt_tokens], skip_special_tokens=True))
    job = GenerateJob(
        artifact=artifact,
        prompts=(prompt,),
        max_new_tokens=new_tokens,
        ignore_eos=True,
        disk_offload=disk_offload,
    )
    result = job.run()
    return prompt, "" if result is None else str(result["outputs"][0]["text"])
