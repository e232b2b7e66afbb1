"""Stock transformers on a folder: what it says of the keys, and what the model answers."""

import json
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from _tiny_models import VOCABULARY, auto_class
from transformers import CONFIG_MAPPING, AutoConfig

# what compressed-tensors stores in place of a weight
PARTS = r"\.weight_(packed|scale|shape|zero_point|g_idx)$"
TOKENS = 16

Seen = dict[str, Any]  # missing, unexpected, mismatched: names; logits: numbers; shape


def class_of(folder: Path) -> Any:
    """The class that a folder's config.json names, or the one that its type stands for."""
    for name in json.loads((folder / "config.json").read_text()).get("architectures", ()):
        if hasattr(transformers, name):
            return getattr(transformers, name)
    return auto_class(AutoConfig.from_pretrained(folder))


def tokens() -> torch.Tensor:
    """What every model is asked."""
    return torch.randint(2, VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(3))


def look(folder: Path) -> Seen:
    """Load a folder as any user of transformers does, in float32, and ask it once.

    Raises:
        ValueError: its logits are not finite.
    """
    options: dict[str, Any] = {"dtype": torch.float32, "output_loading_info": True}
    own = json.loads((folder / "config.json").read_text())
    if own.get("model_type") not in CONFIG_MAPPING:
        # known to transformers by code beside the weights alone: as the type of the class it names
        del own["model_type"]
        options["config"] = class_of(folder).config_class.from_dict(own)
    model, said = class_of(folder).from_pretrained(folder, **options)
    with torch.no_grad():
        logits = model.eval()(input_ids=tokens()).logits.float()
    if not logits.isfinite().all():
        raise ValueError("its logits are not finite")
    keys = {name: sorted(map(str, said[f"{name}_keys"])) for name in ("missing", "unexpected")}
    mismatched = sorted(str(key) for key in said["mismatched_keys"])
    return {**keys, "mismatched": mismatched, "logits": logits[0].tolist()}


def difference(found: Seen, source: Seen) -> str | None:
    """Which keys are wrong with a folder and not with its source, None where none are."""
    for kind in ("missing", "unexpected", "mismatched"):
        known = set(source[kind])
        more = [name for name in found[kind] if re.sub(PARTS, ".weight", name) not in known]
        if more:
            return f"{len(more)} keys {kind}: {', '.join(more[:2])}"
    return None
