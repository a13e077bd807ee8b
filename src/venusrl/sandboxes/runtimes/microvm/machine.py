"""The virtual machine as QEMU's arguments: the same devices in the same places for a template and all its clones.

Owns: the machine's shape. Pure: no I/O. Must not know: processes, files' places, who asked.

Guarantees: two machines of equal ``Shape`` understand each other's state. Nothing of the guest reaches QEMU's control
channel; there is no balloon and no free-page reporting, which would punch holes into a template's memory.
"""

from __future__ import annotations

import json

import msgspec

MEMORY_BLOCK = "ram"
"""What QEMU's migration stream calls the guest's memory."""
BOARD = "pc-q35-8.2"
_SANDBOX = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"


class Shape(msgspec.Struct, frozen=True):
    """What must be equal for state to fit. ``kvm``: a state made with it needs it."""

    memory_mib: int
    cpus: int
    kvm: bool = False
    network: bool = False
    """Whether it has a network card."""


class Files(msgspec.Struct, frozen=True):
    """Descriptors and paths as QEMU sees them. ``overlay`` None: ``base`` itself is written to (a template's boot).

    ``memory`` "" is memory of its own.
    """

    memory: str
    qmp_fd: int
    agent_fd: int
    base_fd: int
    overlay_fd: int | None = None


def _blocks(files: Files) -> list[str]:
    sealed = files.overlay_fd is not None
    base = {
        "driver": "raw",
        "node-name": "base",
        "read-only": sealed,
        "discard": "unmap",
        "file": {"driver": "file", "filename": "/dev/fdset/1", "locking": "off", "read-only": sealed},
    }
    arguments = ["-add-fd", f"fd={files.base_fd},set=1", "-blockdev", json.dumps(base)]
    if files.overlay_fd is not None:
        overlay = {
            "driver": "qcow2",
            "node-name": "disk",
            "l2-cache-size": 65536,
            "refcount-cache-size": 262144,
            "discard": "unmap",
            "file": {"driver": "file", "filename": "/dev/fdset/2", "locking": "off", "discard": "unmap"},
            "backing": "base",
        }
        arguments += ["-add-fd", f"fd={files.overlay_fd},set=2", "-blockdev", json.dumps(overlay)]
    return arguments


def _network() -> list[str]:
    """A card whose connections QEMU makes itself, as any program of the network namespace that it is jailed in: what
    that reaches is all that the guest reaches. The guest's address is set by its init."""
    return [
        *("-netdev", "user,id=net,ipv6=off,net=10.0.2.0/24,host=10.0.2.2,dns=10.0.2.3"),
        *("-device", "virtio-net-pci,netdev=net,addr=4,disable-legacy=on,mac=52:54:00:12:34:56,romfile="),
    ]


def arguments(qemu: str, shape: Shape, files: Files, boot: tuple[str, str] | None, translation_mib: int) -> list[str]:
    """The command line. ``boot``: (kernel, initramfs) for a cold start; None waits for an incoming state."""
    sealed = files.overlay_fd is not None
    memory = f"id={MEMORY_BLOCK},size={shape.memory_mib}M"
    if files.memory:
        shared = "share=off,readonly=on,rom=off" if sealed else "share=on"
        memory = f"memory-backend-file,{memory},mem-path={files.memory},{shared}"
    else:
        memory = f"memory-backend-ram,{memory}"
    accel = "kvm" if shape.kvm else f"tcg,tb-size={translation_mib},thread=single"
    command = [
        *(qemu, "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot", "-S", "-name", "venusrl"),
        *(
            "-machine",
            f"{BOARD},memory-backend={MEMORY_BLOCK},usb=off,sata=off,smbus=off,hpet=off,vmport=off,graphics=off"
            ",mem-merge=off",  # whoever may share pages shares the template's
        ),
        *(
            "-accel",
            accel,
            "-cpu",
            "host" if shape.kvm else "max",
            "-smp",
            str(shape.cpus),
            "-m",
            f"{shape.memory_mib}M",
        ),
        *("-object", memory, "-sandbox", _SANDBOX, "-rtc", "base=utc,clock=host"),
        *("-chardev", f"socket,id=qmp,fd={files.qmp_fd},server=on,wait=off", "-mon", "chardev=qmp,mode=control"),
        *("-chardev", f"socket,id=agent,fd={files.agent_fd},server=on,wait=off"),
        *("-chardev", "ringbuf,id=console,size=16384", "-device", "isa-serial,chardev=console"),
        *_blocks(files),
        *("-device", f"virtio-blk-pci,drive={'disk' if sealed else 'base'},addr=2,disable-legacy=on"),
        *("-device", "virtio-serial-pci,addr=3,disable-legacy=on,max_ports=2"),
        *("-device", "virtserialport,chardev=agent,name=venus.agent"),
        *(_network() if shape.network else ()),
    ]
    if boot is None:
        return [*command, "-incoming", "defer"]
    kernel, initramfs = boot
    line = "console=ttyS0 quiet loglevel=3 panic=-1 oops=panic mitigations=off random.trust_cpu=on"
    return [*command, "-kernel", kernel, "-initrd", initramfs, "-append", line]
