"""scripts/option-docs: what is written down of options, out of the options: the manual pages, and the tables of
docs/configuration.md between its markers. A test fails when they are not as they would be written.

Standard roff (man(7)); the text around the options is here.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click

from pvrdma_lab import paths
from pvrdma_server.caps import LIMIT_NAMES, DeviceConfig
from pvrdma_server.cli import main as server
from pvrdma_server.ctl import main as ctl
from pvrdma_server.mad_hub.cli import main as mad_hub
from pvrdma_server.settings import SettingOption, make_options

CONFIGURATION: Final = paths.REPOSITORY / "docs" / "configuration.md"
MAN_FOLDER: Final = paths.REPOSITORY / "packaging" / "man"
_MARKED: Final = re.compile(r"(<!-- options -->\n).*?(<!-- end of options -->)", re.DOTALL)

_PROGRAMS: Final = {
    "pvrdma-server": (server, "serve a PVRDMA device to one virtual machine"),
    "pvrdma-ctl": (ctl, "look at a running pvrdma-server"),
    "pvrdma-mad-hub": (mad_hub, "relay connection management between VMs and the network"),
}

# Sections beside the options, by program.
_MORE: Final = {
    "pvrdma-server": {
        "SIGNALS": [
            ("SIGTERM, SIGINT", "End. The guest's device is reset first."),
            (
                "SIGHUP",
                ("Read the file of --config again. The log level is taken over; what else has changed is named in the "
                "log and needs a restart. Without --config it ends the server."),
            ),
        ],
        "ENVIRONMENT": [
            ("LISTEN_PID, LISTEN_FDS", "The listening socket of a socket unit, in place of --socket-path."),
            ("NOTIFY_SOCKET, WATCHDOG_USEC", "The server tells systemd when it is ready, alive, reloading, stopping."),
            ("JOURNAL_STREAM", "If stderr is the journal, records carry their priority."),
        ],
        "FILES": [
            ("/etc/pvrdma/VM.toml", ("The configuration of one VM's server (pvrdma-server@VM.service): the options as "
             "keys, without the dashes. The command line counts more.")),
        ],
        "EXIT STATUS": [
            ("0", "Ended as asked; with --check: it would work."),
            ("1", "It failed; the message says why. With --check: it would not work."),
            ("2", "The command line is wrong."),
            ("78", "What was asked for cannot be had, and trying again is of no use; the message says what to change."),
        ],
    },
    "pvrdma-ctl": {
        "FILES": [("/run/pvrdma/VM/status.sock", "The socket of pvrdma-server@VM.service.")],
        "EXIT STATUS": [("0", "The server answered."), ("1", "It did not, or refused; the message says why.")],
    },
}  # fmt: skip


# --- docs/configuration.md -----------------------------------------------------------------------------------------


def option_tables() -> str:
    """The tables of all settings, one per section."""
    parts = []
    section = ""
    for option in make_options():
        if option.section != section:
            section = option.section
            parts.append(
                f"\n### {section}\n\n| option | key | value | default | |\n|---|---|---|---|---|"
            )
        key = f"`{option.key}`" if option.key else "none"
        default = f"`{option.default}`" if option.default else ""
        parts.append(
            f"| `{option.opts[0]}` | {key} | {_value(option)} | {default} | {_meaning(option)} |"
        )
    parts.append("\n### Limits\n\n| name | default |\n|---|---:|")
    defaults = DeviceConfig()
    parts += [f"| `{name}` | {getattr(defaults, name)} |" for name in LIMIT_NAMES]
    return "\n".join(parts).lstrip("\n") + "\n"


def _value(option: SettingOption) -> str:
    if option.key == "limits":
        return "`NAME=VALUE`, repeated; in the file a table `[limits]`"
    kind = option.type
    if isinstance(kind, click.Choice):
        text = " or ".join(f"`{choice}`" for choice in kind.choices)
    elif isinstance(kind, click.IntRange):
        highest = f" to {kind.max}" if kind.max is not None else " or more"
        text = f"number, {kind.min}{highest}"
    else:
        text = (
            f"`{kind.name.upper()}`"
            if ":" in kind.name
            else "text"
            if kind.name == "text"
            else "path"
        )
    return f"{text}, repeated; in the file an array" if option.multiple else text


def _meaning(option: click.Option) -> str:
    return (option.help or "").replace("|", "\\|")


def configuration_page(page: str) -> str:
    """The page with its tables as they should be.

    Raises:
        ValueError: its markers are missing.
    """
    page, count = _MARKED.subn(lambda found: found[1] + option_tables() + found[2], page)
    if count != 1:
        raise ValueError(
            f"{CONFIGURATION} lacks its markers <!-- options --> and <!-- end of options -->"
        )
    return page


# --- manual pages --------------------------------------------------------------------------------------------------


def _roff(text: str) -> str:
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return "\\&" + text if text.startswith((".", "'")) else text


def _paragraphs(help_text: str | None) -> Iterator[str]:
    for number, paragraph in enumerate((help_text or "").strip().split("\n\n")):
        if number:
            yield ".PP"
        yield _roff(" ".join(paragraph.split()))


def _items(records: list[tuple[str, str]]) -> Iterator[str]:
    for term, text in records:
        yield ".TP"
        yield f".B {_roff(term)}"
        yield _roff(" ".join(text.split()))


def _option_items(ctx: click.Context) -> Iterator[str]:
    section = ""
    params = ctx.command.get_params(ctx)
    for option in sorted(params, key=lambda param: isinstance(param, SettingOption)):
        record = option.get_help_record(ctx)
        if record is None:
            continue
        if isinstance(option, SettingOption) and option.section != section:
            section = option.section
            yield f".SS {section}"
        yield from _items([record])


def _usage(ctx: click.Context) -> str:
    return _roff(" ".join(ctx.command.collect_usage_pieces(ctx)))


def man_page(name: str) -> str:
    """The manual page of one program, for section 8."""
    command, purpose = _PROGRAMS[name]
    ctx = click.Context(command, info_name=name, **command.context_settings)
    others = ", ".join(f"\\fB{_roff(other)}\\fP(8)" for other in _PROGRAMS if other != name)
    lines = [
        f'.TH {name.upper()} 8 "" "pvrdma\\-server" "System Administration"',
        ".SH NAME", f"{_roff(name)} \\- {_roff(purpose)}",
        ".SH SYNOPSIS", f".B {_roff(name)}", _usage(ctx),
        ".SH DESCRIPTION", *_paragraphs(command.help),
        ".SH OPTIONS", *_option_items(ctx),
    ]  # fmt: skip
    for word, sub in sorted(command.commands.items()):
        inner = click.Context(sub, info_name=word, parent=ctx, **sub.context_settings)
        lines += [
            f".SH COMMAND {_roff(word.upper())}",
            f".B {_roff(f'{name} {word}')}",
            _usage(inner),
            ".PP",
        ]
        lines += [*_paragraphs(sub.help), *_option_items(inner)]
    for title, records in _MORE.get(name, {}).items():
        lines += [f".SH {title}", *_items(records)]
    lines += [".SH SEE ALSO", others]
    return "\n".join(lines) + "\n"


# --- all of it -----------------------------------------------------------------------------------------------------


def documents() -> dict[Path, str]:
    """Every file that is written out of the options, as it should be."""
    pages = {MAN_FOLDER / f"{name}.8": man_page(name) for name in _PROGRAMS}
    return {CONFIGURATION: configuration_page(CONFIGURATION.read_text()), **pages}


def run() -> None:
    """Writes them."""
    if sys.argv[1:]:
        sys.exit(
            "option-docs takes no arguments; it writes docs/configuration.md and packaging/man"
        )
    for path, text in documents().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(path.relative_to(paths.REPOSITORY))
