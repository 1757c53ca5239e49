"""The documentation as a site: no warnings, every public name in the reference, and no broken links."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

import pytest

import pagemill
from tests.conftest import ROOT
from tests.monitoring.prometheus_server import alerts

pytestmark = pytest.mark.slow


class Page(HTMLParser):
    """The ids and the links of one page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if given.get("id"):
            self.ids.add(str(given["id"]))
        if tag == "a" and given.get("href"):
            self.links.append(str(given["href"]))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if find_spec("mkdocs") is None or find_spec("mkdocstrings") is None:
        pytest.skip("mkdocs is not installed; it is in the docs extra")
    target = tmp_path_factory.mktemp("site")
    # Without --quiet: it hides warnings before --strict counts them.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}


def missing(pages: dict[Path, Page], site: Path) -> Iterator[str]:
    for path, page in pages.items():
        if path.name == "404.html":
            continue  # its links start at the site's root
        for link in page.links:
            address, fragment = urldefrag(link)
            if urlsplit(address).scheme or address.startswith("//"):
                continue
            target = (path.parent / unquote(address)).resolve() if address else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists() or (
                fragment and target in pages and unquote(fragment) not in pages[target].ids
            ):
                yield f"{path.relative_to(site)}: {link}"


def test_every_link_leads_somewhere(pages: dict[Path, Page], site: Path) -> None:
    assert list(missing(pages, site)) == []


def test_every_public_name_is_in_the_reference(pages: dict[Path, Page], site: Path) -> None:
    ids = {name for path, page in pages.items() if "reference" in path.parts for name in page.ids}
    documented = {name.rpartition(".")[2] for name in ids if name.startswith("pagemill.")}
    assert sorted(set(pagemill.__all__) - documented) == []


def test_the_runbook_of_every_alert_is_there(pages: dict[Path, Page], site: Path) -> None:
    for alert in alerts():
        path, fragment = re.findall(r"\}\}(\w+)/#(\w+)$", alert.annotations["runbook_url"])[0]
        assert fragment in pages[site / path / "index.html"].ids
