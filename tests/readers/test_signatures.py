"""Signatures: what comes with firstfault is sound, and a file that is not is refused with file,
line and reason.
"""

import random
import re
import time
from importlib import resources
from pathlib import Path

import pytest

from firstfault.errors import SignatureError
from firstfault.evidence import Role, built_in_signatures, classify, load_signatures
from firstfault.evidence.classification import FailureClass, classify_failures
from firstfault.evidence.signatures import Pattern, Signature, parse_signatures, widen
from firstfault.testing import make_error, make_job
from firstfault.utils.toml import parse_toml

PATIENCE_S = 30.0
"""A pattern that backtracks takes minutes."""
AT_ONCE_S = 0.5
WORD = re.compile(r"[A-Za-z]{3,}")
BUILT_IN = built_in_signatures()
TEXTS = parse_toml((Path(__file__).parent / "texts_of_libraries.toml").read_text(encoding="utf-8"))
GOOD = """schema = 1

[[noise]]
id = "advice"
pattern = "have you tried"
role = "ambiguous"
category = "unknown"
example = "have you tried to turn it off"
why = "advice"

[[signature]]
id = "store"
pattern = "shard (?P<rank>\\\\d+) is locked"
types = ["ShardError"]
role = "primary"
category = "storage"
example = "ShardError: shard 3 is locked"
why = "the store speaks of itself"
"""


def _parts(example: str) -> tuple[str, str]:
    match = re.match(
        r"((?:[a-z_]\w*\.|[a-z]\w*::)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt)): ?", example
    )
    return (match[1], example[match.end() :]) if match else ("", example)


def test_built_in_signatures_are_valid() -> None:
    """Commands skip this check when they load the file."""
    loaded = load_signatures(Path(str(resources.files("firstfault.evidence") / "signatures.toml")))
    assert [item.id for item in loaded.signatures] == [item.id for item in BUILT_IN.signatures]


def test_each_example_is_decided_by_its_own_signature() -> None:
    """Each example is decided by its own signature, and by none that stands before it."""
    for signature in BUILT_IN.signatures:
        kind, message = _parts(signature.example)
        found = classify(message, kind)
        assert (found.signature, found.role, found.category) == (
            signature.id,
            signature.role,
            signature.category,
        )


@pytest.mark.parametrize("noise", BUILT_IN.noise, ids=lambda noise: noise.id)
def test_noise_decides_only_if_there_is_nothing_else(noise: Signature) -> None:
    """Noise decides if there is nothing else, and nothing if there is."""
    found = classify(noise.example)
    assert (found.signature, found.role) == (noise.id, noise.role)
    assert classify(f"CUDA error: misaligned address\n{noise.example}").signature == "gpu-kernel"


def test_every_reason_is_unique_without_a_full_stop() -> None:
    """Every entry has its own reason, without a full stop."""
    entries = BUILT_IN.noise + BUILT_IN.signatures
    assert all(len(entry.why) > 10 and not entry.why.endswith(".") for entry in entries)
    assert len({entry.id for entry in entries}) == len(entries)


def test_a_users_file_comes_first(tmp_path: Path) -> None:
    """Its entries are asked before ours; ours are still there."""
    file = tmp_path / "ours.toml"
    file.write_text(GOOD)
    signatures = load_signatures(file) + BUILT_IN
    found = classify("shard 12 is locked", "data.ShardError", signatures=signatures)
    assert (found.signature, found.role) == ("store", Role.PRIMARY)
    assert found.pointer.rank == 12
    assert classify("shard 12 is locked", "OSError", signatures=signatures).signature == "program"
    based = classify(
        "shard 1 is locked",
        "LocalError",
        ("ShardError", "Exception"),
        signatures=signatures,
    )
    assert based.signature == "store", "a base counts as well"


@pytest.mark.parametrize(
    ("change", "line", "reason"),
    [
        (("schema = 1", "schema = 7"), 1, "must have schema = 1, not 7"),
        (("schema = 1", ""), 1, "must have schema = 1, not None"),
        (("[[signature]]", "[[signatures]]"), 1, "unknown table 'signatures'"),
        (('why = "the store', 'reason = "the store'), 11, "'why' is missing"),
        (('types = ["', 'kinds = ["'), 11, "unknown key 'kinds'"),
        (('types = ["ShardError"]', 'types = "ShardError"'), 11, "'types' must be a list"),
        (
            ('role = "primary"', 'role = "first"'),
            11,
            "role 'first' must be one of primary, secondary, ambiguous",
        ),
        (('category = "storage"', 'category = "stuff"'), 11, "category 'stuff' is none"),
        (("shard (?P", "shard ((?P"), 11, "'pattern' is not a regular expression"),
        (("?P<rank>", "?P<shard>"), 11, "group 'shard' must be one of"),
        (("is locked", "is lost"), 11, "the pattern of 'store' is not found in its own example"),
        (('"have you tried"', '".*"'), 3, "'pattern' is found in an empty text"),
        (('id = "store"', 'id = "advice"'), 11, "id 'advice' is taken by line 3"),
        (('id = "store"', "id = 4"), 11, "'id' must be a text that is not empty"),
        (('example = "have', 'example = " '), 3, "is not found in its own example"),
        (
            ("have you tried", "have (?!not)tried"),
            3,
            "'pattern' has look-ahead ((?!), which RE2 does not support",
        ),
        (
            ("have you tried", "(?<=x)tried"),
            3,
            "'pattern' has look-behind ((?<=), which RE2 does not support",
        ),
        (
            ("have you tried", r"(a)\\1"),
            3,
            r"'pattern' has a back-reference (\1), which RE2 does not support",
        ),
        (("have you tried", "(?!not)tried"), 3, "in the key 'unless'"),
        (
            ('role = "ambiguous"', 'unless = "(?=x)"\nrole = "ambiguous"'),
            3,
            "'unless' has look-ahead",
        ),
        (('role = "ambiguous"', 'unless = 3\nrole = "ambiguous"'), 3, "'unless' must be a pattern"),
        (
            ('role = "ambiguous"', 'unless = "x*"\nrole = "ambiguous"'),
            3,
            "'unless' is found in an empty text",
        ),
        (
            ('role = "am', 'unless = "turn it"\nrole = "am'),
            3,
            "'unless' of 'advice' is found in its own",
        ),
    ],
)
def test_an_invalid_file_is_refused_with_line_and_reason(
    change: tuple[str, str], line: int, reason: str
) -> None:
    """The error names the file, the line at which the entry begins, and what to change."""
    text = GOOD.replace(*change, 1)
    assert text != GOOD
    with pytest.raises(SignatureError) as caught:
        parse_signatures(text, "ours.toml")
    assert str(caught.value).startswith(f"ours.toml:{line}: ")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unreadable_file_is_one_line(tmp_path: Path) -> None:
    """No file, no text, no TOML: one line."""
    with pytest.raises(SignatureError, match=r"none\.toml: cannot be read"):
        load_signatures(tmp_path / "none.toml")
    file = tmp_path / "bytes.toml"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(SignatureError, match="cannot be read"):
        load_signatures(file)
    with pytest.raises(SignatureError, match=r"ours\.toml: no valid TOML: .*line 2"):
        parse_signatures('schema = 1\n[[signature\nid = "x"', "ours.toml")


# --- texts ----------------------------------------------------------------------------------------

_ID = "NCCL communicator and retrieving ncclUniqueId"


@pytest.mark.parametrize(
    ("message", "pointer"),
    [
        (
            "[gloo/pair.cc:1] Connection closed by peer [10.9.8.7]:4711",
            {"ip": "10.9.8.7", "port": 4711},
        ),
        (
            "NCCL WARN Net : Connection closed by remote peer node-7<4711>",
            {"host": "node-7", "port": 4711},
        ),
        ("[Rank 0]: Rank 6 failed to pass monitoredBarrier in 9000 ms", {"rank": 6}),
        (
            f"[3] is setting up {_ID} from [0] via c10d key-value store by key",
            {"rank": 0, "store": True},
        ),
        ("bad batch", None),
    ],
)
def test_a_pointer_holds_only_what_the_text_says(
    message: str, pointer: dict[str, object] | None
) -> None:
    """The pointer holds what the text says, and nothing else."""
    found = classify(message, "RuntimeError").pointer
    assert (found.as_dict() if found is not None else None) == pointer


# --- time -----------------------------------------------------------------------------------------


def _seconds(signature: Signature, text: bytes) -> float:
    """The time of the faster of two searches: another process may have held up one."""

    def once() -> float:
        began = time.thread_time()
        signature.search(text)
        return time.thread_time() - began

    return min(once(), once())


def _adversarial(signature: Signature, size: int) -> list[bytes]:
    """Texts that nearly fit, again and again: the example, its beginnings,
    and its pattern's words in any order.
    """
    example = signature.example
    parts = [example, f"{example[: len(example) * 3 // 4]} ", f"{example[: len(example) // 2]}\n"]
    words = WORD.findall(signature.pattern.source) + re.findall(r"\w+|\W", example)
    parts.append("".join(random.Random(signature.id).choices(words, k=2_000)))
    return [(part * (size // len(part) + 1)).encode()[:size] for part in parts]


@pytest.mark.parametrize(
    ("text", "signature"),
    [
        (
            "NCCL WARN Call to connect returned Software caused connection abort; " * 200,
            "nccl-remote",
        ),
        ("CUDA error: misaligned address" + "x [" * 2_000_000, "gpu-kernel"),
    ],
    ids=["beginnings of several signatures", "a huge one"],
)
def test_formerly_slow_texts_are_judged_in_seconds(text: str, signature: str) -> None:
    """They are judged in seconds."""
    began = time.thread_time()
    assert classify(text, "RuntimeError").signature == signature
    assert time.thread_time() - began < PATIENCE_S


@pytest.mark.timing
@pytest.mark.parametrize(
    "signature", BUILT_IN.noise + BUILT_IN.signatures, ids=lambda signature: signature.id
)
def test_time_is_linear_in_the_text(signature: Signature) -> None:
    """No text of 1 MB takes a signature long; twice the text takes about twice the time."""
    texts = zip(_adversarial(signature, 500_000), _adversarial(signature, 1_000_000), strict=True)
    for half, whole in texts:
        seconds = _seconds(signature, whole)
        assert seconds < AT_ONCE_S
        # a search of a few milliseconds measures the machine
        assert seconds < 0.1 or seconds < 4 * _seconds(signature, half)


@pytest.mark.timing
def test_many_long_harmless_texts_are_judged_in_seconds() -> None:
    """As many workers as a reader opens documents, with different long messages,
    are judged in seconds.
    """
    drawn = random.Random(7)
    words = [
        "the",
        "tensor",
        "batch",
        "shape",
        "expected",
        "got",
        "gradient",
        "index",
        "dataset",
        "value",
        "module",
    ]
    text = " ".join(drawn.choices(words, k=4_000))[:15_900]
    errors = [
        make_error(
            rank,
            exception="ValueError",
            message=f"{text[rank:]} at {rank} {text[:rank]}",
            world_size=16_384,
        )
        for rank in range(2_560)
    ]
    job = make_job(*errors)
    began = time.thread_time()
    assert {judged.failure_class for judged in classify_failures(job)} == {FailureClass.OWN_FAULT}
    assert time.thread_time() - began < 5


# --- patterns -------------------------------------------------------------------------------------


def test_the_filter_never_rejects_a_match() -> None:
    """What the filter calls impossible is not in the text."""
    for signature in BUILT_IN.noise + BUILT_IN.signatures:
        for text in (signature.example.upper().encode(), *_adversarial(signature, 4_000)):
            for filter_, entries in (
                (BUILT_IN.noise_filter, BUILT_IN.noise),
                (BUILT_IN.filter, BUILT_IN.signatures),
            ):
                found = {entry.id for entry in entries if entry.pattern.search(text) is not None}
                assert found <= {entry.id for entry in filter_.possible(text)}, signature.id


@pytest.mark.parametrize(
    ("pattern", "wide"),
    [
        (r"rank \d{1,6}[^\n]{0,300}? failed", r"rank \d*[^\n]*? failed"),
        *((same, same) for same in (r"x{3}", r"\{1,2\}", r"[{1,2}]", r"[^]{1,2}]", r"[\]{1,2}]")),
    ],
)
def test_a_filter_pattern_loses_its_limits_of_repetition(pattern: str, wide: str) -> None:
    """Repetitions with a limit lose it; braces that are text stay."""
    assert widen(pattern) == wide


@pytest.mark.parametrize(("kind", "message", "signature"), TEXTS["left_out"])
def test_unless_leaves_a_text_to_the_signatures_below(
    kind: str, message: str, signature: str
) -> None:
    """A text in which `unless` is found, too, is left to the signatures that follow."""
    assert classify(message, kind).signature == signature


def test_unless_works_in_a_users_file() -> None:
    """`unless` keeps a signature and a noise from texts in which it is found."""
    text = GOOD.replace('types = ["ShardError"]', "unless = 'rebuil[dt]'")
    text = text.replace('role = "ambiguous"', 'unless = "twice"\nrole = "ambiguous"')
    signatures = parse_signatures(text, "ours.toml")
    assert classify("shard 3 is locked", signatures=signatures).signature == "store"
    assert classify("shard 3 is locked until it is REBUILT", signatures=signatures).signature == ""
    assert classify("have you tried", signatures=signatures).signature == "advice"
    assert classify("have you tried twice", signatures=signatures).signature == ""


def test_a_pattern_ignores_case_and_knows_lines() -> None:
    """^ and $ match at lines, the dot ends at one, and what is cut is all that matches;
    any text can be searched.
    """
    pattern = Pattern("^(?:a.c)$")
    assert pattern.search("x\nABC\nx") == {}
    assert pattern.search("a\nc") is None
    assert pattern.cut_from(b"abc\nabcd\naxc\n") == b"\nabcd\n\n"
    found = classify(
        "\ud800 shard \udfff Connection closed by peer [10.9.8.7]:4711 \udcff", "RuntimeError"
    )
    assert found.pointer.ip == "10.9.8.7"
    assert Pattern("(?P<host>.)$").search("\ud800") == {"host": "?"}
    assert classify("\udcff", "ValueError").role is Role.PRIMARY


# --- lines around a peer's end --------------------------------------------------------------------


REMOTE = (
    "[rank5]:[E914 07:08:09.100200 ProcessGroupNCCL.cpp:600] [Rank 5] Collective"
    " WorkNCCL(SeqNum=44, OpType=BROADCAST, NumelIn=9, NumelOut=9, Timeout(ms)=700000) raised the"
    " following async exception: NCCL error: remote process exited or there was a network error,"
    " NCCL version 2.22.3\nncclRemoteError: A call failed possibly due to a network error or a"
    " remote process exiting prematurely.\nLast error:\nNET/IB : Got completion from peer"
    " 10.8.7.6<40404> with status=12 opcode=0 len=0 vendor err 129 (Send)\nterminate called after"
    " throwing an instance of 'c10::DistBackendError'"
)
WAITED = (
    "[rank5]:[E914 07:08:09.100200 ProcessGroupNCCL.cpp:640] [Rank 5] Watchdog caught collective"
    " operation timeout: WorkNCCL(SeqNum=44, OpType=BROADCAST, NumelIn=9, NumelOut=9,"
    " Timeout(ms)=700000) ran for 700020 milliseconds before timing out."
)


@pytest.mark.parametrize("harmless", TEXTS["harmless"])
@pytest.mark.parametrize("prefix", ["", "node9: ", "2031-04-05T06:07:08.9Z stderr F "])
def test_lines_around_a_peers_end_make_no_victim_guilty(harmless: str, prefix: str) -> None:
    """Neither a name nor a notice makes a victim guilty, whether it stands before or after."""
    line = prefix + harmless
    for text, role in ((REMOTE, "secondary"), (WAITED, "ambiguous")):
        assert classify(f"{line}\n{text}").role.value == role
        assert classify(f"{text}\n{line}").role.value == role


@pytest.mark.parametrize("own", TEXTS["own"])
def test_an_own_fault_counts_among_peers_ends(own: str) -> None:
    """What a process raised itself counts, though harmless lines precede it and
    its peers' ends follow.
    """
    before = "\n".join(TEXTS["harmless"])
    assert classify(f"{before}\n{own}\n{REMOTE}").role.value == "primary"
    assert classify(own).category == classify(f"{before}\n{own}\n{REMOTE}").category


@pytest.mark.parametrize(("kind", "message", "role"), TEXTS["between_ranks"])
def test_a_communication_error_is_an_own_fault_only_if_it_says_so(
    kind: str, message: str, role: str
) -> None:
    """An error of a library that connects ranks is the process's own only if the text says so."""
    assert classify(message.replace("{REMOTE}", REMOTE), kind).role.value == role
