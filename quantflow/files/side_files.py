"""The files of a source, beside config and weights, that belong into an artifact."""

import re
from collections.abc import Mapping
from typing import Any

SIDE_FILES = re.compile(
    r"(tokenizer.*\.(json|model)|vocab\.(json|txt)|merges\.txt|special_tokens_map\.json"
    r"|added_tokens\.json|chat_template.*|generation_config\.json|.*processor_config\.json"
    r"|LICEN[CS]E.*|NOTICE.*|USE_POLICY.*)"
)


def is_side_file(name: str, config: Mapping[str, Any]) -> bool:
    """Whether a file is copied: tokenizer, template, licence, code where config.json names any.

    Args:
        name: name of the file, with `/` between sub-folders.
        config: content of config.json.
    """
    code = name.endswith(".py") and "auto_map" in config
    return code or SIDE_FILES.fullmatch(name) is not None
