"""The system calls a sandboxed command may not make, as a classic BPF program.

Owns: the deny list and its assembly. The list denies what reaches past the namespaces: mounts and new
namespaces, kernel keyrings, tracing of others, io_uring, BPF, perf, userfaultfd, clocks, modules, sockets of
families other than unix, inet, inet6 and netlink (a network namespace does not contain vsock), and terminal
injection. Calls newer than this list answer ENOSYS, as an older kernel would.

Must not know: bubblewrap, processes.

Guarantees: pure. A foreign architecture or the x32 interface kills the process. Argument checks look at
the same 32 bits that the kernel looks at.
"""

from __future__ import annotations

import errno
import struct

import msgspec

_LD_ABS = 0x20
_JEQ = 0x15
_JGE = 0x35
_JSET = 0x45
_RET = 0x06

_RET_KILL = 0x8000_0000
_RET_ERRNO = 0x0005_0000
_RET_ALLOW = 0x7FFF_0000

_OFFSET_NR = 0
_OFFSET_ARCH = 4
_OFFSET_ARGS = 16

_X32_BIT = 0x4000_0000
_CLONE_NEW = 0x7E02_0000
"""Every CLONE_NEW flag that clone(2) knows: NS, CGROUP, UTS, IPC, USER, PID, NET."""
_SOCKET_FAMILIES = (1, 2, 10, 16)
_TIOCSTI = 0x5412
_TIOCLINUX = 0x541C
_FIRST_UNKNOWN = 463
"""Calls from here on are newer than this list (shared numbering on every architecture)."""


class Arch(msgspec.Struct, frozen=True):
    """What differs between machines."""

    name: str
    audit: int
    socket: int
    socketpair: int
    clone: int
    ioctl: int
    madvise: int
    prctl: int
    denied: dict[str, int]


# Same number everywhere.
_COMMON = {
    "pidfd_getfd": 438,
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "mount_setattr": 442,
    "quotactl_fd": 443,
    "memfd_secret": 447,
    "process_mrelease": 448,
    "statmount": 457,
    "listmount": 458,
}
_CLONE3 = 435

X86_64 = Arch(
    name="x86_64",
    audit=0xC000_003E,
    socket=41,
    socketpair=53,
    clone=56,
    ioctl=16,
    madvise=28,
    prctl=157,
    denied={
        **_COMMON,
        "ptrace": 101,
        "syslog": 103,
        "personality": 135,
        "ustat": 136,
        "sysfs": 139,
        "modify_ldt": 154,
        "pivot_root": 155,
        "_sysctl": 156,
        "adjtimex": 159,
        "chroot": 161,
        "acct": 163,
        "settimeofday": 164,
        "mount": 165,
        "umount2": 166,
        "swapon": 167,
        "swapoff": 168,
        "reboot": 169,
        "sethostname": 170,
        "setdomainname": 171,
        "iopl": 172,
        "ioperm": 173,
        "create_module": 174,
        "init_module": 175,
        "delete_module": 176,
        "quotactl": 179,
        "nfsservctl": 180,
        "lookup_dcookie": 212,
        "clock_settime": 227,
        "kexec_load": 246,
        "add_key": 248,
        "request_key": 249,
        "keyctl": 250,
        "unshare": 272,
        "vmsplice": 278,
        "perf_event_open": 298,
        "fanotify_init": 300,
        "name_to_handle_at": 303,
        "open_by_handle_at": 304,
        "clock_adjtime": 305,
        "setns": 308,
        "process_vm_readv": 310,
        "process_vm_writev": 311,
        "kcmp": 312,
        "finit_module": 313,
        "kexec_file_load": 320,
        "bpf": 321,
        "userfaultfd": 323,
    },
)

AARCH64 = Arch(
    name="aarch64",
    audit=0xC000_00B7,
    socket=198,
    socketpair=199,
    clone=220,
    ioctl=29,
    madvise=233,
    prctl=167,
    denied={
        **_COMMON,
        "lookup_dcookie": 18,
        "umount2": 39,
        "mount": 40,
        "pivot_root": 41,
        "nfsservctl": 42,
        "chroot": 51,
        "quotactl": 60,
        "vmsplice": 75,
        "acct": 89,
        "personality": 92,
        "unshare": 97,
        "kexec_load": 104,
        "init_module": 105,
        "delete_module": 106,
        "clock_settime": 112,
        "syslog": 116,
        "ptrace": 117,
        "reboot": 142,
        "sethostname": 161,
        "setdomainname": 162,
        "settimeofday": 170,
        "adjtimex": 171,
        "add_key": 217,
        "request_key": 218,
        "keyctl": 219,
        "swapon": 224,
        "swapoff": 225,
        "perf_event_open": 241,
        "fanotify_init": 262,
        "name_to_handle_at": 264,
        "open_by_handle_at": 265,
        "clock_adjtime": 266,
        "setns": 268,
        "process_vm_readv": 270,
        "process_vm_writev": 271,
        "kcmp": 272,
        "finit_module": 273,
        "bpf": 280,
        "userfaultfd": 282,
        "kexec_file_load": 294,
    },
)

ARCHES = {arch.name: arch for arch in (X86_64, AARCH64)}
_PR_SET_MEMORY_MERGE, _MADV_MERGEABLE, _PROCESS_MADVISE = 67, 12, 440
_ALLOWED_PERSONALITY = (0, 0x0004_0000, 0xFFFF_FFFF)
"""The default, ADDR_NO_RANDOMIZE (debuggers, sanitizers) and the query."""


def program(machine: str) -> bytes:
    """Assemble the filter for ``machine`` (as ``os.uname().machine`` names it). Raises KeyError when unknown."""
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in instructions(ARCHES[machine]))


def instructions(arch: Arch) -> list[tuple[int, int, int, int]]:
    """The filter as (code, jump if true, jump if false, constant)."""
    out = [_load(_OFFSET_ARCH), (_JEQ, 1, 0, arch.audit), _ret(_RET_KILL), _load(_OFFSET_NR)]
    if arch.name == "x86_64":
        out += [(_JGE, 0, 1, _X32_BIT), _ret(_RET_KILL)]
    out += [(_JGE, 0, 1, _FIRST_UNKNOWN), _fail(errno.ENOSYS)]
    out += [(_JEQ, 0, 1, _CLONE3), _fail(errno.ENOSYS)]
    for name, number in sorted(arch.denied.items(), key=lambda item: item[1]):
        if name == "personality":
            out += _only(number, 0, _ALLOWED_PERSONALITY, errno.EPERM)
        else:
            out += [(_JEQ, 0, 1, number), _fail(errno.EPERM)]
    out += _only(arch.socket, 0, _SOCKET_FAMILIES, errno.EAFNOSUPPORT)
    out += _only(arch.socketpair, 0, _SOCKET_FAMILIES, errno.EAFNOSUPPORT)
    # Merging memory is the host's to allow: by the time a write takes, one learns what others hold.
    out += _but(arch.prctl, 0, _PR_SET_MEMORY_MERGE, errno.EINVAL)
    out += _but(arch.madvise, 2, _MADV_MERGEABLE, errno.EINVAL)
    out += _but(_PROCESS_MADVISE, 3, _MADV_MERGEABLE, errno.EINVAL)
    out += [(_JEQ, 0, 4, arch.clone), _load(_argument(0)), (_JSET, 0, 1, _CLONE_NEW), _fail(errno.EPERM)]
    out += [_ret(_RET_ALLOW)]
    out += [(_JEQ, 0, 4, arch.ioctl), _load(_argument(1)), (_JEQ, 1, 0, _TIOCSTI), (_JEQ, 0, 1, _TIOCLINUX)]
    return [*out, _fail(errno.EPERM), _ret(_RET_ALLOW)]


def _only(number: int, argument: int, allowed: tuple[int, ...], error: int) -> list[tuple[int, int, int, int]]:
    """Call ``number`` passes iff its argument is one of ``allowed``; decides the call either way."""
    out = [_load(_argument(argument))]
    out += [(_JEQ, len(allowed) - i, 0, value) for i, value in enumerate(allowed)]
    out += [_fail(error), _ret(_RET_ALLOW)]
    return [(_JEQ, 0, len(out), number), *out]


def _but(number: int, argument: int, refused: int, error: int) -> list[tuple[int, int, int, int]]:
    """Call ``number`` passes unless its argument is ``refused``; decides the call either way."""
    return [
        (_JEQ, 0, 4, number),
        _load(_argument(argument)),
        (_JEQ, 0, 1, refused),
        _fail(error),
        _ret(_RET_ALLOW),
    ]


def _argument(index: int) -> int:
    return _OFFSET_ARGS + 8 * index  # low half, little endian


def _load(offset: int) -> tuple[int, int, int, int]:
    return (_LD_ABS, 0, 0, offset)


def _ret(value: int) -> tuple[int, int, int, int]:
    return (_RET, 0, 0, value)


def _fail(code: int) -> tuple[int, int, int, int]:
    return _ret(_RET_ERRNO | code)
