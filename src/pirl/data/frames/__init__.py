"""Frames decoded once: a cache on disk, by content, and what reads it."""
