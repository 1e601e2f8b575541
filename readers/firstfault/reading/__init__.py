"""From an output prefix to `JobErrors`: list, choose, open, merge."""
