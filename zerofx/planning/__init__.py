"""Foresees memory, bytes and time of training on hardware that is not at hand."""
