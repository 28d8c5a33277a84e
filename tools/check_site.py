"""Checks a built site: nothing is loaded from a network, and every local link and picture exists.

python tools/check_site.py build/site
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

LOADED = {
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
    "video": "src",
    "audio": "src",
    "embed": "src",
}
LOADING_LINKS = {
    "stylesheet",
    "icon",
    "preload",
    "prefetch",
    "modulepreload",
    "preconnect",
    "dns-prefetch",
    "manifest",
}
IN_STYLES = re.compile(r"""(?:url\(\s*|@import\s+)["']?((?:https?:)?//[^"')\s]+)""")


class Page(HTMLParser):
    """What a page loads, what it links to, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.in_style = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.in_style = tag == "style"
        self.anchors.update(found[name] for name in ("id", "name") if name in found)
        if tag in LOADED and LOADED[tag] in found:
            self.loads.append(found[LOADED[tag]])
        self.loads += [
            part.split()[0] for part in found.get("srcset", "").split(",") if part.strip()
        ]
        if tag == "link" and LOADING_LINKS & set(found.get("rel", "").split()):
            self.loads.append(found.get("href", ""))
        if tag == "object":
            self.loads.append(found.get("data", ""))
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        self.loads += IN_STYLES.findall(found.get("style", ""))

    def handle_data(self, data: str) -> None:
        if self.in_style:
            self.loads += IN_STYLES.findall(data)


def remote(address: str) -> bool:
    return address.startswith(("http:", "https:", "//"))


def problems(site: Path) -> Iterator[str]:
    """One line for each address that a page loads from a network, and for each local file or
    anchor that is missing.
    """
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    if not pages:
        yield f"{site} has no pages. Build the site first: make docs."
    for path, page in pages.items():
        name = path.relative_to(site)
        yield from (f"{name} loads {address}" for address in page.loads if remote(address))
        for address in [*page.loads, *page.links]:
            parts = urlsplit(address)
            if remote(address) or parts.scheme:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path.resolve()
            if not target.exists():
                yield f"{name}: {address} does not exist"
            elif (
                parts.fragment
                and target in pages
                and unquote(parts.fragment) not in pages[target].anchors
            ):
                yield f"{name}: {address} has no such anchor"
    for style in sorted(site.rglob("*.css")):
        for address in IN_STYLES.findall(style.read_text(encoding="utf-8")):
            yield f"{style.relative_to(site)} loads {address}"


def main() -> int:
    found = list(problems(Path(sys.argv[1]).resolve()))
    print(
        "\n".join(found)
        or f"{sys.argv[1]}: nothing is loaded from a network; every local link, picture and anchor "
        "exists."
    )
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
