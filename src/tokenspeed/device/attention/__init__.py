"""Paged attention over a ragged batch."""
