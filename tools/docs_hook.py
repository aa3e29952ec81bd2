"""For mkdocs: adds the files outside docs/ that pages link to.

A file outside docs/ that a page links to becomes part of the site, under repository/: a link such as
``../examples/first/sft_trl.py`` then works both in the repository and on the site, which is built offline and knows no
address of the repository. Markdown files become pages; other files are copied.
"""

import os
import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(!?\[[^\]]*\]\()([^)\s#:]+)(#[^)\s]*)?\)")
OUTSIDE = "repository/"


def home(uri: str) -> str:
    """Where a page of the site lies in the repository."""
    return uri.removeprefix(OUTSIDE) if uri.startswith(OUTSIDE) else f"docs/{uri}"


def target(uri: str, link: str) -> str:
    """Of the site: what a page's link means."""
    path = posixpath.normpath(posixpath.join(posixpath.dirname(home(uri)), link))
    return path.removeprefix("docs/") if path.startswith("docs/") else OUTSIDE + path


def on_files(files: Files, config) -> Files:
    pages = [file for file in files if file.is_documentation_page()]
    while pages:
        page = pages.pop()
        for _, link, _ in LINK.findall(Path(page.abs_src_path).read_text()):
            uri = target(page.src_uri, link)
            path = ROOT / home(uri)
            if uri.startswith(OUTSIDE) and uri not in files.src_uris and path.is_file():
                file = File.generated(config, uri, abs_src_path=str(path))
                files.append(file)
                pages += [file] if file.is_documentation_page() else []
    return files


def on_page_markdown(markdown: str, page, **_) -> str:
    """Links as they are on the site."""
    folder = posixpath.dirname(page.file.src_uri) or "."

    def rewrite(match: re.Match) -> str:
        start, link, anchor = match.groups()
        return f"{start}{os.path.relpath(target(page.file.src_uri, link), folder)}{anchor or ''})"

    return LINK.sub(rewrite, markdown)
