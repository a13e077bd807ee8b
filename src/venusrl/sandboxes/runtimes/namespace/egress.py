"""What a sandbox may reach outside itself: a point-to-point link and rules of its own.

Owns: one nftables table while any sandbox has a network, one veth pair for each sandbox that was ever given one, their
addresses (one /31 each out of 198.18.0.0/15), what is remembered of them on disk, whether the machine forwards.

Must not know: how sandboxes are made.

Guarantees: without a network a sandbox has nothing but its loopback. With one it never reaches an address of the
machine's own, loopback, link-local and metadata addresses, or another sandbox, whatever is allowed; private networks
only where they are allowed by address. Every packet from a sandbox is judged by the rules of now, so that a change
holds for open connections too. IPv6 goes nowhere. Host names are resolved once, when the network is set. The last
sandbox's network takes the table along, and the forwarding that was turned on for it.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import os
import re
import shutil
import socket
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec

from venusrl.sandboxes.protocol import SandboxError
from venusrl.sandboxes.runtimes.base import Network

POOL = ipaddress.IPv4Network("198.18.0.0/15")
"""Set aside for benchmarks of networks: no real host has an address there."""
NEVER = ("0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "198.18.0.0/15", "224.0.0.0/3", "100.100.100.200/32")
PRIVATE = ("10.0.0.0/8", "100.64.0.0/10", "172.16.0.0/12", "192.168.0.0/16", "192.0.0.0/24")
_RESOLVERS = ("/run/systemd/resolve/resolv.conf", "/etc/resolv.conf")
_TABLES, _DEVICES = "venusrl_", "vs"
"""How the tables and devices begin of this service and any other on this machine."""
_TURNED_ON = "turned_on"
"""In each table: devices that forward only since a table of ours is there."""
_COMMAND_S = 20.0
_RESOLVE_S = 10.0


class Link(msgspec.Struct, frozen=True):
    """One sandbox's. ``index`` counts /31 networks of the pool."""

    index: int
    device: str

    @property
    def gateway(self) -> str:
        return str(POOL[2 * self.index])

    @property
    def address(self) -> str:
        return str(POOL[2 * self.index + 1])


class Egress:
    """Every sandbox's way out. ``state`` is its directory; ``lacks`` says why there is none here."""

    def __init__(self, state: Path) -> None:
        self._state = state
        digest = hashlib.sha256(str(state).encode()).hexdigest()
        self._table = f"{_TABLES}{digest[:8]}"
        self._prefix = f"{_DEVICES}{digest[:4]}_"
        self._links: dict[str, Link] = {}
        self._change = asyncio.Lock()
        self._ready = False
        self.lacks: str | None = "not started"

    def start(self) -> None:
        """See whether this machine can, and what an earlier process has left."""
        missing = [tool for tool in ("nft", "ip", "nsenter") if shutil.which(tool, path=_PATH) is None]
        if os.geteuid() != 0:
            self.lacks = "only root can give sandboxes a network: start as root"
            return
        if missing:
            self.lacks = f"{', '.join(missing)} is not there: install nftables, iproute2 and util-linux"
            return
        self.lacks = None
        self._state.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in self._state.iterdir():
            if path.suffix == ".link":
                self._links[path.stem] = msgspec.json.decode(path.read_bytes(), type=Link)

    async def connect(self, sandbox: str, pid: int, network: Network) -> str:
        """Put these rules into force; the text of its resolv.conf ("" = none). Raises SandboxError."""
        wanted = network.reaches_out
        if not wanted and sandbox not in self._links:
            return ""
        if self.lacks is not None:
            raise SandboxError(f"sandboxes cannot reach a network here: {self.lacks}")
        allow = await _resolve(network.allow)
        deny = await _resolve(network.deny)
        async with self._change:
            await self._prepare()
            link = self._links.get(sandbox)
            fresh = link is None
            if link is None:
                link = await self._reserve(sandbox)
            try:
                await _command("nft", "-f", "-", told=self._rules(link, network, allow, deny))
                if fresh or not Path(f"/sys/class/net/{link.device}").exists():  # noqa: ASYNC240 - not a disk
                    await self._plug(link, pid)
            except SandboxError:
                await self._remove(sandbox)
                raise
        return "".join(f"nameserver {each}\n" for each in resolvers()) if wanted else ""

    async def disconnect(self, sandbox: str) -> None:
        """Forget it. Idempotent."""
        if sandbox in self._links:
            async with self._change:
                await self._remove(sandbox)

    def traffic(self, sandbox: str) -> int:
        """Bytes that its link has carried, either way; 0 without one."""
        if (link := self._links.get(sandbox)) is None:
            return 0
        counters = Path(f"/sys/class/net/{link.device}/statistics")
        with suppress(OSError, ValueError):
            return sum(int((counters / name).read_text()) for name in ("rx_bytes", "tx_bytes"))
        return 0

    async def unplug(self, sandbox: str) -> None:
        """Its network namespace ends, its rules stay: ``connect`` gives the next one the same link. Idempotent."""
        if (link := self._links.get(sandbox)) is not None:
            async with self._change:
                with suppress(SandboxError):  # it went with the namespace
                    await _command("ip", "link", "delete", link.device)

    async def sweep(self, known: set[str]) -> list[str]:
        """Remove the links of sandboxes that are not known."""
        lost = sorted(self._links.keys() - known)
        for sandbox in lost:
            await self.disconnect(sandbox)
        if self.lacks is None and not self._links:  # of an earlier process, perhaps
            async with self._change:
                await self._retire()
        return lost

    # -- how

    async def _prepare(self) -> None:
        if self._ready:
            return
        out = await _default_device()
        forwarding = Path(f"/proc/sys/net/ipv4/conf/{out}/forwarding") if out else None
        off = forwarding is not None and forwarding.read_text().strip() == "0"
        turned_on = off or any(out in devices for devices in (await _turned_on()).values())
        # What this machine did not forward before, it does not begin to forward now.
        other = f'iifname "{out}" oifname != "{_DEVICES}*" drop' if turned_on else ""
        elements = f'elements = {{ "{out}" }};' if turned_on else ""
        never, private = ", ".join(NEVER), ", ".join(PRIVATE)
        await _command(
            *("nft", "-f", "-"),
            told=f"""
table inet {self._table} {{
    set never {{ type ipv4_addr; flags interval; elements = {{ {never} }}; }}
    set private {{ type ipv4_addr; flags interval; elements = {{ {private} }}; }}
    map sandboxes {{ type ifname : verdict; }}
    set {_TURNED_ON} {{ type ifname; {elements} }}
    chain input {{ type filter hook input priority -10; policy accept; iifname "{self._prefix}*" drop; }}
    chain forward {{ type filter hook forward priority -10; policy accept; }}
    chain out {{ type nat hook postrouting priority 100; policy accept; }}
}}
flush chain inet {self._table} forward
flush chain inet {self._table} input
flush chain inet {self._table} out
table inet {self._table} {{
    chain input {{ iifname "{self._prefix}*" drop; }}
    chain forward {{
        iifname "{self._prefix}*" meta nfproto ipv6 drop
        iifname "{self._prefix}*" oifname "{self._prefix}*" drop
        iifname vmap @sandboxes
        iifname "{self._prefix}*" drop
        oifname "{self._prefix}*" ct state established,related accept
        oifname "{self._prefix}*" drop
        {other}
    }}
    chain out {{ iifname "{self._prefix}*" masquerade; }}
}}
""",
        )
        if off and forwarding is not None:  # now that whoever comes next can know
            forwarding.write_text("1")
        self._ready = True

    async def _retire(self) -> None:
        """No sandbox has a network any more: the machine is as it was."""
        self._ready = False
        turned_on = await _turned_on()
        if self._table not in turned_on:
            return
        await _command("nft", "delete", "table", "inet", self._table)
        ours = turned_on.pop(self._table)
        for device in ours.difference(*turned_on.values()):
            with suppress(FileNotFoundError):  # the device is gone too
                place = Path(f"/proc/sys/net/ipv4/conf/{device}/forwarding")
                place.write_text("0")  # noqa: ASYNC240 - not a disk

    def _rules(self, link: Link, network: Network, allow: list[str], deny: list[str]) -> str:
        lines = [f"ip saddr != {link.address} drop", "ip daddr @never drop", "fib daddr type local drop"]
        wanted = network.internet or allow
        if wanted and (servers := resolvers()):
            lines.append(f"ip daddr {{ {', '.join(servers)} }} meta l4proto {{ tcp, udp }} th dport 53 accept")
        lines += [f"ip daddr {each} accept" for each in allow]
        lines += [f"ip daddr {each} drop" for each in deny]
        lines += ["ip daddr @private drop", "accept" if network.internet else "drop"]
        chain = f"inet {self._table} {link.device}"
        told = [f"add chain {chain}", f"flush chain {chain}", *(f"add rule {chain} {line}" for line in lines)]
        return "\n".join(
            [*told, f'add element inet {self._table} sandboxes {{ "{link.device}" : jump {link.device} }}\n']
        )

    async def _reserve(self, sandbox: str) -> Link:
        taken = {link.index for link in self._links.values()}
        addresses = await _command("ip", "-o", "-4", "address", "show", "to", str(POOL))
        for found in re.findall(r"inet (\d+\.\d+\.\d+\.\d+)", addresses):
            taken.add((int(ipaddress.IPv4Address(found)) - int(POOL.network_address)) // 2)
        index = next(n for n in range(1, POOL.num_addresses // 2) if n not in taken)
        link = Link(index, f"{self._prefix}{index}")
        (self._state / f"{sandbox}.link").write_bytes(msgspec.json.encode(link))
        self._links[sandbox] = link
        return link

    async def _plug(self, link: Link, pid: int) -> None:
        device = link.device
        outside = (
            f"link add {device} type veth peer name eth0 netns {pid}\naddress add {link.gateway}/31 dev {device}\n"
        )
        await _command("ip", "-batch", "-", told=outside)
        settings = Path("/proc/sys/net")
        (settings / f"ipv6/conf/{device}/disable_ipv6").write_text("1")
        (settings / f"ipv4/conf/{device}/forwarding").write_text("1")
        await _command("ip", "link", "set", device, "up")
        inside = f"address add {link.address}/31 dev eth0\nlink set eth0 up\nroute add default via {link.gateway}\n"
        await _command("nsenter", f"--net=/proc/{pid}/ns/net", "ip", "-batch", "-", told=inside)

    async def _remove(self, sandbox: str) -> None:
        link = self._links.pop(sandbox, None)
        if link is None:
            return
        with suppress(SandboxError):  # it goes with the sandbox's namespace, sooner or later
            await _command("ip", "link", "delete", link.device)
        name = f"inet {self._table}"
        with suppress(SandboxError):  # never made
            await _command("nft", "-f", "-", told=f'delete element {name} sandboxes {{ "{link.device}" }}\n')
        with suppress(SandboxError):
            await _command("nft", "delete", "chain", "inet", self._table, link.device)
        (self._state / f"{sandbox}.link").unlink(missing_ok=True)
        if not self._links:
            await self._retire()


_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"


async def _command(*words: str, told: str = "") -> str:
    """Run one tool with something to read; what it says. Raises SandboxError."""
    process = await asyncio.create_subprocess_exec(
        *words,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={"PATH": _PATH},
        cwd="/",
    )
    try:
        out, errors = await asyncio.wait_for(process.communicate(told.encode()), _COMMAND_S)
    except BaseException as error:  # whatever it was, cancelled included, leaves no process
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
        if isinstance(error, TimeoutError):
            raise SandboxError(f"{words[0]} did not end in {_COMMAND_S:.0f} s") from None
        raise
    if process.returncode:
        raise SandboxError(f"a sandbox's network could not be changed: {errors.decode(errors='replace').strip()[:500]}")
    return out.decode(errors="replace")


async def _turned_on() -> dict[str, set[str]]:
    """Of every table of ours on this machine, the devices whose forwarding was turned on."""
    found: dict[str, set[str]] = {}
    for table in re.findall(rf"^table inet ({_TABLES}\w+)$", await _command("nft", "list", "tables"), re.MULTILINE):
        with suppress(SandboxError):  # it went meanwhile
            told = await _command("nft", "list", "set", "inet", table, _TURNED_ON)
            found[table] = set(re.findall(r'"([^"]+)"', told))
    return found


async def _default_device() -> str:
    words = (await _command("ip", "-4", "route", "show", "default")).split()
    return words[words.index("dev") + 1] if "dev" in words else ""


def resolvers(places: Iterable[str] = _RESOLVERS) -> list[str]:
    """The machine's name servers that a sandbox could reach (IPv4, not its loopback)."""
    for place in places:
        with suppress(OSError):
            found = re.findall(r"^\s*nameserver\s+(\d+\.\d+\.\d+\.\d+)\s*$", Path(place).read_text(), re.MULTILINE)
            usable = [each for each in found if not ipaddress.ip_address(each).is_loopback]
            if usable:
                return usable
    return []


async def _resolve(names: tuple[str, ...]) -> list[str]:
    """CIDR blocks and addresses as they are, host names as the addresses they have now. Raises SandboxError."""
    found: list[str] = []
    for name in names:
        try:
            block = ipaddress.ip_network(name, strict=False)
        except ValueError:
            found += await _look_up(name)
            continue
        if block.version == 4:  # IPv6 goes nowhere as it is
            found.append(str(block))
    return list(dict.fromkeys(found))


async def _look_up(name: str) -> list[str]:
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?", name):
        raise SandboxError(f"{name!r} is neither a network, an address nor a host name")
    asking = asyncio.get_running_loop().getaddrinfo(name, None, family=socket.AF_INET, type=socket.SOCK_STREAM)
    try:
        answers = await asyncio.wait_for(asking, _RESOLVE_S)
    except (OSError, TimeoutError) as error:
        raise SandboxError(f"the host name {name} cannot be resolved now ({error}): give addresses") from None
    return sorted({str(answer[4][0]) for answer in answers})
