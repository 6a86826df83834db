"""A hook of mkdocs: the notebooks, as they are committed with their outputs, become pages of the site."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import nbformat
from mkdocs.structure.files import File, Files
from nbformat import NotebookNode

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
_IMAGES = {"image/png": "png", "image/svg+xml": "svg"}


def on_files(files: Files, *, config: Any) -> Files:
    for path in sorted(NOTEBOOKS.glob("[0-9]*.ipynb")):
        text, images = page_of(nbformat.read(path, as_version=4), path.stem)
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))
        for name, content in images.items():
            files.append(File.generated(config, f"notebooks/{name}", content=content))
    return files


def page_of(notebook: NotebookNode, stem: str) -> tuple[str, dict[str, bytes]]:
    """The notebook as Markdown, and its pictures by the names under which it shows them."""
    parts, images = [], {}
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        for output in cell.outputs:
            data = output.get("data", {})
            kind = next((k for k in _IMAGES if k in data), None)
            if kind is None:
                text = output.get("text") or data.get("text/plain", "")
                parts.append(f"```text\n{text.rstrip()}\n```")
                continue
            name = f"{stem}-{len(images)}.{_IMAGES[kind]}"
            images[name] = base64.b64decode(data[kind]) if kind == "image/png" else data[kind].encode()
            parts.append(f"![What the code above draws]({name})")
    return "\n\n".join(parts) + "\n", images
