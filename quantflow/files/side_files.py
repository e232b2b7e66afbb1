"""Which files of a source, beside config and weights, belong into an artifact."""

import re
from collections.abc import Mapping
from typing import Any

SIDE_FILES = re.compile(
    r"(tokenizer.*\.(json|model)|vocab\.(json|txt)|merges\.txt|special_tokens_map\.json|added_tokens\.json|"
    r"chat_template.*|generation_config\.json|.*processor_config\.json|LICEN[CS]E.*|NOTICE.*|USE_POLICY.*)"
)


def is_side_file(name: str, config: Mapping[str, Any]) -> bool:
    """Return whether a file is copied: tokenizer, template, licence, and code where config.json names some.

    Args:
        name: of the file, `/` between sub-folders.
        config: the content of config.json.
    """
    code = name.endswith(".py") and "auto_map" in config
    return code or SIDE_FILES.fullmatch(name) is not None
