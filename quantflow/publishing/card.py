"""The model card of a repository: the artifact's own card under the metadata that the hub reads.

Source: huggingface.co/docs/hub/model-cards, its keys `base_model`, `base_model_relation`, `license`
and `pipeline_tag`; `quantized_by` is what quantized repositories have beside them.
"""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from quantflow.exporting.model_card import model_card
from quantflow.formats import DEFAULT
from quantflow.plain_text import one_line
from quantflow.planning.recipe import Quantize
from quantflow.validating.report import COLUMNS, cells

_LICENSES = (  # beginning of a licence's text -> its name on the hub
    (r"Apache License\s+Version 2\.0", "apache-2.0"),
    (r"MIT License", "mit"),
    (r"BSD 3-Clause", "bsd-3-clause"),
    (r"GNU GENERAL PUBLIC LICENSE\s+Version 3", "gpl-3.0"),
    (r"LLAMA 2 COMMUNITY LICENSE", "llama2"),
    (r"META LLAMA 3 COMMUNITY LICENSE", "llama3"),
    (r"LLAMA 3\.1 COMMUNITY LICENSE", "llama3.1"),
    (r"LLAMA 3\.2 COMMUNITY LICENSE", "llama3.2"),
    (r"LLAMA 3\.3 COMMUNITY LICENSE", "llama3.3"),
)
_UNSAFE = re.compile(r"[^\w./:@+%,() -]")  # what a cell of Markdown may not hold
_BEGINNING = 4000  # characters in which a licence says its name


def card(
    manifest: Mapping[str, Any],
    config: Mapping[str, Any],
    *,
    owner: str,
    base_model: str | None,
    license_tags: Mapping[str, str],
    validation: Mapping[str, Any] | None,
) -> str:
    """The card.

    Args:
        manifest: content of the artifact's quantflow.json.
        config: content of its config.json.
        owner: user or organization that the repository belongs to.
        base_model: name of the source on the hub; None leaves it out.
        license_tags: `license` and what belongs to it; empty leaves it out.
        validation: content of the artifact's validation.json; None says that there is none.
    """
    recipe = manifest["recipe"]
    schemes = [scheme for scheme in recipe["resolved"]["schemes"].values() if scheme is not None]
    kinds = sorted({f"{s['weights']['kind']}{s['weights']['num_bits']}" for s in schemes})
    names = sorted({s["name"].lower() for s in schemes})
    tags = ["quantflow", DEFAULT, *names, *kinds, recipe["resolved"]["algorithm"]]
    related = {} if base_model is None else {"base_model": base_model}
    metadata = {
        **related,
        **({"base_model_relation": "quantized"} if related else {}),
        "quantized_by": owner,
        **license_tags,
        "library_name": "transformers",
        "pipeline_tag": _pipeline(config),
        "tags": list(dict.fromkeys(tags)),
    }
    _, _, body = (
        model_card(manifest, config["quantization_config"]).removeprefix("---\n").partition("---\n")
    )
    front = [f"{key}: {json.dumps(value)}" for key, value in metadata.items()]  # JSON is YAML too
    made = ["## How it was made", "", f"    {one_line(made_by(manifest, base_model))}"]
    return "\n".join(
        ["---", *front, "---", body.rstrip("\n"), "", *_validated(validation), "", *made, ""]
    )


def license_named_in(text: str) -> str | None:
    """The hub's name of a licence from its text; None where it is not one that is known here."""
    found = [
        name for words, name in _LICENSES if re.search(words, text[:_BEGINNING], re.IGNORECASE)
    ]
    return found[0] if found else None


def made_by(manifest: Mapping[str, Any], base_model: str | None) -> str:
    """The command that makes the artifact of its source, with every setting that is no default."""
    recipe, source = manifest["recipe"], manifest["source"]
    default = json.loads(json.dumps(asdict(Quantize(name=recipe["name"], scheme=recipe["scheme"]))))
    words = ["quantflow", "quantize", base_model or source["name"]]
    if base_model == source["name"] and source["revision"]:
        words += ["--revision", source["revision"]]
    words += ["-o", recipe["name"], "--scheme", recipe["scheme"]]
    if recipe["algorithm"] is not None:
        words += ["--algorithm", recipe["algorithm"]]
    for key, value in recipe.items():
        if key in default and key != "algorithm" and value != default[key]:
            words += ["--set", f"quantize.0.{key}={json.dumps(value)}"]
    if recipe["seed"]:
        words += ["--seed", str(recipe["seed"])]
    if (measured := manifest["measurement"]) is not None and measured["counts"]["samples"]:
        words += ["--samples", str(measured["counts"]["samples"])]
        words += ["--sequence-length", str(measured["calibration"]["sequence_length"])]
    return shlex.join(words)


def _pipeline(config: Mapping[str, Any]) -> str:
    """What the hub calls the task of a model."""
    architectures = config.get("architectures")
    sees = any("vision" in key for key in config)
    names: Sequence[Any] = architectures if isinstance(architectures, list) else ()
    conditional = any(str(name).endswith("ForConditionalGeneration") for name in names)
    return "image-text-to-text" if sees and conditional else "text-generation"


def _validated(validation: Mapping[str, Any] | None) -> list[str]:
    """The section on the validation."""
    if validation is None:
        return ["## Validation", "", "Not compared with its source."]
    tokens = validation["protocol"].get("tokens")
    lines = [
        "## Validation",
        "",
        f"Compared with its source by `quantflow validate`, on {tokens:d} tokens."
        if isinstance(tokens, int)
        else "Compared with its source by `quantflow validate`.",
        "",
    ]
    rows = (COLUMNS, ["---"] * len(COLUMNS), cells(validation))
    return lines + [f"| {' | '.join(_UNSAFE.sub('_', text) for text in row)} |" for row in rows]
