"""The README's Python snippets run, and its two commands exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from common.ci_register import register_cpu_ci

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"^```python\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("snippet", SNIPPETS, ids=range(len(SNIPPETS)))
def test_snippet_runs(snippet, tmp_path):
    done = subprocess.run([sys.executable, "-c", snippet], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_both_subsystems_have_a_snippet():
    assert any("from srt" in s for s in SNIPPETS) and any("from multimodal_gen" in s for s in SNIPPETS)


def test_commands_are_those_of_the_script():
    commands = re.findall(r"^\$ bash (\S+) (\w+)", README, re.MULTILINE)
    assert [name for _, name in commands] == ["demo", "check"]
    script = (ROOT / commands[0][0]).read_text(encoding="utf-8")
    assert all(re.search(rf"^{name}\)$", script, re.MULTILINE) for _, name in commands)
    assert "scripts/dev check" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_files_that_it_names_exist():
    for name in re.findall(r"`((?:common|srt|multimodal_gen|scripts|test)/[\w./-]+)`", README):
        assert (ROOT / name).exists(), name


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
