"""The scales that an artifact brings for its key-value cache."""

from quantflow.core.kv import KVScales
from quantflow.formats import compressed_tensors
from quantflow.models.graph import graph_for
from quantflow.models.load import read_tensors
from quantflow.runtime.artifact import Artifact


def read_kv_scales(artifact: Artifact) -> tuple[KVScales, ...]:
    """Return the scales of every layer's cache; none where the artifact keeps keys and values as they are.

    Raises:
        InputError: a scale is not finite and positive, or has another shape than the model's heads.
    """
    scheme, config = artifact.kv_cache, artifact.config
    if scheme is None:
        return ()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    found = []
    for layer in graph_for(config).layers:
        tensors = read_tensors(artifact.checkpoint, compressed_tensors.kv_tensor_names(layer.attention))
        found.append(compressed_tensors.decode_kv(layer.attention, tensors, scheme, kv_heads=heads))
    return tuple(found)
