"""Layers and images on a host's disk, by content.

Owns: the directories below one root: ``layers`` (each a root file system tree under its digest, beside it copies for
those who may not share its pages), ``images`` (what a template is, under its own content's id), ``cache`` (what a build
step gave) and ``work`` (what is being made).

Must not know: template names, tenants, builds, runtimes.

Guarantees: a layer that exists is whole and on disk; it never changes. A crash at any instant leaves at most rubbish in
``work``, which the next ``prepare`` removes. ``collect`` removes nothing that a kept image needs, or that anybody who
holds ``making()`` has just made; several processes may use one store. Nobody but its owner can enter it: layers hold
set-user-id programs.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from venusrl.sandboxes.protocol import HostDiskFull, SandboxError, TemplateNotFound
from venusrl.sandboxes.templates import tree
from venusrl.sandboxes.templates.api import Image
from venusrl.sandboxes.templates.errors import BadTemplate, TemplateBusy

_DIGEST = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}")
_COPIES, _CLAIM = "copies", "first"
_libc = ctypes.CDLL(None, use_errno=True)


class Layer(msgspec.Struct, frozen=True):
    """A layer that is kept. ``path`` is what goes into ``Image.layers``."""

    digest: str
    path: str
    bytes: int
    entries: int


class CacheEntry(msgspec.Struct, frozen=True):
    """What was made of a key before: layers, lowest first, and whatever its maker wants to remember."""

    layers: tuple[str, ...]
    note: dict[str, str] = {}


class Collected(msgspec.Struct, frozen=True):
    """What ``collect`` removed, and what is left."""

    layers: int
    bytes: int
    images: tuple[str, ...]
    kept_layers: int
    kept_bytes: int


class Store:
    """One store. All methods block on the disk; call the slow ones (``add``, ``collect``) in a thread."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._layers = root / "layers"
        self._images = root / "images"
        self._cache = root / "cache"
        self._work = root / "work"

    @property
    def root(self) -> Path:
        return self._root

    def prepare(self) -> None:
        """Make the directories and remove what a crash left. Raises SandboxError, HostDiskFull."""
        with disk_errors(self._root):
            for folder in (self._root, self._layers, self._images, self._cache, self._work):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._root.chmod(0o700)
            for left in self._work.iterdir():
                if left.is_dir():
                    _remove_abandoned(left)

    @contextmanager
    def making(self) -> Iterator[None]:
        """While held, ``collect`` refuses: layers may exist that no image names yet."""
        with self._lock("making.lock", fcntl.LOCK_SH):
            yield

    @contextmanager
    def staging(self) -> Iterator[Path]:
        """A directory to make something in, on the layers' file system; gone afterwards."""
        with disk_errors(self._root):
            folder = Path(tempfile.mkdtemp(dir=self._work))
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)  # tells a later ``prepare`` that its maker lives
            yield folder
        finally:
            remove_tree(folder)
            os.close(fd)

    def add(self, made: Path) -> Layer:
        """Keep the tree ``made`` (in a staging directory) as a layer; ``made`` is gone. Needs ``making()``."""
        measure = tree.measure(made)
        place = self._layers / measure.digest
        with disk_errors(self._root):
            if not place.exists():
                parcel = made.parent / f"{made.name}.layer"
                parcel.mkdir(mode=0o700)
                made.rename(parcel / "root")
                (parcel / "layer.json").write_bytes(msgspec.json.encode(measure))
                _flush(parcel)
                try:
                    parcel.rename(place)
                except OSError as error:
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                        raise
                _flush_directory(self._layers)  # else another process was first: its layer is the same
        return self.layer(measure.digest)

    def layer(self, digest: str) -> Layer:
        """Raises TemplateNotFound."""
        place = self._layers / digest
        if _DIGEST.fullmatch(digest) is None:
            raise BadTemplate(f"{digest!r} is not a layer's digest")
        try:
            measure = msgspec.json.decode((place / "layer.json").read_bytes(), type=tree.Measure)
        except FileNotFoundError:
            raise TemplateNotFound(f"the layer {digest} is not here: build or import its template again") from None
        return Layer(digest, str(place / "root"), measure.bytes, measure.entries)

    def layers(self) -> list[Layer]:
        """Every layer."""
        return [self.layer(path.name) for path in sorted(self._layers.iterdir()) if _DIGEST.fullmatch(path.name)]

    def digest_of(self, path: str) -> str:
        """The digest of the layer whose path this is."""
        digest = Path(path).parent.name
        if Path(path) != self._layers / digest / "root":
            raise TemplateNotFound(f"{path} is no layer of the store in {self._root}")
        return digest

    def apart(self, path: str, domain: str, *, first_may_have_it: bool) -> str:
        """The layer at ``path`` as files that nobody but ``domain`` gets: a copy, or, for the first domain that asks
        (``first_may_have_it``), the layer itself. Copies go with their layer, or by ``drop_copies``."""
        place = self._layers / self.digest_of(path)
        with disk_errors(self._root), self.making():
            if first_may_have_it and _claimed(place / _CLAIM, domain):
                return path
            copy = place / _COPIES / _checked(domain)
            if not copy.exists():
                copy.parent.mkdir(mode=0o700, exist_ok=True)
                with self.staging() as scratch:
                    _copy_tree(path, scratch / "copy")
                    with suppress(FileExistsError):  # another process was first: its copy is the same
                        _rename_new(scratch / "copy", copy)
        return str(copy)

    def drop_copies(self, unwanted: Callable[[str], bool]) -> None:
        """Remove what ``apart`` copied for every domain that is ``unwanted``."""
        for copy in list(self._layers.glob(f"*/{_COPIES}/*")):
            if unwanted(copy.name):
                with disk_errors(self._root), self.staging() as rubbish, suppress(FileNotFoundError):
                    copy.rename(rubbish / copy.name)

    def damaged(self) -> list[str]:
        """Digests of layers whose content is no longer theirs. Reads everything."""
        return [layer.digest for layer in self.layers() if tree.measure(Path(layer.path)).digest != layer.digest]

    def put_image(self, image: Image) -> Image:
        """Keep ``image`` under the id of its content, which is returned with it. Needs ``making()``."""
        image = msgspec.structs.replace(image, id=image_id(image, [self.digest_of(p) for p in image.layers]))
        self._put(self._images / f"{image.id}.json", msgspec.json.encode(image))
        return image

    def image(self, identity: str) -> Image:
        """Raises TemplateNotFound."""
        try:
            content = (self._images / f"{_checked(identity)}.json").read_bytes()
        except FileNotFoundError:
            raise TemplateNotFound(f"the image {identity} is not here: build or import its template again") from None
        return msgspec.json.decode(content, type=Image)

    def images(self) -> list[str]:
        return sorted(path.stem for path in self._images.glob("*.json"))

    def remember(self, key: str, entry: CacheEntry) -> None:
        """Keep what a build step gave. Needs ``making()``."""
        self._put(self._cache / f"{_checked(key)}.json", msgspec.json.encode(entry))

    def recall(self, key: str) -> CacheEntry | None:
        """What ``key`` gave before, if all of it is still here. Being asked for keeps it young."""
        path = self._cache / f"{_checked(key)}.json"
        try:
            entry = msgspec.json.decode(path.read_bytes(), type=CacheEntry)
            os.utime(path)
        except FileNotFoundError:
            return None
        return entry if all((self._layers / digest).exists() for digest in entry.layers) else None

    def collect(self, keep: Iterable[str], cache_age_s: float) -> Collected:
        """Remove what neither an image in ``keep`` nor a cache entry asked for lately needs.

        Raises TemplateBusy while something is being made.
        """
        with (
            disk_errors(self._root),
            self._lock("making.lock", fcntl.LOCK_EX | fcntl.LOCK_NB),
            self.staging() as rubbish,
        ):
            return self._sort_out(set(keep), cache_age_s, rubbish)

    def _sort_out(self, keep: set[str], cache_age_s: float, rubbish: Path) -> Collected:
        needed: set[str] = set()
        gone = []
        for identity in self.images():
            if identity in keep:
                needed |= {self.digest_of(path) for path in self.image(identity).layers}
            else:
                gone.append(identity)
                (self._images / f"{identity}.json").unlink()
        for path in self._cache.glob("*.json"):
            entry = msgspec.json.decode(path.read_bytes(), type=CacheEntry)
            if time.time() - path.stat().st_mtime > cache_age_s:
                path.unlink()
            else:
                needed |= set(entry.layers)
        layers = self.layers()
        removed = [layer for layer in layers if layer.digest not in needed]
        for layer in removed:
            (self._layers / layer.digest).rename(rubbish / layer.digest)
        size, whole = sum(layer.bytes for layer in removed), sum(layer.bytes for layer in layers)
        return Collected(len(removed), size, tuple(gone), len(layers) - len(removed), whole - size)

    def _put(self, path: Path, content: bytes) -> None:
        with disk_errors(self._root):
            put(path, content)

    @contextmanager
    def _lock(self, name: str, how: int) -> Iterator[None]:
        with (self._root / name).open("a") as lock:
            try:
                fcntl.flock(lock, how)
            except BlockingIOError:
                raise TemplateBusy("a template is being built or imported: collect when it has ended") from None
            yield


def _claimed(claim: Path, domain: str) -> bool:
    """Whether the layer is ``domain``'s: it is for good of whoever asks first."""
    try:
        os.symlink(domain, claim)
    except FileExistsError:
        return os.readlink(claim) == domain
    return True


def _copy_tree(source: str, target: Path) -> None:
    """All of a layer: owners, modes, times, attributes, links, whiteouts. Raises OSError, SandboxError."""
    command = ["cp", "-a", "--reflink=auto", "--", source, str(target)]
    done = subprocess.run(command, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin", "LC_ALL": "C"})
    if done.returncode:
        if "No space left" in done.stderr:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
        raise SandboxError(f"the layer {source} cannot be copied: {done.stderr.strip()[-300:]}")


def _rename_new(source: Path, target: Path) -> None:
    """Raises FileExistsError."""
    try:
        source.rename(target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            raise FileExistsError(target) from None
        raise


def image_id(image: Image, digests: list[str]) -> str:
    """The id of an image's content: everything but its name and where its layers happen to lie."""
    bare = msgspec.structs.replace(image, id="", name="", layers=tuple(digests))
    return f"img-{hashlib.sha256(msgspec.json.encode(bare, order='deterministic')).hexdigest()[:40]}"


def put(path: Path, content: bytes) -> None:
    """Replace a file at once and for good."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".", suffix=".part", delete=False) as part:
        try:
            part.write(content)
            part.flush()
            os.fsync(part.fileno())
            os.rename(part.name, path)
        except OSError:
            Path(part.name).unlink(missing_ok=True)
            raise
    _flush_directory(path.parent)


@contextmanager
def disk_errors(root: Path) -> Iterator[None]:
    """Turn what the disk says into what we say."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            mend = "free some (venusrl env template gc), or use another disk"
            raise HostDiskFull(f"no space left for templates in {root}: {mend}") from None
        raise SandboxError(f"templates cannot be kept in {root}: {error}") from None


def remove_tree(folder: Path) -> None:
    """Remove a tree, directories without permissions included."""
    for inner, _, _ in os.walk(folder):
        with suppress(OSError):
            if not os.access(inner, os.R_OK | os.W_OK | os.X_OK):
                os.chmod(inner, 0o700)
    shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove_tree(folder)
    except BlockingIOError:
        return  # its maker lives
    finally:
        os.close(fd)


def _checked(name: str) -> str:
    if _NAME.fullmatch(name) is None:
        raise SandboxError(f"{name!r} cannot name anything in the store")
    return name


def _flush(folder: Path) -> None:
    """Everything of the file system that ``folder`` is on reaches the disk: one call for ten thousand files."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if _libc.syncfs(fd) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(folder))
    finally:
        os.close(fd)


def _flush_directory(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
