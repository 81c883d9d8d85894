"""Files of the site: every document of the repository at its own path, and what documents link to.

A hook of mkdocs, whose `docs_dir` may be a folder below mkdocs.yml only. Here the pages of `docs/` move to `docs/` of
the site, and the repository's other documents join them, so that a relative link means the same file on the site and in
the repository.
"""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = ("*.md", "docs/**/*.md", "examples/**/*.md", "benchmarks/**/*.md")
LINKED = (
    "LICENSE",
    "docs/**/*.svg",
    "examples/**/*.py",
    "examples/**/*.toml",
    "benchmarks/*.py",
    "benchmarks/results/*.svg",
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files of `docs/` by those of the repository; keep those of the theme."""
    kept = [file for file in files if file.src_dir != config.docs_dir]
    paths = sorted({path for pattern in (*DOCUMENTS, *LINKED) for path in ROOT.glob(pattern)})
    made = [File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)) for path in paths]
    return Files([*kept, *made])
