"""Every error and warning of the package stands in docs/troubleshooting.md."""

import ast

import pytest
from docs.messages import ROOT, Message, messages, messages_of, squeezed

PAGE = ROOT / "docs" / "troubleshooting.md"
TEXT = squeezed(PAGE.read_text())


@pytest.mark.parametrize("message", messages(), ids=lambda message: message.where)
def test_it_is_explained(message: Message) -> None:
    assert message.in_text in TEXT, (
        f"{message.where} says {message.words!r}, and docs/troubleshooting.md does not: add a row that says what it "
        "means and what to do (… stands for a part that varies)"
    )


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ('raise ConfigError(f"file {path}: is quite bad, {why}")', ": is quite bad,"),
        ('raise BackendError(EINVAL, "reg_mr", f"{n} bytes") from e', "reg_mr"),
        ('raise click.UsageError("one " "of them")', "one of them"),
        ('self._log.warning("an_event", value=1)', "an_event"),
        ('self._report("error", "another_event", why=why)', "another_event"),
        ('raise RefusedRequest("not today")', "not today"),
        ('yield _error(subject, f"it is {x} so", "do that")', "it is"),
        ('class Odd(GuestError):\n    kind = "odd_thing"', "odd_thing"),
    ],
)
def test_what_counts_as_a_message(code: str, words: str) -> None:
    assert [found for found, _ in messages_of(ast.parse(code))] == [words.strip(" :;,.(")]
