"""Text that is safe to store and to show: valid UTF-8, bounded, without secrets."""

from __future__ import annotations

import re

__all__ = ["clean", "clean_end", "elide", "one_line", "printable", "redact", "sentence_of"]

_SECRETS = (
    # user:password@ in a URL
    (re.compile(r"(?P<keep>[a-z][a-z0-9+.-]{0,20}://[^\s/:@]+:)[^\s/@]+(?=@)", re.IGNORECASE), r"\g<keep>***"),
    # AWS access key ids
    (re.compile(r"\b(?P<keep>AKIA|ASIA)[0-9A-Z]{16}\b"), r"\g<keep>***"),
    # query parameters and assignments that carry a credential
    (
        re.compile(
            r"(?P<keep>(?:\b|_)(?:x-amz-signature|x-amz-security-token|access_token|auth_token|session_token|api[_-]?key|"
            r"password|passwd|secret(?:[_-]access[_-]key)?|aws_secret_access_key|client_secret)"
            r"(?:['\"]?\s*[:=]\s*)['\"]?)[^\s'\",&;)}\]]{4,}",
            re.IGNORECASE,
        ),
        r"\g<keep>***",
    ),
    # of a signed URL; "signature:" with a colon is common in other texts
    (re.compile(r"(?P<keep>\b(?:signature|sig)=)[^\s'\",&;)}\]]{4,}", re.IGNORECASE), r"\g<keep>***"),
    (
        re.compile(r"(?P<keep>\bauthorization['\"]?\s*[:=]\s*['\"]?(?:bearer|basic)\s+)[^\s'\",]+", re.IGNORECASE),
        r"\g<keep>***",
    ),
    # tokens with a well-known prefix: Hugging Face, GitHub, GitLab, Slack
    (re.compile(r"\b(?P<keep>hf_|ghp_|gho_|github_pat_|glpat-|xox[bp]-)[0-9A-Za-z_-]{16,}"), r"\g<keep>***"),
)


def redact(text: str) -> str:
    """Replace credentials by ``***``, in time linear in the text's length."""
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text


def elide(text: str, limit: int) -> str:
    """Return at most `limit` characters of `text`: both ends, and between them how many characters are left out."""
    if len(text) <= limit:
        return text
    mark = f"\n... {len(text) - limit} characters left out ...\n"
    room = max(limit - len(mark), 0)
    head = room - room // 2
    return text[:head] + mark[: limit - room] + text[len(text) - room // 2 :]


def clean(text: str, limit: int) -> str:
    """Return `text` for storage: valid UTF-8 without NUL and credentials, at most `limit` characters."""
    # redact before the final cut, which may remove what identifies a credential; the first cut bounds the work
    text = elide(text, 4 * limit)
    text = text.encode("utf-8", "backslashreplace").decode("utf-8").replace("\x00", "")
    return elide(redact(text), limit)


def clean_end(text: str, limit: int) -> str:
    """As `clean`, but return the end of `text`: whole lines, if the last one is not longer than `limit`."""
    text = clean(text[-4 * limit :], 4 * limit)
    if len(text) <= limit:
        return text
    end = text[-limit:]
    return end.partition("\n")[2] if text[-limit - 1] != "\n" and "\n" in end else end


_UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Return `text` without control characters, escape sequences and direction marks; newline and tab stay."""
    return _UNPRINTABLE.sub("", re.sub(r"\x1b\[[0-9;?]*[ -/]*[@-~]", "", text))


def one_line(text: str, limit: int = 200) -> str:
    """Return the first non-empty line of `text`, at most `limit` characters."""
    line = next((part.strip() for part in printable(text).splitlines() if part.strip()), "")
    return line if len(line) <= limit else (line[: max(limit - 3, 0)] + "...")[:limit]


_FLYTEKIT_CODE = re.compile(r"(?:USER|SYSTEM):\w+: error=")


def sentence_of(message: str) -> str:
    """Return the first line of an exception's message, without flytekit's prefix ("USER:X: error=")."""
    line = one_line(message, 2000)
    return line[found.end() :] if (found := _FLYTEKIT_CODE.match(line)) else line
