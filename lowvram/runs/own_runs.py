"""Whether a run's folder is this user's own, so that the code which it names may run again. Imports no torch.

A run that names code signs what was typed for it (`.hydra/overrides.yaml`) with a key that this user alone can read;
the first such run makes it. A folder of somebody else, or one that was changed, has no such signature.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import secrets
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from lowvram.config.cache_folder import state_folder
from lowvram.config.code_names import Names, code_in
from lowvram.config.errors import BadInput
from lowvram.config.texts import shortened
from lowvram.results.files.durable import made_private
from lowvram.results.terminal import hydra_quoted, shown_path

KEY_NAME, KEY_CHARACTERS = "key", 64
LONGEST_NAMES = 800  # characters of a message
SIGNATURE = re.compile(r"^# code: (?P<code>\{.*\})\n# signed: (?P<signature>[0-9a-f]{64})$", re.MULTILINE)
ABOUT = (
    "# lowvram runs this code again for the user alone whose key has signed it: docs/command_line.md, resuming a run\n"
)


def signed(words: Sequence[str], code: Names) -> str:
    """The lines that sign the words of a run below them in their file; empty if this user can't have a key.

    Args:
        code: what the composed configuration names, which includes what presets name.
    """
    key, text = user_key(is_new_allowed=True), json.dumps(code)
    return "" if key is None else f"{ABOUT}# code: {text}\n# signed: {signature(key, words, text)}\n"


def signature(key: str, words: Sequence[str], code: str) -> str:
    return hmac.new(key.encode(), json.dumps([list(words), code]).encode(), hashlib.sha256).hexdigest()


def own_code(text: str, words: Sequence[str]) -> Names | None:
    """What this user's run named as code; None unless this user's key has signed the words.

    Args:
        text: that of the file with the words.
    """
    match = SIGNATURE.search(text)
    key = user_key(is_new_allowed=False) if match else None
    if (
        match is None
        or key is None
        or not hmac.compare_digest(signature(key, words, match["code"]), match["signature"])
    ):
        return None
    named = [json.loads(match["code"]), code_in(words)]
    return {name: [text for each in named for text in each.get(name, ())] for each in named for name in each}


def user_key(is_new_allowed: bool) -> str | None:
    """This user's key; None if there is none, or if another user could know it."""
    folder = state_folder()
    if folder is None:
        return None
    with suppress(OSError):
        if is_new_allowed and not (folder / KEY_NAME).exists():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with suppress(FileExistsError):
                made_private(folder / KEY_NAME, secrets.token_hex(KEY_CHARACTERS // 2).encode())
        fd = os.open(folder / KEY_NAME, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            status, text = os.fstat(fd), os.read(fd, KEY_CHARACTERS + 1).decode(errors="replace")
        finally:
            os.close(fd)
        is_private = status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077
        return text if is_private and stat.S_ISREG(status.st_mode) and len(text) == KEY_CHARACTERS else None
    return None


def is_trusted(folder: Path, typed: str | None) -> bool:
    """Whether the user has typed `trust=FOLDER`.

    Args:
        typed: what was typed for `trust`.
    """
    return typed is not None and Path(typed).expanduser().resolve() == folder.resolve()


def check_code(code: Names, folder: Path, key: str, own: Names | None, trust: str | None) -> None:
    """Check that code which a folder names may run.

    Args:
        code: what it names, without what was typed again.
        key: that under which the folder was typed.
        own: what this user's run in the folder named; None if it isn't this user's.
        trust: what was typed for `trust`.

    Raises:
        BadInput: the user hasn't confirmed the code; it names it, and says what to type.
    """
    confirmed: Mapping[str, Sequence[str]] = own or {}
    foreign = {name: texts for name, texts in code.items() if not {*texts} <= {*confirmed.get(name, ())}}
    if not foreign or is_trusted(folder, trust):
        return
    names = shortened("; ".join(f"{name}: {', '.join(texts)}" for name, texts in foreign.items()), LONGEST_NAMES)
    shown = hydra_quoted(shown_path(folder))
    ways = f"type {' and '.join(list(foreign)[:6])} yourself beside {key}=, or trust={shown} if you know who made it"
    what = f"it names code to run ({names}), and you haven't signed it here"
    raise BadInput(key, shown_path(folder), f"the folder of a run of yours, or one that you trust: {what}; {ways}")
