"""The site of the documentation: every Markdown page of the repository, at the path that it has there.

The source is the repository's root, so that a relative link means the same on the site as in the repository.
Build it with `make docs`.
"""

import logging
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path[:0] = [str(ROOT), str(DOCS / "_ext")]

import shmbridge  # noqa: E402

project = "shmbridge"
copyright = "the authors of shmbridge, Apache-2.0"
release = version = shmbridge.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "navigation",
    "repository_files",
    "search_words",
    "docstrings",
]
root_doc = "docs/README"
include_patterns = ["*.md", "docs/**.md", "bench/**.md", "examples/**.md"]
exclude_patterns = ["docs/model/check.sh"]
html_theme = "furo"
html_title = "shmbridge"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_search_scorer = str(DOCS / "_static/scorer.js")
html_copy_source = False
html_show_sphinx = False
html_last_updated_fmt = None
highlight_language = "none"
pygments_style = "default"
pygments_dark_style = "github-dark"

myst_enable_extensions = ["html_image"]
myst_heading_anchors = 4

default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
# Trainers that are installed in environments of their own.
logging.getLogger("shmbridge").setLevel(logging.ERROR)  # their releases are not the tested ones
autodoc_mock_imports = [
    "gem",
    "hydra",
    "openenv",
    "ray",
    "roll",
    "skyrl",
    "transfer_queue",
    "trl",
    "verl",
    "vllm",
]
autodoc_typehints = "signature"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
napoleon_numpy_docstring = False
