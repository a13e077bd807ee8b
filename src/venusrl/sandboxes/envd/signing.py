"""Signed URLs of E2B's file services.

Owns: ``signature`` and ``verify``. Pure.

Must not know: HTTP, records.

Guarantees: comparisons take the same time whatever is wrong; an expired signature is told from a wrong one only to a
caller who holds a right one.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
from typing import Literal, NamedTuple

Operation = Literal["read", "write"]
_EXPIRATION = re.compile(r"-?[0-9]{1,15}")


class BadSignature(ValueError):
    """The message is what E2B's own services answer."""


class Signed(NamedTuple):
    """What a signed URL says. ``user`` "" = the sandbox's default."""

    path: str
    operation: Operation
    user: str
    signature: str
    expiration: str = ""
    """Unix seconds as they stand in the URL; "" = never."""


def signature(path: str, operation: Operation, user: str, token: str, expiration: str = "") -> str:
    """What a holder of the sandbox's access token puts into the URL."""
    raw = f"{path}:{operation}:{user}:{token}" + (f":{expiration}" if expiration else "")
    digest = hashlib.sha256(raw.encode("utf-8", "surrogateescape")).digest()
    return "v1_" + base64.b64encode(digest).decode().rstrip("=")


def matches(signed: Signed, token: str) -> bool:
    """Whether a holder of ``token`` signed this, expired or not."""
    expected = signature(signed.path, signed.operation, signed.user, token, signed.expiration)
    return hmac.compare_digest(expected.encode(), signed.signature.encode("utf-8", "surrogateescape"))


def verify(signed: Signed, token: str, now: float) -> None:
    """Raises BadSignature."""
    if not signed.signature:
        raise BadSignature("missing signature query parameter")
    if signed.expiration and not _EXPIRATION.fullmatch(signed.expiration):
        raise BadSignature("invalid signature")
    if not matches(signed, token):
        raise BadSignature("invalid signature")
    if signed.expiration and int(signed.expiration) < now:
        raise BadSignature("signature is already expired")
