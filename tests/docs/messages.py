"""What the package says to an operator when something is wrong: errors that it raises, and warnings that it logs."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "pvrdma_server"
# What ends on a terminal, in a log or in the journal with its text. A GuestError is counted and logged by its kind.
RAISED = {
    "BackendError",
    "BadParameter",
    "ClickException",
    "ConfigError",
    "RefusedRequest",
    "TransportError",
    "UsageError",
    "_BadValue",
}
# What --check finds: subject, text, advice.
FOUND = {"_error", "_warning"}
LOGGED = {"warning", "error", "critical", "exception"}
# Shorter pieces of a text with holes are found everywhere.
_MIN_LETTERS = 4


class Message(NamedTuple):
    """One message: `words` are its longest piece without a hole."""

    words: str
    where: str

    @property
    def in_text(self) -> str:
        return squeezed(self.words)


def squeezed(text: str) -> str:
    """A text without what Markdown or a line's end may change."""
    return " ".join(text.replace("`", "").split())


def _pieces(node: ast.AST) -> Iterator[str]:
    """The literal pieces of an expression's text; what is inside a hole's own expression is not text."""
    if isinstance(node, ast.Constant):
        if isinstance(node.value, str):
            yield node.value
    elif isinstance(node, ast.JoinedStr):
        for part in node.values:
            if isinstance(part, ast.Constant):
                yield str(part.value)
    elif isinstance(node, ast.BinOp):
        yield from _pieces(node.left)
        yield from _pieces(node.right)
    elif isinstance(node, ast.IfExp):
        yield from _pieces(node.body)
        yield from _pieces(node.orelse)


def _longest(nodes: list[ast.expr]) -> str | None:
    pieces = [piece.strip(" :;,.(") for node in nodes for piece in _pieces(node)]
    best = max(pieces, key=len, default="")
    return best if sum(letter.isalpha() for letter in best) >= _MIN_LETTERS else None


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _words(call: ast.Call) -> str | None:
    name = _name(call.func)
    if name in RAISED:
        return _longest(call.args)
    if name in FOUND and len(call.args) == len(("subject", "text", "advice")):
        return _longest(call.args[1:2])
    if name == "fail" and isinstance(call.func, ast.Attribute):
        # click's, of a type of parameter
        return _longest(call.args[:1])
    # Helpers that log once, or so many times, have these names everywhere.
    literals = [_literal(node) for node in call.args[:2]]
    if literals and (name == "_tell" or (name == "_report" and literals[0] in LOGGED)):
        return literals[-1]
    if name == "_warn" or (name in LOGGED and isinstance(call.func, ast.Attribute)):
        return literals[0] if literals else None
    return None


def _literal(node: ast.expr) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def _kind(node: ast.ClassDef) -> str | None:
    """The name under which a GuestError is counted and logged."""
    for item in node.body:
        if isinstance(item, ast.Assign) and _name(item.targets[0]) == "kind":
            return _literal(item.value)
    return None


def messages_of(tree: ast.AST) -> list[tuple[str, int]]:
    """The messages of one module, each with its line."""
    found = []
    for node in ast.walk(tree):
        words = None
        if isinstance(node, ast.Call):
            words = _words(node)
        elif isinstance(node, ast.ClassDef):
            words = _kind(node)
        if words:
            found.append((words, getattr(node, "lineno", 0)))
    return found


def messages() -> list[Message]:
    """Every message of the package, in the order of the files."""
    return [
        Message(words, f"{path.relative_to(ROOT)}:{line}")
        for path in sorted(PACKAGE.rglob("*.py"))
        if not path.name.endswith("_build.py")
        for words, line in messages_of(ast.parse(path.read_text()))
    ]
