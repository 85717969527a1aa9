"""The configuration: the file's errors, what counts more than what, and that its documentation is as it is."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from pvrdma_lab.option_docs import documents

from pvrdma_server.capabilities import capabilities
from pvrdma_server.cli import main
from pvrdma_server.config import (
    merge,
    needs_restart,
    node_guid_of,
    read_file,
    server_config,
)
from pvrdma_server.errors import ConfigError
from pvrdma_server.gid_sync import Policy
from pvrdma_server.parts import RelayConfig
from pvrdma_server.settings import Settings, make_options

EVERYTHING = """
socket-path = "/run/pvrdma/vm1.sock"
status-socket = "/run/pvrdma/vm1.status"
metrics-socket = "/run/pvrdma/vm1.metrics"
metrics-listen = "[::1]:9745"
name = "first"
roce-version = 1
doorbells = "trapped"
backend = "soft"
fabric = "/run/pvrdma/fabric"
fabric-uids = [107, 64055]
ibport = 2
gid-policy = "add"
state-dir = "/"
ibdev = "mlx5_2"
mad-hub = "/run/pvrdma/hub.sock"
old-mux = "/run/rdmacm-mux/hub.sock"
log-level = "debug"
log-format = "json"

[limits]
max_qp = 512
max_sge = 4
"""


def toml(folder: Path, text: str) -> Path:
    path = folder / "vm1.toml"
    path.write_text(text)
    return path


def test_every_key_is_read(tmp_path: Path) -> None:
    settings = merge(read_file(toml(tmp_path, EVERYTHING)), {})
    assert settings.metrics_listen == ("::1", 9745)
    assert settings.fabric_uids == (107, 64055)
    assert dict(settings.limits) == {"max_qp": 512, "max_sge": 4}
    in_file = {field.name for field in fields(Settings) if field.metadata["in_file"]}
    assert read_file(toml(tmp_path, EVERYTHING)).keys() == in_file
    same_as_default = {
        field.name for field in fields(Settings) if getattr(settings, field.name) == field.default
    }
    assert same_as_default == {"fd", "backend"}


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('backend = "hard"', "backend = \"hard\": 'hard' is not one of 'soft', 'ibv'"),
        ('ibport = "1"', 'ibport = "1": an integer is wanted'),
        ("ibport = true", "ibport = true: an integer is wanted"),
        ("ibport = 0", "ibport = 0: 0 is not in the range 1<=x<=255"),
        ("name = 1", "name = 1: a string is wanted"),
        ('name = ""', 'name = "": at least one character is wanted'),
        ('socket-path = ""', 'socket-path = "": at least one character is wanted'),
        ('fabric = "a\\u0000"', 'fabric = "a\\u0000": at least one character is wanted, and no zero byte'),
        ("roce-version = 3", "roce-version = 3: 3 is not in the range 1<=x<=2"),
        ("fabric-uids = 5", "fabric-uids = 5: an array is wanted, of integers"),
        ('fabric-uids = ["root"]', 'fabric-uids = "root": an integer is wanted'),
        ("ibdve = 1", "ibdve = 1: there is no key of that name (did you mean ibdev?); there are socket-path, "),
        ("socket_path = 1", "(did you mean socket-path?)"),
        ("fd = 3", "fd = 3: there is no key of that name"),
        ("config = 'x'", 'config = "x": there is no key of that name'),
        ("limits = 1", "limits = 1: a table is wanted: [limits]"),
        ("[limits]\nmax_pq = 1", "limits.max_pq = 1: there is no limit of that name (did you mean max_qp?)"),
        ('[limits]\nmax_qp = "1"', 'limits.max_qp = "1": an integer from 1 to'),
        ("[limits]\nmax_qp = 0", "limits.max_qp = 0: an integer from 1 to 4294967295 is wanted"),
        ('state-dir = "/not/there"', "state-dir = \"/not/there\": Directory '/not/there' does not exist"),
        ('metrics-listen = "0.0.0.0:80"', "127.0.0.1:PORT or [::1]:PORT, nothing else is served"),
        ('metrics-listen = "127.0.0.1:65536"', "nothing else is served"),
    ],
)  # fmt: skip
def test_an_error_names_file_key_value_and_what_is_allowed(
    tmp_path: Path, text: str, complaint: str
) -> None:
    path = toml(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_file(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert complaint in str(caught.value)


def test_all_errors_are_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_file(
            toml(
                tmp_path, "ibport = 0\nfabric-uids = [-1, 'x', 2]\n[limits]\nmax_qp = -1\nmax_q = 5"
            )
        )
    assert len(str(caught.value).splitlines()) == 5


@pytest.mark.parametrize("text", [b"backend =", b"\xff\xfe", b"a = 1\na = 2"])
def test_what_is_no_toml_is_said_so(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "vm1.toml"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match="is not TOML"):
        read_file(path)


def test_no_file_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.toml: No such file"):
        read_file(tmp_path / "none.toml")
    for path, why in ((tmp_path / "none.toml", "No such file"), (tmp_path, "Is a directory")):
        result = run("--config", str(path))
        assert (result.exit_code, f"configuration file {path}: {why}" in result.output) == (
            78,
            True,
        )


# --- command line and file -----------------------------------------------------------------------------------------


def run(*words: str) -> Result:
    return CliRunner().invoke(main, words)


def test_the_command_line_counts_more_and_limits_one_by_one() -> None:
    file = {"backend": "soft", "name": "a", "limits": (("max_qp", 1), ("max_sge", 2))}
    settings = merge(file, {"name": "b", "limits": (("max_sge", 3), ("max_cq", 4))})
    assert (settings.backend, settings.name, settings.ibport) == ("soft", "b", 1)
    assert dict(settings.limits) == {"max_qp": 1, "max_sge": 3, "max_cq": 4}


def test_an_option_given_with_its_default_value_counts_too(tmp_path: Path) -> None:
    path = toml(tmp_path, 'socket-path = "/nowhere/x"\nbackend = "ibv"\n')
    assert "needs --ibdev" in run("--config", str(path), "--check").output
    assert "needs --ibdev" not in run("--config", str(path), "--backend", "soft", "--check").output


TOGETHER: list[tuple[dict[str, Any], str]] = [
    ({}, "nowhere to listen"),
    ({"socket_path": "/x", "fd": 3}, "exclude each other"),
    ({"socket_path": "/x", "backend": "ibv"}, "--backend ibv needs --ibdev"),
    ({"socket_path": "/x", "ibdev": "rxe0"}, "--ibdev is for --backend ibv, this is --backend soft"),
    ({"socket_path": "/x", "gid_policy": "add"}, "--gid-policy is for --backend ibv"),
    ({"socket_path": "/x", "state_dir": "/"}, "--state-dir is for --backend ibv"),
    ({"socket_path": "/x", "mad_hub": "/h"}, "--mad-hub is for --backend ibv"),
    ({"socket_path": "/x", "backend": "ibv", "ibdev": "rxe0", "mad_hub": "/h", "old_mux": "/m"},
     "--mad-hub and --old-mux exclude each other"),
    ({"socket_path": "/x", "fabric_uids": (1,)}, "give --fabric FOLDER"),
    ({"socket_path": "/x", "backend": "ibv", "ibdev": "rxe0", "fabric": "/f"}, "--fabric is for --backend soft"),
]  # fmt: skip


@pytest.mark.parametrize(("values", "complaint"), TOGETHER)
def test_settings_that_do_not_go_together(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        server_config(Settings(**values))
    assert complaint in str(caught.value)


def test_the_servers_form_of_everything(tmp_path: Path) -> None:
    file = tmp_path / "vm7.toml"
    settings = Settings(
        socket_path="/s", backend="ibv", ibdev="rxe0", ibport=2, gid_policy="add",
        state_dir="/var/lib/pvrdma", mad_hub="/hub", limits=(("max_qp", 100_000), ("max_sge", 5)),
    )  # fmt: skip
    config = server_config(settings, file)
    assert (config.soft.name, config.soft.node_guid) == ("vm7", node_guid_of("vm7"))
    assert (config.device.max_qp, config.device.max_sge) == (65535, 4)
    assert config.soft.max_qp == 65535
    assert config.host is not None
    assert (config.host.device, config.host.port, config.host.gid_policy) == ("rxe0", 2, Policy.ADD)
    marker = Path("/var/lib/pvrdma") / f"gids-{node_guid_of('vm7').hex()}.json"
    assert config.host.gid_marker == marker
    assert config.host.relay == RelayConfig(mad_hub="/hub")


def test_the_name_is_the_given_one_the_files_or_the_sockets(tmp_path: Path) -> None:
    file = tmp_path / "vm7.toml"
    assert server_config(Settings(socket_path="/s", name="n"), file).soft.name == "n"
    assert server_config(Settings(socket_path="/s"), file).soft.name == "vm7"
    assert server_config(Settings(socket_path="/s")).soft.name == "/s"


def test_what_needs_a_restart() -> None:
    before = Settings(socket_path="/s", log_level="info")
    assert needs_restart(before, Settings(socket_path="/s", log_level="debug")) == []
    after = Settings(socket_path="/t", fabric="/f", log_level="debug")
    assert needs_restart(before, after) == ["socket-path", "fabric"]


def test_options_before_a_command_are_refused() -> None:
    result = run("--backend", "soft", "status", "/x")
    assert result.exit_code == 2
    assert "options of status stand after its name" in result.output


def test_the_files_keys_are_named_in_errors_of_combinations(tmp_path: Path) -> None:
    path = toml(tmp_path, 'backend = "ibv"\nsocket-path = "/x"')
    result = run("--config", str(path))
    assert result.exit_code == 78
    assert f"keys of {path} have the same names" in result.output


@pytest.mark.parametrize(
    ("text", "findings"),
    [
        ("ibport = 0\nname = 1\nsocket-path = '/x'", ["ibport = 0: ", "name = 1: "]),
        ("", ["nowhere to listen: "]),
        ("socket-path = '/x'\n[limits]\nmax_qp = 1", ["max_qp 1 is not in 3..65535 (keys of "]),
    ],
)
def test_check_reports_a_wrong_file_as_findings(
    tmp_path: Path, text: str, findings: list[str]
) -> None:
    result = run("--config", str(toml(tmp_path, text)), "--check")
    lines = result.stdout.splitlines()
    assert (result.exit_code, len(lines)) == (1, len(findings))
    for line, finding in zip(lines, findings, strict=True):
        assert line.startswith("error   configuration: ")
        assert finding in line
        assert line.endswith("; see docs/configuration.md")


# --- documentation -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_documents_are_as_the_options_are(path: Path) -> None:
    assert path.read_text() == documents()[path], "run scripts/option-docs"


def test_help_has_every_option_in_its_section() -> None:
    text = run("--help").output
    sections = {block.partition(":\n")[0].strip(): block for block in text.split("\n\n")}
    for option in make_options():
        assert option.opts[0] in sections[option.section]
    for other in ("--config", "--check", "--print-capabilities", "--version"):
        assert other in sections["Options"]


def test_print_capabilities() -> None:
    result = run("--print-capabilities")
    assert result.exit_code == 0
    found = capabilities()
    assert '"type": "pvrdma"' in result.output
    assert {option.opts[0] for option in make_options()} == set(found["options"])
    assert found["limits"]["max_qp"] == {"default": 4096, "maximum": 65535}
    assert found["limits"]["max_qp_wr"] == {"default": 16384, "maximum": 131072}
    assert {"config-file", "fd", "socket-activation", "watchdog", "metrics"} <= set(found["features"])  # fmt: skip


@pytest.mark.parametrize("words", ["--back", "--metrics-l", "qemu"])
def test_a_shell_completes(words: str) -> None:
    env = {"_MAIN_COMPLETE": "bash_complete", "COMP_WORDS": f"main {words}", "COMP_CWORD": "1"}
    output = CliRunner(env=env).invoke(main, prog_name="main").output
    assert output.startswith(f"plain,{words}")
