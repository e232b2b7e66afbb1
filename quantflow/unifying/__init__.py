"""Stage 3: several ranks become fewer; measurements are merged, quantized shards joined."""
