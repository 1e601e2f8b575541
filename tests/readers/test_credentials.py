"""Credentials in texts are replaced, and code and ordinary text stay."""

import itertools
import re
import sysconfig
import time
import uuid
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firstfault.credentials import redact
from firstfault.utils.stored_text import clean, clean_end

# The samples are made up. They are put together here, so that no scanner takes them for real ones.
_PW = "hunter2" + "-Zx9"
_RANDOM = "q7Gd0LxW" + "2mVt5RsYb8Kc"
_HEX = "3fa9c07be1" + "d2486580afc3b9e47d612a"
_BASE64 = "kJ8/dWq2+Lm4Xr0" + "/Tz6Vb1Nc9Hs3Gf5Pq7=="
_AWS_SECRET = "tQ9/zKm4Wv+7Ln2Bx8Rc" + "5Hf1Jd6Pg3Ys0Nk+Ua2E"
_UPPER = "IOSFODNN7" + "EXAMPLE"
_TWO_WORDS = "correct horse"
_LINES = ("MIIEvQIBADANBgkqhkiG9w0", "BAQEFAASCBKcwggSjAgEAAoIB", "AQC7VJTUt9Us8cKj")
_JWT = "eyJ" + "hbGciOiJub25lIn0.eyJ" + "zdWIiOiJmYWtlIn0.c2lnbmF0dXJl"
_BEGIN, _END = ("-----" + f"{side} RSA PRIVATE" + " KEY-----" for side in ("BEGIN", "END"))
_VALUES = {
    "PW": _PW,
    "RANDOM": _RANDOM,
    "LOWER": _RANDOM.lower(),
    "HEX": _HEX,
    "BASE64": _BASE64,
    "UPPER": _UPPER,
    "AWS_SECRET": _AWS_SECRET,
    "TWO_WORDS": _TWO_WORDS,
    "JWT": _JWT,
    "BEGIN": _BEGIN,
    "END": _END,
    "PEM": "LS0tLS1CRUdJTiBSU0EgUFJJVkFURSBLRVk" + "tLS0tLQpNSUlF",
    "UUID": str(uuid.UUID(_HEX)),
    **{f"LINE_{number}": line for number, line in enumerate(_LINES, 1)},
}
_SECRETS = (
    *(
        _PW,
        _RANDOM,
        _RANDOM.lower(),
        _HEX,
        _BASE64,
        _TWO_WORDS,
        "staple",
        "hunter2",
        "opensesame",
        "9x",
    ),
    *(
        "c2lnbmF0dXJl",
        _UPPER,
        _AWS_SECRET,
        *_LINES,
        "FURSBLRVk",
        "ss/word",
        "pa/ss",
        "p#w",
        "c,d;e",
    ),
)
_SHORTEST_FRAGMENT = 5
_KEPT, _FOUND = (
    (Path(__file__).parent / f"texts_{kind}_credentials.txt")
    .read_text(encoding="utf-8")
    .splitlines()
    for kind in ("without", "with")
)


def _with_values(line: str) -> str:
    """Return a line of the file with values for its placeholders, such as {PW}; ⏎ is a new line."""
    return re.sub(r"\{(\w+)\}", lambda found: _VALUES.get(found[1], found[0]), line).replace(
        "⏎", "\n"
    )


_SAMPLES = [_with_values(line) for line in _FOUND]
_SIZE = 20_000
_SOON_S = 1.5
"""Of this process; a thirtieth of a second is expected."""


_FRAGMENTS = {
    secret[at : at + _SHORTEST_FRAGMENT]
    for secret in _SECRETS
    for at in range(len(secret) - _SHORTEST_FRAGMENT)
}


def _left(text: str) -> list[str]:
    return [part for part in (*_SECRETS, *_FRAGMENTS) if part in text]


def test_no_part_of_a_secret_is_left() -> None:
    """A credential is replaced completely, wherever it stands, and what stands around it stays."""
    assert [sample for sample in _SAMPLES if not _left(sample)] == []
    places = (
        ("", ""),
        ("denied: ", "\nand after"),
        ('  File "train.py", line 3\n    ', "\nRuntimeError: x"),
    )
    for sample, (before, after) in itertools.product(_SAMPLES, places):
        redacted = redact(f"{before}{sample}{after}")
        assert not _left(redacted), redacted
        assert "***" in redacted
        assert redacted.startswith(before)
        assert redacted.endswith(after)
        assert redact(redacted) == redacted


@pytest.mark.parametrize(
    "form", ["{0}", '  File "train.py", line 3, in train\n    {0}\nRuntimeError: {0}']
)
def test_code_and_ordinary_text_stay(form: str) -> None:
    """Source code, placeholders and ordinary sentences stay as they are,
    alone and in a traceback.
    """
    texts = map(form.format, _KEPT)
    assert [redacted for text in texts if (redacted := redact(text)) != text] == []


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        (f"connect(host, password='{_PW}', port=1)", "connect(host, password='***', port=1)"),
        (f"redis://:{_PW}@cache:6379/0", "redis://:***@cache:6379/0"),
        (
            f"https://x-access-token:ghs_{_RANDOM}@github.com/a/b",
            "https://x-access-token:***@github.com/a/b",
        ),
        (f"me:{_PW}@tcp(db:3306)/x", "me:***@tcp(db:3306)/x"),
        (f"mysql -uroot -p{_PW}secret db", "mysql -uroot -p*** db"),
        (f"https://me:{_PW}@host.org/a@b", "https://me:***@host.org/a@b"),
        (f"mongodb://me:{_PW}@h1:1,h2:2/db", "mongodb://me:***@h1:1,h2:2/db"),
        (f"Authorization: Bearer {_RANDOM} was refused", "Authorization: Bearer *** was refused"),
        (f"user=me&password={_PW}&x=1", "user=me&password=***&x=1"),
        (f"Uid=me;Pwd={_PW};Encrypt=yes", "Uid=me;Pwd=***;Encrypt=yes"),
        (f'{{\\"password\\": \\"{_PW}\\"}}', '{\\"password\\": \\"***\\"}'),
        (f"{_BEGIN}\n{_LINES[0]}\n{_END}", f"{_BEGIN}***{_END}"),
        (
            "https://hooks.slack.com/services/" + "T0/B0/" + _RANDOM,
            "https://hooks.slack.com/services/***",
        ),
    ],
)
def test_names_and_hosts_stay(text: str, redacted: str) -> None:
    """What tells which credential it was stays: its name, the host of a URL,
    the scheme of a header.
    """
    assert redact(text) == redacted


_ALPHANUMERIC = st.characters(
    categories=[], include_characters="abcdefghijkmnpqrstuvwxyzABCDEFGHIJKLMNPQRSTUVWXYZ0123456789"
)
_MIXED = st.text(_ALPHANUMERIC, min_size=16, max_size=60).filter(
    lambda text: any(map(str.isdigit, text)) and any(map(str.isalpha, text)) and len(set(text)) > 5
)


@given(
    st.sampled_from(
        [
            line
            for line in _FOUND
            if re.search(r"[=':/ ].*\{RANDOM\}", line) and line.count("{RANDOM}") == 1
        ]
    ),
    _MIXED,
)
def test_a_random_secret_never_stays(sample: str, secret: str) -> None:
    """A random value of letters and digits is replaced in each form."""
    assert secret not in redact(_with_values(sample.replace("{RANDOM}", secret)))


_PIECES = [
    *("password", "token", "api_key", "AUTHORIZATION", "key", "=", ": ", "'", '"', '\\"', " ", "\n", ","),
    *("(", ")", "{", "}"),
    *("hunter22", "Bearer ", "https://", "me:", "@", "/", "***", "sig", "hf_", "--", "|", "[", "]", ";", "&", "None"),
    *("pass", "pw", "_PROD", "API_KEY ", "login(", "@tcp(", "%s", "AKIA" + _UPPER, _AWS_SECRET, _HEX, "username"),
    *(_BEGIN, _END, _LINES[0], _JWT, "login -p ", "value", "$", "\\", "<", ">", "f", "x"),
]  # fmt: skip


@settings(max_examples=500)
@given(st.lists(st.sampled_from(_PIECES), max_size=30).map("".join))
def test_redacting_again_changes_nothing(text: str) -> None:
    """Redaction is idempotent."""
    assert redact(redact(text)) == redact(text)


_UNITS = [
    *("a", "-_", "\\", '"', '\\"', "a://", "a://b:", "a://b:c@", "://x:y", "password", "password=", "password: "),
    *("password='", 'password=\\"', "password={", "(password=", "password=,", "password='a', 'b', ", 'token="""'),
    *("authorization: ", 'Authorization: Digest a="b", ', "cookies={", "Cookie: a=", "Bearer ", "eyJ", "-eyJ", "AKIA"),
    *("sk-a-", "hf_aaaa", f"{_BEGIN}\n", f"{_END}\n", f"{_END}{_LINES[0]}", "-----BEGIN ", "password: |\n"),
    *("login -p ", "machine a login b ", "--password a,", "/hooks/a/", "aaa8Q~", "?key=", "password=a.b."),
    *("auth=('a',", "<password>a", "a:@tcp(", "a://a:1@", "AKIAIOSFODNN7EXAMPLE:", "tskey-a", "password_a"),
    *('username="a",key="', "a.b.key a", "A_KEY a", "login('a',", "('aaaaaaaaaaaaaaaa'"),
    *("SetKey('", "wandb login --a ", "pcsk_aaaa_", "curl -u 'a", "mysql ", "user_name: key", "password 'a"),
    *("TOKEN_A_", "pass=", "pw", "cookies={a:'", "login(key", "password: |\n\n"),
]  # fmt: skip


@pytest.mark.parametrize("unit", _UNITS)
def test_cpu_time_is_linear_in_repeated_text(unit: str) -> None:
    """Whatever a text repeats, it is read at once: in quadratic time it would take many seconds."""
    started = time.process_time()
    redact(unit * (_SIZE // len(unit)))
    assert time.process_time() - started < _SOON_S


@pytest.mark.parametrize("at", range(0, 60, 3))
def test_a_cut_leaves_no_part_of_a_secret(at: int) -> None:
    """A secret through which a cut goes is not shown, also if redaction makes the text short."""
    long_value = f"password='{'v9' * 900}'\n"
    text = (
        f"{long_value}{'p' * at}\napi_key={_RANDOM} {long_value * 8} {'q' * at}"
        f" api_key={_RANDOM}\n{long_value}"
    )
    for limit in (50, 400, 900, 1000):
        assert not _left(clean(text, limit))
        assert not _left(clean_end(text, limit))


@pytest.mark.parametrize(
    "text", [f"{_BEGIN}\n{_LINES[0]}\n{_LINES[1]}", f"{_LINES[0]}\n{_LINES[1]}\n{_END}\nand after"]
)
def test_a_private_key_without_begin_or_end_is_replaced(text: str) -> None:
    """A private key whose first or last lines were cut off is replaced."""
    assert not _left(redact(text))
    assert "PRIVATE KEY" in redact(text)


def test_of_pythons_own_source_lines_hardly_any_changes() -> None:
    """Of the source lines of this Python's own modules less than one in 10,000 changes;
    most of these look like it.
    """
    lines = [
        line
        for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[::4]
        for line in file.read_text(errors="replace").splitlines()
        if line.strip() and not line.lstrip().startswith("#")
    ]
    changed = [line for line in lines if redact(line) != line]
    assert len(lines) > 10_000
    assert len(changed) < len(lines) / 10_000, changed


@pytest.mark.parametrize(
    ("rules", "text", "expected"),
    [
        ("corp-key-(\\w+)", "use corp-key-a1 here", "use corp-key-*** here"),
        ("customer \\d+", "customer 17, customer 18", "***, ***"),
        ("^id (\\d+)$", "é\nid 17\nno id 18", "é\nid ***\nno id 18"),
        ("(never)?x*", "y", "y"),
        ("\n  corp-(\\w+)\n\nface", "corp-a in \udcffface", "corp-*** in \udcff***"),
        ("", "corp-a", "corp-a"),
    ],
    ids=["a group", "no group", "lines", "empty matches", "several", "none"],
)
def test_rules_of_the_variable_are_added(
    rules: str, text: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FIRSTFAULT_REDACT adds rules, one a line."""
    monkeypatch.setenv("FIRSTFAULT_REDACT", rules)
    assert redact(text) == expected


def test_a_wrong_rule_is_named_once_and_the_others_count(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A wrong rule is named once, by its line, and the others count."""
    monkeypatch.setenv("FIRSTFAULT_REDACT", "(s3cret\ncorp-\\w+")
    assert [redact("corp-a"), redact("corp-b")] == ["***", "***"]
    (record,) = caplog.records
    assert (
        "line 1 of FIRSTFAULT_REDACT is not a regular expression of RE2 (missing ))"
        in record.getMessage()
    )
    assert "s3cret" not in record.getMessage()
