"""config.json in transformers' words, where a folder has those of code beside its weights.

Falcon was released before transformers knew it, as RefinedWebModel (7B) and RefinedWeb (40B).
Models that were trained on from there are still called so. transformers' own conversion of such a
folder renames the same keys; n_head_kv is there in the second generation alone.

| in config.json                | transformers                                       |
|-------------------------------|----------------------------------------------------|
| RefinedWeb, RefinedWebModel   | model_type falcon                                  |
| RWForCausalLM and others      | FalconForCausalLM and others                       |
| n_head, n_layer, n_head_kv    | num_attention_heads, num_hidden_layers, num_kv_heads |
| n_head_kv is there or not     | new_decoder_architecture, where no key says it     |
| auto_map                      | nothing: no code is run                            |
"""

from collections.abc import Mapping
from typing import Any

from quantflow.errors import InputError

_TYPES = ("RefinedWeb", "RefinedWebModel")
_KEYS = {
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_head_kv": "num_kv_heads",
}
# what the old code and transformers take for granted is not the same
_SAID = ("parallel_attn", "multi_query")


def in_todays_words(config: Mapping[str, Any], *, place: str) -> dict[str, Any] | None:
    """The content of config.json in transformers' words; None where it has them.

    Args:
        config: content of config.json.
        place: its path, for messages.

    Raises:
        InputError: an old key and today's say different things, or a key is missing whose default
            was another one.
    """
    if config.get("model_type") not in _TYPES:
        return None
    renamed = {key: value for key, value in config.items() if key not in (*_KEYS, "auto_map")}
    for old, name in _KEYS.items():
        if old not in config:
            continue
        if config.get(name) not in (None, config[old]):
            raise InputError(
                f"{place}: {old} is {config[old]!r}, {name} {config[name]!r}",
                "correct the one that is wrong",
            )
        renamed[name] = config[old]
    new = renamed.setdefault("new_decoder_architecture", config.get("n_head_kv") is not None)
    if missing := [key for key in _SAID[: 1 if new else 2] if key not in config]:
        raise InputError(
            f"{place}: model_type {config['model_type']} without {missing[0]}",
            f"write {missing[0]} into it, true or false",
        )
    architectures = config.get("architectures")
    if isinstance(architectures, list):
        renamed["architectures"] = [
            f"Falcon{name.removeprefix('RW')}" if str(name).startswith("RW") else name
            for name in architectures
        ]
    return renamed | {"model_type": "falcon"}
