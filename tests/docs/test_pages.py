"""The pages: every relative link leads somewhere, every page is in the site's navigation and in the README."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
TOP = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.M | re.S)
_HEADING = re.compile(r"^#+ (.+)$", re.M)


def links(page: Path) -> list[str]:
    found = _LINK.findall(_CODE.sub("", page.read_text()))
    return [link for link in found if "://" not in link and not link.startswith("mailto:")]


def anchors(page: Path) -> set[str]:
    """What a forge and mkdocs make of a page's headings."""
    headings = _HEADING.findall(re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S))
    return {
        re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower()).strip().replace(" ", "-")
        for heading in headings
    }


@pytest.mark.parametrize("page", [*PAGES, *TOP], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name}: {link}: there is no {target}"
        assert target.is_relative_to(ROOT), f"{page.name}: {link} leads out of the repository"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{page.name}: {link}: no such heading"


def navigation() -> list[str]:
    """The pages in mkdocs.yml, whose navigation has one page a line."""
    text = (ROOT / "mkdocs.yml").read_text()
    return re.findall(r"^ +- [^:\n]+: ([\w-]+\.md)$", text.partition("\nnav:\n")[2], re.M)


def test_the_site_has_every_page_once() -> None:
    assert sorted(navigation()) == [page.name for page in PAGES]


def test_links_within_the_site_stay_in_it() -> None:
    """mkdocs serves docs/ only: what is outside has to be named, not linked."""
    for page in PAGES:
        for link in links(page):
            assert not link.startswith(".."), f"{page.name}: {link} leads out of docs/"


def test_the_readme_leads_to_every_page() -> None:
    linked = {link.partition("#")[0] for link in links(ROOT / "README.md")}
    missing = [page.name for page in PAGES if f"docs/{page.name}" not in linked]
    assert not missing
