"""A model in llama.cpp's words, and the GGUF file that holds it."""
