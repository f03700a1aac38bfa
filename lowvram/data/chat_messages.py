"""The messages of a conversation: the formats of data sets as roles and texts, which chat templates take."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import date, time
from typing import Any

from lowvram.data.source import Unfit
from lowvram.data.text_and_label import AS_TIMES

ASSISTANT = "assistant"  # the role whose words are learnt
ROLE, CONTENT, WEIGHT = "role", "content", "weight"
USUAL_KEYS = ((ROLE, CONTENT), ("from", "value"))  # of messages; the second are ShareGPT's
OTHER_NAMES = {"human": "user", **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model"), ASSISTANT)}
ROLES = ("system", "developer", "user", ASSISTANT, "tool", "function", "ipython", "observation")
PART_KEYS = {"type", "text"}  # of a text in a content that is a list
Message = dict[str, Any]  # role, content, and perhaps weight (0: not learnt) and what only some templates know


def checked(messages: Any, keys: Sequence[tuple[Any, Any]], roles: Mapping[str, str]) -> list[Message]:
    """The messages of a row, each with a role that is known and a text, without the keys that only other messages have.

    Args:
        keys: of roles and contents; a message may have any pair of them.
        roles: further roles, by the names that chat templates know.

    Raises:
        Unfit: the row is anything else.
    """
    found, known = list[Message](), {**{role: role for role in ROLES}, **OTHER_NAMES, **roles}
    for message in messages if isinstance(messages, list) else ():
        kept = {key: value for key, value in message.items() if value is not None} if isinstance(message, dict) else {}
        pair = next(
            ((role, content) for role, content in keys if isinstance(kept.get(role), str) and content in kept), None
        )
        if pair is None:
            found.clear()
            break
        role, content = kept.pop(pair[0]), text_of(kept.pop(pair[1]))
        if role not in known:
            raise Unfit(unknown_role(role, known))
        if kept.get(WEIGHT, 1) not in (0, 1):
            raise Unfit(f"has a message of the weight {kept[WEIGHT]!r}: 1 has it learnt, 0 not")
        found.append({ROLE: known[role], CONTENT: content, **kept})
    if not found:
        pairs = " or ".join(f"a {role} and a {content}" for role, content in keys)
        raise Unfit(f"is no list of messages, each with {pairs} (data.role and data.content name others)")
    return found


def unknown_role(role: str, known: Mapping[str, str]) -> str:
    """A sentence on a role that nobody knows, so that it isn't clear whether its words are learnt."""
    name = role if role.isidentifier() else repr(role)
    likely = known.get(role.lower(), ASSISTANT)
    return (
        f"has a message of the role {role!r}; known are {', '.join(known)}. Map it with data.roles={{{name}: {likely}}}"
        f" (what the assistant says is learnt), or leave it to the chat template with data.roles={{{name}: {name}}}"
    )


def text_of(content: Any) -> str:
    """A message's text; the texts of a list of parts, joined. Raises Unfit for anything else."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "".join(map(text_of_part, content))
    what = f"a time{AS_TIMES}" if isinstance(content, date | time) else f"no text but {content!r}"
    raise Unfit(f"has a content that is {what}")


def text_of_part(part: Any) -> str:
    """A part's text, of {"type": "text", "text": TEXT} or TEXT. Raises Unfit for images and the like."""
    if isinstance(part, str):
        return part
    kept = {key: value for key, value in part.items() if value is not None} if isinstance(part, dict) else {}
    if not (kept.keys() == PART_KEYS and kept["type"] == "text" and isinstance(kept["text"], str)):
        raise Unfit(f"has a content with a part that is no text: {str(kept or part)[:80]}")
    return kept["text"]


def is_learnt(message: Message) -> bool:
    """Whether the message is the assistant's, and isn't left out by a weight of 0."""
    return message[ROLE] == ASSISTANT and bool(message.get(WEIGHT, 1))


def is_left_out(message: Message) -> bool:
    """Whether the message is the assistant's, but left out by a weight of 0."""
    return message[ROLE] == ASSISTANT and not is_learnt(message)


def unread_keys(messages: Iterable[Message], template: str) -> frozenset[str]:
    """The further keys of messages that a chat template doesn't name, so that it can't read them."""
    keys = {key for message in messages for key in message} - {ROLE, CONTENT, WEIGHT}
    return frozenset(key for key in keys if not re.search(rf"\b{re.escape(key)}\b", template))
