"""What a template's name means, and what bubblewrap is told of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from venusrl.sandboxes.protocol import TemplateNotFound
from venusrl.sandboxes.runtimes.namespace import bwrap
from venusrl.sandboxes.runtimes.namespace.bwrap import Bind, Descriptors, View
from venusrl.sandboxes.templates import roots as templates

FDS = Descriptors(status=5, seccomp=6, userns=7)
VIEW = View((Bind("/usr", "/usr"), Bind("/s/work", "/work", writable=True)), (("usr/bin", "/bin"),))


def test_host_is_always_there() -> None:
    assert templates.resolve("host") == templates.Template(directory=None, user=1000)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("ubuntu", "absolute path"),
        ("rel/ative", "absolute path"),
        ("/no/such/root", "not a directory"),
        ("/", 'use "host"'),
        ("", "absolute path"),
    ],
)
def test_what_is_not_a_template_says_what_is(name: str, says: str) -> None:
    with pytest.raises(TemplateNotFound, match=says):
        templates.resolve(name)


def test_a_root_file_system_needs_a_shell(tmp_path: Path) -> None:
    with pytest.raises(TemplateNotFound, match="no /bin/sh"):
        templates.resolve(str(tmp_path))
    (tmp_path / "usr/bin").mkdir(parents=True)
    (tmp_path / "bin").symlink_to("/usr/bin")
    with pytest.raises(TemplateNotFound, match="no /bin/sh"):
        templates.resolve(str(tmp_path))
    (tmp_path / "usr/bin/dash").write_text("")
    (tmp_path / "usr/bin/sh").symlink_to("dash")
    assert templates.resolve(str(tmp_path)).directory == str(tmp_path)


def test_a_shell_outside_the_root_is_none(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/sh").symlink_to("../../../../../../../../bin/true")
    with pytest.raises(TemplateNotFound, match="no /bin/sh"):
        templates.resolve(str(tmp_path))


def test_only_listed_files_of_etc_are_shown(tmp_path: Path) -> None:
    for name in ("shadow", "passwd", "ssh", "hostname", "localtime", "services", "python3.11", "krb5.keytab"):
        (tmp_path / name).write_text("")
    assert [path.name for path in templates.host_etc(tmp_path)] == ["localtime", "services", "python3.11"]


def test_the_isolation_is_always_asked_for() -> None:
    told = bwrap.arguments(VIEW, 1000, FDS, {}, (), "/work")
    for flag in ("--die-with-parent", "--unshare-pid", "--unshare-ipc", "--unshare-uts"):
        assert flag in told
    assert told[told.index("--cap-drop") + 1] == "ALL"
    assert told[told.index("--seccomp") + 1] == "6"
    assert told[told.index("--userns") + 1] == told[told.index("--block-fd") + 1] == "7"
    assert "--unshare-user" not in told
    assert "--share-net" not in told


def test_without_a_namespace_to_join_it_makes_its_own() -> None:
    told = bwrap.arguments(VIEW, 1000, Descriptors(5, 6, None), {}, (), "/work")
    assert told[told.index("--unshare-user") :][:5] == ["--unshare-user", "--uid", "1000", "--gid", "1000"]
    assert "--userns" not in told


def test_everything_is_read_only_but_what_is_said() -> None:
    told = bwrap.arguments(VIEW, 1000, FDS, {}, (Bind("/m/0", "/tests"),), "/work")
    writable = [told[i + 1 : i + 3] for i, word in enumerate(told) if word == "--bind"]
    assert writable == [["/s/work", "/work"]]
    assert told[told.index("/m/0") - 1] == "--ro-bind"
    # The root is closed last: mount points are made in it before.
    assert told.index("/m/0") < len(told) - 1 - told[::-1].index("--remount-ro")


def test_the_environment_is_ours_and_the_callers() -> None:
    told = bwrap.arguments(VIEW, 1000, FDS, {"HOME": "/work", "X": "y z"}, (), "/tmp")
    settings = {told[i + 1]: told[i + 2] for i, word in enumerate(told) if word == "--setenv"}
    assert settings["HOME"] == "/work"
    assert settings["X"] == "y z"
    assert settings["PYTHONDONTWRITEBYTECODE"] == "1"
    assert told[-2:] == ["--chdir", "/tmp"]
