"""The commands of docs/quick-start.md, for the image and the tests that follow it word for word."""

import re

from pvrdma_lab import paths

PAGE = paths.REPOSITORY / "docs" / "quick-start.md"
_SECTION = re.compile(r"^## (.+?)\n(.*?)(?=^## |\Z)", re.M | re.S)
_BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.M | re.S)
_PACKAGES = re.compile(r"apt-get install -y (.+)$", re.M)


def blocks(section: str) -> list[str]:
    """Returns the shell blocks of one section, in order.

    Raises:
        KeyError: the page has no such section.
    """
    return _BLOCK.findall(dict(_SECTION.findall(PAGE.read_text()))[section])


def packages() -> list[str]:
    """Returns the Debian packages that the page's one line installs."""
    (line,) = (match[1] for block in blocks("Install") for match in _PACKAGES.finditer(block))
    return line.split()
