"""Time a model takes: what `bench` measures, and each kernel beside a plain read."""
