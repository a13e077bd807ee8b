"""How one sandbox is made: the plan, from a new process of the forge to its agent.

Owns: the order of the steps, all of them in one process, which is PID 1 of its namespace from the start. As the
machine's root: control group, listening socket, namespaces, files, devices, /proc, the new root. Then as the
sandbox's own unprivileged uid, in its user namespace: the loss of every right not needed, the agent.

Must not know: the loop that asked, how steps are carried out, egress.

Guarantees: the agent runs with no descriptor but /dev/null and its listening socket, an empty environment, no
capability that reaches past its own files and processes, no new privileges, the system call filter, its own session
and keyring. Nothing it needs belongs to the forge. A step that fails is told; the forge then removes what there is
outside the namespaces.
"""

from __future__ import annotations

import errno
import os
import resource
import uuid
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import msgspec

from venusrl.sandboxes.protocol import HostDiskFull, SandboxError, TemplateNotFound
from venusrl.sandboxes.runtimes.namespace import files, groups, kernel, orders, steps, wire
from venusrl.sandboxes.runtimes.namespace.cgroup import NodeGroups
from venusrl.sandboxes.runtimes.namespace.orders import HIDDEN, SANDBOX_USER, UPPER, Make
from venusrl.sandboxes.runtimes.namespace.skeleton import DISK, ETC, HOST, HOST_OWN, LOWER, ROOT
from venusrl.sandboxes.runtimes.namespace.steps import Failure

CAPABILITIES = frozenset({0, 1, 3, 4, 5, 6, 7, 10, 31})
"""Of root inside: CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID, NET_BIND_SERVICE, SETFCAP."""
_UPPER = f"{DISK}/{UPPER}"
_SHM_MIB = 64
_OPEN_FILES = 65536
_OOM_SCORE = "300"
"""When the whole machine runs out of memory, a sandbox goes before the service; the agent sets its commands higher."""
_FLAGS = kernel.MS_NOSUID | kernel.MS_NODEV
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_TTY_GROUP = 5
_BOOT_ID = ".boot-id"
_LINKS = (
    *(("ptmx", "pts/ptmx"), ("fd", "/proc/self/fd"), ("core", "/proc/kcore")),
    *(("stdin", "/proc/self/fd/0"), ("stdout", "/proc/self/fd/1"), ("stderr", "/proc/self/fd/2")),
)
_MASKED: tuple[str, ...] = (
    "kcore",
    "keys",
    "key-users",
    "latency_stats",
    "timer_list",
    "sched_debug",
    "interrupts",
    "kallsyms",
)
_MASKED += ("iomem", "ioports", "modules", "config.gz", "cmdline", "partitions", "diskstats", "swaps", "sysrq-trigger")
_MASKED_FOLDERS = ("acpi", "asound", "scsi", "bus", "driver", "irq")
_READ_ONLY = ("sys", "fs")
_NEW = kernel.CLONE_NEWNS | kernel.CLONE_NEWCGROUP | kernel.CLONE_NEWUTS | kernel.CLONE_NEWIPC | kernel.CLONE_NEWNET


class Tools(msgspec.Struct, frozen=True):
    """What the forge has ready. ``sockets`` is the descriptor of the directory for listening sockets."""

    groups: NodeGroups | None
    sockets: int
    idmapped: bool
    root: bytes
    last: bytes
    """Steps that are the same for all: ``entering_root`` and ``becoming_agent``."""


class Furniture(msgspec.Struct, frozen=True):
    """What an image lacks: a folder for the files, files with their whole new content, the home of its user ("" = it
    has one)."""

    etc: bool = False
    files: tuple[tuple[str, bytes], ...] = ()
    home: str = ""


class Plan:
    """Steps, and what to say where one fails for a reason that is its template's."""

    def __init__(self) -> None:
        self._steps: list[bytes] = []
        self._blame: dict[int, str] = {}

    def add(self, *more: bytes, blame: str = "") -> None:
        """``blame``: the message of TemplateNotFound should the first of these fail, ``{}`` the system's error."""
        if blame:
            self._blame[len(self._steps)] = blame
        self._steps.extend(more)

    def encoded(self) -> bytes:
        return b"".join(self._steps)

    def error(self, failure: Failure) -> SandboxError:
        """What a failure means."""
        if failure.step in self._blame:
            return TemplateNotFound(self._blame[failure.step].format(failure))
        full = failure.error in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT)
        return (HostDiskFull if full else SandboxError)(f"a sandbox could not be made: {failure}")


def plan(order: Make, tools: Tools, userns: int | None, lacks: Furniture, go: int | None) -> Plan:
    """Everything that makes this sandbox. ``lacks`` is what its image does. ``go``: a descriptor to wait for once its
    disk is there, until ``fill`` has filled it."""
    made = Plan()
    if tools.groups is not None:
        made.add(*groups.steps_into(tools.groups, order.sandbox, order.limits))
    made.add(steps.listen(f"/proc/self/fd/{tools.sockets}/{order.sandbox}"))
    made.add(steps.write("/proc/self/oom_score_adj", _OOM_SCORE))
    made.add(steps.unshare(_NEW), steps.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE))
    _disk(made, order)
    if go is not None:
        made.add(steps.wait(go))
    if order.layers:
        _image(made, order, userns, lacks)
    else:
        _host(made, order, userns if tools.idmapped else None)
    _devices(made, order)
    made.add(steps.hostname(order.sandbox[:63]), tools.root)
    if order.merge:
        made.add(steps.merge())
    made.add(*_limits(order, grouped=tools.groups is not None), *_become(order, userns), tools.last)
    return made


def fill(order: Make, tools: Tools, maker: int, report: int, go: int) -> NoReturn:
    """In a child of the forge: fill the disk of a maker that waits for it with the sandbox's archive."""
    try:
        # Here, not above: the forge stays small.
        from venusrl.sandboxes.runtimes.namespace import archive

        assert order.archive is not None
        if tools.groups is not None:  # what the files take is the sandbox's
            groups.PersistentGroup(tools.groups, order.sandbox).enter()
        archive.unpack(Path(order.archive), Path(f"/proc/{maker}/cwd/{DISK}"), order.base or 0)
        os.write(go, b"+")
    except SandboxError as error:
        _tell(report, error)
    except BaseException as error:  # noqa: BLE001 - a forked child must never return into the forge's loop
        _tell(report, SandboxError(f"a sandbox's kept files could not be restored: {error!r}"))
    finally:
        os._exit(0)


def _tell(report: int, error: SandboxError) -> None:
    with suppress(OSError):  # the forge is gone: nobody to tell
        os.write(report, steps.told(wire.encode(wire.failure(0, error))[wire.HEADER_BYTES :][:4000]))


def error(made: Plan, said: bytes) -> SandboxError:
    """What a maker, or who filled its disk, said before it ended."""
    if (body := steps.body(said)) is not None:
        problem = wire.decode_reply(body)
        assert isinstance(problem, wire.Failed)
        found = wire.error_of(problem)
        return found if isinstance(found, SandboxError) else SandboxError(str(found))
    return made.error(steps.failure(said))


# -- as the machine's root: the files


def _disk(made: Plan, order: Make) -> None:
    if order.blank:
        # What is removed inside is given back to the machine.
        flags = _FLAGS | kernel.MS_NOATIME
        made.add(steps.disk(order.blank, os.path.dirname(order.blank), DISK, flags, "discard"))
    else:
        inodes = max(2048, order.limits.disk_mib * orders.FILES_PER_MIB)
        options = f"mode=0700,size={_files_mib(order)}m,nr_inodes={inodes}"
        made.add(steps.mount("files", DISK, "tmpfs", _FLAGS, options))
    made.add(steps.folder(_UPPER, owner=order.base or 0))


def _files_mib(order: Make) -> int:
    """Files in memory: they may not take so much of it that a full disk ends the sandbox."""
    limits = order.limits
    return max(1, min(limits.disk_mib, limits.memory_mib - max(8, limits.memory_mib // 8)))


def _overlay(
    made: Plan, layers: tuple[str, ...], upper: str, target: str, userns: int | None, *, privileged: bool
) -> None:
    for index, layer in enumerate(layers):
        made.add(
            steps.clone_tree(layer, f"{LOWER}/{index}", userns),
            blame=f"the template's layer {_plain(layer)} cannot be shown to sandboxes ({{}}): keep templates on a file "
            "system that supports id-mapped mounts (ext4, xfs, btrfs, tmpfs)",
        )
    mode = os.stat(layers[-1]).st_mode & 0o7777 if layers != (ETC,) else 0o755
    lower = ":".join(f"{LOWER}/{index}" for index in reversed(range(len(layers))))
    options = f"lowerdir={lower},upperdir={upper},workdir={upper}.work" + ("" if privileged else ",userxattr")
    made.add(steps.folder(f"{upper}.work"), steps.change(upper, mode))
    made.add(
        steps.mount("sandbox", target, "overlay", _FLAGS, options),
        blame="the template cannot be overlaid ({}): this needs a kernel with overlayfs, 6.6 or newer when not root",
    )


def _plain(text: str) -> str:
    """For ``str.format``."""
    return text.replace("{", "{{").replace("}", "}}")


def _image(made: Plan, order: Make, userns: int | None, lacks: Furniture) -> None:
    """The image, and what every sandbox has where the image lacks it. Its own links cannot lead out."""
    _overlay(made, order.layers, _UPPER, ROOT, userns, privileged=order.base is not None)
    made.add(*(steps.folder_in_root(ROOT, name) for name in ("dev", "proc", "sys")))
    made.add(steps.folder_in_root(ROOT, "tmp", 0o1777))
    if order.archive is not None:
        return
    owner = order.base or 0
    user = owner + (SANDBOX_USER if order.base is not None else 0)
    made.add(*(steps.folder_in_root(ROOT, name, owner=user) for name in ("work", "logs")))
    if lacks.etc:
        made.add(steps.folder_in_root(ROOT, "etc", 0o755, owner))
    for path, content in lacks.files:
        made.add(steps.write_in_root(ROOT, path, content, owner))
    if lacks.home:
        made.add(steps.folder_in_root(ROOT, lacks.home, owner=user))


def furniture(root: int, name: str) -> Furniture:
    """What an image, open as ``root``, lacks for the user ``name`` to be there and have a home."""
    home = f"home/{name}"
    lacking: list[tuple[str, bytes]] = []
    try:
        os.close(kernel.openat2(root, "etc", os.O_PATH | os.O_DIRECTORY, resolve=kernel.RESOLVE_IN_ROOT))
        etc = False
    except FileNotFoundError:
        etc = True
    for path, line, least in (
        ("etc/passwd", f"{name}:x:{SANDBOX_USER}:{SANDBOX_USER}::/{home}:/bin/sh\n", "root:x:0:0:root:/root:/bin/sh\n"),
        ("etc/group", f"{name}:x:{SANDBOX_USER}:\n", "root:x:0:\n"),
    ):
        try:
            text = files.read(root, path, 1 << 20).decode(errors="surrogateescape")
        except FileNotFoundError:
            text = least
        if any(each.startswith(f"{name}:") for each in text.splitlines()):
            return Furniture(etc, tuple(lacking))
        whole = text + ("" if text.endswith("\n") else "\n") + line
        lacking.append((path, whole.encode(errors="surrogateescape")))
    return Furniture(etc, tuple(lacking), home)


def _host(made: Plan, order: Make, userns: int | None) -> None:
    owner, count = order.base or 0, order.count
    user = owner + SANDBOX_USER if count > 1 else owner
    made.add(steps.clone_tree(HOST, ROOT, userns))
    if order.archive is None:
        modes, users = {"tmp": 0o1777, "root": 0o700, "var/tmp": 0o1777}, ("work", "logs", "home/user")
        for name in (*HOST_OWN, "home/user", "var/tmp", "etc"):
            made.add(steps.folder(f"{_UPPER}/{name}", modes.get(name, 0o755), user if name in users else owner))
    made.add(*(steps.bind(f"{_UPPER}/{name}", f"{ROOT}/{name}") for name in HOST_OWN))
    # /etc is the sandbox's to change, over the machine's few harmless files.
    _overlay(made, (ETC,), f"{_UPPER}/etc", f"{ROOT}/etc", userns, privileged=count > 1)


def _devices(made: Plan, order: Make) -> None:
    dev, owner = f"{ROOT}/dev", order.base or 0
    flags = kernel.MS_NOSUID | kernel.MS_NOEXEC
    made.add(steps.mount("dev", dev, "tmpfs", flags, "mode=0755,size=64k,nr_inodes=64"))
    made.add(steps.change(dev, 0o755, owner))
    for name in _DEVICES:
        made.add(steps.file(f"{dev}/{name}", mode=0o666), steps.bind(f"/dev/{name}", f"{dev}/{name}"))
    made.add(steps.folder(f"{dev}/pts"), steps.folder(f"{dev}/shm"))
    tty = f",gid={owner + _TTY_GROUP}" if order.count > 1 else ""
    made.add(steps.mount("devpts", f"{dev}/pts", "devpts", flags, f"newinstance,ptmxmode=0666,mode=0620{tty}"))
    options = f"mode=1777,size={_SHM_MIB}m,nr_inodes=4096,uid={owner}"
    made.add(steps.mount("shm", f"{dev}/shm", "tmpfs", _FLAGS, options))
    made.add(*(steps.link(target, f"{dev}/{name}") for name, target in _LINKS))
    made.add(steps.file(f"{dev}/{_BOOT_ID}", f"{order.boot_id or uuid.uuid4()}\n"))
    if order.base is not None:  # else it would not be hidden: the sandbox's user is our own
        made.add(steps.folder(f"{ROOT}/{HIDDEN}", 0o700), steps.bind(DISK, f"{ROOT}/{HIDDEN}"))
    made.add(steps.remount(dev, kernel.MS_RDONLY | flags))


def entering_root() -> bytes:
    """Make what is ours the whole world."""
    told = [steps.loopback()]
    for setting, value in (("ping_group_range", "0 2147483647"), ("ip_unprivileged_port_start", "0")):
        # One-uid maps have no such groups.
        told.append(steps.write(f"/proc/sys/net/ipv4/{setting}", value, lenient=steps.MAY_FAIL))
    told += [steps.go_to(ROOT)]
    told += [steps.mount("proc", "proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)]
    for name in _MASKED:
        told.append(steps.bind("dev/null", f"proc/{name}", lenient=steps.MAY_BE_MISSING))
    flags = _FLAGS | kernel.MS_RDONLY | kernel.MS_NOEXEC
    for name in _MASKED_FOLDERS:
        absent = steps.MAY_BE_MISSING | steps.MAY_BE_NO_FOLDER
        told.append(steps.mount("none", f"proc/{name}", "tmpfs", flags, "size=0,mode=0555", lenient=absent))
    for name in _READ_ONLY:
        told += [steps.bind(f"proc/{name}", f"proc/{name}"), steps.remount(f"proc/{name}", flags)]
    # The machine's own says nothing to a sandbox; this one is new when its processes do not go on.
    told += [steps.bind(f"dev/{_BOOT_ID}", "proc/sys/kernel/random/boot_id"), steps.change_root()]
    return b"".join(told)


# -- as the sandbox's uid


def _limits(order: Make, *, grouped: bool) -> list[bytes]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    # Core files: 1, not 0: a core_pattern that pipes ignores 0.
    told = [steps.limit(resource.RLIMIT_CORE, 1, 1), steps.limit(resource.RLIMIT_NOFILE, min(4096, most), most)]
    if not grouped:  # each process for itself, for want of a limit for all
        memory, processes = order.limits.memory_mib << 20, 4 * order.limits.pids
        told.append(steps.limit(resource.RLIMIT_AS, memory, memory))
        told.append(steps.limit(resource.RLIMIT_NPROC, processes, processes))
    return told


def _become(order: Make, userns: int | None) -> list[bytes]:
    """Enter the user namespace as its root, never carrying host uid 0 in. No other namespace belongs to it: whoever got
    every right there could still not mount, or touch the network."""
    if userns is not None:
        assert order.base is not None
        return [steps.become(order.base), steps.setns(userns, kernel.CLONE_NEWUSER)]
    maps = (steps.write(f"/proc/self/{name}", "0 0 1\n") for name in ("uid_map", "gid_map"))
    return [steps.unshare(kernel.CLONE_NEWUSER), steps.write("/proc/self/setgroups", "deny"), *maps]


def becoming_agent(agent: int, arguments: tuple[str, ...], program: bytes, *, privileged: bool) -> bytes:
    """``agent`` is the descriptor of its program, ``program`` the system call filter."""
    kept = CAPABILITIES if privileged else frozenset[int]()
    told = (steps.descriptors(agent), steps.keyring(), steps.keep_capabilities(kept), steps.filter_calls(program))
    return b"".join((*told, steps.start(arguments)))
