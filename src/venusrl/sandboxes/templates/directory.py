"""Directories of this machine become layers.

Owns: copying a root file system directory, ``base`` (a whole small root made of this machine's own Debian packages, so
that it works without a network), and what every template gets on top (a user, /tmp).

Must not know: images made elsewhere, template names, builds.

Guarantees: ``base`` holds files of listed packages and what they depend on; of /etc only what is listed here, of homes
and of what administrators wrote nothing. Devices are refused, links stay links.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from venusrl.sandboxes.protocol import TemplateNotFound
from venusrl.sandboxes.templates import tree
from venusrl.sandboxes.templates.compose import Composer, own
from venusrl.sandboxes.templates.errors import BadTemplate
from venusrl.sandboxes.templates.unpack import Bounds

BASE_PACKAGES = (
    "bzip2",
    "ca-certificates",
    "curl",
    "file",
    "git",
    "iproute2",
    "less",
    "libc-bin",
    "make",
    "patch",
    "procps",
    "python3",
    "python3-pip",
    "python3-venv",
    "unzip",
    "xz-utils",
)
"""Beside the essential ones; what is not installed here is left out."""
_NOT_INSIDE = ("dpkg", "init-system-helpers", "login", "passwd")
"""Essential to a machine, of no use in a sandbox."""
_NEEDED = ("bash", "coreutils", "libc6")
_LEFT_OUT = (
    "usr/share/doc",
    "usr/share/man",
    "usr/share/info",
    "usr/share/locale",
    "usr/share/lintian",
    "var/lib/dpkg",
)
_ETC = (
    "bash.bashrc",
    "debian_version",
    "host.conf",
    "ld.so.conf",
    "ld.so.conf.d",
    "mime.types",
    "profile.d",
    "protocols",
    "services",
    "skel",
    "terminfo",
)
_ETC_MADE = {
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\nservices: files\n",
    "profile": "export PATH=${PATH:-/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin}\n",
    "resolv.conf": "",
}
_MADE = {"tmp": 0o1777, "var/tmp": 0o1777, "root": 0o700, "home": 0o755, "proc": 0o755, "sys": 0o755, "dev": 0o755}
_LOCAL = ("bin", "lib", "sbin", "share")
_TOP = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_VOLATILE = ("proc", "sys", "dev", "run")
_MAX_ID = 65535


def copy(source: Path, layer: Path, bounds: Bounds) -> None:
    """A root file system directory to the new directory ``layer``. Raises BadTemplate."""
    if not source.is_dir() or source.resolve() == Path("/"):
        raise BadTemplate(f"{source} is not a root file system directory")
    copier = _Copier(source, layer, bounds)
    copier.folder(layer, source)
    copier.below("")
    copier.finish()
    if tree.Merged([layer]).find("bin/sh") is None and tree.Merged([layer]).read("bin/sh", 1) is None:
        mend = ": build its Dockerfile with --dockerfile" if (source / "Dockerfile").is_file() else ""
        raise BadTemplate(f"{source} has no /bin/sh, so it is not a root file system{mend}")


def copy_base(layer: Path, root: Path = Path("/")) -> None:
    """``base``, from the machine whose root is ``root``. Raises TemplateNotFound where it cannot be made."""
    packages = _installed(root / "var/lib/dpkg/status")
    if any(name not in packages for name in _NEEDED):
        raise TemplateNotFound(
            'this machine is not a Debian or Ubuntu, so "base" cannot be made of its packages: import an image as '
            '"base" (venusrl env template build --image debian:stable-slim base)'
        )
    copier = _Copier(root, layer, Bounds())
    layer.mkdir()
    layer.chmod(0o755)
    for name in _TOP:
        if (root / name).is_symlink():
            (layer / name).symlink_to(os.readlink(root / name))
    for package in sorted(_closure(packages)):
        for path in _files(root, package):
            copier.path(path)
    for path in ("etc/ld.so.cache", "etc/ssl/certs/ca-certificates.crt", "etc/localtime"):
        copier.path(path)
    _link_alternatives(root, layer)
    for name in ("passwd", "group"):
        master = root / f"usr/share/base-passwd/{name}.master"
        text = master.read_text() if master.exists() else "root:x:0:0:root:/root:/bin/bash\n"
        copier.made(layer / "etc" / name, text)
    for name, text in _ETC_MADE.items():
        copier.made(layer / "etc" / name, text)
    for name, mode in _MADE.items():
        (layer / name).mkdir(parents=True, exist_ok=True)
        (layer / name).chmod(mode)
    for name in _LOCAL:
        (layer / "usr/local" / name).mkdir(parents=True, exist_ok=True)
    if (layer / "usr/bin/python3").exists() and not (layer / "usr/bin/python").is_symlink():
        (layer / "usr/bin/python").symlink_to("python3")
    copier.finish()


def provision(layers: list[Path], place: Path, workdir: str = "") -> Path | None:
    """A layer with the default user, /tmp and the working directory (root's, as Docker makes it) where they lack, else
    None. ``place`` does not exist yet. Raises BadTemplate when ``workdir`` is a file."""
    merged = tree.Merged(layers)
    composer = Composer(place, merged)
    changed = composer.provide_user()
    if workdir and merged.find(merged.resolve(workdir)) is None:
        composer.folder(workdir)
        changed = True
    if changed:
        return place
    shutil.rmtree(place)
    return None


class _Copier:
    """Copies from ``source`` to ``layer`` by paths relative to both."""

    def __init__(self, source: Path, layer: Path, bounds: Bounds) -> None:
        self._source = source
        self._layer = layer
        self._bounds = bounds
        self._bytes = 0
        self._entries = 0
        self._twins: dict[tuple[int, int], Path] = {}
        self._folders: list[tuple[Path, Path]] = []

    def below(self, folder: str) -> None:
        """Everything in ``folder``; of what only a running system has, nothing."""
        for name in sorted(os.listdir(self._source / folder)):
            path = f"{folder}/{name}" if folder else name
            self.one(self._source / path, self._layer / path)
            place = self._source / path
            if place.is_dir() and not place.is_symlink() and path not in _VOLATILE:
                self.below(path)

    def path(self, path: str) -> None:
        """One path of ``base``, its directories included; the byte code of a Python module with it."""
        source = self._source / path
        if not os.path.lexists(source):
            return
        folder = source.parent.resolve()
        if not folder.is_relative_to(self._source):
            return
        real = str(folder.relative_to(self._source) / source.name)
        for parent in reversed(Path(real).parents):
            if parent != Path(".") and not (self._layer / parent).is_dir():
                self.one(self._source / parent, self._layer / parent)
        target = self._layer / real
        if os.path.lexists(target):
            return
        self.one(source, target)
        if source.suffix == ".py":
            for code in sorted((source.parent / "__pycache__").glob(f"{source.stem}.cpython-*.pyc")):
                (target.parent / "__pycache__").mkdir(exist_ok=True)
                self.one(code, target.parent / "__pycache__" / code.name)

    def made(self, target: Path, text: str) -> None:
        """A small file of our own."""
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
        target.chmod(0o644)
        os.utime(target, ns=(0, 0))

    def folder(self, target: Path, source: Path) -> None:
        target.mkdir(mode=0o700)
        self._folders.append((target, source))

    def one(self, source: Path, target: Path) -> None:
        status = os.lstat(source)
        self._count(status)
        owner = (status.st_uid, status.st_gid)
        if max(owner) > _MAX_ID:
            raise BadTemplate(f"{source} belongs to {owner[0]}:{owner[1]}; sandboxes have ids up to {_MAX_ID}")
        kind = stat.S_IFMT(status.st_mode)
        if kind == stat.S_IFDIR:
            self.folder(target, source)
            return
        twin = self._twins.get((status.st_dev, status.st_ino))
        if kind == stat.S_IFLNK:
            target.symlink_to(os.readlink(source))
        elif kind == stat.S_IFREG and twin is not None:
            os.link(twin, target)
            return
        elif kind == stat.S_IFREG:
            shutil.copyfile(source, target, follow_symlinks=False)
            for name, value in tree.attributes(source).items():
                os.setxattr(target, name, value)
            if status.st_nlink > 1:
                self._twins[status.st_dev, status.st_ino] = target
        elif kind == stat.S_IFIFO:
            os.mkfifo(target)
        elif kind == stat.S_IFSOCK or source.parent.name == "dev":
            return
        else:
            raise BadTemplate(f"{source} is a device: a template holds none")
        own(target, owner)
        if kind != stat.S_IFLNK:
            target.chmod(stat.S_IMODE(status.st_mode))
        os.utime(target, ns=(0, status.st_mtime_ns), follow_symlinks=False)

    def finish(self) -> None:
        """Directories' owners and modes, last: one may forbid writing into it."""
        for target, source in reversed(self._folders):
            status = os.lstat(source)
            own(target, (status.st_uid, status.st_gid))
            target.chmod(stat.S_IMODE(status.st_mode))

    def _count(self, status: os.stat_result) -> None:
        self._entries += 1
        self._bytes += status.st_size if stat.S_ISREG(status.st_mode) else 0
        if self._bytes > self._bounds.bytes or self._entries > self._bounds.entries:
            raise BadTemplate(
                f"{self._source} holds more than {self._bounds.bytes >> 20} MiB or {self._bounds.entries} entries"
            )


def _installed(status: Path) -> dict[str, dict[str, str]]:
    """The machine's installed packages by name, virtual ones too, with their fields."""
    found: dict[str, dict[str, str]] = {}
    try:
        text = status.read_text(errors="replace")
    except FileNotFoundError:
        return {}
    for paragraph in text.split("\n\n"):
        lines = [line for line in paragraph.splitlines() if not line.startswith(" ")]
        fields = {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}
        if fields.get("Status", "").endswith(" installed"):
            found[fields["Package"]] = fields
    for fields in list(found.values()):
        for name in _words(fields.get("Provides", "")):
            found.setdefault(name, fields)
    return found


def _closure(packages: dict[str, dict[str, str]]) -> set[str]:
    """Listed and essential packages with all that they depend on."""
    todo = [name for name, fields in packages.items() if fields.get("Essential") == "yes"]
    todo += [name for name in BASE_PACKAGES if name in packages]
    done: set[str] = set()
    while todo:
        fields = packages.get(todo.pop())
        if fields is None or fields["Package"] in done or fields["Package"] in _NOT_INSIDE:
            continue
        done.add(fields["Package"])
        for field in ("Depends", "Pre-Depends"):
            for choice in fields.get(field, "").split(","):
                todo += [name for name in _words(choice.replace("|", ",")) if name in packages][:1]
    return done


def _words(text: str) -> list[str]:
    """Package names of a dependency field, versions and architectures left out."""
    return [part.split("(")[0].strip().partition(":")[0] for part in text.split(",") if part.strip()]


def _files(root: Path, package: str) -> Iterator[str]:
    info = root / "var/lib/dpkg/info"
    for listing in (info / f"{package}.list", *sorted(info.glob(f"{package}:*.list"))):
        if listing.exists():
            for line in listing.read_text(errors="surrogateescape").splitlines():
                path = line.lstrip("/")
                if path and path != "." and _wanted(path):
                    yield path
            return


def _wanted(path: str) -> bool:
    if path.startswith(_LEFT_OUT):
        return False
    parts = path.split("/")
    return parts[0] != "etc" or len(parts) == 1 or parts[1] in _ETC or parts[1].startswith("python3")


def _link_alternatives(root: Path, layer: Path) -> None:
    """What update-alternatives set up (awk, pager ...), where ``layer`` has the program."""
    for record in sorted((root / "var/lib/dpkg/alternatives").glob("*")):
        chosen = root / "etc/alternatives" / record.name
        lines = record.read_text(errors="replace").splitlines()
        if not chosen.is_symlink() or len(lines) < 2:
            continue
        target = os.readlink(chosen)
        link = layer / lines[1].lstrip("/")
        if tree.Merged([layer]).read(target.lstrip("/"), 1) is None or not link.parent.is_dir():
            continue
        (layer / "etc/alternatives").mkdir(parents=True, exist_ok=True)
        (layer / "etc/alternatives" / record.name).symlink_to(target)
        if not os.path.lexists(link):
            link.symlink_to(f"/etc/alternatives/{record.name}")
