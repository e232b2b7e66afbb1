"""The layer of a loaded artifact that predicts further tokens (MTP), for its decoder."""

from quantflow.errors import UnsupportedError
from quantflow.runtime.lean import LeanDecoder
from quantflow.runtime.load import Loaded
from quantflow.runtime.mtp import REMEDY, AheadLayer, DraftLayer
from quantflow.runtime.transformers_decoder import TransformersDecoder


def layer_ahead(loaded: Loaded) -> DraftLayer:
    """The layer, read.

    Raises:
        UnsupportedError: there is none, it is none of the model's own kind, or the decoder shows no
            hidden states.
        InputError: a tensor that holds what it must not.
    """
    if isinstance(loaded.decoder, LeanDecoder):
        return AheadLayer(loaded.artifact, loaded.decoder.shared)
    if not isinstance(loaded.decoder, TransformersDecoder) or loaded.model is None:
        why = "; ".join(loaded.reasons)
        raise UnsupportedError(f"mtp with {type(loaded.decoder).__name__}: {why}", REMEDY)
    from quantflow.runtime.module_mtp import ModuleAhead  # here: it imports transformers' masks

    return ModuleAhead(loaded.artifact, loaded.model)
