"""What several algorithms share: grids, error feedback, rounding, factorisations, and what an error costs."""
