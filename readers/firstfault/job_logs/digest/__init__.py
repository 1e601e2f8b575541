"""Read the logs of a job once more, for the lines that a brief quotes: the entry point of ``firstfault.log_digests``."""

from firstfault.job_logs.digest.log_digest import digest_logs as digest_logs
