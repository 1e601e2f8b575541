"""Failures as data: exceptions, records of failures, torch's error files."""
