"""Reference pages of the documentation site, generated from the source; MkDocs calls `on_files`.

* Each public package has a page with the names in its `__all__`, which mkdocstrings fills with
  their docstrings. `Dataset` has a page of its own.
* `command-line.md` has the commands of `headrace` and their options.

`FencedExamples` is an extension of Griffe, which reads the docstrings.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe
import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from site_hooks import replace_in_nav
from typer.main import get_command

from headrace.cli.main import app

ROOT = Path(__file__).parents[1]

#: A page with a title of its own in the navigation.
ERRORS = "api/headrace.errors.md"

#: A doctest at the left margin of a docstring, up to the next empty line.
DOCTEST = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)

#: Names of `headrace` by topic; each must occur once.
NAMES = {
    "Pipelines": "Dataset DatasetIterator Options AUTOTUNE Optional Lookup "
    "INFINITE_CARDINALITY UNKNOWN_CARDINALITY",
    "Files": "TFRecordDataset TextLineDataset CsvDataset JsonLinesDataset ParquetDataset "
    "WebDataset MDSDataset ArrayRecordDataset LanceDataset FixedLengthRecordDataset StorageCache",
    "Custom sources": "Source IndexedSource Reader Chunk",
    "Elements": "ArraySpec DatasetSpec RaggedArray IndexedSlices",
    "Statistics": "IteratorStats",
    "Parameter servers": "Variable EmbeddingTable",
    "Checkpoints": "Checkpoint CheckpointManager checkpoints_iterator",
}

#: Methods and properties of `Dataset` by topic; each must occur once.
METHODS = {
    "Create": "from_tensor_slices from_tensors from_generator from_random_access from_pipeline "
    "from_source from_image_folder list_files range random counter load",
    "Transform": "map random_map scan filter take_while ignore_errors flat_map interleave "
    "in_processes apply",
    "Select": "take skip shard unique enumerate repeat",
    "Batch": "batch padded_batch ragged_batch batch_by_cost bucket_by_sequence_length "
    "pack_sequences unbatch rebatch window group_by_window",
    "Shuffle and resample": "shuffle rejection_resample",
    "Combine": "zip concatenate choose_from_datasets sample_from_datasets",
    "Speed up": "prefetch cache snapshot with_options options",
    "Read": "iterate as_numpy_iterator reduce get_single_element save",
    "Inspect": "element_spec cardinality explain fingerprint plan",
}


class FencedExamples(griffe.Extension):
    """Puts doctests outside an `Examples` section into code blocks, not Markdown quotes."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        if obj.docstring is not None:
            obj.docstring.value = DOCTEST.sub(r"```pycon\n\g<0>\n```", obj.docstring.value)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the reference pages."""
    pages = _api_pages()
    for uri, text in {**pages, "command-line.md": _command_line()}.items():
        files.append(File.generated(config, uri, content=text))
    replace_in_nav(config.nav, "api/*", [uri for uri in pages if uri != ERRORS])
    return files


def _api_pages() -> dict[str, str]:
    """Return the text of each page of the API reference by its file name.

    Pages are those of `headrace`, of every module in its `__all__`, and of every module in theirs.
    """
    top = griffe.load("headrace", search_paths=[str(ROOT / "src")])
    dataset = top["Dataset"]
    methods = [name for name in dataset.all_members if not name.startswith("_")]
    pages = {
        "api/headrace.md": "",  # first
        "api/headrace.Dataset.md": "\n".join(
            [
                "# headrace.Dataset",
                "",
                *_summary("headrace.Dataset", dataset.all_members, methods, METHODS, level=2),
                "::: headrace.Dataset",
                "    options:",
                f"      members: {_names(METHODS)}",
                "      show_root_members_full_path: true",
            ]
        ),
    }
    packages: list[tuple[str, griffe.Object | griffe.Alias]] = [("headrace", top)]
    while packages:
        path, package = packages.pop(0)
        names = sorted(str(name) for name in package.exports or ())
        modules = [name for name in names if package[name].is_module]
        packages += [(f"{path}.{name}", package[name]) for name in modules]
        pages[f"api/{path}.md"] = _api_page(path, package, names, modules)
    return pages


def _api_page(
    path: str, package: griffe.Object | griffe.Alias, names: list[str], modules: list[str]
) -> str:
    """Return the text of the page of one public package."""
    lines = [f"# {path}", ""]
    if package.docstring is not None:
        lines += [package.docstring.value.partition("\n\n")[0], ""]
    if modules:
        lines += ["| package | contents |", "|---|---|"]
        lines += [
            f"| [`{path}.{name}`]({path}.{name}.md) | {_first_line(package[name])} |"
            for name in modules
        ]
        lines.append("")
    own = [name for name in names if name not in modules]
    topics = NAMES if path == "headrace" else {"": " ".join(own)}
    lines += _summary(path, package.members, own, topics)
    for topic, members in topics.items():
        if topic:
            lines += [f"## {topic}", ""]
        for name in members.split():
            if f"{path}.{name}" != "headrace.Dataset":
                lines += [f"::: {path}.{name}", ""]
                if topic:
                    lines[-1:] = ["    options:", "      heading_level: 3", ""]
    return "\n".join(lines)


def _summary(
    path: str, members: Any, names: list[str], topics: dict[str, str], level: int = 0
) -> list[str]:
    """Return a table of names by topic, with the first lines of their docstrings."""
    listed = _names(topics)
    if sorted(listed) != sorted(names):
        different = sorted(set(listed) ^ set(names))
        raise ValueError(f"topics of {path} in docs/site_reference.py differ in {different}")
    lines = [f"{'#' * level} Summary", ""] if level else []
    lines += ["| name | description |", "|---|---|"]
    for topic, some in topics.items():
        if topic:
            lines.append(f"| **{topic}** | |")
        lines += [
            f"| [`{name}`][{path}.{name}] | {_first_line(members[name])} |" for name in some.split()
        ]
    return [*lines, ""]


def _names(topics: dict[str, str]) -> list[str]:
    return [name for names in topics.values() for name in names.split()]


def _first_line(member: griffe.Object | griffe.Alias) -> str:
    text = member.docstring.value if member.docstring is not None else ""
    return " ".join(text.partition("\n\n")[0].split()).replace("|", "\\|")


def _command_line() -> str:
    """Return the page of the commands of `headrace`."""
    command = get_command(app)
    lines = [
        "# Command line",
        "",
        "`headrace COMMAND --help` shows the same text. Exit codes: 0 is success, or the end by "
        "Ctrl-C or SIGTERM after running; 1 is a failure while running; 2 is wrong usage.",
        "",
        *_options(command),
    ]
    waiting = [("headrace", command)]
    while waiting:
        path, command = waiting.pop(0)
        subcommands = [
            (f"{path} {name}", each)
            for name, each in getattr(command, "commands", {}).items()
            if not each.hidden
        ]
        if path != "headrace":
            lines += [f"## {path}", "", _escape(command.help or ""), "", *_options(command)]
        waiting = subcommands + waiting
    return "\n".join(lines)


def _options(command: Any) -> list[str]:
    """Return a table of the arguments and options of a command, as in its help."""
    context = typer.Context(command)
    records = [each.get_help_record(context) for each in command.params]
    lines = [f"| `{record[0]}` | {_escape(record[1])} |" for record in records if record]
    return ["| option | description |", "|---|---|", *lines, ""] if lines else []


def _escape(text: str) -> str:
    """Return help text as Markdown, with options and placeholders as code."""
    text = re.sub(r"(?<![\w`-])(--[a-z][a-z-]+)", r"`\1`", text)
    return text.replace("\b", "").replace("|", "\\|").replace("<", "&lt;")
