"""The Jobs API of a Ray cluster: one request over HTTP, and what it answers. Imports neither Ray nor torch.

The API is documented, the same in all versions of Ray, and needs no Ray here, whose pins clash with ours; the command
`ray job` would, and tells less exactly whether a job was taken.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any, final
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, OpenerDirector, ProxyHandler, Request, build_opener

from lowvram.config.errors import BadInput, Refused, printable
from lowvram.config.secret import text_without_secrets
from lowvram.results.files.regular import SHORT_BYTES, read_regular

ANSWER_S = 60.0  # the longest that an answer, or a part of it, may take
LARGEST_ANSWER_BYTES = 2**28  # a list of jobs has 20,000 characters of the log of each that has failed
LONGEST_REASON = 300
DEFAULT_ADDRESS = "http://127.0.0.1:8265"
ADDRESSES = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")  # as `ray job` reads them
DENIED = (401, 403)


class Silent(Exception):
    """Nothing has answered. The text says why.

    Attributes:
        was_heard: whether the request may have been read.
    """

    def __init__(self, reason: object, was_heard: bool) -> None:
        super().__init__(one_line(str(reason)) or type(reason).__name__)
        self.was_heard = was_heard


@final
@dataclass(frozen=True)
class Answer:
    """What the cluster has answered."""

    status: int
    text: str

    def value(self) -> Any:
        """The text as JSON; None if it is none."""
        try:
            return json.loads(self.text)
        except ValueError:
            return None

    def reason(self) -> str:
        """The last line that says something: of a traceback, the error."""
        lines = [line for line in self.text.splitlines() if re.search(r"\w{3}", line)]
        return f"HTTP {self.status}: {one_line(lines[-1]) if lines else 'it says no reason'}"


class Redirects(HTTPRedirectHandler):
    """Follows none: whoever is asked gets the cluster's token."""

    def redirect_request(self, req: Request, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> None:
        return None


def ask(address: str, path: str, body: Mapping[str, Any] | None = None) -> Answer:
    """Send one request: a POST if it has a body.

    Raises:
        Silent: nothing has answered.
        Refused: the token's file can't be read.
    """
    request = Request(f"{address}{path}", None if body is None else json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    if token := token_of(os.environ):
        request.add_header("Authorization", f"Bearer {token}")
    try:
        with opener_for(address).open(request, timeout=ANSWER_S) as answer:
            return Answer(answer.status, text_of(answer))
    except HTTPError as error:
        with error:
            return Answer(error.code, text_of(error))
    except URLError as error:  # while connecting or sending
        raise Silent(error.reason, was_heard=False) from None
    except (OSError, HTTPException, ValueError) as error:
        raise Silent(error, was_heard=True) from None


def text_of(answer: Any) -> str:
    """The body of an answer. Raises Silent if it breaks off."""
    try:
        return answer.read(LARGEST_ANSWER_BYTES).decode(errors="replace")
    except (OSError, HTTPException) as error:
        raise Silent(error, was_heard=True) from None


def opener_for(address: str) -> OpenerDirector:
    """What sends requests: by the proxies of the environment, but to this machine directly."""
    host = urlsplit(address).hostname or ""
    is_here = host in ("localhost", "::1") or host.startswith("127.")
    return build_opener(Redirects(), ProxyHandler({} if is_here else None))


def address_from(environment: Mapping[str, str]) -> str:
    """Where the cluster is, if launcher.address doesn't say it.

    Raises:
        BadInput: the environment names a cluster, but not by the address of its dashboard.
    """
    name = next((name for name in ADDRESSES if environment.get(name)), None)
    if name is None or environment[name] == "auto":
        return DEFAULT_ADDRESS
    allowed = "the address of the cluster's dashboard, such as http://HEAD:8265; or type launcher.address"
    if not is_address(environment[name]):
        raise BadInput(name, environment[name], allowed)
    return environment[name].rstrip("/")


def is_address(text: str) -> bool:
    return re.fullmatch(r"https?://[\w.:\[\]-]+(/[\w./~-]*)?", text) is not None


def token_of(environment: Mapping[str, str]) -> str | None:
    """The cluster's token, from where Ray takes it; None if there is none.

    Raises:
        Refused: the file that the environment names can't be read.
    """
    if environment.get("RAY_AUTH_MODE", "").lower() == "disabled":
        return None
    if token := environment.get("RAY_AUTH_TOKEN", "").strip():
        return token
    named = environment.get("RAY_AUTH_TOKEN_PATH")
    try:
        path = Path(named) if named else Path.home() / ".ray" / "auth_token"
        return read_regular(path, SHORT_BYTES).decode().strip() or None
    except (OSError, ValueError, RuntimeError) as error:
        if named is None:
            return None
        raise Refused(f"launcher=ray: RAY_AUTH_TOKEN_PATH={named}: can't be read: {one_line(str(error))}") from None


def denial(address: str, answer: Answer) -> Refused:
    """The error for an answer that no job follows from."""
    how = ""
    if answer.status in DENIED:
        how = ": the cluster wants its token in RAY_AUTH_TOKEN, or in the file that RAY_AUTH_TOKEN_PATH names"
    return Refused(f"launcher=ray: {address} has answered {answer.reason()}{how}")


def one_line(text: str) -> str:
    """What a stranger says, fit for a message."""
    return printable(text_without_secrets(" ".join(text.split())))[:LONGEST_REASON]
