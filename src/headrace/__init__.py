"""Headrace: a production inference server for language models on ordinary machines."""

__version__ = "0.1.0"
