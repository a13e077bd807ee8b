"""What a sandbox starts from.

Owns: the meaning of a template's name. ``host`` is an allow-list of this machine's own directories, all
read-only: programs and libraries, a handful of harmless files of /etc, nothing of anybody's home. Any other
name is the path of a root file system directory.

Must not know: bubblewrap, cgroups.

Guarantees: a template that resolves has a shell. No file of /etc is shown that is not on the list.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import msgspec

from venusrl.sandboxes.protocol import TemplateNotFound
from venusrl.sandboxes.runtimes.namespace import kernel

HOST = "host"
HOST_DIRECTORIES = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
HOST_ETC = (
    "alternatives",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "mime.types",
    "perl",
    "protocols",
    "services",
    "terminfo",
)
HOST_ETC_PREFIXES = ("python3",)
HOST_USER = 1000
WRITABLE = ("work", "tmp", "logs")
"""Top-level directories every sandbox can write; with ``host``, the only ones. Verifiers leave their word in /logs."""
_SHELLS = ("bin/sh", "usr/bin/sh")


class Template(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A usable template. ``directory`` is None for ``host``; ``user`` is the uid commands have inside."""

    directory: str | None
    user: int


def resolve(name: str) -> Template:
    """Look ``name`` up. Raises TemplateNotFound with the mend."""
    if name == HOST:
        return Template(directory=None, user=HOST_USER)
    path = Path(name)
    if not path.is_absolute():
        raise TemplateNotFound(f'there is no template {name!r}: use "host" or the absolute path of a root file system')
    if not path.is_dir():
        raise TemplateNotFound(f"the template {name} is not a directory: unpack a root file system there")
    if path == Path("/"):
        raise TemplateNotFound('the machine\'s own root is not a template: use "host"')
    if not any(_within(path, shell) for shell in _SHELLS):
        raise TemplateNotFound(f"the template {name} has no /bin/sh: it is not a root file system")
    # Files of a root file system belong to root; a user that owns them can install and edit as in a container.
    return Template(directory=str(path.resolve()), user=0)


def _within(root: Path, name: str) -> bool:
    """Whether ``name`` exists in ``root``, links resolved as they would be inside it."""
    directory = os.open(root, os.O_PATH | os.O_DIRECTORY)
    try:
        os.close(kernel.openat2(directory, name, os.O_PATH, resolve=kernel.RESOLVE_IN_ROOT))
    except OSError:
        return False
    finally:
        os.close(directory)
    return True


def host_etc(etc: Path = Path("/etc")) -> list[Path]:
    """The entries of /etc that ``host`` shows."""
    names = [name for name in HOST_ETC if (etc / name).exists()]
    names += sorted(e.name for e in etc.iterdir() if e.name.startswith(HOST_ETC_PREFIXES))
    return [etc / name for name in names]


def host_python() -> Path | None:
    """The prefix of a Python to add to ``host`` when its own directories hold none, else None."""
    if any(Path(folder, "python3").exists() for folder in ("/usr/local/bin", "/usr/bin", "/bin")):
        return None
    prefix = Path(sys.base_prefix).resolve()
    return prefix if (prefix / "bin" / "python3").exists() else None
