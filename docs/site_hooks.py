"""Hooks of MkDocs: bring the README and the notebooks to the site, and show Markdown as GitHub does.

The pages under docs/ and the README have links that work in the repository. A hook turns them into
links between pages of the site.
"""

from pathlib import Path

from markdown.extensions import Extension
from markdown.inlinepatterns import SimpleTextInlineProcessor
from markdown.preprocessors import Preprocessor
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
LINKS_OF_README = {"](docs/": "]("}
LINKS_OF_PAGES = {"](../README.md": "](index.md", "](../notebooks/": "](notebooks/"}


class AsGitHub(Extension):
    """Markdown of docstrings: [*B, T] begins no emphasis, and an example becomes a block of code."""

    def extendMarkdown(self, md):
        md.inlinePatterns.register(SimpleTextInlineProcessor(r"(\[\*)(?=B)"), "shape", 185)
        md.preprocessors.register(ExamplesAsCode(md), "examples", 200)


class ExamplesAsCode(Preprocessor):
    """Put fences around paragraphs that begin with >>>."""

    def run(self, lines):
        fenced = False
        in_example = False
        found = []
        for line in lines:
            if line.startswith("```"):
                fenced = not fenced
            if line.startswith(">>>") and not fenced and not in_example:
                in_example = True
                found += ["", "```pycon"]
            if in_example and not line.strip():
                in_example = False
                found += ["```", ""]
            found.append(line)
        return found + ["```"] if in_example else found


def on_config(config):
    """Add the extension, which has no name that mkdocs.yml could give."""
    config.markdown_extensions.append(AsGitHub())
    return config


@event_priority(100)  # before the plugin that shows notebooks
def on_files(files, config):
    """Add the README as the first page, and the notebooks."""
    files.append(File.generated(config, "index.md", abs_src_path=str(ROOT / "README.md")))
    for notebook in sorted((ROOT / "notebooks").glob("*.ipynb")):
        name = f"notebooks/{notebook.name}"
        files.append(File(name, str(ROOT), config.site_dir, config.use_directory_urls))
    return files


def on_page_markdown(markdown, page, config, files):
    """Return the text of a page with links of the site, and with plain bars in the code of tables."""
    links = LINKS_OF_README if page.file.src_uri == "index.md" else LINKS_OF_PAGES
    for old, new in links.items():
        markdown = markdown.replace(old, new)
    lines = markdown.split("\n")
    for number, line in enumerate(lines):
        if line.startswith("| "):  # GitHub wants bars in code escaped, Python-Markdown does not
            lines[number] = line.replace(r"\|", "|")
    return "\n".join(lines)
