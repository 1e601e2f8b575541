"""Proof that a job had finished: what its programs print when the whole work is done.

`words` checks one line. `proof` weighs the lines of an attempt: what speaks for a completion,
strongest last, and what speaks against it; `loops` and `rounds` find the end of a training's outer
loop, and `noise` leaves out what matters no more. `outcome` judges the attempt's failures by that.
"""
