"""Hooks of MkDocs: convert equations to MathML, and fail the build if a page loads anything from another machine.

They also append to the reference of functions a section with the public names that it does not list yet.
"""

import html
import re
import sys
from pathlib import Path

from latex2mathml.converter import convert

# The output of pymdownx.arithmatex for $...$ and $$...$$.
_INLINE = re.compile(r'<span class="arithmatex">\\\((.*?)\\\)</span>', re.S)
_DISPLAY = re.compile(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', re.S)
# Tags whose address a browser loads by itself.
_FETCHED = re.compile(
    r'<(?:script|img|iframe|source|video|audio|embed)\b[^>]*\bsrc="(?:https?:)?//[^"]*"|<link\b[^>]*\bhref="(?:https?:)?//[^"]*"'
)


# Code, which stays unchanged, and pairs of brackets, which are links only in the reference of functions.
_BRACKETS = re.compile(r"(```.*?```|`[^`\n]*`)|\](\s?)\[", re.S)


def on_page_markdown(markdown, page, **_):
    """Append missing public names to the reference of functions; on other pages `[a][b]` is no link."""
    if page.file.src_uri != "reference/functions.md":
        return _BRACKETS.sub(lambda match: match[1] or f"]{match[2]}\\[", markdown)
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    import ptxrt

    listed = set(re.findall(r"^::: ptxrt\.(\w+)$", markdown, re.M))
    rest = [name for name in ptxrt.__all__ if name not in listed]
    return markdown + "".join(["\n## More\n\n"] * bool(rest) + [f"::: ptxrt.{name}\n" for name in rest])


def on_page_content(content, **_):
    """Replace equations by MathML, which browsers render without a script."""
    content = _DISPLAY.sub(lambda match: convert(html.unescape(match[1]), display="block"), content)
    return _INLINE.sub(lambda match: convert(html.unescape(match[1])), content)


def on_post_build(config, **_):
    """Fail if a page loads anything from another machine."""
    for path in sorted(Path(config["site_dir"]).rglob("*.html")):
        found = [tag for tag in _FETCHED.findall(path.read_text(encoding="utf-8")) if 'rel="canonical"' not in tag]
        if found:
            raise SystemExit(f"{path} would load {found[0]}; the site must work offline")
