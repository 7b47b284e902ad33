"""The suite runner: what it runs, what it counts, and what makes it fail."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from common.ci_register import find_registrations, register_cpu_ci

register_cpu_ci(est_time=75, suite="base-a-test-cpu")

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
        (("--timeout-per-file", "0"), "--timeout-per-file: expected seconds above 0, got 0"),
        (("--timeout-per-file=-3",), "expected seconds above 0, got -3"),
        (("--timeout-per-file", "nan"), "expected seconds above 0, got nan"),
        (("--timeout-per-file", "long"), "--timeout-per-file: invalid seconds value: 'long'"),
    ],
)
def test_wrong_options_are_errors_that_list_the_known(tmp_path, arguments, listed):
    code, output = run_suite(tmp_path, *arguments)
    assert code == 2 and listed in output


def test_a_file_of_several_suites_runs_once_in_a_run_of_all(tmp_path):
    body = (
        f"def test_a(): pass\nregister_cpu_ci(9, 'parity-test-cpu')\nopen({str(tmp_path / 'ran')!r}, 'a').write('x')\n"
    )
    write(tmp_path, "test_two.py", body, est=3)
    code, output = run_suite(tmp_path)
    assert code == 0 and output.splitlines()[-1] == "1 passed, 0 failed, 0 skipped"
    assert "1 files, estimated 9 s" in output and (tmp_path / "ran").read_text() == "x"
    parts = [
        run_suite(tmp_path, "--list", "--auto-partition-id", str(part), "--auto-partition-size", "2")[1]
        for part in range(2)
    ]
    assert sorted(name for part in parts for name in files_listed(part)) == ["test_two.py"]
    for suite, estimate in (("base-a-test-cpu", 3), ("parity-test-cpu", 9)):
        assert f"1 files, estimated {estimate} s" in run_suite(tmp_path, "--list", "--suite", suite)[1]


def test_files_of_the_checkout_are_shown_by_their_relative_path(tmp_path):
    program = f"import run_suite, pathlib; run_suite.ROOT = pathlib.Path({str(tmp_path)!r}); run_suite.main()"
    write(tmp_path, "test_off.py", "", more=", disabled='broken upstream'")
    write(tmp_path, "test_on.py", "")
    done = subprocess.run(
        [sys.executable, "-c", program, "--tests", str(tmp_path), "--list"],
        cwd=ROOT / "scripts",
        capture_output=True,
        text=True,
        check=True,
    )
    assert "disabled  test_off.py: broken upstream" in done.stdout
    assert str(tmp_path) not in done.stdout


STARTS_CHILDREN = """
import os, pathlib, subprocess
def test_a():
    stubborn = "import signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    children = [subprocess.Popen([sys.executable, "-c", code]) for code in (stubborn, "import time; time.sleep(600)")]
    path = pathlib.Path(__file__).with_suffix(".pids")
    path.with_suffix(".part").write_text(" ".join(map(str, [os.getpid(), *(child.pid for child in children)])))
    time.sleep(3)  # until the first child ignores SIGTERM
    path.with_suffix(".part").rename(path)
    time.sleep(600)
"""


def is_running(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    stat = Path(f"/proc/{pid}/stat")  # where nobody reaps orphans, the dead stay listed
    return not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_leaves_no_process(tmp_path, number):
    for i in range(2):
        write(tmp_path, f"test_{i}.py", STARTS_CHILDREN, est=9 - i)
    write(tmp_path, "test_later.py", "open(__file__ + '.ran', 'w')\ndef test_b(): pass\n")
    runner = subprocess.Popen(
        [sys.executable, str(RUNNER), "--tests", str(tmp_path), "--jobs", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background has it ignored
    )
    pids = []
    try:
        files = [tmp_path / f"test_{i}.pids" for i in range(2)]
        while not all(file.exists() for file in files):
            assert runner.poll() is None, runner.stdout.read()
            time.sleep(0.1)
        pids = [int(pid) for file in files for pid in file.read_text().split()]
        assert len(pids) == 6 and all(map(is_running, pids))
        runner.send_signal(number)
        output, _ = runner.communicate(timeout=120)  # it ends, or it waits for its tests
        assert runner.returncode == 128 + number
        assert "the running tests and what they started were ended" in output and "Traceback" not in output
        assert not any(map(is_running, pids))
        assert not (tmp_path / "test_later.py.ran").exists()
    finally:
        for pid in filter(is_running, (runner.pid, *pids)):
            os.kill(pid, signal.SIGKILL)


def test_a_file_out_of_time_leaves_no_process(tmp_path):
    write(tmp_path, "test_slow.py", STARTS_CHILDREN)
    code, output = run_suite(tmp_path, "--timeout-per-file", "12")
    pids = [int(pid) for pid in (tmp_path / "test_slow.pids").read_text().split()]
    left = list(filter(is_running, pids))
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert code == 1 and "timed out after 12 s" in output
    assert len(pids) == 3 and not left


def test_check_wants_test_files(tmp_path):
    (tmp_path / "helper.py").write_text("x = 1\n")
    for folder in (tmp_path, tmp_path / "missing"):
        code, output = run_suite(folder, "--check")
        assert code == 1 and f"{folder}: no test file; expected test_*.py" in output and "Traceback" not in output


def test_check_names_a_test_file_that_would_never_run(tmp_path):
    write(tmp_path, "foo_test.py", "def test_a(): pass\n")
    write(tmp_path, "test_bar_test.py", "def test_a(): pass\n")
    code, output = run_suite(tmp_path, "--check")
    assert (
        code == 1 and "foo_test.py: its name does not begin with test_" in output and "expected test_foo.py" in output
    )
    assert "bar" not in output
    (tmp_path / "foo_test.py").unlink()
    assert run_suite(tmp_path, "--check") == (0, "1 test files are registered\n")


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
