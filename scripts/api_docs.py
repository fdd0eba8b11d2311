"""Writes docs/api.md, the reference of the public names, from their signatures and docstrings. Imports none of them.

An object stands under the first of `MODULES` that exports it.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = ROOT / "docs" / "api.md"
WIDTH = 100
# The rooms come before the package itself, which exports most of their names again.
MODULES = {
    "elasticgang.train": "the loop",
    "elasticgang.member.manager": "the rank's part in the job; from `eg.join`",
    "elasticgang.gang": "gangs",
    "elasticgang.comm": "process groups",
    "elasticgang.layout": "layouts",
    "elasticgang.checkpoint.interchange": "weights of other trainers",
    "elasticgang.errors": "errors",
    "elasticgang.testing": "faults at named places, for tests",
}
NAMES = {  # of a module without `__all__`
    "elasticgang.checkpoint.interchange": ["load_weights"],
    "elasticgang.member.manager": ["QuorumManager", "Step"],
    "elasticgang.testing": ["fail_at", "kill_this_process"],
}
HEADER = """\
# API

The public names, with their signatures and errors. `scripts/api-docs` makes this page from the docstrings; edit those.
`import elasticgang as eg` has the names marked **eg**; the others are in the module under which they stand.
"""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/api-docs", description="Write docs/api.md from the docstrings.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the page is not up to date")
    args = parser.parse_args(argv)
    text = reference()
    if args.check:
        if OUTPUT.read_text() == text:
            return 0
        print("docs/api.md is not what the docstrings say; run scripts/api-docs", file=sys.stderr)
        return 1
    OUTPUT.write_text(text)
    return 0


@functools.cache
def reference() -> str:
    """The whole page, as the sources were at the first call."""
    package = griffe.load("elasticgang", search_paths=[ROOT], docstring_parser="google", allow_inspection=False)
    exported = _exports(package)
    lines = [HEADER]
    headings: dict[str, str] = {}  # of an object, by its path
    for name, title in MODULES.items():
        module = package[name.removeprefix("elasticgang.")]
        lines.append(f"\n## {name}: {title}\n")
        found = {each: _target(module[each]) for each in NAMES.get(name) or _exports(module) or list(_classes(module))}
        theirs = [f"`{each}`" for each, target in found.items() if target is None]
        ours = {each: target for each, target in found.items() if target is not None}
        others = []
        # An object that has two names stands under its own.
        for each, target in sorted(ours.items(), key=lambda item: item[0] != item[1].name):
            if target.path not in headings:
                headings[target.path] = each
                lines += _object(each, target, "**eg** " if each in exported else "")
            elif headings[target.path] != each:
                others.append(f"`{each}` is `{headings[target.path]}`")
        if others:
            lines.append(f"Other names: {', '.join(others)}.\n")
        if theirs:
            lines.append(f"Also torchft's {', '.join(theirs)}, as torchft documents them.\n")
    missing = sorted(set(exported) - set(headings.values()))
    if missing:
        raise SystemExit(f"scripts/api-docs: no module of MODULES exports {', '.join(missing)}")
    return "\n".join(lines).rstrip() + "\n"


def _exports(module: Any) -> list[str]:
    return [str(name) for name in module.exports or ()]


def _classes(module: Any) -> Iterator[str]:
    return (name for name, member in module.members.items() if not member.is_alias and member.is_class)


def _target(member: Any) -> Any:
    """What a name stands for; None for an object of another package."""
    try:
        found = member.final_target if member.is_alias else member
    except griffe.AliasResolutionError:
        return None
    # `elasticgang.train.join` is a module, and the function of that name in it is what the package exports.
    return found[found.name] if found.is_module else found


def _object(name: str, found: Any, mark: str) -> Iterator[str]:
    yield f"### {name}\n"
    if found.is_class:
        bases = [str(base) for base in found.bases if str(base) not in ("ABC", "object")]
        bases_said = f" Bases: {', '.join(f'`{base}`' for base in bases)}." if bases else ""
        yield f"{mark}class.{bases_said}\n"
        if found.parameters:
            yield _code(_signature(name, found.parameters))
    elif found.is_function:
        yield f"{mark}function.\n"
        yield _code(_signature(name, found.parameters, found.returns))
    else:
        yield f"{mark}constant.\n"
        yield _code(f"{name} = {found.value}")
    yield from _docstring(found.docstring)
    if found.is_class:
        constructor = found.members.get("__init__")
        if constructor is not None:
            yield from _docstring(constructor.docstring)
        yield from _members(found)


def _members(cls: Any) -> Iterator[str]:
    """The documented ones with their docstrings, then the others in a line."""
    of_bases, others = [], []
    shown = {each.name for each in cls.parameters}
    for name, member in cls.members.items():
        if name.startswith("_") or member.is_alias:
            continue
        line = _member_line(name, member)
        if member.docstring is not None:
            # Code with a line break is no inline code.
            yield f"{_code(line)}" if "\n" in line else f"**`{line}`**\n"
            yield from _docstring(member.docstring)
        elif _is_documented_by_a_base(cls, name):
            of_bases.append(f"`{name}`")
        elif name not in shown:
            others.append(f"`{line}`" if "\n" not in line else f"`{name}(...)`")
    if of_bases:
        yield f"As its bases document them: {', '.join(of_bases)}.\n"
    if others:
        yield f"Also: {', '.join(others)}.\n"


def _member_line(name: str, member: Any) -> str:
    if member.is_function:
        return _signature(name, member.parameters, member.returns)
    return name if member.annotation is None else f"{name}: {member.annotation}"


def _is_documented_by_a_base(cls: Any, name: str) -> bool:
    found = (base.members.get(name) for base in cls.mro())
    return any(member is not None and not member.is_alias and member.docstring is not None for member in found)


def _signature(name: str, parameters: Any, returns: Any = None) -> str:
    """As one writes it, in one line or with a line for each parameter."""
    said, kinds = [], griffe.ParameterKind
    positional = [each for each in parameters if each.name not in ("self", "cls")]
    for index, each in enumerate(positional):
        star = {kinds.var_positional: "*", kinds.var_keyword: "**"}.get(each.kind, "")
        if each.kind is kinds.keyword_only and not any(
            before.kind in (kinds.keyword_only, kinds.var_positional) for before in positional[:index]
        ):
            said.append("*")
        annotation = f": {each.annotation}" if each.annotation is not None else ""
        is_default = each.default is not None and not star
        said.append(f"{star}{each.name}{annotation}" + (f" = {each.default}" if is_default else ""))
    result = f" -> {returns}" if returns is not None else ""
    line = f"{name}({', '.join(said)}){result}"
    if len(line) <= WIDTH:
        return line
    return f"{name}(\n" + "".join(f"    {each},\n" for each in said) + f"){result}"


def _code(text: str) -> str:
    return f"```\n{text}\n```\n"


def _docstring(docstring: Any) -> Iterator[str]:
    if docstring is None:
        return
    for section in docstring.parsed:
        if section.kind is griffe.DocstringSectionKind.raises:
            yield "Raises:\n"
            for each in section.value:
                yield f"- `{each.annotation}`: {' '.join(each.description.split())}"
            yield ""
        elif section.kind is griffe.DocstringSectionKind.admonition:
            lines = section.value.description.splitlines()
            said = [re.sub(r"^(\w+): ", r"- `\1`: ", line) for line in lines]
            yield "\n".join([f"{section.title}:\n", *said, ""])
        else:
            yield f"{section.value}\n"


if __name__ == "__main__":
    sys.exit(main())
