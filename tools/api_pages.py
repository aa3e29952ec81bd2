"""Writes the docstrings of the public names into docs/api: python tools/api_pages.py [--check]

A page says which names it shows, and in which order: text between ``<!-- api: NAME -->`` and ``<!-- end -->`` is made
from the docstring of NAME. --check changes nothing and fails if a page differs from the docstrings. Sources are read,
not imported.
"""

import argparse
import functools
import re
import sys
import textwrap
from pathlib import Path

import griffe

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted((ROOT / "docs" / "api").glob("*.md"))
REGION = re.compile(r"(<!-- api: ([\w.]+) -->\n)(.*?)(<!-- end -->)", re.S)
TITLES = {
    "parameters": "Arguments",
    "attributes": "Attributes",
    "raises": "Raises",
    "returns": "Returns",
    "yields": "Yields",
}
Kind = griffe.DocstringSectionKind


@functools.cache
def package() -> griffe.Module:
    options = {"warn_unknown_params": False, "warn_missing_types": False, "returns_multiple_items": False}
    return griffe.load(
        "packing_ops",
        search_paths=[ROOT],
        allow_inspection=False,
        docstring_parser="google",
        docstring_options={**options, "returns_named_value": False},
    )


def call_of(function: griffe.Function, name: str) -> str:
    """Returns the signature as Python, a line for each parameter if it is long."""
    parameters, markers = [], {griffe.ParameterKind.positional_only: "/", griffe.ParameterKind.keyword_only: "*"}
    kinds = [parameter.kind for parameter in function.parameters]
    for i, parameter in enumerate(function.parameters):
        if parameter.name in ("self", "cls"):
            continue
        keyword = parameter.kind is griffe.ParameterKind.keyword_only
        if keyword and griffe.ParameterKind.var_positional not in kinds and kinds.index(parameter.kind) == i:
            parameters.append(markers[parameter.kind])
        stars = {griffe.ParameterKind.var_positional: "*", griffe.ParameterKind.var_keyword: "**"}.get(
            parameter.kind, ""
        )
        text = f"{stars}{parameter.name}"
        text += f": {parameter.annotation}" if parameter.annotation else ""
        if parameter.default is not None and not stars:
            text += f" = {parameter.default}" if parameter.annotation else f"={parameter.default}"
        parameters.append(text)
        if parameter.kind is griffe.ParameterKind.positional_only and kinds[i + 1 : i + 2] != [parameter.kind]:
            parameters.append(markers[parameter.kind])
    result = f" -> {function.returns}" if function.returns else ""
    line = f"{name}({', '.join(parameters)}){result}"
    if len(line) <= 100:
        return line
    lines = "".join(f"    {parameter},\n" for parameter in parameters)
    return f"{name}(\n{lines}){result}"


def examples(text: str) -> str:
    """Returns an example with its prompts, and what they print, in blocks of code."""
    parts = []
    for paragraph in re.split(r"\n\s*\n", text.strip("\n")):
        code = paragraph.lstrip().startswith(">>>")
        parts.append(f"```pycon\n{textwrap.dedent(paragraph)}\n```" if code else paragraph)
    return "\n\n".join(parts).replace("\n```\n\n```pycon\n", "\n\n")


def item(name: str, description: str) -> str:
    return f"- `{name}`: {textwrap.indent(description.strip(), '  ').strip()}"


def section(part: griffe.DocstringSection) -> str:
    if part.kind is Kind.text:
        fields = re.sub(r"^(Determinism|Synchronises|Memory|Gradients): ", r"- **\1**: ", part.value, flags=re.M)
        return fields.replace("\n\n\n", "\n\n")
    if part.kind is Kind.examples:
        return examples("\n\n".join(value for _, value in part.value))
    if part.kind is Kind.admonition:
        text = part.value.description
        return examples(text) if part.title in ("Example", "Examples") else f"**{part.title}**: {text}"
    title = TITLES[part.kind.value]
    if part.kind in (Kind.parameters, Kind.attributes):
        return f"**{title}**\n\n" + "\n".join(item(each.name, each.description) for each in part.value)
    if part.kind is Kind.raises:
        return f"**{title}**\n\n" + "\n".join(item(str(each.annotation), each.description) for each in part.value)
    return f"**{title}**: " + "\n".join(each.description for each in part.value)


def text_of(thing: griffe.Object | griffe.Alias, name: str, level: int) -> str:
    """Returns heading, signatures and docstring of a name, and after a class its public methods."""
    parts = [f"{'#' * level} {name}"]
    if thing.is_function and "property" not in thing.labels:
        signatures = [call_of(each, name) for each in thing.overloads or [thing]]
        parts.append("```py\n" + "\n".join(signatures) + "\n```")
    elif thing.is_class and "__init__" in thing.members and thing.docstring:
        parts.append(f"```py\n{call_of(thing.members['__init__'], name)}\n```")
    parts += [section(part) for part in thing.docstring.parsed] if thing.docstring else []
    if thing.is_class:
        public = {n: member for n, member in thing.members.items() if not n.startswith("_") and not member.is_attribute}
        parts += [text_of(member, f"{name}.{n}", level + 1) for n, member in public.items() if member.docstring]
    return "\n\n".join(parts)


def resolved(path: str) -> griffe.Object | griffe.Alias:
    found = package()[path.removeprefix("packing_ops.")]
    return found.final_target if found.is_alias else found


def rewritten(text: str) -> str:
    """Returns a page's text with the docstrings of today."""
    return REGION.sub(lambda m: f"{m[1]}\n{text_of(resolved(m[2]), m[2].rpartition('.')[2], 3)}\n\n{m[4]}", text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = [page for page in PAGES if rewritten(page.read_text()) != page.read_text()]
    if check and stale:
        sys.exit(f"{', '.join(page.name for page in stale)}: not what the docstrings say. make api writes them again")
    for page in stale:
        page.write_text(rewritten(page.read_text()))
    print(f"docs/api: {len(stale)} of {len(PAGES)} pages rewritten")


if __name__ == "__main__":
    main()
