"""The options of `generate`; `quantflow.stages.cli.generate_job` makes a job of their values."""

import functools
from collections.abc import Callable
from typing import Any

import click

Command = Callable[..., Any]


def generating(command: Command) -> Command:
    """Add the options that say what is continued, and how."""
    return functools.reduce(
        lambda decorated, option: option(decorated), reversed([*_PROMPTS, *_LENGTH, *_CHOICE, *_WAY]), command
    )


_PROMPTS = (
    click.option("--prompt", "prompts", metavar="TEXT", multiple=True, help="A text to continue; also several."),
    click.option(
        "--prompts",
        "source",
        metavar="FILE|DIR|NAME",
        help="More prompts: .txt (blank lines between), .json (a list), .jsonl, .csv, .parquet; a folder; a hub name.",
    ),
    click.option("--column", metavar="KEY", help="Of --prompts' rows (default: the first that holds text)."),
    click.option("--limit", type=int, metavar="N", help="The first N of --prompts."),
    click.option("--chat", is_flag=True, help="Prompts are a user's messages: put them into the chat template."),
    click.option("--max-input-tokens", type=int, metavar="N", help="The first N tokens of each prompt (default: all)."),
    click.option("--batch-size", type=int, default=1, show_default=True, help="Prompts that run together, padded on the left."),
    click.option("--reference", metavar="FILE", help="JSON of prompt: text; exit 4 where a text is another."),
)
_LENGTH = (
    click.option("--max-new-tokens", type=int, default=64, show_default=True),
    click.option("--min-new-tokens", type=int, default=0, metavar="N", help="No end before N new tokens."),
    click.option("--min-length", type=int, default=0, metavar="N", help="No end before N tokens of prompt and text."),
    click.option("--stop", metavar="TEXT", multiple=True, help="End with this text; also several."),
    click.option("--ignore-eos", is_flag=True, help="Go on after end tokens."),
)
_CHOICE = (
    click.option("--temperature", type=float, help="Sample instead of taking the most likely token."),
    click.option("--top-k", type=int, help="Sample from the k most likely tokens."),
    click.option("--top-p", type=float, help="Sample from the fewest tokens that hold this probability."),
    click.option("--min-p", type=float, help="Sample from tokens at least this share as likely as the likeliest."),
    click.option("--typical-p", type=float, help="Sample from the most typical tokens that hold this probability."),
    click.option("--seed", type=int, default=0, show_default=True),
    click.option("--repetition-penalty", type=float, default=1.0, metavar="X", help="Above 1: what was said gets less likely."),
    click.option("--frequency-penalty", type=float, default=0.0, metavar="X", help="Logits less X for every time generated."),
    click.option("--presence-penalty", type=float, default=0.0, metavar="X", help="Logits less X if generated at all."),
    click.option("--no-repeat-ngram-size", type=int, default=0, metavar="N", help="No N tokens in a row twice."),
    click.option("--bad-words", metavar="WORD", multiple=True, help="Never say it as it is tokenized; also several."),
)
_WAY = (
    click.option("--num-beams", type=int, metavar="N", help="Beam search: follow N sequences."),
    click.option("--num-return-sequences", "returned", type=int, default=1, metavar="N", help="Texts per prompt."),
    click.option("--length-penalty", type=float, metavar="X", help="Beams: score = log-probability / tokens^X (default 1)."),
    click.option("--early-stopping", type=click.Choice(["true", "false", "never"]), help="Beams: when to end (default false)."),
    click.option("--force-words", metavar="WORD", multiple=True, help="Beams: every text contains it; also several."),
    click.option("--penalty-alpha", type=float, metavar="X", help="Contrastive search among --top-k candidates."),
    click.option("--assistant-model", "draft", metavar="DIR", help="An artifact or model of the same tokens that proposes."),
    click.option("--assistant-tokens", "draft_tokens", type=int, default=5, show_default=True, help="Proposed at a time."),
    click.option("--prompt-lookup", type=int, metavar="N", help="Propose N tokens that followed the last ones before."),
    click.option("--medusa", metavar="DIR", help="Medusa heads that propose: a folder with medusa_lm_head.safetensors."),
    click.option("--adapter", metavar="DIR", help="A LoRA adapter (PEFT) beside the quantized linears."),
    click.option(
        "--merge-adapter",
        "merge",
        is_flag=True,
        help="Merge it where weights are not quantized; beside the others still.",
    ),
    click.option(
        "--ranks", type=int, default=1, metavar="N", help="Processes that share the model (default 1), or torchrun's."
    ),
)
