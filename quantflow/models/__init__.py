"""Hugging Face causal LMs as named linears, with one decoder layer in memory at a time.

    graph        linears of each layer, those that share an input, and the norms before them
    names        checkpoint names and module names
    load         tensors from safetensors files, a model on meta, and back
    capture      embeddings, decoder layers and head, run layer by layer with the model's own code
    layer_store  the resume state of a stage, layer by layer

Supported families are those of `quantflow.models.graph.FAMILIES`.
"""
