"""Text from elsewhere, made safe to store: valid UTF-8, bounded, without secrets."""

from __future__ import annotations

from firstfault.credentials import redact
from firstfault.utils.text import elide


def clean(text: str, limit: int) -> str:
    """Return `text` for storage: valid UTF-8 without NUL and credentials,
    at most `limit` characters.
    """
    # redact before the final cut, which may remove what identifies a credential; the first cut
    # bounds the work
    text = _first_cut(text, 4 * limit)
    text = text.encode("utf-8", "backslashreplace").decode("utf-8").replace("\x00", "")
    return elide(redact(text), limit)


def clean_end(text: str, limit: int) -> str:
    """Do the same as `clean`, but return the end of `text`: whole lines, unless the last one is
    longer than `limit`.
    """
    max_characters = 4 * limit
    end = text[-max_characters:]
    if len(text) > max_characters and text[-max_characters - 1] != "\n":
        end = _without_part(end, "\n")
    text = clean(end, max_characters)
    if len(text) <= limit:
        return text
    end = text[-limit:]
    return end.partition("\n")[2] if text[-limit - 1] != "\n" and "\n" in end else end


_MAX_PART_CHARACTERS = 1000


def _first_cut(text: str, max_characters: int) -> str:
    """Return both ends of a long text, without the word and the line through which the cuts go.

    Half of a credential isn't recognised, and would be shown if redaction makes the text around it
    short.
    """
    if len(text) <= max_characters:
        return text
    head, tail = text[: max_characters // 2], text[len(text) - max_characters // 2 :]
    near_end = max(len(head) - _MAX_PART_CHARACTERS, 0)
    word = max(head.rfind(" ", near_end), head.rfind("\n", near_end))
    head = head[:word] if word >= 0 else head
    near = tail[:_MAX_PART_CHARACTERS]
    tail = _without_part(near, "\n" if "\n" in near else " ") + tail[_MAX_PART_CHARACTERS:]
    return f"{head}\n... {len(text) - len(head) - len(tail)} characters left out ...\n{tail}"


def _without_part(text: str, separator: str) -> str:
    """Return what follows the first separator; the text itself if nothing does."""
    return text.partition(separator)[2] or text
