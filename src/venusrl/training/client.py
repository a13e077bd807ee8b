"""The trainer's side of the trainer API (``docs/architecture.md``), synchronous, standard library only.

Owns: requests, their patience and the meaning of their answers. Must not know: models, checkpoints.

Guarantees: a coordinator that restarts within ``patience_s`` goes unnoticed; one that refuses is an ApiError with
its text at once; every request has a timeout; a report can be repeated.
"""

from __future__ import annotations

import http.client
import logging
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from email.message import Message
from typing import TypeVar

import msgspec

from venusrl.training.errors import ApiError, CoordinatorLost
from venusrl.types import Batch

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
REQUEST_TIMEOUT_S = 60.0
"""On top of what a request asks the coordinator to wait."""
FIRST_RETRY_S = 0.1
LONGEST_RETRY_S = 2.0
_RETRIED = frozenset({500, 502, 503, 504})


class RunState(msgspec.Struct, frozen=True):
    """``version``: the weights the run stands at. ``max_steps``: the version at which it ends."""

    version: int
    max_steps: int


class Trained(msgspec.Struct, frozen=True):
    """A finished step. ``version`` is the new one; ``checkpointed``: training can resume from it."""

    batch_id: str
    version: int
    model_path: str
    checkpointed: bool
    metrics: dict[str, float]


@dataclass(frozen=True)
class Waiting:
    """No batch yet, and why."""

    reason: str


@dataclass(frozen=True)
class RunOver:
    reason: str


@dataclass(frozen=True)
class _Answer:
    status: int
    body: bytes
    headers: dict[str, str]

    @property
    def text(self) -> str:
        return self.body[:2000].decode(errors="replace").strip()


class TrainerClient:
    def __init__(
        self, url: str, key: str, *, patience_s: float = 120.0, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._url = url.rstrip("/")
        self._key = key
        self._patience_s = patience_s
        self._sleep = sleep

    def state(self) -> RunState:
        answer = self._call("GET", "/v1/trainer/state", None, wait_s=0)
        return _decode(answer, RunState)

    def batch(self, version: int, wait_s: float) -> Batch | Waiting | RunOver:
        """The batch that trains ``version``. Waits at the coordinator for up to ``wait_s``."""
        answer = self._call("GET", f"/v1/trainer/batch?version={version}&wait_s={wait_s:g}", None, wait_s=wait_s)
        if answer.status == 204:
            return Waiting(answer.headers.get("x-waiting-for", "unknown"))
        if answer.status == 410:
            return RunOver(answer.text)
        batch = _decode(answer, Batch)
        if batch.version != version:
            raise ApiError(f"asked for the batch of version {version}, got {batch.id} of version {batch.version}")
        return batch

    def report(self, trained: Trained) -> None:
        """Idempotent, so that it can be repeated after a lost answer or a crash. A run that is over does not mind."""
        self._call("POST", "/v1/trainer/trained", msgspec.msgpack.encode(trained), wait_s=0)

    def _call(self, method: str, path: str, body: bytes | None, *, wait_s: float) -> _Answer:
        """One request, repeated while the coordinator is away. Raises CoordinatorLost, ApiError."""
        give_up = time.monotonic() + self._patience_s + wait_s
        pause = FIRST_RETRY_S
        while True:
            try:
                answer = self._once(method, path, body, REQUEST_TIMEOUT_S + wait_s)
                if answer.status not in _RETRIED:
                    break
                problem = f"HTTP {answer.status}: {answer.text}"
            except (OSError, http.client.HTTPException) as error:
                problem = str(error) or type(error).__name__
            if time.monotonic() + pause > give_up:
                raise CoordinatorLost(f"{method} {self._url}{path} failed for {self._patience_s:g} s: {problem}")
            _log.warning("%s %s: %s; trying again", method, path, problem)
            self._sleep(pause)
            pause = min(pause * 2, LONGEST_RETRY_S)
        if answer.status >= 400 and answer.status != 410:
            raise ApiError(f"{method} {path}: HTTP {answer.status}: {answer.text}")
        return answer

    def _once(self, method: str, path: str, body: bytes | None, timeout_s: float) -> _Answer:
        headers = {"Authorization": f"Bearer {self._key}", "Accept": "application/msgpack"}
        if body is not None:
            headers["Content-Type"] = "application/msgpack"
        request = urllib.request.Request(self._url + path, data=body, method=method, headers=headers)
        try:
            with _opener.open(request, timeout=timeout_s) as response:
                return _answer(response.status, response.read(), response.headers)
        except urllib.error.HTTPError as error:
            with error:
                return _answer(error.code, error.read(), error.headers)


# The coordinator is on this machine or named by the user: never through a proxy of the environment.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def _answer(status: int, body: bytes, headers: Message) -> _Answer:
    return _Answer(status, body, {name.lower(): value for name, value in headers.items()})


def _decode(answer: _Answer, kind: type[_T]) -> _T:
    as_json = answer.headers.get("content-type", "").startswith("application/json")
    try:
        if as_json:
            return msgspec.json.decode(answer.body, type=kind)
        return msgspec.msgpack.decode(answer.body, type=kind)
    except msgspec.MsgspecError as error:
        raise ApiError(f"the coordinator's answer is not a {kind.__name__}: {error}") from error
