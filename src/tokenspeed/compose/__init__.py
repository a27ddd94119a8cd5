"""The composition root: the only room that names concrete classes of both planes. No logic."""
