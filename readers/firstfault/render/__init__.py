"""Draws a `Report`: Flyte's message, terminal, HTML page and deck, Markdown.

Imports `report` and what is below it. rich and jinja2 are imported by the modules that draw with them.
"""
