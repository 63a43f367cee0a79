"""Chats, as the template of a tokenizer writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import groupby
from typing import Any

import datasets
from datasets import Dataset

from headprune.errors import DataError

Messages = Sequence[Mapping[str, Any]]

_SAID = {"content", "value"}
_ROLES = {"human": "user", "gpt": "assistant"}  # of ShareGPT
_MARKS = tuple(map(chr, range(0xE000, 0xF900)))  # for private use: no text has all of them
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


def holds_chats(table: Dataset, column: str) -> bool:
    """Return whether a column holds lists of messages."""
    feature = table.features[column]
    message = getattr(feature, "feature", feature)
    if isinstance(message, dict):
        return message is not feature and bool(_SAID & message.keys())
    if not isinstance(message, getattr(datasets, "Json", ())):  # messages with unlike keys
        return False
    rows = table.select_columns([column]).with_format(None)
    first = next((row[column] for row in rows if row[column]), None)
    return isinstance(first, list) and isinstance(first[0], dict) and bool(_SAID & first[0].keys())


def chat_text(messages: Messages, tokenizer: Any, source: str, asks: bool = False) -> str:
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
        chat = _named(messages)
        asks = asks and chat[-1].get("role") != "assistant"
        text: str = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=asks)
    except Exception as error:  # a template raises errors of its own
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise DataError(f"'{source}': the chat template takes no such messages: {first}") from None
    return text


def answer_places(messages: Messages, tokenizer: Any, source: str) -> str:
    """Return the places of the assistant's answers in a chat's text, as JSON.

    A place is a start, an end, and whether the next token counts because it ends the answer.

    Raises:
        DataError: If there is no answer, or the template does not say where one stands.
    """
    text, chat = chat_text(messages, tokenizer, source), _named(messages)
    if _GENERATION.search(tokenizer.get_chat_template()):
        places = list(_marked(chat, tokenizer))
    else:
        places = list(_probed(chat, text, tokenizer, source))
    if not places:
        raise DataError(
            f"'{source}' has a chat without an answer of the assistant, {text[:40]!r}. Leave it "
            "out."
        )
    return json.dumps(places)


def _named(messages: Messages) -> list[dict[str, Any]]:
    """Return messages with ``role`` and ``content``; nothing else is changed."""
    return [
        {"role": _ROLES.get(one["from"], one["from"]), "content": one["value"]}
        | {key: value for key, value in one.items() if key not in ("from", "value")}
        if "from" in one and "value" in one
        else dict(one)
        for one in messages
    ]


def _marked(chat: list[dict[str, Any]], tokenizer: Any) -> Iterator[tuple[int, int, bool]]:
    """Yield places between ``{% generation %}`` and ``{% endgeneration %}``."""
    tokens = tokenizer.apply_chat_template(
        chat,
        return_dict=True,
        return_assistant_tokens_mask=True,
        tokenizer_kwargs={"return_offsets_mapping": True},
    )
    pairs = zip(tokens["assistant_masks"], tokens["offset_mapping"], strict=True)
    for counts, run in groupby(pairs, key=lambda pair: bool(pair[0])):
        places = [place for _, place in run]
        if counts:
            yield places[0][0], places[-1][1], False


def _probed(
    chat: list[dict[str, Any]], text: str, tokenizer: Any, source: str
) -> Iterator[tuple[int, int, bool]]:
    """Yield places by rendering the chat anew: up to an answer, and with a sign instead of it.

    An answer begins where the template asks for it (``add_generation_prompt``); where it never
    asks, after what stands before the sign. It ends before what stands after the sign.
    """
    sign = next(sign for sign in _MARKS if sign not in text)
    signs = "|".join(map(re.escape, tokenizer.all_special_tokens))
    to_special = re.compile(rf"\s*(?={signs})" if signs else "$^")

    def render(some: list[dict[str, Any]], **options: bool) -> str | None:
        try:
            rendered: str = tokenizer.apply_chat_template(some, tokenize=False, **options)
        except Exception:  # a template may refuse a part of a chat
            return None
        return rendered

    @cache
    def first(count: int, asks: bool = False) -> str | None:
        return text if count == len(chat) else render(chat[:count], add_generation_prompt=asks)

    for number, message in enumerate(chat):
        if message.get("role") != "assistant":
            continue
        parts = isinstance(message.get("content"), list)
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
                "Leave out --loss answers."
            )
        closes = whole is not None and (limit is None or end < limit)
        if closes and (space := to_special.match(text, end)):
            end = space.end()
        yield start, end, closes
