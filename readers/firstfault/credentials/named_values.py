"""Rule 2, the value: ``password=x``, ``"api_key": "x"``, ``--token x``, ``X-Api-Key: x``."""

from __future__ import annotations

import re
from collections.abc import Iterator

from firstfault.credentials.literals import (
    HIDDEN,
    NamedValue,
    Strength,
    ValueSyntax,
    is_placeholder,
    is_random,
    is_secret_literal,
    is_secret_word,
)
from firstfault.credentials.names import (
    NAMES_TABLE,
    PYTHON_KEYWORD,
    NameInText,
    find_credential_names,
)
from firstfault.utils.lazy_pattern import LazyPattern

PROSE_AFTER_FLAG, AUTH_METHODS, AUTH_SCHEMES = (
    frozenset(NAMES_TABLE[key].split()) for key in ("prose", "methods", "schemes")
)
MAX_LIST_ITEMS = 64
AUTH_WORDS = {
    "authorization",
    "auth",
    "credentials",
    "credential",
    "creds",
    "cred",
    "bearer",
    "jwt",
}
AUTH_SCHEME_PREFIX = re.compile(
    rf"(?:{'|'.join(AUTH_SCHEMES)})(?:[ ]|%20|\+){{1,4}}", re.IGNORECASE
)
MAX_UNQUOTED_LENGTH = 300
"""Characters that are read to decide whether a value without quotes is a credential."""
QUOTE_OR_NEWLINE = {mark: re.compile(f"[{mark}\n]") for mark in "\"'`"}
MAX_TRIPLE_QUOTED_LENGTH = 16_384

# An option's value in a usage line.
_METAVAR = LazyPattern(r"[A-Z_]{1,15}")

# A quote may have the backslashes of a string inside a string. The literal may have a prefix,
# rb"x", or be in a call: SecretStr("x"), b64decode("x")
_OPENING_QUOTE = LazyPattern(r"""
  (?P<wrapper>(?:[A-Za-z_][\w.]{0,40}\.)?
    (?:SecretStr|SecretBytes|Secret|str|bytes|b64decode|quote|quote_plus|unquote)\([ \t]{0,4})?
  [rRbBuUfF]{0,2}(?P<quote>\\{0,7}["'`])(?P<triple>(?P=quote){2})?
""")
_ITEM_SEPARATOR = LazyPattern(r"""\s{0,80},\s{0,80}(?=[rbuf]{0,2}\\{0,7}["'])""")


def redact_named_values(text: str) -> str:
    """Replace literal values that follow a credential's name; names, code and placeholders stay."""
    kept, copied_until = [], 0
    for credential in find_credential_names(text):
        for start, end in _find_values(credential) if credential.word_start >= copied_until else ():
            if copied_until <= start < end:
                kept += [text[copied_until:start], HIDDEN]
                copied_until = end
    return "".join((*kept, text[copied_until:])) if kept else text


_LIST_START = LazyPattern(r"""[\[(]\s{0,80}(?=[rbuf]{0,2}\\{0,7}["'])""")


def _find_values(credential: NameInText) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each credential that follows a name."""
    text = credential.text
    opening = _OPENING_QUOTE.match(text, credential.value_start)
    if opening is not None:
        return _find_quoted_values(credential, opening)
    if credential.sign == "," and credential.is_flag and not credential.is_quoted:
        return _find_unquoted_value(credential)
    # only a quoted value follows these: in f(token, x) and token == x, x is code
    if credential.sign in {",", "==", "!="} or credential.word in {"cookie", "cookies"}:
        return iter(())
    if credential.word == "authorization" and (
        scheme := AUTH_SCHEME_PREFIX.match(text, credential.value_start)
    ):
        credential.value_start = scheme.end()
    if credential.strength is Strength.SURE or (
        credential.word == "auth" and credential.sign == "="
    ):
        opened = _LIST_START.match(text, credential.value_start)
        if opened is not None:
            return _find_list_items(credential, opened.end())
    return _find_unquoted_value(credential)


_TEXT_AFTER_CLOSING_QUOTE = LazyPattern(
    r"[ \t]{0,8}(?:[,)+%\]}:]|\.(?:format|join)|$|\n|in\b|not\b)"
)
_ASSIGNMENT_TARGETS = LazyPattern(r"(?:^|[\s:;])[\w.]{1,80},[ ]?$")


def _find_quoted_values(
    credential: NameInText, opening: re.Match[str]
) -> Iterator[tuple[int, int]]:
    text = credential.text
    quote = opening["quote"]
    triple = opening["triple"] is not None
    start = opening.end()
    may_end = (
        not (opening["wrapper"] or triple or credential.is_quoted)
        and credential.before.count(quote[-1]) % 2
    )
    if may_end and _TEXT_AFTER_CLOSING_QUOTE.match(text, start):
        return  # this quote closes the string that contains the name: "no password", "token"
    end = _find_closing_quote(text, start, quote, triple=triple)
    content = text[start:end]
    if credential.word == "authorization" and (
        scheme := AUTH_SCHEME_PREFIX.match(text, start, end)
    ):
        start = scheme.end()
        content = text[scheme.end() : end]
    if not _is_secret_quoted(credential, content, end):
        return
    yield start, end
    # user, password = "x", "y": the literal after the first comma belongs to the name, too
    following = _ITEM_SEPARATOR.match(text, end + len(quote))
    if following and credential.sign == "=" and _ASSIGNMENT_TARGETS.search(credential.before):
        yield from _find_list_items(credential, following.end())


_GETTER_OR_SETTER_CALL = LazyPattern(r"""
  (?:getenv|get|setdefault|setenv|pop|putenv|set|set_secret|add_header|putheader
  |getattr\(\w{1,40},[ ]?)\(?[bB]?["']$
""")
_TUPLE_START = LazyPattern(r"""\([ \t]{0,4}[bB]?["']$""")


def _is_secret_quoted(credential: NameInText, content: str, end: int) -> bool:
    # part of a statement: lambda token: "x"
    in_code = (
        not credential.is_quoted
        and credential.sign == ":"
        and PYTHON_KEYWORD.search(credential.before)
    )
    named_value = NamedValue(credential.name, credential.strength, credential.get_syntax(end))
    if in_code or not is_secret_literal(content, named_value, quoted=True):
        return False
    if credential.word in AUTH_WORDS and content.lower() in AUTH_METHODS:
        return False
    if credential.sign != ",":
        return True
    if credential.is_flag:
        is_option = content.startswith("-") or _METAVAR.fullmatch(content)
        return not is_option and not is_secret_word(content)
    if _GETTER_OR_SETTER_CALL.search(credential.before):
        return not is_secret_word(content)
    is_in_tuple = bool(_TUPLE_START.search(credential.before))
    return is_random(content) or (is_in_tuple and "-" in credential.name and not content.islower())


# An item of a list that is a name, and not a credential: it has no digits, or is a constant's name.
_PLAIN_NAME = LazyPattern(r"[A-Za-z_. -]*|[A-Z0-9_]*")


def _find_list_items(credential: NameInText, position: int) -> Iterator[tuple[int, int]]:
    for _ in range(MAX_LIST_ITEMS):
        opening = _OPENING_QUOTE.match(credential.text, position)
        if opening is None or opening["triple"]:
            return
        end = _find_closing_quote(credential.text, opening.end(), opening["quote"])
        content = credential.text[opening.end() : end]
        is_name = is_secret_word(content) or (
            credential.word != "auth" and _PLAIN_NAME.fullmatch(content)
        )
        if not is_placeholder(content) and not is_name:
            yield opening.end(), end
        following = _ITEM_SEPARATOR.match(credential.text, end + len(opening["quote"]))
        if following is None:
            return
        position = following.end()


# The name of a secret of Kubernetes, such as registry-cred.
_SECRET_NAME = LazyPattern(
    r"(?:[a-z]{1,40}-){1,6}(?:secrets?|creds?|credentials?|tokens?|keys?|tls)"
)
_SIMPLE_VALUE = LazyPattern(r"""[^\s"'`,;&)\]}]*""")

# A quote, comma or bracket belongs to the value if more of the value follows: password=a,b)c.
_UNQUOTED_VALUE = LazyPattern(r"""
  (?:[^\s"'`,;&)\]}]
  |["'`](?=[A-Za-z0-9])
  |[,;&](?![ ]?[\w.%-]{1,60}\\?["']?[=:]|\s|$|[,;&"'])
  |[)\]}](?!\s|$|[)\]}"',;:.]))*
""")


def _find_unquoted_value(credential: NameInText) -> Iterator[tuple[int, int]]:
    text, start = credential.text, credential.value_start
    if text[start : start + 1] in "([{<":
        return
    pattern = _UNQUOTED_VALUE
    end = _find_unquoted_end(credential, pattern)
    named_value = NamedValue(credential.name, credential.strength, credential.get_syntax(end))
    # in code a comma or bracket ends the value: connect(password=x, user=y)
    if named_value.syntax in {ValueSyntax.CALL, ValueSyntax.CODE}:
        pattern = _SIMPLE_VALUE
        end = _find_unquoted_end(credential, pattern)
    value = text[start:end]
    # punctuation at the end belongs to the sentence
    if named_value.syntax in {ValueSyntax.PROSE, ValueSyntax.COLON}:
        value = value.rstrip(".:!?")
    if not value or (credential.sign == "," and not is_random(value)):
        return
    is_option = value.startswith("-") or _METAVAR.fullmatch(value)
    if credential.sign == " " and (is_option or value.lower().rstrip(".:") in PROSE_AFTER_FLAG):
        return  # an option, not its value
    if credential.word in AUTH_WORDS and value.lower() in AUTH_METHODS:
        return
    # "secret: registry-cred" refers to a secret of Kubernetes
    if credential.word in {"secret", "secrets"} and _SECRET_NAME.fullmatch(value):
        return
    if is_secret_literal(value, named_value, quoted=False):
        # the whole value, however long: replaced text isn't searched again, so the time stays
        # linear
        yield start, _find_unquoted_end(credential, pattern, len(text))


_ESCAPED_NEWLINE_OR_QUOTE = LazyPattern(r"""\\+(?:[nr]|["'`]|$)""")


def _find_unquoted_end(
    credential: NameInText, value: LazyPattern, max_length: int = MAX_UNQUOTED_LENGTH
) -> int:
    """Return the end of an unquoted value: at the latest an escaped newline or quote,
    or `max_length` characters.
    """
    # text that isn't replaced is searched again for other names, so each search for a value must be
    # bounded: otherwise a log line of many names costs quadratic time
    match = value.match(
        credential.text, credential.value_start, credential.value_start + max_length
    )
    text = match[0] if match else ""
    escaped = _ESCAPED_NEWLINE_OR_QUOTE.search(text)
    return credential.value_start + (escaped.start() if escaped else len(text))


def _find_closing_quote(text: str, start: int, quote: str, *, triple: bool = False) -> int:
    """Return the end of a string that `quote` opened before `start`;
    the end of the line if nothing closes it.
    """
    if triple:
        end = text.find(quote * 3, start, start + MAX_TRIPLE_QUOTED_LENGTH)
        return end if end >= 0 else min(start + MAX_TRIPLE_QUOTED_LENGTH, len(text))
    # inside a string inside a string, a quote counts only with as many backslashes as the opening
    # one had
    depth, position = len(quote) - 1, start
    while mark := QUOTE_OR_NEWLINE[quote[-1]].search(text, position):
        at = mark.start()
        if text[at] == "\n":
            return at
        backslashes = at - start - len(text[start:at].rstrip("\\"))
        if backslashes % 2 == 0 if depth == 0 else backslashes <= depth:
            return at - backslashes if depth else at
        position = at + 1
    return len(text)
