"""The site in a real browser: `make docs-test`. It reads build/site and opens nothing from elsewhere.

Screenshots of a few pages go to build/screenshots.
"""

from __future__ import annotations

import functools
import os
import shutil
import threading
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import urldefrag, urlsplit

import pytest

pytest.importorskip("playwright", reason="needs the environment of `make docs-test`")

from playwright.sync_api import Browser, Page, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
SITE, SHOTS = ROOT / "build" / "site", ROOT / "build" / "screenshots"
PAGES = sorted(path.relative_to(SITE).as_posix().removesuffix("index.html") for path in SITE.rglob("index.html"))
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
TERMS = {  # what people type, and a page that must be among the results
    "out of memory": "faq/", "GSPO": "faq/", "push to hub": "faq/", "accumulate gradients": "faq/",
    "use the trained model": "faq/", "FusedGRPOTrainer": "integrations/", "fused_linear_grpo_loss": "api/loss/",
    "resume": "training/", "softcap": "heads/", "top_p": "candidates/", "vLLM": "vllm/", "LoRA": "api/trainer/",
}  # fmt: skip


class Quiet(SimpleHTTPRequestHandler):
    """Files, without a line for each."""

    def log_message(self, *words: object) -> None:
        """Nothing."""


@pytest.fixture(scope="session")
def home() -> Iterator[str]:
    """The address of the site on this machine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(SITE)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """Chromium: $CHROMIUM, the system's, or playwright's own."""
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=path, args=FLAGS)


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page; what it cannot load, and errors of its scripts, fail the test."""
    page, problems = browser.new_page(viewport={"width": 1280, "height": 900}), list[str]()
    page.set_default_timeout(10_000)
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("response", lambda answer: problems.append(answer.url) if answer.status >= 400 else None)
    page.on("request", lambda request: None if _is_here(request.url) else problems.append(request.url))
    yield page
    page.close()
    assert not problems


def _is_here(url: str) -> bool:
    # the theme asks GitHub for the number of stars
    return urlsplit(url).hostname in ("127.0.0.1", "api.github.com") or url.startswith(("data:", "blob:"))


def test_all_pages_are_there() -> None:
    assert len(PAGES) > 25
    assert {"", "faq/", "training/", "vllm/", "api/loss/"} <= set(PAGES)


@pytest.mark.parametrize("place", PAGES)
def test_a_page_opens_and_its_links_lead_somewhere(page: Page, home: str, place: str) -> None:
    page.goto(home + place)
    assert page.locator("article h1").count() == 1
    assert page.locator("nav.md-nav--primary").count() == 1
    for picture in page.locator("article img").all():
        assert picture.evaluate("image => image.naturalWidth") > 0, picture.get_attribute("src")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "it scrolls sideways"
    text = page.locator("article").inner_text()
    assert "$\\" not in text, "a formula that is not set"
    for link in page.locator("a[href]").evaluate_all("links => links.map(link => link.href)"):
        address, anchor = urldefrag(link)
        if not address.startswith(home):
            assert address.startswith("https://"), link
            continue
        file = SITE / address.removeprefix(home)
        file = file / "index.html" if file.is_dir() else file
        assert file.is_file(), link
        if anchor and file.suffix == ".html":
            assert f'id="{anchor}"' in file.read_text(encoding="utf-8"), link


@pytest.mark.parametrize("term", TERMS)
def test_search_finds(page: Page, home: str, term: str) -> None:
    page.goto(home)
    page.locator("input.md-search__input").click()
    page.locator("input.md-search__input").press_sequentially(term)
    page.locator(".md-search-result__item a").first.wait_for(timeout=10_000)
    found = page.locator(".md-search-result__item a").evaluate_all("links => links.map(link => link.href)")
    assert any(urlsplit(link).path == f"/{TERMS[term]}" for link in found[:20]), found


def test_navigation_leads_to_a_page(page: Page, home: str) -> None:
    page.goto(home)
    page.locator(".md-tabs__link", has_text="API").click()
    page.wait_for_url("**/api/loss/")
    assert page.locator("article h2", has_text="fused_linear_grpo_loss").is_visible()
    assert page.locator("nav.md-nav--secondary a", has_text="GRPOLossConfig").count() > 0


def test_the_sitemap_has_every_page() -> None:
    tree = ElementTree.parse(SITE / "sitemap.xml")
    listed = {
        urlsplit(str(place.text)).path.removeprefix("/grpo-fused/") for place in tree.iter() if "loc" in place.tag
    }
    assert listed == set(PAGES)


@pytest.mark.parametrize("width", [1280, 390], ids=["desktop", "phone"])
def test_screenshots(browser: Browser, home: str, width: int) -> None:
    SHOTS.mkdir(parents=True, exist_ok=True)
    page = browser.new_page(viewport={"width": width, "height": 900})
    for place in ("", "faq/", "training/", "mathematics/", "benchmarks/", "api/loss/"):
        page.goto(home + place)
        file = SHOTS / f"{place.replace('/', '-')}{width}.png"
        page.screenshot(path=file)
        assert file.stat().st_size > 10_000
    page.close()
