"""The elastic agent of one node."""
