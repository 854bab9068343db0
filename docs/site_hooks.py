"""What the site needs besides the pages: files of the repository that they link to, and links that lead to these.

In a repository a link such as `../benchmarks/results/decode.json` leads to the file. The site gets a copy of each file that it
links to, below `repository/`; the README is the beginning of the site's first page, and of a folder only the name is left.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
COPIES = "repository"
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")


def target_of(page: str, link: str) -> str | None:
    """The path in the repository that a page's link leads to, where that is outside of docs/; `page` counts from docs/."""
    if "://" in link or link.startswith(("mailto:", "/")):
        return None
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), link))
    return None if path.startswith("docs/") and not path.endswith(".py") else path


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for page in [*files.documentation_pages()]:
        for _, link, _ in LINK.findall(page.content_string):
            path = target_of(page.src_uri, link)
            copy = f"{COPIES}/{path}"
            if path and (ROOT / path).is_file() and path != "README.md" and copy not in files.src_uris:
                files.append(File.generated(config, copy, abs_src_path=str(ROOT / path)))
    return files


def readme() -> str:
    """The README without its list of pages, its links as of docs/."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return text.partition("## Documentation")[0].replace("](docs/", "](")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    here = page.file.src_uri
    if here == "README.md":
        markdown = readme() + markdown.replace("# Documentation", "## Documentation", 1)

    def rewritten(match: re.Match) -> str:
        text, link, heading = match.groups()
        path = target_of(here, link)
        if path is None:
            return match[0]
        if (ROOT / path).is_dir():
            return text
        to = "README.md" if path == "README.md" else f"{COPIES}/{path}"
        return f"[{text}]({posixpath.relpath(to, posixpath.dirname(here) or '.')}{heading or ''})"

    return LINK.sub(rewritten, markdown)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    # In docstrings a name in brackets is a reference; here it is one word of code among others.
    return re.sub(r"\[(<code>[^<]*</code>)\]", r"\1", html)
