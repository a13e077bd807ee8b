"""Which sandbox and which port a request is meant for.

Owns: the reading of Host and of E2B's two routing headers. Pure.

Must not know: HTTP libraries, records.

Guarantees: routing headers count only where the Host cannot name a sandbox (a loopback or other IP address,
``localhost``, ``sandbox.<domain>``), so that a page served by one sandbox cannot reach another by adding headers to
requests to its own host name.
"""

from __future__ import annotations

import ipaddress
import re
from typing import NamedTuple

ID_HEADER = "E2b-Sandbox-Id"
PORT_HEADER = "E2b-Sandbox-Port"
_ID = re.compile(r"[a-z0-9]{1,63}")
_PORT = re.compile(r"[0-9]{1,5}")


class BadAddress(ValueError):
    """The request names no sandbox, or no port, that could exist. The message is safe to send back."""


class Address(NamedTuple):
    """A port of a sandbox; the sandbox may not exist."""

    sandbox: str
    port: int


def host_name(host: str) -> str:
    """``host`` without its port and without the brackets of an IPv6 address, in lower case."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0] if host.count(":") == 1 else host


def is_shared(host: str) -> bool:
    """Whether this Host belongs to no single sandbox, so that headers may say which."""
    name = host_name(host)
    if name == "localhost" or (name.startswith("sandbox.") and len(name) > len("sandbox.")):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def names_sandbox(host: str) -> bool:
    """Whether the Host has the form ``{port}-{id}.{domain}``."""
    try:
        _of_host(host)
    except BadAddress:
        return False
    return True


def address(host: str, sandbox: str, port: str) -> Address | None:
    """Where a request goes: ``sandbox`` and ``port`` are the routing headers, "" where absent.

    None = it names no sandbox at all (and may be for the service itself). Raises BadAddress.
    """
    if is_shared(host):
        if not sandbox and not port:
            return None
        if not sandbox or not port:
            raise BadAddress(f"missing header {PORT_HEADER if sandbox else ID_HEADER}")
        return Address(_checked_id(sandbox), _checked_port(port))
    return _of_host(host)


def _of_host(host: str) -> Address:
    first, dot, domain = host_name(host).partition(".")
    port, dash, sandbox = first.partition("-")
    if not dot or not domain or not dash:
        raise BadAddress("the Host names no sandbox: it must read {port}-{sandbox}.{domain}")
    return Address(_checked_id(sandbox), _checked_port(port))


def _checked_id(text: str) -> str:
    # Older clients append "-{clientID}" to the id; what follows the dash says nothing here.
    sandbox = text.partition("-")[0]
    if not _ID.fullmatch(sandbox):
        raise BadAddress("invalid sandbox id: lower-case letters and digits only")
    return sandbox


def _checked_port(text: str) -> int:
    if not _PORT.fullmatch(text) or not 0 < int(text) < 65536:
        raise BadAddress("invalid sandbox port: a number from 1 to 65535")
    return int(text)
