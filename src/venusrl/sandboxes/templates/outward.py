"""A program that may reach others' machines, and nothing of this one, whatever it is told to connect to.

Owns: ``run``: a command in a network of its own (``jailed.py``) and the proxy that is its only way out; ``not_here``:
the rule.

Must not know: what the command fetches.

Guarantees: a name is resolved once for each connection, and the connection goes to the very address that was judged, so
a name that changes its meaning gains nothing; redirects are connections like any other; only TLS (CONNECT) passes. With
an operator's own HTTPS_PROXY connections go on to that, by name: what a name means is then its business.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from urllib.parse import urlsplit

from venusrl.sandboxes.runtimes.namespace.egress import NEVER

_JAILED = Path(__file__).with_name("jailed.py")
_NEVER = [ipaddress.ip_network(block) for block in (*NEVER, "fe80::/10", "ff00::/8", "::/127", "fd00:ec2::254/128")]
_HEAD_S = 30.0
_CONNECT_S = 30.0
_PIECE = 1 << 16

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Allowed = Callable[[Address], bool]
Resolve = Callable[[str, int], Awaitable[list[str]]]


class Refused(Exception):
    """A connection that may not be; the words are for the one who asked."""


def not_here(address: Address) -> bool:
    """Whether it is neither an address of this machine nor one that means something to this machine alone."""
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    return not any(address in block for block in _NEVER) and not _own(address)


def _own(address: Address) -> bool:
    """What a machine sends to itself comes from the very address it goes to. Sends nothing."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((str(address), 9))
            return ipaddress.ip_address(probe.getsockname()[0]) == address
    except OSError:
        return False  # no way there at all


async def resolved(host: str, port: int) -> list[str]:
    """The addresses of a name, as this machine knows them. Raises OSError."""
    answers = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(answer[4][0]) for answer in answers]


def run(
    command: list[str],
    timeout_s: float,
    *,
    allowed: Allowed = not_here,
    resolve: Resolve = resolved,
) -> subprocess.CompletedProcess[str]:
    """The command's end and what it said. Blocks. Raises subprocess.TimeoutExpired (the command is killed)."""
    return asyncio.run(_run(command, timeout_s, _Proxy(allowed, resolve)))


async def _run(command: list[str], timeout_s: float, proxy: _Proxy) -> subprocess.CompletedProcess[str]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(_JAILED), str(theirs.fileno()), *command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(theirs.fileno(),),
        )
        theirs.close()
        try:
            async with asyncio.timeout(timeout_s):
                # One that fails before it sends closes its end, which ends the wait.
                _, sent, _, _ = await asyncio.to_thread(socket.recv_fds, ours, 1, 1)
                async with proxy.on(sent):
                    out, err = await process.communicate()
        except TimeoutError:
            raise subprocess.TimeoutExpired(command, timeout_s) from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert process.returncode is not None
    texts = (text.decode(errors="replace") for text in (out, err))
    return subprocess.CompletedProcess(command, process.returncode, *texts)


class _Proxy:
    """Connections of a jailed program, one task each."""

    def __init__(self, allowed: Allowed, resolve: Resolve) -> None:
        self._allowed = allowed
        self._resolve = resolve
        self._upstream = urlsplit(os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy") or "")

    @contextlib.asynccontextmanager
    async def on(self, sockets: list[int]) -> AsyncIterator[None]:
        """Serve on what the jail listens on."""
        tasks: set[asyncio.Task[None]] = set()

        def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.create_task(self._serve(reader, writer), name="a jailed program's connection")
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        servers = [await asyncio.start_server(begin, sock=socket.socket(fileno=number)) for number in sockets]
        try:
            yield
        finally:
            for server in servers:
                server.close()
            for task in list(tasks):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(ConnectionError, TimeoutError):
            try:
                async with asyncio.timeout(_HEAD_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                there, back = await self._reach(head.split(b"\r\n", 1)[0].decode("latin-1"))
            except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                return
            except (Refused, OSError) as error:
                writer.write(f"HTTP/1.1 403 {error}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
                await writer.drain()
                return
            with contextlib.closing(back):
                writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
                await asyncio.gather(_carry(reader, back), _carry(there, writer))

    async def _reach(self, line: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to what a request's first line names. Raises Refused, OSError."""
        method, _, rest = line.partition(" ")
        host, _, port = rest.partition(" ")[0].rpartition(":")
        host = host.strip("[]")
        if method != "CONNECT" or not host or not port.isdigit():
            raise Refused("only TLS passes: the registry names an address without it")
        if self._upstream.hostname:
            await self._judged(host, int(port), unknown_is_fine=True)
            return await self._through(host, port)
        found = await self._judged(host, int(port))
        last: OSError = OSError(f"{host} has no address")
        for address in found:
            try:
                async with asyncio.timeout(_CONNECT_S):
                    return await asyncio.open_connection(address, int(port))
            except OSError as error:
                last = error
        raise OSError(f"{host}:{port} cannot be reached ({last})")

    async def _judged(self, host: str, port: int, *, unknown_is_fine: bool = False) -> list[str]:
        try:
            found = await self._resolve(host, port)
        except (OSError, UnicodeError) as error:
            if unknown_is_fine:
                return []
            raise OSError(f"{host} cannot be resolved ({error})") from None
        if not all(self._allowed(ipaddress.ip_address(address)) for address in found):
            raise Refused(f"{host} is of the service's own network")
        return found

    async def _through(self, host: str, port: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """By the operator's proxy."""
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        async with asyncio.timeout(_CONNECT_S):
            there, back = await asyncio.open_connection(self._upstream.hostname, self._upstream.port or 80)
            back.write(f"CONNECT {where} HTTP/1.1\r\nHost: {where}\r\n\r\n".encode())
            head = await there.readuntil(b"\r\n\r\n")
        if head.split(b" ", 2)[1:2] != [b"200"]:
            back.close()
            raise OSError(f"the proxy of HTTPS_PROXY refuses {where}: {head.splitlines()[0].decode('latin-1')}")
        return there, back


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_PIECE):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
