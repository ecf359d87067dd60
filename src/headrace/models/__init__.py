"""Model files -> configuration and packed weights."""
