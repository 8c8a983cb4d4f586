"""The import arrows between and inside the packages, and the length of files.

Each package's files are listed once, top to bottom: a file may import only files above it. A file that is not listed
fails, so that whoever adds one decides where it stands. Imports inside functions count like all others.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

_OPS = """
errors readings segments checks reference chunked shortconv
kernels kernels.common kernels.gates kernels.conv kernels.intra kernels.chain kernels.decode kernels.attention
kernels.hopper_common kernels.hopper_intra kernels.hopper_chain
launcher blocks launch_conv launch_plain launch_hopper launch_attention launch attention schema api api_conv precompile
__init__ testing
"""
_HF = """
errors events reasons trace_events histogram metrics prometheus
run_record trace_runs trace_headline trace_text trace_rows trace_picture trace
config integers setting_checks markers plain_text seams chat_cuts encode prompt_checks prompts
prefix_tree boundary_choice checkpoint_bytes logged_prompts stable_cuts advice advise
identity keys kv slots checkpoint kept eviction prefixes index requests demand priorities queues plan admission leases
draft starts holdings narrator deferral lifecycle scheduler stats
turns sinks pools audit attention row_table batch layers decode_graphs families running_limit memory packed_step
recovery runner steps collector export handover sampling generate patching
outputs handles request_settings request_sampling submissions pins answers step_loop open_engines engine
observe
__init__
demo demo.wording demo.catalog demo.tokenizer demo.architecture demo.batches demo.training_rule demo.train
demo.embedded demo.compare demo.report __main__
"""
_WITHOUT_TORCH = """
errors events reasons trace_events histogram metrics prometheus
run_record trace_runs trace_headline trace_text trace_rows trace_picture trace
config markers keys kv slots checkpoint kept eviction prefixes index requests demand priorities queues
plan admission leases draft starts holdings narrator deferral lifecycle scheduler stats
"""

ORDER = {"ckpt_ops": _OPS.split(), "ckpt_hf": _HF.split()}
HEAVY = {"ckpt_ops", "torch", "transformers", "triton"}

MODULES = [(package, name) for package, names in ORDER.items() for name in names]


def path_of(package: str, name: str) -> Path:
    base = ROOT / package
    if name == "__init__":
        return base / "__init__.py"
    target = base.joinpath(*name.split("."))
    return target / "__init__.py" if target.is_dir() else target.with_suffix(".py")


def name_of(package: str, path: Path) -> str:
    parts = path.relative_to(ROOT / package).with_suffix("").parts
    if len(parts) > 1 and parts[-1] == "__init__":
        parts = parts[:-1]
    return ".".join(parts)


def imports(package: str, name: str) -> Iterator[str]:
    """Absolute dotted names of all that a file imports, ``from x import y`` as ``x.y``."""
    path = path_of(package, name)
    parts = [package, *name.split(".")]
    own = parts if path.name == "__init__.py" and name != "__init__" else parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = own[: len(own) - node.level + 1] if node.level else []
            origin = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{origin}.{alias.name}" for alias in node.names)


def own_imports(package: str, name: str) -> Iterator[str]:
    """Files of the same package that a file imports, by their name in ORDER."""
    for imported in imports(package, name):
        top, _, rest = imported.partition(".")
        if top != package:
            continue
        candidates = [rest, rest.rpartition(".")[0]]
        yield next((found for found in candidates if found in ORDER[package]), "__init__")


def third_party(package: str, name: str) -> set[str]:
    tops = {imported.partition(".")[0] for imported in imports(package, name)}
    return tops - set(sys.stdlib_module_names) - set(ORDER) - {"__future__"}


@pytest.mark.parametrize("package", ORDER)
def test_every_file_is_listed_once(package: str) -> None:
    present = sorted(name_of(package, path) for path in (ROOT / package).rglob("*.py"))
    assert present == sorted(ORDER[package]), "list new files in ORDER, where they stand in the flow of data"


@pytest.mark.parametrize(("package", "name"), MODULES)
def test_a_file_imports_only_files_above_it(package: str, name: str) -> None:
    order = ORDER[package]
    below = {imported for imported in own_imports(package, name) if order.index(imported) >= order.index(name)}
    assert not below, f"{package}.{name} imports {sorted(below)}, which stand below it"


@pytest.mark.parametrize("name", ORDER["ckpt_ops"])
def test_ops_know_nothing_of_models(name: str) -> None:
    tops = {imported.partition(".")[0] for imported in imports("ckpt_ops", name)}
    assert "ckpt_hf" not in tops
    assert third_party("ckpt_ops", name) <= {"torch", "triton"}


@pytest.mark.parametrize("name", ORDER["ckpt_ops"])
def test_only_kernels_and_their_launcher_import_triton(name: str) -> None:
    if "triton" in third_party("ckpt_ops", name):
        assert name in ("blocks", "launcher") or name.startswith(("launch", "kernels."))


@pytest.mark.parametrize("name", [name for name in ORDER["ckpt_ops"] if name.startswith("kernels.")])
def test_kernels_import_nothing_but_triton_and_each_other(name: str) -> None:
    assert third_party("ckpt_ops", name) <= {"triton"}
    assert all(imported.startswith("kernels") for imported in own_imports("ckpt_ops", name))


@pytest.mark.parametrize("name", _WITHOUT_TORCH.split())
def test_what_needs_no_tensor_imports_no_torch(name: str) -> None:
    pending, seen = [name], set()
    while pending:
        current = pending.pop()
        if current in seen:
            continue
        seen.add(current)
        found = HEAVY & {imported.partition(".")[0] for imported in imports("ckpt_hf", current)}
        assert not found, f"ckpt_hf.{name} must do without torch, but ckpt_hf.{current} imports {sorted(found)}"
        pending.extend(own_imports("ckpt_hf", current))


def test_importing_the_ops_loads_neither_triton_nor_transformers() -> None:
    program = (
        "import sys, torch; before = set(sys.modules); import ckpt_ops; "
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before})"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "ckpt_ops" in done.stdout.split()
    assert not {"triton", "transformers", "ckpt_hf"} & set(done.stdout.split())


def source_files() -> list[Path]:
    return sorted(path for folder in ("ckpt_hf", "ckpt_ops", "benchmarks") for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("path", source_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_files_are_short(path: Path) -> None:
    kernels = path.parent.name == "kernels" or path.name == "launch.py"
    lines = len(path.read_text().splitlines())
    assert lines <= (350 if kernels else 250), f"{lines} lines: split it where the data flows from one part to the next"
