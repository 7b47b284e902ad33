"""The kernel is optional: without a C compiler the build goes through, plain torch rotates, and one line says so."""

import os
import re
import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest
import torch

from common import rope_kernel
from common.ci_register import register_cpu_ci

register_cpu_ci(est_time=25, suite="base-a-test-cpu")

ROOT = Path(__file__).resolve().parents[3]

ROTATE = """
import logging
logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
import torch
from srt.layers.rotary_embedding import get_rope
from common import rope_kernel
query = torch.arange(256.0).view(2, 128)
for _ in range(3):
    out = get_rope(64, 64, 128, 10000.0)(torch.tensor([1, 90]), query, query.clone())[0]
print(rope_kernel._library is not None, out.sum().item())
"""


def build(target, **environment):
    """What pip's build does to the extension, with this checkout's pyproject.toml, outside of the checkout."""
    command = [sys.executable, "-c", "from setuptools import setup; setup()", "build_ext"]
    command += ["--build-lib", str(target), "--build-temp", str(target / "temp")]
    return subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=240
    )


def rotate_with(folder, **environment):
    """Run ROTATE in a checkout of links, whose only kernel is the one in ``folder``, if any."""
    tree = folder / environment.get("LIVE_ROPE_KERNEL", "auto")
    (tree / "common").mkdir(parents=True)
    (tree / "srt").symlink_to(ROOT / "srt")
    for path in (ROOT / "common").iterdir():
        if path.suffix == ".py":
            (tree / "common" / path.name).write_bytes(path.read_bytes())
    for path in folder.glob("common/_rope_kernel*"):
        (tree / "common" / path.name).symlink_to(path)
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1", **environment}
    return subprocess.run(
        [sys.executable, "-c", ROTATE], cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )


@pytest.fixture(scope="module")
def without_compiler(tmp_path_factory):
    folder = tmp_path_factory.mktemp("without")
    built = build(folder, CC="/bin/false")
    assert built.returncode == 0, built.stderr
    assert not list(folder.rglob("_rope_kernel*.so"))
    return folder


def kernel_lines(run):
    return [line for line in run.stderr.splitlines() if "kernel" in line]


def test_without_a_compiler_one_line_says_so_and_plain_torch_rotates(without_compiler):
    run = rotate_with(without_compiler)
    assert run.returncode == 0, run.stderr
    [line] = kernel_lines(run)
    assert line.startswith("live_rope: ") and "not built" in line and "plain torch" in line
    found, total = run.stdout.split()
    query = torch.arange(256.0).view(2, 2, 64).double()
    angles = torch.outer(torch.tensor([1.0, 90.0]), 10000 ** (-torch.arange(0, 64, 2) / 64)).unsqueeze(1).double()
    a, b = query.chunk(2, dim=-1)
    wanted = (a * angles.cos() - b * angles.sin() + b * angles.cos() + a * angles.sin()).sum()
    assert found == "False"
    assert float(total) == pytest.approx(wanted.item(), rel=1e-4)


def test_the_kernel_forced_where_it_was_not_built_is_an_error(tmp_path):
    run = rotate_with(tmp_path, LIVE_ROPE_KERNEL="c")
    assert run.returncode and "ImportError: LIVE_ROPE_KERNEL=c" in run.stderr and "not built" in run.stderr


def test_an_unknown_kernel_is_an_error(tmp_path):
    run = rotate_with(tmp_path, LIVE_ROPE_KERNEL="fast")
    assert run.returncode and "must be auto, c, torch or triton, got 'fast'" in run.stderr


@pytest.mark.skipif(rope_kernel._library is None, reason="the kernel is not built here: there is no C compiler")
def test_with_a_compiler_one_extension_is_built_and_used_without_a_word(tmp_path):
    built = build(tmp_path)
    assert built.returncode == 0, built.stderr
    [extension] = tmp_path.glob("common/_rope_kernel*")
    assert any(extension.name == "_rope_kernel" + suffix for suffix in EXTENSION_SUFFIXES)
    run = rotate_with(tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("True") and not kernel_lines(run)
    forced = rotate_with(tmp_path, LIVE_ROPE_KERNEL="torch")
    assert forced.stdout.startswith("False") and not kernel_lines(forced)
    assert float(forced.stdout.split()[1]) == pytest.approx(float(run.stdout.split()[1]), rel=1e-6)


def test_building_needs_setuptools_alone():
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    [requires] = re.findall(r"^requires = \[(.*)\]$", text, re.MULTILINE)
    assert re.fullmatch(r'"setuptools[^"]*"', requires)
    assert "optional = true" in text


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
