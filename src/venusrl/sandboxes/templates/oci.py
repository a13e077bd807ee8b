"""Images made elsewhere.

Owns: reading an OCI image layout (a directory, or an archive of one), the archive that ``docker save`` writes, and
fetching from a registry with skopeo.

Must not know: template names, builds, runtimes.

Guarantees: every blob is checked against its digest and size, every layer against the digest that the image's
configuration names. Nothing of the image is run. A reference names a registry's image and nothing else.
"""

from __future__ import annotations

import base64
import hashlib
import ipaddress
import json
import platform
import posixpath
import re
import shutil
import socket
import subprocess
import tarfile
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from venusrl.sandboxes.protocol import RuntimeUnavailable
from venusrl.sandboxes.templates import outward
from venusrl.sandboxes.templates.errors import BadTemplate
from venusrl.sandboxes.templates.store import CacheEntry, Store
from venusrl.sandboxes.templates.unpack import Bounds, Hashing, clean_name, decompressed, unpack

_T = TypeVar("_T")
_REFERENCE = re.compile(
    r"(?=.{1,512}$)[a-z0-9][a-z0-9._-]*(:[0-9]{1,5})?(/[a-z0-9][a-z0-9._-]*)*"
    r"(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(@sha256:[0-9a-f]{64})?"
)
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_INDEXES = ("application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json")
_JSON_BYTES = 8 << 20
_MOST_LAYERS = 256
_DEPTH = 4
_PULL_TIMEOUT_S = 1800
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Login(msgspec.Struct, frozen=True):
    """Who to be at a registry. Other ``type``s (cloud accounts) are refused."""

    type: str = "registry"
    username: str = ""
    password: str = ""


class Imported(msgspec.Struct, frozen=True):
    """What an image holds, as layers of the store, lowest first."""

    layers: tuple[str, ...]
    env: dict[str, str] = {}
    workdir: str = ""


class _Descriptor(msgspec.Struct, frozen=True):
    digest: str
    size: int
    mediaType: str = ""  # noqa: N815 - the format's name
    platform: dict[str, Any] | None = None
    annotations: dict[str, str] | None = None


class _Manifest(msgspec.Struct, frozen=True):
    config: _Descriptor | None = None
    layers: list[_Descriptor] = []
    manifests: list[_Descriptor] = []


class _Settings(msgspec.Struct, frozen=True):
    Env: list[str] | None = None
    WorkingDir: str | None = None


class _Root(msgspec.Struct, frozen=True):
    diff_ids: list[str]


class _Config(msgspec.Struct, frozen=True):
    rootfs: _Root
    config: _Settings | None = None
    architecture: str = ""


class _Saved(msgspec.Struct, frozen=True):
    """An entry of docker save's manifest.json."""

    Config: str
    Layers: list[str]
    RepoTags: list[str] | None = None


def read(store: Store, source: Path, scratch: Path, bounds: Bounds, reference: str = "") -> Imported:
    """An image from ``source``: a layout directory or an archive. Needs ``store.making()``; blocks.

    ``reference`` chooses among several. Raises BadTemplate, HostDiskFull.
    """
    if not source.exists():
        raise BadTemplate(f"{source} does not exist")
    folder = source if source.is_dir() else _open_archive(source, scratch / "archive", bounds)
    if (folder / "index.json").is_file():
        return _read_layout(store, folder, scratch, bounds, reference)
    if (folder / "manifest.json").is_file():
        return _read_saved(store, folder, scratch, bounds, reference)
    raise BadTemplate(f"{source} holds neither an OCI image layout (index.json) nor docker save's manifest.json")


def pull(
    store: Store,
    reference: str,
    scratch: Path,
    bounds: Bounds,
    login: Login | None = None,
    *,
    outward_only: bool = False,
) -> Imported:
    """An image from a registry. ``outward_only``: of nothing that is this machine's own, wherever the registry sends.

    Raises BadTemplate, RuntimeUnavailable without skopeo."""
    if outward_only:
        _check_not_here(reference)
    if _REFERENCE.fullmatch(reference) is None:
        raise BadTemplate(f"{reference!r} is not the name of an image: registry/name:tag, or name:tag")
    skopeo = shutil.which("skopeo")
    if skopeo is None:
        raise RuntimeUnavailable(
            "images of registries are fetched by skopeo, which is not here: apt-get install skopeo, or import a file"
        )
    folder = scratch / "pulled"
    command = [skopeo, "--insecure-policy", "copy", "--quiet", "--override-os", "linux"]
    command += ["--override-arch", _architecture(), "--retry-times", "2"]
    if login is not None:
        if login.type != "registry" or not login.username:
            raise BadTemplate(f"a login of type {login.type!r} is not known: use a user name and a password")
        command += ["--authfile", str(_login_file(reference, login, scratch / "login.json"))]
    command += [f"docker://{reference}", f"oci:{folder}:image"]
    try:
        done = outward.run(command, _PULL_TIMEOUT_S) if outward_only else _plainly(command)
    except subprocess.TimeoutExpired:
        raise BadTemplate(f"{reference} could not be fetched within {_PULL_TIMEOUT_S} s") from None
    if done.returncode != 0:
        words = done.stderr.strip().splitlines()
        raise BadTemplate(f"{reference} could not be fetched: {words[-1][:500] if words else 'skopeo said nothing'}")
    return _read_layout(store, folder, scratch, bounds, "")


def _plainly(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, errors="replace", timeout=_PULL_TIMEOUT_S, check=False
    )


def _check_not_here(reference: str) -> None:
    """A name that is this machine's own is told at once, with the mend; ``outward`` holds for what comes later. Blocks.

    Raises BadTemplate.
    """
    registry = _registry(reference)
    host = registry.rpartition(":")[0] if ":" in registry else registry
    try:
        found = {ipaddress.ip_address(str(each[4][0])) for each in socket.getaddrinfo(host, None)}
    except (OSError, UnicodeError):
        return  # skopeo will say so
    if not all(outward.not_here(one) for one in found):
        raise BadTemplate(
            f"{reference} is an image of this machine's own network: ask the operator to import it (venusrl env "
            "template build --image)"
        )


def _registry(reference: str) -> str:
    """HOST or HOST:PORT of an image's registry."""
    host, slash, _ = reference.partition("/")
    return host if slash and ("." in host or ":" in host or host == "localhost") else "docker.io"


def _architecture() -> str:
    return _MACHINES.get(platform.machine(), platform.machine())


def _login_file(reference: str, login: Login, path: Path) -> Path:
    """A file, for what is on a command line everybody can read."""
    secret = base64.b64encode(f"{login.username}:{login.password}".encode()).decode()
    path.touch(mode=0o600)
    path.write_text(json.dumps({"auths": {_registry(reference): {"auth": secret}}}))
    return path


def _read_layout(store: Store, folder: Path, scratch: Path, bounds: Bounds, reference: str) -> Imported:
    index = _decode(_small(folder / "index.json"), _Manifest, "index.json")
    manifest = _choose(folder, index, reference)
    if manifest.config is None or not manifest.layers:
        raise BadTemplate("the image has no configuration or no layers: it is not a container image")
    config = _decode(_blob(folder, manifest.config), _Config, "the image's configuration")
    blobs = []
    for layer in manifest.layers:
        if "tar" not in layer.mediaType or "encrypted" in layer.mediaType:
            raise BadTemplate(f"a layer of type {layer.mediaType!r} cannot be read: export the image without it")
        blobs.append((_blob_path(folder, layer), _digest(layer.digest), layer.size))
    return _layers(store, config, blobs, scratch, bounds)


def _choose(folder: Path, index: _Manifest, reference: str) -> _Manifest:
    """Go down from the index to one manifest: the one named, of this machine's kind."""
    for _ in range(_DEPTH):
        found = [d for d in index.manifests if (d.annotations or {}).get("vnd.docker.reference.type") is None]
        if reference:
            named = [d for d in found if (d.annotations or {}).get("org.opencontainers.image.ref.name") == reference]
            if not named:
                raise BadTemplate(f"the layout has no image named {reference!r}")
            found, reference = named, ""
        if len(found) > 1:
            found = [d for d in found if d.platform is None or _suits(d.platform)]
        if len(found) != 1:
            raise BadTemplate(f"the layout has {len(found)} images for linux/{_architecture()}: name one (--ref)")
        chosen = found[0]
        content = _decode(_blob(folder, chosen), _Manifest, "a manifest")
        if not content.manifests:
            return content
        index = content
    raise BadTemplate("the layout's indexes are nested too deeply")


def _suits(wanted: dict[str, Any]) -> bool:
    return wanted.get("os", "linux") == "linux" and wanted.get("architecture") == _architecture()


def _read_saved(store: Store, folder: Path, scratch: Path, bounds: Bounds, reference: str) -> Imported:
    found = _decode(_small(folder / "manifest.json"), list[_Saved], "manifest.json")
    if reference:
        found = [saved for saved in found if reference in (saved.RepoTags or [])]
    if len(found) != 1:
        raise BadTemplate(f"the archive has {len(found)} images that could be meant: name one (--ref)")
    config = _decode(_small(_member(folder, found[0].Config)), _Config, "the image's configuration")
    blobs = [(_member(folder, name), "", _member(folder, name).stat().st_size) for name in found[0].Layers]
    return _layers(store, config, blobs, scratch, bounds)


def _layers(
    store: Store, config: _Config, blobs: list[tuple[Path, str, int]], scratch: Path, bounds: Bounds
) -> Imported:
    """Unpack each layer that is not here yet, and check it against the configuration."""
    wanted = [_digest(text) for text in config.rootfs.diff_ids]
    if len(wanted) != len(blobs) or len(blobs) > _MOST_LAYERS:
        raise BadTemplate(f"the image names {len(wanted)} layers and has {len(blobs)} (at most {_MOST_LAYERS})")
    if config.architecture not in ("", _architecture()):
        raise BadTemplate(f"the image is for {config.architecture}, this machine is {_architecture()}")
    kept: list[str] = []
    for number, (blob, digest, size) in enumerate(blobs):
        known = store.recall(f"diff-{wanted[number]}")
        if known is None:
            known = _layer(store, blob, digest, size, wanted[number], scratch / f"layer-{number}", bounds)
        kept += known.layers
    settings = config.config or _Settings()
    env = dict(text.partition("=")[::2] for text in settings.Env or [] if "=" in text)
    return Imported(tuple(kept), env, settings.WorkingDir or "")


def _layer(store: Store, blob: Path, digest: str, size: int, diff: str, root: Path, bounds: Bounds) -> CacheEntry:
    what = f"the layer {diff[:12]}"
    root.mkdir()
    try:
        with blob.open("rb") as raw:
            magic = raw.read(4)
            raw.seek(0)
            packed = Hashing(raw, size, what)
            unpacked = unpack(decompressed(packed, magic), root, bounds, what)
            found = packed.drain()
    except OSError as error:
        raise BadTemplate(f"{what} cannot be read: {error}") from None
    if digest and found != digest:
        raise BadTemplate(f"{what} is damaged: its digest is {found[:12]}, not {digest[:12]}; fetch the image again")
    if unpacked.diff != diff:
        raise BadTemplate(f"{what} is not the image's: its content's digest is {unpacked.diff[:12]}")
    entry = CacheEntry((store.add(root).digest,))
    store.remember(f"diff-{diff}", entry)
    return entry


def _digest(text: str) -> str:
    match = _DIGEST.fullmatch(text)
    if match is None:
        raise BadTemplate(f"{text[:80]!r} is not a SHA-256 digest")
    return match.group(1)


def _blob_path(folder: Path, descriptor: _Descriptor) -> Path:
    path = folder / "blobs" / "sha256" / _digest(descriptor.digest)
    if path.is_symlink() or not path.is_file():
        raise BadTemplate(f"the layout lacks the blob {descriptor.digest}: copy it again")
    if path.stat().st_size != descriptor.size:
        raise BadTemplate(f"the blob {descriptor.digest} has {path.stat().st_size} bytes, not {descriptor.size}")
    return path


def _blob(folder: Path, descriptor: _Descriptor) -> bytes:
    content = _small(_blob_path(folder, descriptor))
    if hashlib.sha256(content).hexdigest() != _digest(descriptor.digest):
        raise BadTemplate(f"the blob {descriptor.digest} is damaged: copy the layout again")
    return content


def _small(path: Path) -> bytes:
    if path.is_symlink() or not path.is_file():
        raise BadTemplate(f"{path.name} is missing")
    if path.stat().st_size > _JSON_BYTES:
        raise BadTemplate(f"{path.name} is larger than {_JSON_BYTES} bytes: it is refused")
    return path.read_bytes()


def _decode(content: bytes, kind: type[_T], what: str) -> _T:
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.MsgspecError as error:
        raise BadTemplate(f"{what} cannot be read: {error}") from None


def _member(folder: Path, name: str) -> Path:
    path = folder / clean_name(name, "manifest.json")
    if path.is_symlink() or not path.is_file():
        raise BadTemplate(f"the archive lacks {name!r}")
    return path


def _open_archive(source: Path, folder: Path, bounds: Bounds) -> Path:
    """The regular files of an archive of an image, nothing else."""
    folder.mkdir()
    left = bounds.bytes
    try:
        with tarfile.open(source) as archive:
            for count, member in enumerate(archive):
                if count > 10 * _MOST_LAYERS:
                    raise BadTemplate(f"{source.name} has too many entries for an archive of an image")
                if not member.isreg():
                    continue
                left -= member.size
                if left < 0:
                    raise BadTemplate(f"{source.name} holds more than {bounds.bytes >> 20} MiB")
                place = folder / clean_name(member.name, source.name)
                content = archive.extractfile(member)
                if content is None or place.exists():
                    raise BadTemplate(f"{source.name} has {member.name!r} twice")
                (folder / posixpath.dirname(place.relative_to(folder))).mkdir(parents=True, exist_ok=True)
                with place.open("xb") as file:
                    shutil.copyfileobj(content, file)
    except (tarfile.TarError, EOFError, OSError) as error:
        raise BadTemplate(f"{source.name} cannot be read as an archive of an image: {error}") from None
    return folder
