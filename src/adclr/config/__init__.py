"""Settings, recipes and the automatic choice of a recipe: pydantic and YAML only, no torch."""
