"""Stage 3: several ranks become fewer. Their measurements are merged, their quantized shards joined."""
