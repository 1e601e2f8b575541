"""Reads what a failed job left behind without firstfault: console logs, and dumps of torch's flight recorder."""
