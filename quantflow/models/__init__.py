"""Hugging Face causal LMs as named linears, with one decoder layer in memory at a time.

    family       one row per family: names, decoder design, GGUF names
    graph        linears, the ones that share an input, and the norms before them
    discovery    the same, from one forward of a model without weights
    open         a folder opened as files, and the graph of its model
    names        checkpoint names and module names
    skeleton     a model on meta
    load         tensors from safetensors files, into a model and back
    capture      embeddings, decoder layers and head, run layer by layer with the model's own code
    layer_store  the resume state of a stage, layer by layer

A family needs no row to be supported; see `quantflow.models.family`.
"""
