"""What the layout promises: imports point one way, and everything is packaged."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = {"quantlab": ROOT, "quantlab_kernels": ROOT / "kernels", "quantlab_cli": ROOT / "cli"}
MODULES = {
    ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path
    for package, root in PACKAGES.items()
    for path in sorted((root / package).rglob("*.py"))
}
# Who may not be imported, however indirectly it is written, by whom.
FORBIDDEN = {
    "quantlab.formats": ("quantlab.recurrence", "quantlab.replay", "quantlab.models"),
    "quantlab.recurrence": ("quantlab.replay", "quantlab.models", "quantlab.engine"),
    "quantlab.replay": ("quantlab.models", "quantlab.engine", "quantlab.study"),
    "quantlab.models": ("quantlab.engine", "quantlab.study", "quantlab.report"),
    "quantlab.engine": ("quantlab.study", "quantlab.report"),
    "quantlab.metrics": ("quantlab.engine", "quantlab.study", "quantlab.models"),
    "quantlab.report": ("quantlab.engine", "quantlab.models"),
    "quantlab": ("quantlab_cli",),
}


def imported(path):
    """(module, line) of every import in a file, also of those inside functions."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, node.lineno
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def inside(module, package):
    return module == package or module.startswith(package + ".")


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_point_one_way(package):
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {target}"
        for module, path in MODULES.items()
        if inside(module, package)
        for target, line in imported(path)
        if any(inside(target, other) for other in FORBIDDEN[package])
    ]
    assert not wrong


def test_kernels_are_reached_through_dispatch_alone():
    users = {
        module
        for module, path in MODULES.items()
        if inside(module, "quantlab")
        for target, _ in imported(path)
        if inside(target, "quantlab_kernels")
    }
    assert users == {"quantlab.dispatch"}


@pytest.mark.parametrize("source_root", ["kernels", "cli"])
def test_source_roots_are_no_packages(source_root):
    # A package named kernels at the root would shadow the one that transformers imports.
    assert not list((ROOT / source_root).glob("*.py"))


def test_every_package_is_distributed():
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]
    found = {
        ".".join(path.parent.relative_to(root).parts)
        for package, root in PACKAGES.items()
        for path in (root / package).rglob("__init__.py")
    }
    assert {*found, "quantlab.data.manifests"} == set(setuptools["packages"])


@pytest.mark.parametrize(
    "module",
    ["quantlab", "quantlab.formats", "quantlab.replay", "quantlab.engine", "quantlab.study"],
)
def test_importing_loads_no_torch(module):
    code = f"import sys, {module}; print(sorted({{'torch', 'triton', 'numpy'}} & set(sys.modules)))"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert run.stdout == "[]\n"


def test_loading_a_model_imports_no_training():
    code = (
        "import sys, quantlab.models.load as l; l.load_model('tiny-gdn'); "
        "print([n for n in sys.modules if n.startswith('quantlab.models.zoo.')])"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert run.stdout == "['quantlab.models.zoo.recipe']\n"
