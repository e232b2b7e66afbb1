"""What Gaudi's toolkit reads and writes: measurements, scales, names, and QUANT_CONFIG."""
