"""Hugging Face causal language models as a list of named linears, one decoder layer in memory at a time.

    graph        which linears there are, which share an input, and which norm feeds them
    names        checkpoint names and module names
    load         tensors from safetensors files, a model on meta, and back
    capture      embeddings, decoder layers and head, run layer by layer with the model's own code
    calibration  text files to token sequences
    llama_cpp    names, metadata and tokenizers in llama.cpp's words

Supported families are those of `quantflow.models.graph.FAMILIES`.
"""
