"""Where models come from: a folder, a name on the hub, or a GGUF file.

Each becomes a folder that every stage reads.
"""
