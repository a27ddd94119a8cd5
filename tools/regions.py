"""Parts of a document that a script writes, between comments that say so; the rest is written by hand."""

from __future__ import annotations

import re
from collections.abc import Mapping


def filled(text: str, regions: Mapping[str, str]) -> str:
    """`text` with new content in its regions, by name.

    Raises: ValueError: a region is missing, is there twice, or has no content to go in.
    """
    found = re.findall(r"^<!-- begin (\w+)[^\n]*-->$", text, re.MULTILINE)
    if sorted(found) != sorted(regions):
        raise ValueError(f"the document has the regions {sorted(found)}, the script writes {sorted(regions)}")
    for name, content in regions.items():
        pattern = rf"(^<!-- begin {name}[^\n]*-->\n).*?(^<!-- end {name} -->$)"
        text = re.sub(
            pattern, lambda m, c=content: f"{m[1]}\n{c.strip()}\n\n{m[2]}", text, flags=re.MULTILINE | re.DOTALL
        )
    return text


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table of Markdown; bars in cells are escaped."""
    lines = [head, ("---",) * len(head), *(tuple(cell.replace("|", "\\|") for cell in row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
