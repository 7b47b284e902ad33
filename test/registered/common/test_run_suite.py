"""The suite runner: what it runs, what it counts, and what makes it fail."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from common.ci_register import find_registrations, register_cpu_ci

register_cpu_ci(est_time=40, suite="base-a-test-cpu")

ROOT = Path(__file__).parents[3]
RUNNER = ROOT / "scripts" / "run_suite.py"
HEAD = (
    'import sys, time\nimport pytest\nregister_cpu_ci = lambda *a, **k: None\nregister_cpu_ci({est}, "{suite}"{more})\n'
)
TAIL = '\nif __name__ == "__main__":\n    sys.exit(pytest.main([__file__]))\n'


def write(folder, name, body, est=1, suite="base-a-test-cpu", more=""):
    (folder / name).write_text(HEAD.format(est=est, suite=suite, more=more) + body + TAIL)


def run_suite(folder, *arguments):
    done = subprocess.run(
        [sys.executable, str(RUNNER), "--tests", str(folder), *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def files_listed(output):
    return re.findall(r"(test_\w+\.py)$", output, re.MULTILINE)


def test_counts_test_cases_and_passes(tmp_path):
    write(
        tmp_path,
        "test_good.py",
        "def test_a(): pass\n@pytest.mark.parametrize('n', range(3))\ndef test_b(n): pass\n"
        "@pytest.mark.skip(reason='no moon')\ndef test_c(): pass\n",
    )
    code, output = run_suite(tmp_path, "--suite", "base-a-test-cpu")
    assert code == 0
    assert output.splitlines()[-1] == "4 passed, 0 failed, 1 skipped"
    assert "no moon" in output


def test_a_failure_shows_its_output_and_stops_the_rest(tmp_path):
    write(tmp_path, "test_bad.py", "def test_a(): print('the reason'); assert 1 == 2\n", est=9)
    write(tmp_path, "test_later.py", "def test_b(): pass\n")
    code, output = run_suite(tmp_path)
    assert code == 1 and "the reason" in output
    assert "not run after an earlier failure" in output
    code, output = run_suite(tmp_path, "--continue-on-error")
    assert code == 1
    assert output.splitlines()[-1] == "1 passed, 1 failed, 0 skipped"


@pytest.mark.parametrize(
    ("body", "arguments", "cause"),
    [
        ("def test_a(): time.sleep(60)\n", ("--timeout-per-file", "4"), "timed out after 4 s"),
        ("raise RuntimeError('at import')\n", (), "at import"),
        ("import os\ndef test_a(): os._exit(7)\n", (), "exit status 7"),
        ("", (), "no test ran"),
        ("import os, signal\ndef test_a(): os.kill(os.getpid(), signal.SIGSEGV)\n", (), "exit status -11"),
    ],
)
def test_what_is_not_a_passed_test_fails_the_run(tmp_path, body, arguments, cause):
    write(tmp_path, "test_one.py", body)
    code, output = run_suite(tmp_path, *arguments)
    assert code == 1
    assert cause in output
    assert re.search(r"^0 passed, 1 failed, 0 skipped$", output, re.MULTILINE)


def test_an_empty_selection_fails(tmp_path):
    write(tmp_path, "test_one.py", "def test_a(): pass\n")
    code, output = run_suite(tmp_path, "--suite", "parity-test-cpu")
    assert code == 1 and "no test ran" in output


def test_partitions_are_balanced_deterministic_and_cover_each_file_once(tmp_path):
    for i, est in enumerate((50, 30, 20, 10, 10, 10)):
        write(tmp_path, f"test_{i}.py", "", est=est)
    parts = []
    for part in range(3):
        arguments = ("--list", "--auto-partition-id", str(part), "--auto-partition-size", "3")
        _, output = run_suite(tmp_path, *arguments)
        assert run_suite(tmp_path, *arguments)[1] == output
        parts.append(files_listed(output))
    assert sorted(name for part in parts for name in part) == [f"test_{i}.py" for i in range(6)]
    assert [sorted(part) for part in parts] == [
        ["test_0.py"],
        ["test_1.py", "test_4.py"],
        ["test_2.py", "test_3.py", "test_5.py"],
    ]


def test_nightly_disabled_and_other_suites_are_left_out(tmp_path):
    write(tmp_path, "test_day.py", "")
    write(tmp_path, "test_night.py", "", more=", nightly=True")
    write(tmp_path, "test_off.py", "", more=", disabled='broken upstream'")
    write(tmp_path, "test_parity.py", "", suite="parity-test-cpu")
    _, output = run_suite(tmp_path, "--list", "--suite", "base-a-test-cpu")
    assert files_listed(output) == ["test_day.py"]
    assert "broken upstream" in output and "\n1 files" in output
    _, output = run_suite(tmp_path, "--list", "--nightly")
    assert sorted(files_listed(output)) == ["test_day.py", "test_night.py", "test_parity.py"]


@pytest.mark.parametrize(
    ("arguments", "listed"),
    [
        (("--hw", "tpu"), "cpu, cuda"),
        (("--suite", "nope"), "base-a-test-cpu"),
        (("--auto-partition-id", "1"), "go together"),
        (("--auto-partition-id", "3", "--auto-partition-size", "3"), "0..2"),
        (("--jobs", "0"), "at least 1"),
    ],
)
def test_wrong_options_are_errors_that_list_the_known(tmp_path, arguments, listed):
    code, output = run_suite(tmp_path, *arguments)
    assert code == 2 and listed in output


def test_check_names_every_unregistered_file(tmp_path):
    (tmp_path / "test_alone.py").write_text("def test_a(): pass\n")
    code, output = run_suite(tmp_path, "--check")
    assert code == 1 and "test_alone.py" in output and "no registration" in output


def test_check_imports_nothing_but_the_standard_library(tmp_path):
    done = subprocess.run([sys.executable, "-S", str(RUNNER), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_this_checkout_is_registered():
    found = find_registrations(ROOT / "test" / "registered")
    assert {"test/registered/rotary/test_rope_cache_invalidation.py"} <= {
        str(r.path.relative_to(ROOT)) for r in found if r.suite == "base-a-test-cpu"
    }


if __name__ == "__main__":
    sys.exit(pytest.main([__file__, "-v"]))
