"""What pages are made of: files of `templates`, autoescaped, and hashes for the content security policy."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from importlib import resources

import jinja2

from weft.report.text import clean, microseconds, seconds, size


def csp_hash(text: str) -> str:
    """A style sheet or script as the content security policy names it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def asset(name: str) -> str:
    """A file of `templates`."""
    return resources.files("weft.report").joinpath("templates", name).read_text(encoding="utf-8")


@cache
def template(name: str) -> jinja2.Template:
    """A page's frame: autoescaped, and an error where it names what is not given."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(us=microseconds, clean=clean, seconds=seconds, size=size)
    return environment.from_string(asset(name))
