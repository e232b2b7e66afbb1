"""Recipes and gates, shipped as data; `quantflow run NAME` finds a recipe by its name."""
