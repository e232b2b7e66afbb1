"""Kernels in Triton for GPUs, a file each, and the backends that call them.

The kernels' modules import the package `triton`, which torch brings on GPUs; backends.py imports
them when a weight is prepared. Without a GPU the interpreter of Triton runs them
(TRITON_INTERPRET=1), and they are compiled for cards that are not there
(tests/unit/backends/test_triton.py).
"""
