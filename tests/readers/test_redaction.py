"""Credentials in texts are replaced, and code and ordinary text stay."""

from __future__ import annotations

import sysconfig
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firstfault.text import clean, clean_end, redact

# The samples are made up. They are put together here, so that no scanner takes them for real ones.
_PW = "hunter2" + "-Zx9"
_RANDOM = "q7Gd0LxW" + "2mVt5RsYb8Kc"
_HEX = "3fa9c07be1" + "d2486580afc3b9e47d612a"
_BASE64 = "kJ8/dWq2+Lm4Xr0" + "/Tz6Vb1Nc9Hs3Gf5Pq7=="
_AWS_SECRET = "tQ9/zKm4Wv+7Ln2Bx8Rc" + "5Hf1Jd6Pg3Ys0Nk+Ua2E"
_UPPER = "IOSFODNN7" + "EXAMPLE"
_LINES = ("MIIEvQIBADANBgkqhkiG9w0", "BAQEFAASCBKcwggSjAgEAAoIB", "AQC7VJTUt9Us8cKj")
_JWT = "eyJ" + "hbGciOiJub25lIn0.eyJ" + "zdWIiOiJmYWtlIn0.c2lnbmF0dXJl"
_BEGIN, _END = ("-----" + f"{side} RSA PRIVATE" + " KEY-----" for side in ("BEGIN", "END"))
_TWO_WORDS = "correct horse"

_TOKENS = [
    "hf_" + _RANDOM,
    *(f"gh{kind}_" + _RANDOM for kind in "pousr"),
    "github_pat_" + "11ABCDEFG0_" + _RANDOM,
    "glpat-" + _RANDOM,
    "sk-" + _RANDOM,
    "sk-proj-" + _RANDOM + "_" + _RANDOM,
    "sk-ant-" + "api03-" + _RANDOM + "-AA",
    "AIza" + "Sy" + _RANDOM,
    "xoxb-" + "1234567890-" + _RANDOM,
    "xoxp-" + "1234567890-" + _RANDOM,
    "npm_" + _RANDOM,
    "pypi-" + "AgEIcHlwaS5vcmc" + _RANDOM,
    "dckr_pat_" + _RANDOM,
    "dapi" + _HEX,
    "SG." + _RANDOM + "." + _RANDOM,
    "hvs." + _RANDOM,
    "sk_" + "live_" + _RANDOM,
    "nvapi-" + _RANDOM,
    "AKIA" + _UPPER,
    "ASIA" + _UPPER,
    *("AKIA" + _UPPER + between + _AWS_SECRET for between in (":", "', '", '": "', ",", "\n", " secret ")),
    "GOOG1E" + _UPPER + "K4" + " secret " + _AWS_SECRET,
    "pcsk_" + "4kT9x_" + _RANDOM * 3,
    "tgp_v1_" + _RANDOM + "_" + _RANDOM,
    "sbp_" + _HEX + "07fe13ab",
    "sb_secret_" + _RANDOM + "_x7",
    "ntn_" + "40718352961" + _RANDOM * 2,
    "tskey-auth-" + "k5Jr8WqZ2tCNTRL-" + _RANDOM * 2,
    "rpa_" + _UPPER * 2 + "h2",
    "ls__" + _HEX,
    "lsv2_pt_" + _HEX + "_" + _HEX[:10],
    "AKCp8" + _RANDOM * 3,
    "cmVmdGtu" + _RANDOM * 3,
    "fw_" + _RANDOM + "4tYs",
    "ak-" + _RANDOM + "3f",
    "LS0tLS1CRUdJTiBSU0EgUFJJVkFURSBLRVk" + "tLS0tLQpNSUlF",
    _JWT,
    "IQoJb3JpZ2luX2VjEJr" + _BASE64,
]
_NAMED = [
    f"password={_PW}",
    f"PGPASSWORD={_PW} psql -h db",
    f"export DB_PASSWORD='{_TWO_WORDS}'",
    f"WANDB_API_KEY={_HEX}",
    f"MY_SERVICE_TOKEN={_RANDOM}",
    f"APP_SECRET={_RANDOM}",
    f"SMTP_PASS={_PW}",
    f"AWS_SECRET_ACCESS_KEY: {_BASE64}",
    f"AWS_SESSION_TOKEN={_BASE64}",
    f"aws_secret_access_key = {_BASE64}",
    f"client_secret = {_PW}",
    f"{{'SecretAccessKey': '{_BASE64}', 'SessionToken': '{_RANDOM}'}}",
    f'{{"api_key": "{_RANDOM}"}}',
    f'{{\\"password\\": \\"{_PW}\\", \\"user\\": \\"me\\"}}',
    f'{{\\\\\\"password\\\\\\": \\\\\\"{_PW}\\\\\\"}}',
    f'"{{\\"clientSecret\\":\\"{_TWO_WORDS}\\"}}"',
    f"Config(user='me', password='{_TWO_WORDS}')",
    f'connect(host, password="{_PW}", port=5432)',
    f"Settings(password=SecretStr('{_PW}'))",
    f'password: str = "{_PW}"',
    f'os.environ["HF_TOKEN"] = "{_RANDOM}"',
    f"os.environ.get('API_KEY', '{_PW}')",
    f'if password == "{_PW}":',
    f"password=b'{_PW}'",
    f'password="""{_TWO_WORDS}\nstaple"""',
    f"db:\n  password: {_PW}\n  port: 5432",
    "  password: opensesame",
    "api_key: opensesame",
    f"token: {_RANDOM}",
    f"password: |\n  {_PW}\nuser: me",
    f"client-key-data: {_BASE64}",
    f"client_key_data='{_BASE64}' private_key='{_BASE64}'",
    f"- name: DB_PASSWORD\n  value: {_PW}",
    f"{{'name': 'DB_PASSWORD', 'value': '{_PW}', 'value_from': None}}",
    f"DefaultEndpointsProtocol=https;AccountName=a;AccountKey={_BASE64};EndpointSuffix=core.windows.net",
    f"SharedAccessSignature=sv=2020-08-04&ss=b&sig={_BASE64}",
    f"Endpoint=sb://x.servicebus.windows.net/;SharedAccessKey={_BASE64}",
    f"Driver={{ODBC}};Server=db;Uid=me;Pwd={_PW};Encrypt=yes",
    "Server=db;Uid=me;Pwd={a;b" + "9x};Encrypt=yes",
    f"train.py --password {_PW} --epochs 3",
    "train.py --password opensesame",
    f"train.py --token={_PW}",
    f"train.py --api-key '{_TWO_WORDS}'",
    f"['train.py', '--password', '{_PW}']",
    f"docker login -u me -p {_HEX} registry.io",
    f"['docker', 'login', '-u', 'me', '-p', '{_PW}']",
    f"sshpass -p {_PW} ssh me@host",
    f"curl -u me:{_PW} https://host/",
    f"machine host.org login me password {_PW}",
    f"machine host.org\n  login me\n  password {_PW}\n",
    f"wandb login {_HEX}",
    f"ALTER USER me WITH PASSWORD '{_PW}'",
    f"<password>{_PW}</password>",
    f"requests.get(url, auth=('me', '{_PW}'))",
    f'"auth": "{_BASE64}"',
    f"Your password: {_PW}",
    f"password=abc,d;e&f)g-{_PW}",
    f"dbPassword={_PW}",
    f"passwords=['{_PW}', 'x-1']",
    f"secret=%7B password%3D{_PW}",
    f"password2={_PW}",
    f"PASSWORD={_PW[:7]}",
    f"DB_PASSWORD_PROD={_PW}",
    "export DB_PASSWORD_STAGING=opensesame",
    f"AWS_SECRET_ACCESS_KEY_PROD={_AWS_SECRET}",
    f"GITHUB_TOKEN_RO={_RANDOM}",
    f"SECRET_KEY_BASE={_RANDOM}",
    f"secret_key_base: {_HEX}",
    f"DB_PASSWORD_ANALYTICS={_RANDOM}",
    f"GITHUB_TOKEN_ACME={_RANDOM}",
    f"db_password_prod = '{_PW}'",
    f"{{'API_TOKEN_DEV': '{_RANDOM}'}}",
    f"secret_id: {_RANDOM}",
    f"VAULT_SECRET_ID={_HEX[:8]}-{_HEX[8:12]}-{_HEX[12:16]}-{_HEX[16:20]}-{_HEX[20:32]}",
    f'"pass": "{_PW}"',
    '{"user": "me", "pass": "opensesame"}',
    "user: me\npass: opensesame",
    f"login failed, user=me pass={_PW}",
    f"dbpass={_PW}",
    f"rootpw='{_TWO_WORDS}'",
    f"pw={_PW}",
    f"PASS={_PW}",
    f"pw: {_PW}",
    f"DB_PW={_PW}",
    f'{{"username":"me","key":"{_HEX}"}}',
    f'{{\n  "username": "me",\n  "key": "{_HEX}"\n}}',
    f"KaggleApi(username='me', key='{_HEX}')",
    f"spark.hadoop.fs.s3a.secret.key {_AWS_SECRET}",
    f"spark.hadoop.fs.s3a.secret.key     {_AWS_SECRET}",
    f"fs.azure.account.key.mydata.dfs.core.windows.net={_AWS_SECRET}{_BASE64}",
    f"ENV OPENAI_API_KEY {_RANDOM}",
    "  password=hunter2",
    "password = hunter2",
    f"curl --user me:{_PW} https://host",
    f"redis-cli -a {_PW} ping",
    f"mysql -u root -p{_PW} shop",
    f"mysql -uroot -p{_PW}secret shop",
    f"{{user: me, token: {_RANDOM}}}",
    f'{{"token": {_RANDOM}}}',
    f"KAGGLE_KEY={_HEX}",
    f"JWT_SECRET_KEY={_RANDOM}",
    f"user, password = 'me-2', '{_PW}'",
    f"host=db user=me password='{_TWO_WORDS}' dbname=x",
    f"jdbc:postgresql://db/x?user=me&password={_PW}",
    f"jdbc:oracle:thin:me/{_PW}@//db:1521/x",
    f"//registry.npmjs.org/:_authToken={_RANDOM}",
    f"Namespace(lr=0.1, token='{_RANDOM}')",
    f"V1EnvVar(name='HF_TOKEN', value='{_RANDOM}')",
    f"login(token='{_RANDOM}')",
    f"wandb.login(key='{_HEX}')",
    f"wandb.login('{_HEX}')",
    f'wandb.login(\n    "local-{_HEX}", relogin=True\n)',
    f"wandb login --relogin --host=https://host {_HEX}",
    f"comet_ml.login('{_RANDOM}')",
    f"comet_ml.Experiment('{_RANDOM}', project_name='x')",
    f"neptune.set_api_token('{_RANDOM}')",
    f"openai.api_key = '{_RANDOM}'",
    f"AzureKeyCredential('{_RANDOM}')",
    f"Fernet(b'{_AWS_SECRET}')",
    f"smtp.login('me@host', '{_TWO_WORDS}')",
    f"def f(password: str = '{_PW}') -> None:",
    f"TOKEN: Final = '{_RANDOM}'",
    f'password="it\'s {_PW}"',
    f"password='say \\'{_PW}\\' twice'",
    f'"token":\n  "{_RANDOM}"',
    f"+logger.api_key={_RANDOM}",
    f"using password {_RANDOM}",
    f"HTTPBasicAuth('me', '{_PW}')",
    f"Wrong API key provided: {_RANDOM}",
    f"\u0130 password={_PW}",
    f"args=['train.py', --token, {_RANDOM}]",
]
_HEADERS = [
    f"Authorization: Token {_PW}",
    f"Authorization: Bearer {_RANDOM}",
    f"authorization: basic {_BASE64}",
    f"{{'Authorization': 'Bearer {_RANDOM}'}}",
    f"('Authorization', 'Bearer {_RANDOM}')",
    f"(b'authorization', b'Bearer {_RANDOM}')",
    f'curl -H "Authorization: {_RANDOM}" https://host',
    f"Proxy-Authorization: Basic {_BASE64}",
    f"sent Bearer {_RANDOM} to host",
    f"Bearer%20{_RANDOM}",
    f"Authorization: AWS4-HMAC-SHA256 Credential=me/2024/s3/aws4_request, SignedHeaders=host, Signature={_HEX}",
    f"Cookie: session={_RANDOM}; theme={_PW}",
    f"Set-Cookie: sid={_RANDOM}; Path=/; HttpOnly",
    f"{{'Cookie': 'session={_RANDOM}'}}",
    f"cookies={{'session': '{_RANDOM}'}}",
    f"x-api-key: {_RANDOM}",
    f"X-Auth-Token:{_RANDOM}",
    f"-H 'Ocp-Apim-Subscription-Key: {_HEX}'",
    f"[('x-api-key', '{_PW}')]",
]
_URLS = [
    f"redis://:{_PW}@cache:6379/0",
    f"postgresql://me:{_PW}@db:5432/x",
    f"postgresql://me:p@ss/word-{_PW}@db/x",
    f"postgresql://me:pa/ss-{_PW}@db:5432/x",
    f"mysql+pymysql://me:p#w?{_PW}@db/x",
    f"amqp://me:{_PW}@mq//",
    f"mongodb://me:{_PW}@h1:27017,h2:27017/db?replicaSet=r",
    f"mongodb+srv://me:{_PW}@c.mongodb.net",
    f"https://me:p@{_PW}@host.org/simple",
    f"git+https://x-access-token:{_RANDOM}@github.com/a/b.git@main",
    f"https://{_RANDOM}@github.com/a/b.git",
    f"https://b.s3.amazonaws.com/k?X-Amz-Credential=AKIA&X-Amz-Signature={_HEX}&X-Amz-Date=1",
    f"https://b.s3.amazonaws.com/k?X-Amz-Security-Token={_RANDOM}%2B{_RANDOM}",
    f"https://b.s3.amazonaws.com/k?X-Amz-Credential={_RANDOM}%2F20240101",
    f"https://storage.googleapis.com/b/k?X-Goog-Signature={_HEX}",
    f"https://a.blob.core.windows.net/c/k?sv=2020&sig={_RANDOM}%3D&se=1",
    f"https://api.host/v1?access_token={_PW}&x=1",
    f"https://maps.googleapis.com/x?key={_RANDOM}",
    "https://hooks.slack.com/services/" + f"T0000/B0000/{_RANDOM}",
    "https://discord.com/api/webhooks/" + f"1234567890/{_RANDOM}",
    "https://x.webhook.office.com/webhookb2/" + f"{_HEX}@{_HEX}/IncomingWebhook/{_HEX}/{_HEX}",
    "https://chat.googleapis.com/v1/spaces/A/messages?key=" + f"{_RANDOM}&token={_RANDOM}",
    "https://chat.host.org/hooks/" + _RANDOM.lower(),
    f"root:{_PW}@tcp(db:3306)/x",
    f"dsn='root:p@ss/word-{_PW}@unix(/run/db.sock)/x?parseTime=true'",
    f"mysql://root:{_PW}@tcp(db:3306)/x",
    f"https://me:{_PW}@[::1]:8080/x",
    f"grpc://me:{_PW}@host:81",
    f"git clone https://x-access-token:ghs_{_RANDOM}@github.com/a/b",
    f"https://x-access-token:{_RANDOM}",
]
_KEYS = [
    "\n".join((_BEGIN, *_LINES, _END)),
    "\\n".join((_BEGIN, *_LINES, _END)),
    '{"type": "service_account", "private_key_id": "'
    + _HEX
    + '", "private_key": "'
    + "\\n".join((_BEGIN, *_LINES, _END, '"}')),
    "\n    ".join(("key: |", _BEGIN, *_LINES, _END)),
    "\n".join((_BEGIN, "Proc-Type: 4,ENCRYPTED", "", *_LINES, _END)),
]
_SECRETS = (
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
    "c2lnbmF0dXJl",
    _UPPER,
    _AWS_SECRET,
    *_LINES,
    "FURSBLRVk",
    "ss/word",
    "pa/ss",
    "p#w",
    "c,d;e",
)
_SHORTEST_FRAGMENT = 5
_KEPT = (Path(__file__).parent / "texts_without_credentials.txt").read_text(encoding="utf-8").splitlines()
_SIZE = 60_000
_SOON_S = 15
"""Of this process; a tenth of a second is expected."""


def _left(text: str) -> list[str]:
    """Return the parts of the secrets that are left in a text."""
    found = [secret for secret in _SECRETS if secret in text]
    long = (secret for secret in _SECRETS if len(secret) > _SHORTEST_FRAGMENT)
    parts = {secret[at : at + _SHORTEST_FRAGMENT] for secret in long for at in range(len(secret) - _SHORTEST_FRAGMENT)}
    return found + [part for part in parts if part in text]


@pytest.mark.parametrize("sample", [*_TOKENS, *_NAMED, *_HEADERS, *_URLS, *_KEYS])
@pytest.mark.parametrize(
    "around", ["{}", "denied: {}\nand after", '  File "train.py", line 3\n    {}\nRuntimeError: x']
)
def test_no_part_of_a_secret_is_left(sample: str, around: str) -> None:
    """A credential is replaced completely, wherever it stands, and what stands around it stays."""
    assert _left(sample)
    redacted = redact(around.replace("{}", sample))
    assert not _left(redacted), redacted
    assert "***" in redacted
    before, after = around.split("{}")
    assert redacted.startswith(before)
    assert redacted.endswith(after)
    assert redact(redacted) == redacted


@pytest.mark.parametrize("text", _KEPT)
def test_code_and_ordinary_text_stay(text: str) -> None:
    """Source code, placeholders and ordinary sentences stay as they are, alone and in a traceback."""
    assert redact(text) == text
    inside = f'  File "train.py", line 3, in train\n    {text}\nRuntimeError: {text}'
    assert redact(inside) == inside


@pytest.mark.parametrize(
    ("text", "redacted"),
    [
        (f"connect(host, password='{_PW}', port=1)", "connect(host, password='***', port=1)"),
        (f"redis://:{_PW}@cache:6379/0", "redis://:***@cache:6379/0"),
        (f"https://x-access-token:ghs_{_RANDOM}@github.com/a/b", "https://x-access-token:***@github.com/a/b"),
        (f"me:{_PW}@tcp(db:3306)/x", "me:***@tcp(db:3306)/x"),
        (f"mysql -uroot -p{_PW}secret db", "mysql -uroot -p*** db"),
        (f"https://me:{_PW}@host.org/a@b", "https://me:***@host.org/a@b"),
        (f"mongodb://me:{_PW}@h1:1,h2:2/db", "mongodb://me:***@h1:1,h2:2/db"),
        (f"Authorization: Bearer {_RANDOM} was refused", "Authorization: Bearer *** was refused"),
        (f"user=me&password={_PW}&x=1", "user=me&password=***&x=1"),
        (f"Uid=me;Pwd={_PW};Encrypt=yes", "Uid=me;Pwd=***;Encrypt=yes"),
        (f'{{\\"password\\": \\"{_PW}\\"}}', '{\\"password\\": \\"***\\"}'),
        (f"{_BEGIN}\n{_LINES[0]}\n{_END}", f"{_BEGIN}***{_END}"),
        ("https://hooks.slack.com/services/" + "T0/B0/" + _RANDOM, "https://hooks.slack.com/services/***"),
    ],
)
def test_names_and_hosts_stay(text: str, redacted: str) -> None:
    """What tells which credential it was stays: its name, the host of a URL, the scheme of a header."""
    assert redact(text) == redacted


_ALPHANUMERIC = st.characters(
    categories=[], include_characters="abcdefghijkmnpqrstuvwxyzABCDEFGHIJKLMNPQRSTUVWXYZ0123456789"
)
_MIXED = st.text(_ALPHANUMERIC, min_size=16, max_size=60).filter(
    lambda text: any(map(str.isdigit, text)) and any(map(str.isalpha, text)) and len(set(text)) > 5
)


@given(st.sampled_from([text for text in (*_NAMED, *_HEADERS, *_URLS) if text.count(_RANDOM) == 1]), _MIXED)
def test_a_random_secret_never_stays(sample: str, secret: str) -> None:
    """A random value of letters and digits is replaced in each form."""
    assert secret not in redact(sample.replace(_RANDOM, secret))


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
def test_the_time_is_linear(unit: str) -> None:
    """Whatever a text repeats, it is read at once: in quadratic time it would take minutes."""
    started = time.process_time()
    redact(unit * (_SIZE // len(unit)))
    assert time.process_time() - started < _SOON_S


# --- texts that are cut ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", range(0, 60, 3))
def test_a_cut_leaves_no_part_of_a_secret(at: int) -> None:
    """A secret through which a cut goes is not shown, also if redaction makes the text short."""
    long_value = f"password='{'v9' * 900}'\n"
    text = f"{long_value}{'p' * at}\napi_key={_RANDOM} {long_value * 8} {'q' * at} api_key={_RANDOM}\n{long_value}"
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


def test_code_of_others() -> None:
    """Of the source lines of this Python's own modules less than one in 10,000 changes; most of these look like it."""
    lines = [
        line
        for file in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[::4]
        for line in file.read_text(errors="replace").splitlines()
        if line.strip() and not line.lstrip().startswith("#")
    ]
    changed = [line for line in lines if redact(line) != line]
    assert len(lines) > 10_000
    assert len(changed) < len(lines) / 10_000, changed


# --- rules of one's own ---------------------------------------------------------------------------------------------


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
def test_own_rules(rules: str, text: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """FIRSTFAULT_REDACT adds rules, one a line."""
    monkeypatch.setenv("FIRSTFAULT_REDACT", rules)
    assert redact(text) == expected


def test_a_wrong_rule(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A wrong rule is named once, by its line, and the others count."""
    monkeypatch.setenv("FIRSTFAULT_REDACT", "(s3cret\ncorp-\\w+")
    assert [redact("corp-a"), redact("corp-b")] == ["***", "***"]
    (record,) = caplog.records
    assert "line 1 of FIRSTFAULT_REDACT is not a regular expression of RE2 (missing ))" in record.getMessage()
    assert "s3cret" not in record.getMessage()
