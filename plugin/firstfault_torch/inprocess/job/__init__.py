"""Restarts under firstfault's agent: what is recorded about them, and which workers a node still has."""
