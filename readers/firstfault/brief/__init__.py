"""A brief: at most 6,000 tokens of Markdown about an attempt,
for a language model or a person who asks one.

It has what firstfault concludes and how sure it is, and the lines of the logs from which a reader
can judge that: the first failure, what each process printed last, a merged time line, and what is
missing.
"""

from firstfault.brief.conclusion import NoFailure as NoFailure, Subject as Subject
from firstfault.brief.digest import LineRanges as LineRanges, LogDigest as LogDigest
from firstfault.brief.markdown_brief import (
    MAX_TOKENS as MAX_TOKENS,
    build_brief as build_brief,
    find_ranges as find_ranges,
)
from firstfault.brief.tokens import estimate_tokens as estimate_tokens
