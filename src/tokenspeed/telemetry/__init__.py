"""Metrics and logging. Nothing here may make a round or a request wait."""
