"""Proof that a job had finished: what its programs print when the whole work is done.

`words` checks one line. `proof` weighs the lines of an attempt: what speaks for a completion,
strongest last, and what speaks against it.
"""
