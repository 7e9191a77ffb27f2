"""Shards of tokens: their format, how they are read, made from text, and fetched."""
