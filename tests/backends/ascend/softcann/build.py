"""Compiles the libraries of CANN that torch_npu loads, from the symbols that the wheel lacks."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.backends.ascend.softcann.operators import C_TYPES, SIGNATURES

__all__ = ["build", "missing_symbols"]

HERE = Path(__file__).parent
# The wheel names six libraries; all symbols are in the first, the others only have to be there.
RUNTIME = "libascendcl.so"
EMPTY = (
    *("libhccl.so", "libacl_op_compiler.so", "libge_runner.so", "libgraph.so"),
    "libacl_tdt_channel.so",
)
OPERATORS = "libopapi.so"
CANN_NAME = re.compile(r"(?:acl|rt[A-Z]|Msprof)\w*")


def build(folder: Path, package: Path) -> None:
    """Compile the libraries into ``folder``; ``package`` is the installed torch_npu."""
    source = (HERE / "runtime.c").read_text(encoding="utf-8")
    implemented = set(re.findall(r"^[\w ]+?\*?(\w+)\(", source, re.MULTILINE))
    failing = sorted(missing_symbols(package) - implemented)
    runtime = folder / "runtime.c"
    stubs = [f'long {name}(void) {{ return not_implemented("{name}"); }}' for name in failing]
    runtime.write_text("\n".join([source, *stubs, ""]), encoding="utf-8")
    _compile(folder / RUNTIME, runtime)
    empty = folder / "empty.c"
    empty.write_text("int softcann_marker;\n", encoding="utf-8")
    for name in EMPTY:  # torch_npu looks for functions of the runtime in these, too
        link = (f"-L{folder}", "-Wl,--no-as-needed", "-lascendcl", "-Wl,-rpath,$ORIGIN")
        _compile(folder / name, empty, *link)
    operators = folder / "operators.c"
    objects = (HERE / "operators.c").read_text(encoding="utf-8")
    functions = (_operator(name, kinds) for name, kinds in SIGNATURES.items())
    operators.write_text("\n".join([objects, *functions]), encoding="utf-8")
    _compile(folder / OPERATORS, operators)


def missing_symbols(package: Path) -> set[str]:
    """Return the names of CANN's functions that the libraries of the wheel use and do not have."""
    used: set[str] = set()
    defined: set[str] = set()
    for library in sorted(package.rglob("*.so")):
        for kind, name in _symbols(library):
            (used if kind in "Uw" else defined).add(name)
    return {name for name in used - defined if CANN_NAME.fullmatch(name)}


def _symbols(library: Path) -> Iterator[tuple[str, str]]:
    listing = subprocess.run(
        ["nm", "-D", "--without-symbol-versions", str(library)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for line in listing.splitlines():
        *_, kind, name = line.split()
        yield kind, name


def _operator(name: str, kinds: str) -> str:
    """Return the two functions of an operator: one collects its arguments, one runs it."""
    parameters = "".join(f"{C_TYPES[kind]}a{at}, " for at, kind in enumerate(kinds))
    lines = [
        f"int {name}GetWorkspaceSize({parameters}uint64_t *workspace, Call **executor) {{",
        f'    Call *call = begin("{name}", {len(kinds)});',
    ]
    for at, kind in enumerate(kinds):
        lines.append(f"    call->arguments[{at}].kind = '{kind}';")
        if kind == "s":
            value = f'object = strdup(a{at} ? a{at} : "")'
        elif kind in "fd":
            value = f"real = a{at}"
        else:
            value = f"integer = a{at}" if kind in "iIb" else f"object = a{at}"
        lines.append(f"    call->arguments[{at}].{value};")
    return "\n".join(
        [
            *lines,
            "    *workspace = 0;",
            "    *executor = call;",
            "    return 0;",
            "}",
            f"int {name}(void *workspace, uint64_t size, Call *call, void *stream) {{",
            "    return finish(call);",
            "}",
        ]
    )


def _compile(library: Path, source: Path, *options: str) -> None:
    name = f"-Wl,-soname,{library.name}"
    command = ["gcc", "-shared", "-fPIC", "-O1", "-w", "-o", str(library), name, str(source)]
    subprocess.run([*command, *options], check=True)


if __name__ == "__main__":
    build(Path(sys.argv[1]), Path(sys.argv[2]))
