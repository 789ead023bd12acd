"""Sphinx settings of the documentation's site, which `make docs` builds."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from sphinx.addnodes import pending_xref
from sphinx.transforms.post_transforms import SphinxPostTransform

ROOT = Path(__file__).resolve().parents[2]

project = "ElasticJob"
author = "The ElasticJob authors"
project_copyright = author
release = version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

extensions = ["myst_parser", "sphinxcontrib.mermaid"]
root_doc = "docs/site/index"
# The pages stay where the forge shows them; the site has them and no other file.
include_patterns = [
    "*.md",
    "docs/**.md",
    "bench/README.md",
    "charts/elasticjob/README.md",
    "examples/digits/README.md",
]
exclude_patterns = [".*", "build", "dist"]
source_suffix = {".md": "markdown"}

myst_enable_extensions = ["colon_fence"]
myst_fence_as_directive = ["mermaid"]
myst_heading_anchors = 5

html_theme = "pydata_sphinx_theme"
html_title = f"ElasticJob {version}"
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "navigation_with_keys": False,
    "show_prev_next": False,
    "secondary_sidebar_items": ["page-toc"],
}


class FolderLinks(SphinxPostTransform):
    """Text in place of a link to a folder, which the forge shows and the site does not have.

    It runs before MyST resolves its references, at priority 9.
    """

    default_priority = 8

    def run(self, **_: Any) -> None:
        for link in list(self.document.findall(pending_xref)):
            page = ROOT / link.get("refdoc", "")
            if link["reftype"] == "myst" and (page.parent / link["reftarget"]).is_dir():
                link.replace_self(link.children)


def setup(app: Any) -> None:
    """Register the transform of this file."""
    app.add_post_transform(FolderLinks)
