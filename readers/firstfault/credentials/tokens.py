"""Credentials that are known by their form: private keys, and tokens with a well-known prefix."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["HIDDEN", "without_private_keys", "without_tokens"]

HIDDEN = "***"

# --- private keys ---------------------------------------------------------------------------------------------------

_MARK = re.compile(r"-{4,5} ?(?P<side>BEGIN|END) [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)? ?-{4,5}")
_KEY_TEXT = re.compile(r"[A-Za-z0-9+/=]{16}")
_BASE64 = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/="
_KEY_LINE = re.compile(r"[A-Za-z0-9+/=\\]*|(?:Proc-Type|DEK-Info|Comment|Version): .*")


def without_private_keys(text: str) -> str:
    """Replace what is between the lines BEGIN and END of private keys, also if one of both was cut off."""
    if "PRIVATE KEY" not in text:
        return text
    kept, done = [], 0
    for start, end in _keys(text):
        kept += [text[done:start], HIDDEN]
        done = end
    return "".join((*kept, text[done:])) if kept else text


def _keys(text: str) -> Iterator[tuple[int, int]]:
    marks = [(mark["side"] == "BEGIN", mark.start(), mark.end()) for mark in _MARK.finditer(text)]
    borders = [(False, 0, 0), *marks, (True, len(text), len(text))]
    for (begins, _, start), (next_begins, end, _) in pairwise(borders):
        key = _key_between(text, start, end, begins=begins, ends=not next_begins)
        if _KEY_TEXT.search(text, *key):
            yield key


def _key_between(text: str, start: int, end: int, *, begins: bool, ends: bool) -> tuple[int, int]:
    """Return the place of the key between two marks; an empty one if neither belongs to it."""
    if begins and ends:
        return start, end
    if begins:
        return start, start + _length_of_key(text[start:end])
    return (end - _length_of_end(text[start:end]), end) if ends else (start, start)


def _length_of_key(text: str) -> int:
    """Return how much of the text after BEGIN belongs to the key, if there is no END."""
    length = 0
    for line in text.splitlines(keepends=True):
        if not _KEY_LINE.fullmatch(line.strip()):
            # a key on one line, with escaped newlines
            return length or len(line) - len(line.lstrip(_BASE64 + "\\ \t"))
        length += len(line)
    return length


def _length_of_end(text: str) -> int:
    """Return how much of the text before END belongs to the key, if there is no BEGIN."""
    rest = text.rstrip(_BASE64 + "\\\r\n\t")
    key = text[len(rest) :]
    # the last word of an earlier line is no part of the key
    return len(key) if not rest else len(key) - len(re.split(r"\n|\\n", key, maxsplit=1)[0])


# --- tokens ---------------------------------------------------------------------------------------------------------

_BEFORE = r"(?:(?<![A-Za-z0-9])|(?<=\\[nrt])|(?<=%[0-9A-Fa-f]{2}))"
"""A token begins at a word's beginning, or after an escaped character."""
_SURE = (
    r"AIza|github_pat_|gl(?:pat|dt|rt|ptt|oas|soat|imt|agent|cbt|ft|ffct)-|dckr_[po]at_|do[opr]_v1_|shp(?:at|ca|pa|ss)_"
    r"|lin_api_|r8_|gsk_|pplx-|tvly-|nvapi-|wandb_v1_|lsv2_(?:pt|sk)_|ATATT3x|PMAK-|GOCSPX-|AGE-SECRET-KEY-1"
    r"|[srp]k_(?:live|test|prod)_|whsec_|figd_|gl(?:sa|c)_|NRAK-|sntry[su]_|rubygems_|pscale_(?:tkn|pw|oauth)_|fo1_"
    r"|api_org_|sk-ant-|sk-proj-|sk-or-|1//0"
)
_LIKE_NAMES = r"hf_|gh[pousr]_|npm_|pypi-|sk-|xai-|pul-|dapi"
"""Prefixes with which names and ordinary words begin, too."""
_EXACT = (
    r"pcsk_(?=[0-9A-Za-z]{4,8}_[0-9A-Za-z]{20})|tgp_v1_|sb_secret_(?!(?:[a-z]{2,20}_){2}|(?:[A-Z]{2,20}_){2})"
    r"|sbp_(?=[a-z0]{0,6}_?[0-9a-f]{32})|ntn_(?=[0-9A-Za-z]{40})|rpa_(?=[0-9A-Za-z]{24})|ls__(?=[0-9A-Za-z]{32})"
    r"|tskey-(?=(?:[a-z]{2,12}-)?[0-9A-Za-z]{6,40}-[0-9A-Za-z]{16})|lsv2_(?=[a-z]{0,8}_?[0-9a-f]{24})"
    r"|AKCp(?=[0-9][0-9A-Za-z]{30})|cmVmdGtu(?=[0-9A-Za-z]{40})|fw_(?=[0-9A-Za-z]{24})"
    r"|a[ks]-(?=[0-9A-Za-z]{22}(?![0-9A-Za-z_-]))"
)
"""Prefixes, each with the form of what follows it; this must not consist of words."""
_DOTTED = r"SG\.|hv[sbr]\.|ya29\.|dp\.(?:pt|st|ct|sa|scim)\.|ops_eyJ|atlasv1\."
_TOKENS = re.compile(
    _BEFORE
    + rf"""(?:
        (?P<id>AKIA|ASIA|ABIA|ACCA|GOOG1E)[0-9A-Z]{{16,}}
      | (?P<jwt>eyJ)[A-Za-z0-9_-]{{10,}}(?P<parts>(?:\.[A-Za-z0-9_=-]+){{0,4}})
      | (?P<sure>{_SURE})[0-9A-Za-z_-]{{16,}}
      | (?P<dotted>{_DOTTED})[0-9A-Za-z_.-]{{16,}}
      | (?P<slack>xox[a-z]-|xoxe\.xox[bp]-|xapp-)[0-9A-Za-z-]{{10,}}
      | (?P<like>{_LIKE_NAMES})(?P<rest>[0-9A-Za-z_-]{{16,}})
      | (?P<exact>{_EXACT})(?P<body>[0-9A-Za-z_-]{{16,}})
      | (?P<session>FwoGZXIvYXdz|IQoJb3JpZ2lu)[0-9A-Za-z+/=%_-]{{16,}}
      | (?P<key>LS0tLS1CRUdJTiB)(?!DRVJU)[0-9A-Za-z+/=]{{16,}}
      | (?P<bot>[0-9]{{8,10}}:AA)[0-9A-Za-z_-]{{30,}}
      | (?P<azure>[0-9A-Za-z_~-]{{3}}[0-9]Q~)[0-9A-Za-z_.~-]{{24,}}
    )""",
    re.VERBOSE,
)
_MARKS = """
    AKIA ASIA ABIA ACCA eyJ AIza github_pat_ glpat- gldt- glrt- glptt- gloas- glsoat- glimt- glagent- glcbt-
    glft- glffct- glsa_ glc_ dckr_ dop_v1_ doo_v1_ dor_v1_ shpat_ shpca_ shppa_ shpss_ lin_api_ r8_ gsk_ pplx-
    tvly- nvapi- wandb_v1_ lsv2_ ATATT3x PMAK- GOCSPX- AGE-SECRET k_live_ k_test_ k_prod_ whsec_ figd_ NRAK-
    sntrys_ sntryu_ rubygems_ pscale_ fo1_ api_org_ sk- 1//0 SG. hvs. hvb. hvr. ya29. dp. ops_eyJ atlasv1. xox
    xapp- hf_ ghp_ gho_ ghu_ ghs_ ghr_ npm_ pypi- xai- pul- dapi FwoGZXIvYXdz IQoJb3JpZ2lu LS0tLS1CRUdJ :AA Q~
    GOOG1E pcsk_ tgp_v1_ sb_secret_ sbp_ ntn_ tskey- rpa_ ls__ fw_ ak- as- AKCp cmVmdGtu
"""
"""One of these is in each token; a search for them is many times faster than the regular expression."""
_EACH_MARK = tuple(_MARKS.split())
_BESIDE_ID = re.compile(
    r"""(?P<keep>(?:AKIA|ASIA|ABIA|ACCA|GOOG1E)(?:[0-9A-Z]{16,64}|\*{3})[^0-9A-Za-z+]{1,16}
        (?:[rbu](?=["'])|(?:and|key|secret|with)[^0-9A-Za-z+]{1,4}){0,3}["']?)
        (?P<value>[0-9A-Za-z+/]{40})(?![0-9A-Za-z+/])""",
    re.VERBOSE,
)
"""The secret beside the id of an access key, which has 40 characters."""
_IDS = ("AKIA", "ASIA", "ABIA", "ACCA", "GOOG1E")
_LONG_PART = 16
_MIXED_PART = 10

_SCHEMES = re.compile(
    r"\b(?P<scheme>bearer|basic|token)(?P<space>(?:[ ]|%20|\+){1,4})(?P<value>[0-9A-Za-z._~+/=%-]{8,})", re.IGNORECASE
)
_LONG = 20
_RUN = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|[0-9]+")
_LONGEST_RUN = 5


def without_tokens(text: str) -> str:
    """Replace tokens that are known by their prefix, and those after ``Bearer``, ``Basic`` and ``Token``."""
    if any(mark in text for mark in _IDS):
        text = _BESIDE_ID.sub(_without_secret, text)
    if any(mark in text for mark in _EACH_MARK):
        text = _TOKENS.sub(_without_token, text)
    return _SCHEMES.sub(_without_value, text)


def _without_secret(found: re.Match[str]) -> str:
    return found["keep"] + HIDDEN if _is_varied(found["value"]) else found[0]


def _without_token(found: re.Match[str]) -> str:
    kind = found.lastgroup
    if kind == "body":
        return found["exact"] + HIDDEN if _is_varied(found["body"]) else found[0]
    if kind == "parts":
        return f"eyJ{HIDDEN}" if found["parts"] else found[0]
    if kind == "rest":
        return found["like"] + HIDDEN if _is_token(found["rest"]) else found[0]
    return (found[kind] if kind else "") + HIDDEN


def _is_token(text: str) -> bool:
    """Whether a text is random, and not words with ``_`` or ``-`` between them."""
    parts = re.split("[_-]", text)
    if max(map(len, parts)) >= _LONG_PART:
        return True
    return any(len(part) >= _MIXED_PART and _has_letter_and_digit(part) for part in parts)


def _is_words(text: str) -> bool:
    """Whether a text of letters and digits is made of words and numbers, such as ``embeddings2024large``."""
    return len(_RUN.findall(text)) * _LONGEST_RUN <= len(text)


def _is_varied(text: str) -> bool:
    return _has_letter_and_digit(text) or not _is_words(text)


def _has_letter_and_digit(text: str) -> bool:
    return any(map(str.isdigit, text)) and any(map(str.isalpha, text))


def _without_value(found: re.Match[str]) -> str:
    value = found["value"].rstrip(".")
    mixed = not value[1:].islower() and not value.isupper() and value.isalpha()
    random = _has_letter_and_digit(value) or "=" in value or len(value) >= _LONG or mixed or value.isdigit()
    if found["scheme"].lower() == "token":
        random = _has_letter_and_digit(value) and len(value) >= _LONG_PART and value.isalnum() and not _is_words(value)
    return found["scheme"] + found["space"] + HIDDEN if random else found[0]
