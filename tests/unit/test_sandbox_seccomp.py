"""The system call filter, run by a small interpreter of classic BPF."""

from __future__ import annotations

import errno
import struct

import pytest

from venusrl.sandboxes.runtimes.namespace import seccomp

ALLOW, KILL = 0x7FFF_0000, 0x8000_0000
EPERM = 0x0005_0000 | errno.EPERM
EINVAL = 0x0005_0000 | errno.EINVAL
ENOSYS = 0x0005_0000 | errno.ENOSYS
EAFNOSUPPORT = 0x0005_0000 | errno.EAFNOSUPPORT
X86 = seccomp.X86_64


def decide(arch: seccomp.Arch, number: int, *arguments: int, audit: int | None = None) -> int:
    """What the kernel would do with this call."""
    padded = [*arguments, 0, 0, 0, 0, 0, 0][:6]
    data = struct.pack("<IIQ6Q", number, arch.audit if audit is None else audit, 0, *padded)
    program = seccomp.program(arch.name)
    code = [struct.unpack_from("<HBBI", program, at) for at in range(0, len(program), 8)]
    position, accumulator = 0, 0
    while True:
        operation, if_true, if_false, constant = code[position]
        position += 1
        if operation == 0x06:
            return int(constant)
        if operation == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, constant)
            continue
        holds = {0x15: accumulator == constant, 0x35: accumulator >= constant, 0x45: bool(accumulator & constant)}
        position += if_true if holds[operation] else if_false


@pytest.mark.parametrize("arch", seccomp.ARCHES.values(), ids=lambda arch: arch.name)
def test_every_listed_call_is_denied_and_nothing_else_by_accident(arch: seccomp.Arch) -> None:
    special = {arch.socket, arch.socketpair, arch.clone, arch.ioctl, 435}
    denied = {number for name, number in arch.denied.items() if name != "personality"}
    for number in set(range(463)) - special:
        expected = EPERM if number in denied else ALLOW
        assert decide(arch, number) == expected, number


def test_no_number_is_listed_twice() -> None:
    for arch in seccomp.ARCHES.values():
        assert len(set(arch.denied.values())) == len(arch.denied)


@pytest.mark.parametrize(
    ("number", "arguments", "expected"),
    [
        (X86.socket, (1,), ALLOW),
        (X86.socket, (2,), ALLOW),
        (X86.socket, (10,), ALLOW),
        (X86.socket, (16,), ALLOW),
        (X86.socket, (40,), EAFNOSUPPORT),  # AF_VSOCK
        (X86.prctl, (67, 1), EINVAL),  # PR_SET_MEMORY_MERGE
        (X86.prctl, (38, 1), ALLOW),  # PR_SET_NO_NEW_PRIVS
        (X86.madvise, (0, 4096, 12), EINVAL),  # MADV_MERGEABLE
        (X86.madvise, (0, 4096, 4), ALLOW),  # MADV_DONTNEED
        (440, (3, 0, 1, 12), EINVAL),  # process_madvise of oneself
        (440, (3, 0, 1, 21), ALLOW),  # MADV_PAGEOUT
        (X86.socket, (38,), EAFNOSUPPORT),  # AF_ALG
        (X86.socket, (17,), EAFNOSUPPORT),  # AF_PACKET
        (X86.socket, ((1 << 32) | 40,), EAFNOSUPPORT),
        (X86.socketpair, (40,), EAFNOSUPPORT),
        (X86.socketpair, (1,), ALLOW),
        (X86.clone, (0x0120_0011,), ALLOW),  # fork
        (X86.clone, (0x003D_0F00,), ALLOW),  # a thread
        (X86.clone, (0x1000_0011,), EPERM),  # CLONE_NEWUSER
        (X86.clone, (0x0002_0011,), EPERM),  # CLONE_NEWNS
        (X86.clone, (0x4000_0011,), EPERM),  # CLONE_NEWNET
        (X86.ioctl, (0, 0x5401), ALLOW),
        (X86.ioctl, (0, 0x5412), EPERM),  # TIOCSTI
        (X86.ioctl, (0, (7 << 32) | 0x5412), EPERM),
        (X86.ioctl, (0, 0x541C), EPERM),  # TIOCLINUX
        (X86.denied["personality"], (0xFFFF_FFFF,), ALLOW),
        (X86.denied["personality"], (0x0040_0000,), EPERM),  # READ_IMPLIES_EXEC
        (435, (), ENOSYS),  # clone3: its flags are in memory, out of the filter's sight
        (463, (), ENOSYS),
        (467, (), ENOSYS),
        (100_000, (), ENOSYS),
    ],
)
def test_arguments_decide(number: int, arguments: tuple[int, ...], expected: int) -> None:
    assert decide(X86, number, *arguments) == expected


def test_a_foreign_architecture_and_x32_are_killed() -> None:
    assert decide(X86, 39, audit=0x4000_0003) == KILL  # i386
    assert decide(X86, 0x4000_0000 | 39) == KILL
    assert decide(seccomp.AARCH64, 172, audit=X86.audit) == KILL


def test_the_program_fits_the_kernels_limit() -> None:
    for name in seccomp.ARCHES:
        assert len(seccomp.program(name)) // 8 <= 4096
