"""Sphinx: ``sphinx-build -W docs OUT``. tools/test.sh builds it, and so does Read the Docs (.readthedocs.yaml)."""

from xhf_hooks.system.versions import __version__

project = 'xhf_hooks'
author = 'The xhf_hooks authors'
copyright = f'2026, {author}'
release = __version__

extensions = ['myst_parser', 'sphinx.ext.autodoc', 'sphinx.ext.napoleon']
html_theme = 'furo'
html_static_path = ['_static']
html_css_files = ['wide.css']
smartquotes = False  # 'continue' is a value to copy
# Included by other pages
exclude_patterns = ['_build', 'bench/*.md']
html_title = f'xhf_hooks {release}'

# A link to a heading that is not there is a warning, and a warning is an error
myst_heading_anchors = 4
nitpicky = False

autodoc_member_order = 'bysource'
autodoc_typehints = 'description'
# Axolotl cannot be installed beside the rest
autodoc_mock_imports = ['axolotl']
napoleon_include_init_with_doc = False
