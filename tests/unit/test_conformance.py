"""docs/conformance.md says about rdma-core's tests what the list says that the guest tests compare with."""

import re
from pathlib import Path

from vm.rdma_core import expected, markdown

DOCUMENT = Path(__file__).parents[2] / "docs" / "conformance.md"


def test_the_document_is_what_the_list_makes() -> None:
    """After a change of the list, put what `markdown` returns between the two marks."""
    text = DOCUMENT.read_text()
    between = re.search(r"<!-- rdma-core: begin -->\n(.*)<!-- rdma-core: end -->", text, re.DOTALL)
    assert between is not None
    assert between[1] == markdown(expected())


def test_every_test_is_listed_once_and_every_group_has_a_reason() -> None:
    want = expected()
    names = [*want.passed, *(name for group in want.groups for name in group.tests)]
    assert len(names) == len(set(names))
    for group in want.groups:
        assert group.tests, group.name
        assert group.why.endswith("."), group.name
        assert group.outcome in ("skipped", "failed")


def test_the_files_that_the_document_names_exist() -> None:
    text = DOCUMENT.read_text()
    root = DOCUMENT.parents[1]
    for row in re.findall(r"^\|.*\|$", text, re.MULTILINE):
        folder = root
        for name in re.findall(r"`((?:tests/|test_)[\w/]*(?:\.py)?)`", row):
            if name.startswith("tests/"):
                folder = (root / name).parent
                assert (root / name).exists(), name
            elif name.endswith(".py"):
                assert (folder / name).exists(), name
