"""Messages to a prompt, by the model's own Jinja template."""

from __future__ import annotations
