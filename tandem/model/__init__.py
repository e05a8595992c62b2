"""Models: transformers, unmodified, with one attention function for both phases."""
