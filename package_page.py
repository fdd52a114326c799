"""README.md as the long description: a package page has none of the files that it links to."""

import re
import tomllib
from pathlib import Path

CODE_OR_RELATIVE_LINK = re.compile(r"```.*?```|(!?)\[([^]]*)\]\((?!\w+:)([^)\s]+)\)|`[^`\n]+`", re.DOTALL)


def repository() -> str | None:
    """The project's own URL, if pyproject.toml names one."""
    project = tomllib.loads(Path(__file__).with_name("pyproject.toml").read_text())["project"]
    url: str | None = project.get("urls", {}).get("Repository")
    return url and url.rstrip("/")


def package_page(text: str, url: str | None) -> str:
    """Relative links and images are absolute, under `url`; without one links are text, images left out."""

    def absolute(found: re.Match[str]) -> str:
        image, label, path = found.groups()
        if path is None:
            return found[0]  # code
        if url is None:
            return "" if image else label
        path = f"README.md{path}" if path.startswith("#") else path
        return f"{image}[{label}]({url}/{'raw' if image else 'blob'}/HEAD/{path})"

    return CODE_OR_RELATIVE_LINK.sub(absolute, text)
