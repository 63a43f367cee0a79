"""Chats, as the template of a tokenizer writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple

import datasets
from datasets import Dataset

from headprune.errors import DataError

BESIDE = ("system", "tools")  # columns
Place = tuple[int, int, bool]

_SAID = {"content", "value"}
_ROLES = {"human": "user", "gpt": "assistant"}  # of ShareGPT
_MARKS = tuple(map(chr, range(0xE000, 0xF900)))  # for private use: no text has all of them
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Chat(NamedTuple):
    """Messages, and what stands beside them: a system message, and tools in JSON or as a list."""

    messages: Sequence[Mapping[str, Any]]
    system: str | None = None
    tools: Any = None


def holds_chats(table: Dataset, column: str) -> bool:
    """Return whether a column holds lists of messages, or their JSON."""
    feature = table.features[column]
    if getattr(feature, "dtype", None) in ("string", "large_string"):
        rows = table.select_columns([column]).with_format(None)
        cell = next((row[column] for row in rows if row[column]), "").lstrip()
        with suppress(ValueError):
            return cell.startswith("[") and _are_messages(json.loads(cell))
        return False
    message = getattr(feature, "feature", feature)
    if isinstance(message, dict):
        return message is not feature and bool(_SAID & message.keys())
    if not isinstance(message, getattr(datasets, "Json", ())):  # messages with unlike keys
        return False
    rows = table.select_columns([column]).with_format(None)
    first = next((row[column] for row in rows if row[column]), None)
    return _are_messages(first)


def _are_messages(cell: Any) -> bool:
    first = cell[0] if isinstance(cell, list) and cell else None
    return isinstance(first, dict) and bool(_SAID & first.keys())


def chats_of(batch: Mapping[str, list[Any]], column: str) -> Iterator[Chat]:
    """Yield the chats of a column, with what stands beside them in ``system`` and ``tools``."""
    beside = (batch.get(name) or [None] * len(batch[column]) for name in BESIDE)
    yield from map(Chat, batch[column], *beside)


def chat_text(chat: Chat, tokenizer: Any, source: str, asks: bool = False) -> str:
    """Return a chat as text, by the template of a tokenizer.

    Messages have ``role`` and ``content``, or ``from`` and ``value`` as of ShareGPT. ``asks``: the
    template asks for an answer to the last message.

    Raises:
        DataError: If there is no template, or it takes no such messages.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise DataError(
            f"'{source}' holds chats, and the tokenizer has no chat template. Give one of a model "
            "that chats, or write each chat as one text."
        )
    try:
        named, how = _named(chat), _how(chat)
        asks = asks and named[-1].get("role") != "assistant"
        how |= {"tokenize": False, "add_generation_prompt": asks}
        text: str = tokenizer.apply_chat_template(named, **how)
    except Exception as error:  # a template raises errors of its own
        first = next(iter(str(error).splitlines()), type(error).__name__).rstrip(".")
        raise DataError(
            f"'{source}': the chat template takes no such messages: {first}. They begin with "
            f"{str(chat.messages)[:80]!r}."
        ) from None
    return text


def answer_places(chat: Chat, tokenizer: Any, source: str) -> str:
    """Return the places of the assistant's answers in a chat's text, as JSON.

    A place is a start, an end, and whether the next token counts because it ends the answer. An
    answer of weight 0, as of OpenAI, has none.

    Raises:
        DataError: If there is no answer, or the template does not say where one stands.
    """
    text, named, how = chat_text(chat, tokenizer, source), _named(chat), _how(chat)
    answers = [n for n, message in enumerate(named) if message.get("role") == "assistant"]
    muted = [n for n in answers if named[n].get("weight") == 0]
    if _GENERATION.search(tokenizer.get_chat_template(tools=how["tools"])):
        without = list(_probed(named, muted, text, tokenizer, source, how))
        places = list(_marked(named, without, tokenizer, how))
    else:
        counted = [n for n in answers if n not in muted]
        places = list(_probed(named, counted, text, tokenizer, source, how))
    if not places:
        raise DataError(
            f"'{source}' has a chat without an answer of the assistant that counts, "
            f"{text[:40]!r}. Leave it out."
        )
    return json.dumps(places)


def _how(chat: Chat) -> dict[str, Any]:
    """Return the tools for a template, which some files hold as JSON."""
    return {
        "tools": (json.loads(chat.tools) if isinstance(chat.tools, str) else chat.tools) or None
    }


def _named(chat: Chat) -> list[dict[str, Any]]:
    """Return messages with ``role`` and ``content``; nothing else is changed.

    A system message that stands beside them comes first, unless they begin with one.
    """
    said: Any = chat.messages
    messages = [
        {"role": _ROLES.get(one["from"], one["from"]), "content": one["value"]}
        | {key: value for key, value in one.items() if key not in ("from", "value")}
        if "from" in one and "value" in one
        else dict(one)
        for one in (json.loads(said) if isinstance(said, str) else said)
    ]
    if not chat.system or (messages and messages[0].get("role") == "system"):
        return messages
    return [{"role": "system", "content": chat.system}, *messages]


def _marked(
    chat: list[dict[str, Any]], without: list[Place], tokenizer: Any, how: dict[str, Any]
) -> Iterator[Place]:
    """Yield places between ``{% generation %}`` and ``{% endgeneration %}``."""
    tokens = tokenizer.apply_chat_template(
        chat,
        **how,
        return_dict=True,
        return_assistant_tokens_mask=True,
        tokenizer_kwargs={"return_offsets_mapping": True},
    )
    pairs = zip(tokens["assistant_masks"], tokens["offset_mapping"], strict=True)

    def counted(pair: tuple[int, tuple[int, int]]) -> bool:
        marked, (at, _) = pair
        return bool(marked) and not any(start <= at < end + more for start, end, more in without)

    for counts, run in groupby(pairs, key=counted):
        places = [place for _, place in run]
        if counts:
            yield places[0][0], places[-1][1], False


def _probed(
    chat: list[dict[str, Any]],
    answers: list[int],
    text: str,
    tokenizer: Any,
    source: str,
    how: dict[str, Any],
) -> Iterator[Place]:
    """Yield places by rendering the chat anew: up to an answer, and with a sign instead of it.

    An answer begins where the template asks for it (``add_generation_prompt``); where it never
    asks, after what stands before the sign. It ends before what stands after the sign.
    """
    sign = next(sign for sign in _MARKS if sign not in text)
    signs = "|".join(map(re.escape, tokenizer.all_special_tokens))
    to_special = re.compile(rf"\s*(?={signs})" if signs else "$^")

    def render(some: list[dict[str, Any]], **options: bool) -> str | None:
        try:
            rendered: str = tokenizer.apply_chat_template(some, tokenize=False, **how, **options)
        except Exception:  # a template may refuse a part of a chat
            return None
        return rendered

    @cache
    def first(count: int, asks: bool = False) -> str | None:
        return text if count == len(chat) else render(chat[:count], add_generation_prompt=asks)

    for number in answers:
        parts = isinstance(chat[number].get("content"), list)
        instead = {
            "role": "assistant",
            "content": [{"type": "text", "text": sign}] if parts else sign,
        }
        whole = render([*chat[:number], instead, *chat[number + 1 :]])
        if whole == text:
            continue  # the template leaves this answer out
        head, _, tail = (whole or render([*chat[:number], instead]) or "").partition(sign)
        asked = first(number, True)
        heads = [asked if asked != first(number) else None, head or None]
        start = next((len(h) for h in heads if h is not None and text.startswith(h)), None)
        through = first(number + 1)
        limit = len(through) if through and text.startswith(through) else None
        end = None
        if whole is not None and text.endswith(tail) and sign not in tail:
            end = len(text) - len(tail)
        elif limit is not None and whole is None:
            end = len(text[:limit].rstrip())
        if start is None or end is None or end < start:
            raise DataError(
                f"'{source}': the chat template writes an answer in several places or changes what "
                f"stands around it ({text[:40]!r}), so that answers cannot be told from the rest. "
                "Leave out loss=answers."
            )
        closes = whole is not None and (limit is None or end < limit)
        if closes and (space := to_special.match(text, end)):
            end = space.end()
        yield start, end, closes
