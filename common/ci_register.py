"""How a test file says which suite it belongs to: markers that do nothing, read from the source without running it."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from importlib.util import decode_source
from pathlib import Path

# Suites by backend: what they hold, for `run_suite.py --list`.
SUITES: dict[str, dict[str, str]] = {
    "cpu": {
        "base-a-test-cpu": "the promises of both subsystems and of what they share",
        "parity-test-cpu": "transformers' and diffusers' installed classes as oracles",
        "triton-interpret-test-cpu": "the GPU kernel in triton's interpreter",
        "distributed-test-cpu": "several gloo processes",
    },
    "cuda": {"base-a-test-1-gpu": "the GPU kernel on a GPU"},
    "amd": {},
    "npu": {},
    "xpu": {},
}


def register_cpu_ci(
    est_time: float,
    suite: str,
    nightly: bool = False,
    disabled: str | None = None,
    *,
    stage: str | None = None,
    runner_config: str | None = None,
) -> None:
    """Mark the calling file as part of ``suite`` on the backend in the marker's name.

    Args:
        est_time: seconds that the file takes, for balanced partitions and the list.
        suite: a suite known to the backend, see ``SUITES``.
        nightly: run only when nightly tests are asked for.
        disabled: why the file is not run, if it is not.
        stage, runner_config: for the CI's own scheduling; carried, not interpreted.

    All arguments must be constants: they are read from the source.
    """


# The same marker for the other backends; a file may carry several.
register_cuda_ci = register_amd_ci = register_npu_ci = register_xpu_ci = register_cpu_ci

_MARKERS = {f"register_{backend}_ci": backend for backend in SUITES}
_ARGUMENTS = ("est_time", "suite", "nightly", "disabled")
_LONGEST = 86_400  # a day
_KEYWORDS = (*_ARGUMENTS, "stage", "runner_config")


class RegistrationError(ValueError):
    """A test file is not registered as it should be; the message names the file and the cause."""


@dataclass(frozen=True)
class Registration:
    """One marker of one file."""

    path: Path
    backend: str
    suite: str
    est_time: float
    nightly: bool = False
    disabled: str | None = None
    stage: str | None = None
    runner_config: str | None = None


def read_registrations(path: Path) -> list[Registration]:
    """The markers of a test file, read from its syntax tree.

    Raises:
        RegistrationError: none, one with an argument that is not a constant or not known, an unknown suite, or no
            ``if __name__ == "__main__":`` by which a person can run the file; or it is no Python source.
    """
    try:
        tree = ast.parse(decode_source(path.read_bytes()), filename=str(path))
    except OSError as error:
        raise RegistrationError(f"{path}: cannot be read: {error.strerror}; expected a file") from error
    except (SyntaxError, ValueError, RecursionError) as error:  # ValueError: not UTF-8; NUL bytes, before Python 3.12
        raise RegistrationError(f"{path}: cannot be parsed: {error}; expected Python source, in UTF-8") from error
    found = [
        _read_marker(path, statement.value)
        for statement in tree.body
        if isinstance(statement, ast.Expr) and _marker_name(statement.value) is not None
    ]
    if not found:
        raise RegistrationError(
            f"{path}: no registration; expected register_cpu_ci(est_time=..., suite=...) or a sibling"
        )
    if not any(map(_is_main_entry, tree.body)):
        raise RegistrationError(f'{path}: no `if __name__ == "__main__":` entry; a person could not run it directly')
    return found


def _marker_name(node: ast.expr) -> str | None:
    if not isinstance(node, ast.Call):
        return None
    name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", None)
    return name if name in _MARKERS else None


def _read_marker(path: Path, call: ast.Call) -> Registration:
    name = _marker_name(call)
    where = f"{path}:{call.lineno}: {name}"
    if len(call.args) > len(_ARGUMENTS):
        raise RegistrationError(f"{where}: {len(call.args)} positional arguments; expected at most {len(_ARGUMENTS)}")
    nodes = dict(zip(_ARGUMENTS, call.args))
    for keyword in call.keywords:
        if keyword.arg not in _KEYWORDS or keyword.arg in nodes:
            raise RegistrationError(
                f"{where}: argument {keyword.arg!r}; expected each of {', '.join(_KEYWORDS)} at most once"
            )
        nodes[keyword.arg] = keyword.value
    values = {}
    for argument, node in nodes.items():
        try:
            values[argument] = ast.literal_eval(node)
        except (ValueError, TypeError):  # TypeError: a set or dict of what is not hashable
            raise RegistrationError(
                f"{where}: {argument} is `{ast.unparse(node)}`; expected a constant, since the file is not run to read it"
            ) from None
    for argument, kinds in (("est_time", (int, float)), ("suite", (str,))):
        if argument not in values:
            raise RegistrationError(f"{where}: {argument} is missing")
        if isinstance(values[argument], bool) or not isinstance(values[argument], kinds):
            raise RegistrationError(f"{where}: {argument} is {values[argument]!r}; expected {kinds[-1].__name__}")
    for argument in ("disabled", "stage", "runner_config"):
        if not isinstance(values.get(argument), (str, type(None))):
            raise RegistrationError(f"{where}: {argument} is {values[argument]!r}; expected a string or None")
    if not isinstance(values.get("nightly", False), bool):
        raise RegistrationError(f"{where}: nightly is {values['nightly']!r}; expected True or False")
    if not 0 < values["est_time"] <= _LONGEST:
        raise RegistrationError(
            f"{where}: est_time is {values['est_time']}; expected seconds above 0, at most {_LONGEST}"
        )
    backend = _MARKERS[name]
    if values["suite"] not in SUITES[backend]:
        known = ", ".join(SUITES[backend]) or "none yet"
        raise RegistrationError(f"{where}: unknown suite {values['suite']!r}; known for {backend}: {known}")
    return Registration(path, backend, **values)


def _is_main_entry(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("__name__ == '__main__'", "'__main__' == __name__")


def find_registrations(folder: Path) -> list[Registration]:
    """The registrations of every ``test_*.py`` under ``folder``, by path.

    Raises:
        RegistrationError: one line for each file that is not registered as it should be, or is named so that it would
            not be looked at; or there is no test file.
    """
    found, errors = [], []
    for path in sorted(folder.rglob("*_test.py")):
        if not path.name.startswith("test_"):
            name = f"test_{path.name.removesuffix('_test.py')}.py"
            errors.append(f"{path}: its name does not begin with test_, so it is never run; expected {name}")
    for path in sorted(folder.rglob("test_*.py")):
        try:
            found += read_registrations(path)
        except RegistrationError as error:
            errors.append(str(error))
    if not found and not errors:
        errors.append(f"{folder}: no test file; expected test_*.py in it or below")
    if errors:
        raise RegistrationError("\n".join(errors))
    return found
