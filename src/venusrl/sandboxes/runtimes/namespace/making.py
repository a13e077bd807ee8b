"""How one sandbox is made: from a fork of the forge to its agent.

Owns: the order of the steps, all of them in one process, which is PID 1 of its namespace from the start. As the
machine's root: control group, listening socket, namespaces, files, devices, /proc, the new root. Then as the
sandbox's own unprivileged uid, in its user namespace: the loss of every right not needed, the agent.

Must not know: the loop that asked, asyncio, egress.

Guarantees: the agent runs with no descriptor but /dev/null and its listening socket, an empty environment, no
capability that reaches past its own files and processes, no new privileges, the system call filter, its own session
and keyring. Nothing it needs belongs to the forge. A step that fails is told; the forge then removes what there is
outside the namespaces.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import signal
import socket
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import msgspec

from venusrl.sandboxes.protocol import HostDiskFull, SandboxError, TemplateNotFound
from venusrl.sandboxes.runtimes.namespace import files, kernel, skeleton, wire
from venusrl.sandboxes.runtimes.namespace.cgroup import NodeGroups
from venusrl.sandboxes.runtimes.namespace.groups import PersistentGroup
from venusrl.sandboxes.runtimes.namespace.orders import AGENT_LISTENER, HIDDEN, SANDBOX_USER, UPPER, Make
from venusrl.sandboxes.runtimes.namespace.skeleton import DISK, ETC, HOST, HOST_OWN, LOWER, ROOT

CAPABILITIES = frozenset({0, 1, 3, 4, 5, 6, 7, 10, 31})
"""Of root inside: CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID, NET_BIND_SERVICE, SETFCAP."""
_FILES_PER_MIB = 256
_SHM_MIB = 64
_OPEN_FILES = 65536
_OOM_SCORE = "300"
"""When the whole machine runs out of memory, a sandbox goes before the service; the agent sets its commands higher."""
_AGENT_PIDS = 2
"""The agent itself, and one it is just starting."""
_FLAGS = kernel.MS_NOSUID | kernel.MS_NODEV
_DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_TTY_GROUP = 5
_BOOT_ID = ".boot-id"
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
_AGENT = AGENT_LISTENER + 1
"""Where the agent's program is until it runs."""
_NEW = kernel.CLONE_NEWNS | kernel.CLONE_NEWCGROUP | kernel.CLONE_NEWUTS | kernel.CLONE_NEWIPC | kernel.CLONE_NEWNET


class Tools(msgspec.Struct, frozen=True):
    """What the forge has ready. Descriptors: ``sockets`` the directory for listening sockets, ``agent`` the program."""

    groups: NodeGroups | None
    sockets: int
    agent: int
    agent_arguments: tuple[str, ...]
    seccomp: bytes
    idmapped: bool


def make(order: Make, tools: Tools, userns: int | None, report: int) -> NoReturn:
    """In a child of the forge, in its new PID namespace: become it. ``report`` is closed by the agent's start; else it
    gets a ``Failed``, and this process ends."""
    try:
        os.setsid()
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        if tools.groups is not None:
            group = PersistentGroup(tools.groups, order.sandbox, order.limits)
            group.enter()
        listener = _listen(tools.sockets, order.sandbox)
        _set_oom_score()
        kernel.unshare(_NEW)
        kernel.mount("none", "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
        _build(order, tools, userns)
        _enter_root(order)
        _limit(order, grouped=tools.groups is not None)
        _become(order, userns)
        _run_agent(tools, listener, privileged=order.base is not None)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT)
        _tell(report, (HostDiskFull if full else SandboxError)(f"a sandbox could not be made: {error}"))
    except SandboxError as error:
        _tell(report, error)
    except BaseException as error:  # noqa: BLE001 - a forked child must never return into the forge's loop
        _tell(report, SandboxError(f"a sandbox could not be made: {error!r}"))
    finally:
        os._exit(1)


def _tell(report: int, error: SandboxError) -> None:
    with suppress(OSError):  # the forge is gone: nobody to tell
        os.write(report, wire.encode(wire.failure(0, error))[wire.HEADER_BYTES :][:4000])


def _listen(folder: int, sandbox: str) -> int:
    path = f"/proc/self/fd/{folder}/{sandbox}"
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    before = os.umask(0o177)
    try:
        listener.bind(path)
    finally:
        os.umask(before)
    listener.listen(16)
    return listener.detach()


def _set_oom_score() -> None:
    Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)


# -- as the machine's root: the files


def _build(order: Make, tools: Tools, userns: int | None) -> None:
    owner = order.base or 0
    inodes = max(2048, order.limits.disk_mib * _FILES_PER_MIB)
    kernel.mount("files", DISK, "tmpfs", _FLAGS, f"mode=0700,size={_files_mib(order)}m,nr_inodes={inodes}")
    upper = f"{DISK}/{UPPER}"
    os.mkdir(upper, 0o755)
    if order.archive is not None:
        # Here, not above: the forge stays small, and every fork of it quick.
        from venusrl.sandboxes.runtimes.namespace import archive

        archive.unpack(Path(order.archive), Path(DISK), owner)
    else:
        os.chown(upper, owner, owner)
    if order.layers:
        _overlay(order.layers, upper, ROOT, userns, privileged=order.base is not None)
        root = os.open(ROOT, os.O_PATH | os.O_DIRECTORY)
        _furnish_image(root, order, owner)
        os.close(root)
    else:
        kernel.clone_tree_read_only(HOST, ROOT, userns if tools.idmapped else None)
        _furnish_host(upper, userns if tools.idmapped else None, order)
    _devices(owner, order.count, order.boot_id or _new_id())
    if order.base is not None:  # else it would not be hidden: the sandbox's user is our own
        os.mkdir(f"{ROOT}/{HIDDEN}", 0o700)
        kernel.bind(DISK, f"{ROOT}/{HIDDEN}")
    _remount_read_only(f"{ROOT}/dev")


def _files_mib(order: Make) -> int:
    """Files are memory here: they may not take so much of it that a full disk ends the sandbox."""
    limits = order.limits
    return max(1, min(limits.disk_mib, limits.memory_mib - max(8, limits.memory_mib // 8)))


def _overlay(layers: tuple[str, ...], upper: str, target: str, userns: int | None, *, privileged: bool) -> None:
    if len(layers) > skeleton.MAX_LAYERS:
        raise TemplateNotFound(
            f"the template has {len(layers)} layers; {skeleton.MAX_LAYERS} can be overlaid: squash it"
        )
    lower: list[str] = []
    for index, layer in enumerate(layers):
        place = f"{LOWER}/{index}"
        try:
            kernel.clone_tree_read_only(layer, place, userns)
        except OSError as error:
            raise TemplateNotFound(
                f"the template's layer {layer} cannot be shown to sandboxes ({error}): keep templates on a file system "
                "that supports id-mapped mounts (ext4, xfs, btrfs, tmpfs)"
            ) from None
        lower.insert(0, place)
    work = f"{upper}.work"
    os.mkdir(work)
    options = f"lowerdir={':'.join(lower)},upperdir={upper},workdir={work}" + ("" if privileged else ",userxattr")
    attributes = os.stat(lower[0])
    os.chmod(upper, attributes.st_mode & 0o7777)
    try:
        kernel.mount("sandbox", target, "overlay", _FLAGS, options)
    except OSError as error:
        raise TemplateNotFound(
            f"the template cannot be overlaid ({error}): this needs a kernel with overlayfs, 6.6 or newer when not root"
        ) from None


def _furnish_image(root: int, order: Make, owner: int) -> None:
    """What every sandbox has, where the image lacks it. Its own links cannot lead out."""
    for name in ("dev", "proc", "sys", "tmp"):
        files.make_mount_point(root, name, directory=True)
    os.chmod("tmp", 0o1777, dir_fd=root)
    if order.archive is not None:
        return
    user = owner + (SANDBOX_USER if order.base is not None else 0)
    for name in ("work", "logs"):
        files.make_mount_point(root, name, directory=True)
        os.chown(name, user, user, dir_fd=root)
    _ensure_user(root, order.user, owner, user)


def _ensure_user(root: int, name: str, owner: int, user: int) -> None:
    """The template's user exists and has a home."""
    home = f"home/{name}"
    for path, line in (
        ("etc/passwd", f"{name}:x:{SANDBOX_USER}:{SANDBOX_USER}::/{home}:/bin/sh\n"),
        ("etc/group", f"{name}:x:{SANDBOX_USER}:\n"),
    ):
        try:
            text = files.read(root, path, 1 << 20).decode(errors="surrogateescape")
        except FileNotFoundError:
            text = "root:x:0:0:root:/root:/bin/sh\n" if path == "etc/passwd" else "root:x:0:\n"
        if any(each.startswith(f"{name}:") for each in text.splitlines()):
            return
        whole = text + ("" if text.endswith("\n") else "\n") + line
        files.write(root, path, whole.encode(errors="surrogateescape"), owner)
    files.make_mount_point(root, home, directory=True)
    os.chown(home, user, user, dir_fd=root)


def _furnish_host(upper: str, etc_userns: int | None, order: Make) -> None:
    owner, count = order.base or 0, order.count
    user = owner + SANDBOX_USER if count > 1 else owner
    modes = {"tmp": 0o1777, "root": 0o700}
    if order.archive is None:
        for name in HOST_OWN:
            os.mkdir(f"{upper}/{name}")
            os.chmod(f"{upper}/{name}", modes.get(name, 0o755))
            uid = user if name in ("work", "logs") else owner
            os.chown(f"{upper}/{name}", uid, uid)
        for path, uid, mode in (("home/user", user, 0o755), ("var/tmp", owner, 0o1777), ("etc", owner, 0o755)):
            os.mkdir(f"{upper}/{path}")
            os.chmod(f"{upper}/{path}", mode)
            os.chown(f"{upper}/{path}", uid, uid)
    for name in HOST_OWN:
        kernel.bind(f"{upper}/{name}", f"{ROOT}/{name}", recursive=False)
    # /etc is the sandbox's to change, over the machine's few harmless files.
    _overlay((ETC,), f"{upper}/etc", f"{ROOT}/etc", etc_userns, privileged=count > 1)


def _new_id() -> str:
    return Path("/proc/sys/kernel/random/uuid").read_text().strip()


def _devices(owner: int, count: int, boot_id: str) -> None:
    dev = f"{ROOT}/dev"
    kernel.mount("dev", dev, "tmpfs", kernel.MS_NOSUID | kernel.MS_NOEXEC, "mode=0755,size=64k,nr_inodes=64")
    os.chown(dev, owner, owner)
    for name in _DEVICES:
        os.close(os.open(f"{dev}/{name}", os.O_CREAT | os.O_WRONLY, 0o666))
        kernel.bind(f"/dev/{name}", f"{dev}/{name}", recursive=False)
    for folder in ("pts", "shm"):
        os.mkdir(f"{dev}/{folder}")
    tty = f",gid={owner + _TTY_GROUP}" if count > 1 else ""
    options = f"newinstance,ptmxmode=0666,mode=0620{tty}"
    kernel.mount("devpts", f"{dev}/pts", "devpts", kernel.MS_NOSUID | kernel.MS_NOEXEC, options)
    kernel.mount("shm", f"{dev}/shm", "tmpfs", _FLAGS, f"mode=1777,size={_SHM_MIB}m,nr_inodes=4096,uid={owner}")
    links = {"ptmx": "pts/ptmx", "fd": "/proc/self/fd", "core": "/proc/kcore"}
    links |= {"stdin": "/proc/self/fd/0", "stdout": "/proc/self/fd/1", "stderr": "/proc/self/fd/2"}
    for name, target in links.items():
        os.symlink(target, f"{dev}/{name}")
    Path(f"{dev}/{_BOOT_ID}").write_text(f"{boot_id}\n")


def _remount_read_only(target: str) -> None:
    flags = kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NOEXEC
    kernel.mount("none", target, None, flags)


# -- as the sandbox's uid


def _limit(order: Make, *, grouped: bool) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (1, 1))  # 1, not 0: a core_pattern that pipes ignores 0
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(_OPEN_FILES, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, limit), limit))
    if not grouped:  # each process for itself, for want of a limit for all
        memory = order.limits.memory_mib << 20
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
        resource.setrlimit(resource.RLIMIT_NPROC, (4 * order.limits.pids, 4 * order.limits.pids))


def _become(order: Make, userns: int | None) -> None:
    """Enter the user namespace as its root, never carrying host uid 0 in. No other namespace belongs to it: whoever got
    every right there could still not mount, or touch the network."""
    if userns is not None:
        assert order.base is not None
        os.setgroups([])
        os.setresgid(order.base, order.base, order.base)
        os.setresuid(order.base, order.base, order.base)
        kernel.setns(userns, kernel.CLONE_NEWUSER)
        return
    kernel.unshare(kernel.CLONE_NEWUSER)
    Path("/proc/self/setgroups").write_text("deny")
    for name in ("uid_map", "gid_map"):
        Path(f"/proc/self/{name}").write_text("0 0 1\n")


def _enter_root(order: Make) -> None:
    """Make what is ours the whole world."""
    socket.sethostname(order.sandbox[:63])
    kernel.bring_up_loopback()
    for setting, value in (("ping_group_range", "0 2147483647"), ("ip_unprivileged_port_start", "0")):
        with suppress(OSError):  # one-uid maps have no such groups
            Path(f"/proc/sys/net/ipv4/{setting}").write_text(value)
    os.chdir(ROOT)
    kernel.mount("proc", "proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC)
    _mask()
    kernel.pivot_root(".", ".")
    kernel.umount(".", kernel.MNT_DETACH)
    os.chdir("/")


def _run_agent(tools: Tools, listener: int, *, privileged: bool) -> NoReturn:
    _descriptors(listener, tools.agent)
    with suppress(OSError):  # a kernel without keyrings has none to leave
        kernel.new_session_keyring()
    os.umask(0o022)
    kernel.keep_capabilities(CAPABILITIES if privileged else frozenset())
    kernel.never_gain_privileges()
    kernel.filter_calls(tools.seccomp)
    os.execve(_AGENT, list(tools.agent_arguments), {})


def _mask() -> None:
    for name in _MASKED:
        if os.path.exists(f"proc/{name}"):
            kernel.bind("dev/null", f"proc/{name}", recursive=False)
    for name in _MASKED_FOLDERS:
        if os.path.isdir(f"proc/{name}"):
            kernel.mount(
                "none", f"proc/{name}", "tmpfs", _FLAGS | kernel.MS_RDONLY | kernel.MS_NOEXEC, "size=0,mode=0555"
            )
    for name in _READ_ONLY:
        kernel.bind(f"proc/{name}", f"proc/{name}", recursive=False)
        flags = kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | _FLAGS | kernel.MS_NOEXEC
        kernel.mount("none", f"proc/{name}", None, flags)
    # The machine's own says nothing to a sandbox; this one is new when its processes do not go on.
    kernel.bind(f"dev/{_BOOT_ID}", "proc/sys/kernel/random/boot_id", recursive=False)


def _descriptors(listener: int, agent: int) -> None:
    """0 to 2 are /dev/null, 3 the listening socket, 4 the agent's program until it runs."""
    null = os.open("/dev/null", os.O_RDWR)
    high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 64) for fd in (null, listener, agent)]
    kernel.close_on_exec_from(0)
    for target in (0, 1, 2):
        os.dup2(high[0], target)
    os.dup2(high[1], AGENT_LISTENER)
    os.dup2(high[2], _AGENT, inheritable=False)
