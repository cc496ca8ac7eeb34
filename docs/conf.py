"""Sphinx: `make docs` builds these pages into build/docs; every warning is an error."""

import asyncloader

project = "asyncloader"
author = "The asyncloader authors"
release = asyncloader.__version__
html_title = f"asyncloader {release}"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["images"]

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4  # links to headings, in the spelling of GitHub's

autodoc_typehints = "none"  # they are in the signatures
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}
autoclass_content = "class"
napoleon_use_ivar = True

html_theme = "furo"
html_show_sphinx = False
