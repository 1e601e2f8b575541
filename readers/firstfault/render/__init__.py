"""Draws a `Report`: Flyte's message, terminal, HTML page and deck, Markdown.

Imports `report` and what is below it. Only the modules that draw with rich and jinja2 import them.
"""
