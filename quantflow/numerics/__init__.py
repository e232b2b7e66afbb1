"""Mathematics of several algorithms: grids, error feedback, rounding, factorisations, errors."""
