"""Takes pictures of the README, as a code host shows it, and of pages of the built site.

    make docs && python docs/figures/make_screenshots.py

Needs Chromium. The README is drawn in a plain style of the width that code hosts use; 1280 x 800 is what a
visitor sees first.
"""

import io
import sys
import tempfile
from pathlib import Path

from markdown_it import MarkdownIt
from PIL import Image

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "tests/house/site"))

import browser  # noqa: E402

WIDTH, HEIGHT = 1280, 800
SITE = ROOT / "build/site"
PAGES = {
    "site-start": "docs/README.html",
    "site-how-to": "docs/how-to/find-the-slow-side.html",
    "site-search": "search.html?q=out+of+memory",
    "site-api": "docs/reference/api/producer.html",
}
STYLE = """
body { max-width: 980px; margin: 0 auto; padding: 32px; color: #1f2328; background: #fff;
       font: 16px/1.5 -apple-system, "Segoe UI", "Noto Sans", Helvetica, Arial, sans-serif; }
h1, h2 { border-bottom: 1px solid #d1d9e0; padding-bottom: .3em; margin: 24px 0 16px; line-height: 1.25; }
h1 { font-size: 2em; margin-top: 0 } h2 { font-size: 1.5em }
p, ul, ol, table, pre { margin: 0 0 16px }
a { color: #0969da; text-decoration: none } img { max-width: 100% }
code { font: 85% ui-monospace, "DejaVu Sans Mono", monospace; background: #818b981f; padding: .2em .4em;
       border-radius: 6px }
pre { background: #f6f8fa; padding: 16px; border-radius: 6px; overflow: auto; line-height: 1.45 }
pre code { background: none; padding: 0 }
table { border-collapse: collapse; display: block; overflow: auto }
th, td { border: 1px solid #d1d9e0; padding: 6px 13px } tr:nth-child(2n) td { background: #f6f8fa }
"""


def main() -> None:
    """Writes readme-first-screen.png and site-*.png."""
    readme()
    with browser.served(SITE) as address:
        for name, page in PAGES.items():
            picture(f"{address}/{page}", name, scale=0.6)


def readme() -> None:
    """Draws the README's first screen."""
    body = MarkdownIt("commonmark").enable("table").render((ROOT / "README.md").read_text())
    html = f'<!doctype html><meta charset="utf-8"><base href="{ROOT.as_uri()}/"><style>{STYLE}</style>{body}'
    with tempfile.NamedTemporaryFile("w", suffix=".html") as page:
        page.write(html)
        page.flush()
        picture(Path(page.name).as_uri(), "readme-first-screen", scale=1)


def picture(url: str, name: str, scale: float) -> None:
    """Writes a PNG of 64 colours of a page's first screen."""
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "page.png"
        browser.screenshot(url, raw, WIDTH, HEIGHT)
        image = Image.open(io.BytesIO(raw.read_bytes())).convert("RGB")
    if scale != 1:
        image = image.resize((round(WIDTH * scale), round(HEIGHT * scale)), Image.Resampling.LANCZOS)
    path = HERE / f"{name}.png"
    image.quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)
    print(path, f"{path.stat().st_size / 1024:.0f} KiB")


if __name__ == "__main__":
    main()
