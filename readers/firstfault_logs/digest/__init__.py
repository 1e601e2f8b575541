"""Read the logs of a job once more, for the lines that a brief quotes.

The entry point ``firstfault.log_digests`` names `digest_logs`.
"""

from firstfault_logs.digest.log_digest import digest_logs as digest_logs
