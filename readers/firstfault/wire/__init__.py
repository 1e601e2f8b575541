"""Documents and verdicts as bytes, and back."""
