"""What one line reports about the end of a job: the words of a completion, and lines that mean
nothing below one.
"""

from __future__ import annotations

import enum
import re

from firstfault.utils.lazy_pattern import LazyPattern

_MAX_REPORT_CHARS = 400
"""A sentence about a completion is short; a record of a structured log may be longer."""
_MAX_RECORD_CHARS = 4096
_MAX_HEADER_CHARS = 100
"""Time, logger and level in front of a message."""
_ALL_PERCENT = 100
_FURTHER_MARKS = (
    "topping",
    "to stop",
    *("inal", "FINAL", "RESULT", "otal", "verall", "eak ", "untime", "train", "Train", "训练"),
    *("arly", "W&B", "SUCC", "eached", "over", "onclu", "eturn", "tatus", "utcome"),
)
"""One of them, or of those in `may_report_completion`, is in each line about a completion:
most logs have few.
"""

# What a line near the end of a failed job may have, whichever program printed it.
FAILURE_REPORT = LazyPattern(r"""(?i)
  rror\b | xception\b | fatal | critical | killed | abort(?:ed|ing) | \bfail(?:ed|ure)\b | \bXid\b | timed[ ]out
| \breset\b
| Traceback | RUNLIMIT | TERM_ | \bOOM | non-zero | \bcore[ ]dumped | \bcrash
| \b(?:code|status)\W{0,4}[1-9] | \bsignal[ ]\d
| \bcancel(?:l?ed)?\b | \bpreempt | \bevict | \bterminat(?:ed|ing)\b | ^[ ][ ]File[ ]" | \bunhealthy\b | \blost\b
""")

# What schedulers print about a job that failed; an exit code of 0 below is then another command's.
JOB_FAILED = LazyPattern(
    r"(?i)\b(?:job|trial|run|workflow|pipeline)\b[^\n]{0,40}\bfailed\b|\bstatus\W{1,3}failed"
)

# What schedulers and shells print about a job that succeeded, even if one of its processes died.
JOB_SUCCEEDED = LazyPattern(r"""(?i)
  \b(?:job|trial|run|workflow|pipeline)\b [^\n]{0,80} \bsucceeded\b
| \b(?:Job)?State(?:=|:[ ]?)COMPLETED\b
| \bCOMPLETED[ ]+0:0\b
| ^[\w.-]+\s+\d+/\d+\s+Completed\b
| ^(?:\+[ ])?exit(?:[ ]code|[ ]status)?:?[ ]0$
| ^(?:jobset|job)\.[\w./-]+\s+(?:Completed\b|Complete\s+\d+/\d+)
""")

# Before the words of a success that didn't happen.
NEGATION = LazyPattern(
    r"(?i)\b(?:not|never|without|before|until|fail(?:ed|ure)?|abort(?:ed)?|un)\b"
)


class CompletionKind(enum.IntEnum):
    """What a completion is based on, weakest first."""

    COUNTER = 1
    """The counter of the outer loop is at its end."""
    RESULT = 2
    """A result of the whole job, printed after its last step."""
    WORD = 3
    """A sentence about the end of the training or the job."""
    STATUS = 4
    """The status of the whole run in a structured log, or a launcher's or scheduler's report."""


_SUBJECT = r"""
(?: (?:pre-?)?train(?:ing|er)? | fit(?:ting)? | fine-?tun(?:e|ing) | optimi[sz]ation | learning | distillation
  | job | run | experiment | workflow | pipeline | script | program | main | benchmark | task | session | trial
  | everything | all[ ](?:\w+[ ])?(?:epochs|steps|iterations|stages|tasks|ranks|workers|processes|jobs|done) )
"""
_END = (
    r"(?: complet(?:ed|e|ion) | finish(?:ed)? | done | succeed(?:ed)? | succeeded | ended | over |"
    r" concluded )"
)
_STAGE = r"""
\b(?:eval\w* | valid\w* | test(?:ing|s)? | epochs? | steps? | iterations? | batch(?:es)? | checkpoint\w* | ckpt
  | sav(?:e|ed|ing) | load\w* | download\w* | upload\w* | (?:pre|post)-?process\w* | token\w* | data\w* | init\w*
  | set-?up | warm-?up | compil\w* | build\w* | stages? | phases? | folds? | rounds? | sanity | start\w* | prepar\w*
  | install\w* | import\w* | cach\w* | splits? | shard\w* | conver\w* | creat\w* | generat\w* | sampl\w* | rollouts?
  | files? | requests? | connect\w* | handshake | rendezvous | transfer\w* | cop(?:y|ied|ying) | sync\w* | forward
  | backward | graph | captur\w* | profil\w* | submi\w* | schedul\w* | config\w* | pars\w* | registr\w* | health
  | cleanup | prefetch\w* | index\w* | queue\w* | allocat\w* )\b
"""
"""Words for parts of a job: the end of one is no end of the job."""

# "training finished", "all epochs done"
_END_SENTENCE = LazyPattern(
    rf"(?i)(?<![\w/.-]) (?P<subject>{_SUBJECT}) \b (?P<between>[^.;!\n]{{0,60}}?)"
    rf" \b{_END}\b(?![\w/-])"
)

# "finished training", "done with the benchmark"
_INVERTED_END_SENTENCE = LazyPattern(
    rf"(?i)\b{_END}\b (?P<between>[^.;!\n]{{0,24}}?) (?<![\w/.-])"
    rf" (?P<subject>{_SUBJECT}) \b"
)

# What follows a sentence about one of many
_ONE_OF_MANY = LazyPattern(
    r"(?i)^\W{0,3}(?:(?:for|of|on|in)[ ])?(?:the[ ])?"
    rf"(?: {_STAGE}\W{{0,3}}\d | (?:one|an?|each|this|first|current)[ ]{_STAGE} )"
)

# In front of a message, below the name of a logger, which is no subject of the sentence
_LOW_LEVEL = LazyPattern(r"\b(?:INFO|DEBUG|WARN(?:ING)?|NOTICE)\b")
_COUNTED_STAGE = LazyPattern(
    r"(?i)\b(?:epoch|step|iteration|iter|batch|fold|stage|phase|round|cycle)\W{0,3}\d"
)
_STAGE_WORD = LazyPattern(r"(?i)" + _STAGE)

# A part of a whole, in a sentence about its end
_FRACTION = LazyPattern(r"(?<![\d.])(?P<part>\d{1,9})[ ]?(?:/|of)[ ]?(?P<whole>\d{1,9})(?![\d.])")
_PERCENTAGE = LazyPattern(r"(?<![\d.])(?P<percent>\d{1,3}(?:\.\d+)?)[ ]?%")

# A line of source code or of a shell's script, in a traceback or a copy of the program
_SOURCE_CODE = LazyPattern(
    r"""
            \w\([ ]?[bfr]{0,2}["'] | ^\s*(?:\#|//) | ^\W*[│┃|]\W*\d+[ ]*[│┃|] | ^\s*\+?\s*(?:echo|printf)\b
          | ^\s+File[ ]"
        """
)

# Not yet
_PENDING_WORD = LazyPattern(
    r"""(?i)
            \b(?:when | once | if | after | will | should | wait(?:ing|s|ed)? | can(?:not)? | may | might | must
            | expect\w* | estimat\w* | remaining | to[ ]be | unless | would | while | during | whether | ETA | soon
            | \w+n't | please | almost | nearly | partial\w* )\b
        """
)

# A pair of a record: "status": "success", state=completed
_SUCCESS_STATUS = LazyPattern(
    r"""(?i)
            ["']?\b(?:status | state | outcome | exit_?status | final_?status)["']?\s?[=:]\s?["']?
            (?:success\w* | succeeded | complete[d]? | finished | done | ok | passed)\b
        """
)

# The event that such a record is about: the end of the whole
_END_EVENT = LazyPattern(
    r"""(?i)
            (?:^|["'=:])[ ]?["']?(?:run | job | train(?:ing)? | fit | experiment | session | workflow | benchmark
            | program | main | task | pipeline | process)
            [_. -]?(?:stop | end | finish | complete | done | close | exit | result | summary | status)
            (?:p?ed|d)?["'\s,]
        """
)
_STATUS_EVENT = LazyPattern(
    r"""(?i)
            ["']?(?:key|event|name|type)["']?\s?[=:]\s?["']status["'].{0,40}["']success\w*["']
        """
)

# Results of the whole
_FINAL_RESULT = LazyPattern(
    r"""
            ^\W{0,3}RESULTS?\b\W
          | (?i:\bfinal[ _](?:[\w@.]+[ _/]){0,3}(?:metrics? | results? | scores? | (?:\w+_)?loss | acc(?:uracy)?
            | reward | perplexity | ppl | bleu | m?ap | f1 | auc | wer | error)\b)[^\n]{0,80}\d
          | (?i:\btrain_(?:runtime|samples_per_second|steps_per_second)\b)
          | (?i:\bpeak[ ](?:gpu[ ]|cuda[ ])?memory\b)
          | (?i:\b(?:total|overall)[ ](?:\w+[ ]){0,2}(?:time|runtime|duration)\b)[^\n]{0,20}\d
          | (?i:\btrain(?:ing)?[ ](?:took|time)\b)[^\n]{0,20}\d
          | (?i:\bfinal[ _](?:[\w@.]+[ _/]){0,3}(?:metrics?|results?|scores?)\W{0,4}(?:none\b|\{))
          | (?i:\b(?:saved|wrote|written|exported|stored)\b[^\n]{0,40}\bfinal[ _-]?{WEIGHTS}\b)
          | (?i:\bfinal[ _-]?{WEIGHTS}[ ](?:\w+[ ]){0,2}(?:saved|written|exported|stored)\b)
          | (?i:\b\d{1,6}[ ]epochs[ ]completed[ ]in[ ]\d)
          | (?i:\bearly[ -]?stop(?:ping|ped)?\b[^\n]{0,40}\b(?:trigger|reach|stopp|epoch|step))
          | (?i:\bsignal+ing[ ]\w+[ ]to[ ]stop\b)
          | (?i:(?:^|[\]:|>]\s{0,3}|\d\W{1,3})early[ -]?stop(?:ping|ped)?\W*$)
          | (?i:\breached[ ](?:the[ ])?max(?:imum)?[ _](?:\w+[ _](?:of[ ])?)?(?:steps|epochs|iter\w*)\b)
        """.replace("{WEIGHTS}", "(?:model|checkpoint|weights|ckpt|adapters?|policy)")
)

# Words of a success that any part of a job may have
_SUCCESS_OF_ANY = LazyPattern(r"(?i)successfully|\bsucceeded\b|\ball[ ]done\b")
_STOPPED_EARLY = LazyPattern(r"(?i)\bearly[ -]?stop")

# The process ended without an exception
_PROCESS_SUCCEEDED = LazyPattern(
    r"^wandb:[ ]Waiting[ ]for[ ]W&B[ ]process[ ]to[ ]finish\W{0,6}\(success\)"
)
_TRAINING_TIME = LazyPattern(
    r"(?i)\b(?:total|overall)[ ](?:\w+[ ])?(?:pre-?)?train(?:ing)?[ ]time\b"
)
_DURATION = LazyPattern(r"(?i)\b(?:time|runtime|duration|took)\b")

# The mean of a loop, printed at the end of each epoch; a counter in a line of metrics
_PER_ITEM = LazyPattern(r"(?i)\beta\b | /[ ]?it\b | \bsteps?\W{0,3}\d{1,9}[ ]?[|(,]")

# Lines that mean nothing below a completion
_NOISE_LINE = LazyPattern(
    r"""
            ^\s*$ | ^\W+$ | ^\++[ ] | \bNCCL[ ](?:INFO|WARN)\b | \bUCX[ ]{1,3}(?:WARN|INFO|DIAG)\b
          | ^\s*(?:\[\w*\]:?\s?)?\[?[WD]\d{3,4}[ ] | ^\W{0,3}(?:WARN(?:ING)?|DEBUG|TRACE)\b | [Ww]arning:
          | ^\s*frame[ ]\#\d | ^\s*<omitting | ^Exception[ ]raised[ ]from | ^wandb:(?!.*\(success\)) | ^[ ]{2,}
          | \bsrun:[ ]got[ ]SIGCONT
        """
)

# Work that goes on
_MORE_WORK = LazyPattern(
    r"""(?i)
            \b(?:start\w* | begin\w* | running | launch\w* | resum\w* | continu\w* | now)\b [^\n]{0,40}
            \b(?:train | eval | valid | test | infer | generat | predict | stage | phase | epoch | job)
          | \beta\W{0,3}(?!0:00:00)\d | ^\W*(?:working[ ]on | processing)\b
          | ^\W*(?:\w+[ ])?(?:evaluat | validat | test | infer | generat | predict)ing\b
        """
)

_CLAUSE_BREAK = re.compile(r"[.;!\]|:>]\s")
_BELOW_ERROR = re.compile(
    r"^\s*(?:\[(?:rank)?\d+\]:?\s?)?(?:\[?[WID]\d{3,4}[ ]|\[?(?:W|I|D)\s[\w/.]+\.\w+:\d+\])"
    r"|\bNCCL"
    r" (?:INFO|WARN)\b|^\W{0,3}(?:WARN(?:ING)?|INFO|DEBUG|TRACE)\b|\s(?:WARN(?:ING)?|INFO|DEBUG)[\s\]:]"
    r"|\bUCX\s+(?:WARN|INFO|DIAG)\b"
    r"|:\d+: \w*Warning: ",
)
_CONTINUATION = re.compile(r"^\s*$|^\s*frame #\d|^Exception raised from |^\s*<omitting ")


def may_report_completion(text: str) -> bool:
    """Whether a line may have words of a completion; without a loop,
    because each line of a log is tested.
    """
    is_possible = (
        "omplet" in text
        or "inish" in text
        or "ucce" in text
        or "done" in text
        or "Done" in text
        or "DONE" in text
        or "OMPLET" in text
        or "INISH" in text
        or "nded" in text
        or "stopped" in text
        or "xit" in text
    )
    return is_possible and len(text) < _MAX_RECORD_CHARS


def find_completion_kind(text: str) -> CompletionKind | None:
    """Return what a line reports about the end of the whole job, or None if it reports nothing."""
    if not may_report_completion(text) and not any(mark in text for mark in _FURTHER_MARKS):
        return None
    text = text.removeprefix("[after ")  # a mark between two parts of a program
    is_code = _SOURCE_CODE.search(text) is not None
    if is_code or len(text) > _MAX_RECORD_CHARS or JOB_FAILED.search(text):
        return None
    if (
        "uccess" in text
        or "ucceed" in text
        or "omplete" in text
        or "inished" in text
        or "tatus" in text
    ):
        if _STATUS_EVENT.search(text):
            return CompletionKind.STATUS
        if _SUCCESS_STATUS.search(text) and _END_EVENT.search(text):
            return CompletionKind.STATUS
    if len(text) > _MAX_REPORT_CHARS or FAILURE_REPORT.search(text):
        return None
    if JOB_SUCCEEDED.search(text) and not NEGATION.search(text):
        return CompletionKind.STATUS
    if _PROCESS_SUCCEEDED.search(text) or _has_sentence(text):
        return CompletionKind.WORD
    return CompletionKind.RESULT if _has_result(text) else None


def is_success_report(text: str) -> bool:
    """Whether a line reports that a training, a process or a job has succeeded."""
    kind = find_completion_kind(text)
    return kind is not None and kind >= CompletionKind.WORD


def _has_result(text: str) -> bool:
    """Whether a line has a result of the whole job, and not of an epoch,
    a step or an evaluation.
    """
    result = _FINAL_RESULT.search(text)
    if result is None:
        return False
    # "epoch 6: early stopping" is about the epoch in which the training ended
    is_counted = _COUNTED_STAGE.search(text[: result.start()]) is not None
    if is_counted and not _STOPPED_EARLY.search(result[0]):
        return False
    if _TRAINING_TIME.search(text):
        return True
    is_of_stage = _DURATION.search(result[0]) and _STAGE_WORD.search(text)
    return not is_of_stage and _PER_ITEM.search(text) is None


# What frameworks and launchers print at the end of a success, besides sentences such as "training
# finished".
_SUCCESS_REPORT = LazyPattern(r"""(?i)
  \bsucceeded\b
| \bsuccessfully\b [^\n]{0,20} \b(?:complet|finish|train|end)
| \bexits?[ ]successfully\b
| \b(?:complet|finish|train|end|exit)ed[ ]successfully\b
| [-=*]{2,}[ ]?SUCCESS[ ]?[-=*]{2,}
| \b(?:exit(?:ed)?(?:[ ]with)?(?:[ ]exit)?|return(?:ed)?)[ _-]?(?:code|status|value)?\W{0,4}0\b(?!:\d)
| ^\W*(?:job[ ])?exit[_ ]?status[ =:\t]{1,30}0\s*$
| `Trainer\.fit`[ ]stopped
| max_(?:steps|epochs) [^\n]{0,12} \breached
| \ball[ ]done\b
| 训练(?:已)?(?:完成|结束)
| \bAll[ ](?:\w+[ ])?(?:ranks|workers|processes|tasks)[ ](?:\w+[ ])?(?:finished|completed|exited[ ]normally)
""")


def _has_sentence(text: str) -> bool:
    """Whether a line has a sentence about the end of the training or the job,
    and not of a part of it.
    """
    level = _LOW_LEVEL.search(text[:_MAX_HEADER_CHARS])
    begin = 0 if level is None else level.end()
    for sentence in (_END_SENTENCE, _INVERTED_END_SENTENCE):
        match = sentence.search(text, begin)
        if match is None:
            continue
        before = text[: match.start()]
        after = text[match.end() :]
        clause = _CLAUSE_BREAK.split(before)[-1]
        of_stage = _STAGE_WORD.search
        if of_stage(match["between"]) or of_stage(clause[-40:]) or _ONE_OF_MANY.search(after):
            continue
        if _COUNTED_STAGE.search(before) or not _is_whole(text):
            continue
        if _PENDING_WORD.search(clause + match[0]) or NEGATION.search(text[: match.end()]):
            continue
        return True
    success = _SUCCESS_REPORT.search(text)
    return (
        success is not None
        and NEGATION.search(text[: success.end()]) is None
        and _PENDING_WORD.search(text[: success.end()]) is None
        and _is_whole(text)
        and not _is_success_of_stage(text, success)
    )


def is_success_of_anything(text: str) -> bool:
    """Whether a line reports a success without naming the training or the job:
    "calibration completed successfully".
    """
    names_whole = _END_SENTENCE.search(text) or _INVERTED_END_SENTENCE.search(text)
    success = None if names_whole else _SUCCESS_REPORT.search(text)
    return success is not None and _SUCCESS_OF_ANY.search(success[0]) is not None


def _is_success_of_stage(text: str, success: re.Match[str]) -> bool:
    """Whether words of a success are in a clause about a part of the job:
    "Warmup completed successfully", "all done with data loading".
    """
    if _SUCCESS_OF_ANY.search(success[0]) is None:
        return False
    before = _CLAUSE_BREAK.split(text[: success.start()])[-1]
    after = _CLAUSE_BREAK.split(text[success.end() :])[0]
    return any(
        pattern.search(part) is not None
        for pattern in (_STAGE_WORD, _COUNTED_STAGE)
        for part in (before, after)
    )


def _is_whole(text: str) -> bool:
    """Whether no number in a line is a part of a whole: 370 of 1000, 37 %."""
    parts = (fraction for fraction in _FRACTION.finditer(text))
    percents = (float(percentage["percent"]) for percentage in _PERCENTAGE.finditer(text))
    is_counted = all(int(fraction["part"]) >= int(fraction["whole"]) for fraction in parts)
    return is_counted and all(percent >= _ALL_PERCENT for percent in percents)


def is_early_stop(text: str) -> bool:
    """Whether a line is about a training that ended before its last epoch
    because it gained no more.
    """
    return "arly" in text and _STOPPED_EARLY.search(text) is not None


def is_noise(text: str) -> bool:
    """Whether a line below a completion means nothing: a level below error, a frame,
    a command of a shell.
    """
    return _NOISE_LINE.search(text) is not None


def shows_more_work(text: str) -> bool:
    """Whether a line below a completion shows that the program goes on with other work."""
    return _MORE_WORK.search(text) is not None


def is_below_error(text: str) -> bool:
    """Whether a line has a level below error."""
    return _BELOW_ERROR.search(text) is not None


def is_continuation(text: str) -> bool:
    """Whether a line belongs to the message of the line above: a frame of native code,
    or a blank one.
    """
    return _CONTINUATION.search(text) is not None
