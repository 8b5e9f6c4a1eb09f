"""The README and the changelog as pages; links out of docs/ as links to the repository; formulas as MathML.

Browsers set MathML themselves, so that a page needs no script from elsewhere.
"""

from __future__ import annotations

import html
import posixpath
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
GENERATED = {"index.md": "README.md", "changes.md": "CHANGELOG.md"}
"""Page of the site: the file of the repository that it shows."""


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that are not in docs/."""
    for page, source in GENERATED.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links relative to the file in the repository become links of the site, or to the repository."""
    name = page.file.src_uri
    folder = "" if name in GENERATED else posixpath.dirname(f"docs/{name}")
    return re.sub(r"(\]\()([^)\s:#]+)([^)\s]*\))", lambda link: moved(link, folder, name, config.repo_url), markdown)


def moved(link: re.Match[str], folder: str, page: str, repository: str) -> str:
    """A link of a page whose file is in a folder of the repository."""
    before, target, after = link.groups()
    path = posixpath.normpath(posixpath.join(folder, target))
    for own, source in GENERATED.items():
        path = f"docs/{own}" if path == source else path
    if path.startswith("docs/"):
        return f"{before}{posixpath.relpath(path.removeprefix('docs/'), posixpath.dirname(page) or '.')}{after}"
    kind = "tree" if (ROOT / path).is_dir() else "blob"
    return f"{before}{repository}/{kind}/main/{path}{after}"


def on_page_content(content: str, page: Any, config: Any, files: Files) -> str:
    """Formulas, which arithmatex puts between `\\(` and `\\)` or `\\[` and `\\]`."""
    marked = r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>'
    return re.sub(
        marked, lambda found: set_formula(html.unescape(found[2]), found[1] == "div"), content, flags=re.DOTALL
    )


def set_formula(latex: str, display: bool) -> str:
    """A formula as MathML; a wide one on a line of its own scrolls."""
    if display:
        return f'<div style="overflow-x: auto">{convert(latex, display="block")}</div>'
    return str(convert(latex))
